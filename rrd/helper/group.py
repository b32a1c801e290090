"""A group of dies, and who holds one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from rrd.helper.base import WARNING, Backend, Refusal, say


class Owner(Protocol):
    """Who may hold a die: a connection."""

    def gone(self) -> bool:
        """Whether it has ended, so that what it holds is anybody's."""


class Group:
    """One holder at a time: an owner with one die, from its acquire to its release or its end.

    Each owner has a thread; the backend sees one call at a time. A call that hangs in the kernel keeps the others out:
    they are refused after ``patience`` seconds.
    """

    def __init__(self, name: str, backend: Backend, *, patience: float) -> None:
        self.name, self.patience = name, patience
        self.dies = tuple(backend.dies)
        self._backend = backend
        self._turn = threading.Lock()
        self._holder: tuple[Owner, str] | None = None
        self._stopping = False

    def start(self) -> None:
        """Close every die. Raises BadSetup."""
        with self._taken():
            self._backend.start()

    def acquire(self, die: str, owner: Owner) -> None:
        """Open ``die`` for ``owner``. Raises Refusal."""
        with self._taken():
            if self._holder == (owner, die):
                return
            if self._stopping:
                raise Refusal("rrd-gate is stopping", later=True)
            if self._holder is not None and self._holder[0].gone():
                with suppress(Refusal):  # of another die than the one that is asked for; said by _close
                    self._close()
            if self._holder is not None:
                raise Refusal(f"die {self._holder[1]} has the bus", later=True)
            self._backend.open(die, lambda: not owner.gone())
            self._holder = (owner, die)

    def release(self, die: str, owner: Owner) -> None:
        """Close ``die`` if ``owner`` holds it. Raises Refusal."""
        with self._taken():
            if self._holder == (owner, die):
                self._close()

    def leave(self, owner: Owner) -> None:
        """Close what ``owner`` holds, however long that takes: it has gone."""
        with self._turn:
            if self._holder is not None and self._holder[0] is owner:
                with suppress(Refusal):  # said by _close
                    self._close()

    def stop(self) -> None:
        """Refuse every acquire from now on."""
        self._stopping = True

    @property
    def held(self) -> bool:
        """Whether somebody holds a die."""
        return self._holder is not None

    def end(self) -> bool:
        """Take what is still held. False if it does not let itself be closed, or if a call hangs."""
        try:
            with self._taken():
                if self._holder is not None:
                    say(WARNING, f"die {self._holder[1]} was not given back, and is taken")
                    self._close()
        except Refusal:
            return False
        return True

    def _close(self) -> None:
        assert self._holder is not None
        die = self._holder[1]
        try:
            self._backend.close(die)
        except Refusal as e:
            say(WARNING, e.reason)
            raise
        finally:  # the backend turns it off again before it opens another
            self._holder = None

    @contextmanager
    def _taken(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=self.patience):
            raise Refusal(f"group {self.name} is busy: the swap before this one has not ended", later=True)
        try:
            yield
        finally:
            self._turn.release()
