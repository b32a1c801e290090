"""When to scan the spool: soon after something happened there, and every so often even if nothing was heard.

Events only mark the spool dirty; what happened is for the scan to see. So a lost event costs time, never truth, and
the watch may be wrong about everything but ``rescan_seconds``. It looks after itself all the same: an inotify watch is
deaf for ever once its directory is replaced, and its threads can die unnoticed. A deaf watch is rebuilt; where that
fails the spool is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

CHECK_SECONDS = 2.0
"""How often the watch looks whether it can still hear, and how often a spool without a watch is scanned."""

_TELLING = frozenset({"created", "modified", "moved", "deleted", "closed", "attrib"})
"""Kinds of events that may mean a changed file. Our own reading makes others."""


def inotify() -> BaseObserver:
    """A new observer of the operating system's events. Raises ``OSError`` where there is none to be had."""
    from watchdog.observers.inotify import InotifyObserver  # late: commands that watch nothing start faster

    # it logs errors whenever an observer stops, and overflows, which the next scan makes good
    logging.getLogger("watchdog").setLevel(logging.CRITICAL)
    return InotifyObserver()


class Debounce:
    """When a burst of events is over: ``quiet`` seconds after its last, at the latest ``cap`` after its first.

    Marked from any thread; has no clock of its own.
    """

    def __init__(self, quiet: float = 0.3, cap: float = 2.0) -> None:
        self._quiet, self._cap = quiet, cap
        self._lock = threading.Lock()
        self._first: float | None = None
        self._newest = 0.0

    def mark(self, now: float) -> bool:
        """An event at ``now``. Whether it is the first of its burst."""
        with self._lock:
            first = self._first is None
            self._first = now if self._first is None else self._first
            self._newest = now
            return first

    def due(self) -> float | None:
        """When the burst is over, or None without one."""
        with self._lock:
            return None if self._first is None else min(self._first + self._cap, self._newest + self._quiet)

    def clear(self) -> None:
        with self._lock:
            self._first = None


class Watch:
    """Tells when to scan ``directory``: ``while await watch.dirty(scan.next_check): scan = …``

    ``observer`` makes watchdog observers; None polls. ``now`` is a monotonic clock. Belongs to one event loop; what
    may block runs in threads.
    """

    def __init__(self, directory: Path, *, rescan_seconds: float = 30.0, check_seconds: float = CHECK_SECONDS,
                 debounce: Debounce | None = None, observer: Callable[[], BaseObserver] | None = inotify,
                 now: Callable[[], float] = time.monotonic) -> None:
        self._rescan_seconds, self._check_seconds, self._now = rescan_seconds, check_seconds, now
        self._debounce = debounce or Debounce()
        self._ears = Ears(directory, observer, self._heard)
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rescan_at = self._check_at = 0.0  # at once
        self._closed = False

    @property
    def healthy(self) -> bool:
        """Whether changes are heard of at once; if not, the spool is polled."""
        return self._ears.hearing

    def poke(self) -> None:
        """Have ``dirty`` return at once, as after SIGHUP. From the loop only."""
        self._rescan_at = self._now()
        self._wake.set()

    async def dirty(self, until: float | None = None) -> bool:
        """Return True when it is time to scan, at the latest at ``until`` on the monotonic clock; False once closed.

        The first call returns at once. A change during a scan makes the next call return.
        """
        self._loop = asyncio.get_running_loop()
        until = float("inf") if until is None else until
        while not self._closed:
            self._wake.clear()
            if self._now() >= self._check_at:
                await self._check()
            burst = self._debounce.due()
            due = min(until, self._rescan_at, float("inf") if burst is None else burst)
            now = self._now()
            if now >= due:
                self._debounce.clear()
                self._rescan_at = now + self._rescan_seconds
                return not self._closed
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(due, self._check_at) - now)
        return False

    async def close(self) -> None:
        """Stop watching; a waiting ``dirty`` returns False."""
        self._closed = True
        self._wake.set()
        await asyncio.to_thread(self._ears.close)

    async def _check(self) -> None:
        """See to the ears. What they may have missed is for a scan to find."""
        missed = await asyncio.to_thread(self._ears.check)
        self._check_at = self._now() + self._check_seconds
        if missed:
            self._rescan_at = self._now()

    def _heard(self) -> None:
        """An event, in a thread of watchdog's."""
        if self._debounce.mark(self._now()) and self._loop:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._wake.set)


class Ears:
    """A watchdog observer of one directory that is replaced when it has gone deaf. Its methods may block.

    Deaf is: a dead thread; another directory at the same path; a directory whose time shows an entry come or gone
    of which no event told until the check after.
    """

    def __init__(self, directory: Path, make: Callable[[], BaseObserver] | None, heard: Callable[[], None]) -> None:
        self._directory, self._make, self._tell = directory, make, heard
        self._observer: BaseObserver | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._place = (0, 0)
        self._mtime = 0
        self._events = self._counted = 0  # all ever heard; of those, the ones before the last check
        self._unexplained = False

    @property
    def hearing(self) -> bool:
        return self._observer is not None

    def check(self) -> bool:
        """Rebuild what is deaf. Whether a change may have gone unheard since the last check: always, without ears."""
        with self._lock:
            if self._closed:
                return False
            events = self._events  # before the stat: an event may come after its change, never before it
            try:
                info = os.stat(self._directory)
            except OSError:
                self._stop()
                return True
            place = (info.st_dev, info.st_ino)
            silent = (info.st_mtime_ns != self._mtime or self._unexplained) and events == self._counted
            deaf = self._observer is None or place != self._place or self._dead() or (silent and self._unexplained)
            self._place, self._mtime, self._counted = place, info.st_mtime_ns, events
            self._unexplained = silent and not deaf
            if deaf:
                self._stop()
                self._start()
            return silent or deaf

    def _dead(self) -> bool:
        assert self._observer
        return not (self._observer.is_alive() and self._observer.emitters
                    and all(e.is_alive() for e in self._observer.emitters))

    def _start(self) -> None:
        """A fresh observer, or none: no inotify instance left, no right to read, no directory."""
        if self._make is None:
            return
        handler: Any = _Handler(self._hear)
        with contextlib.suppress(Exception):  # watchdog raises OSError, RuntimeError, ctypes' errors; polling will do
            self._observer = self._make()
            try:
                self._observer.schedule(handler, os.path.realpath(self._directory), recursive=False)
                self._observer.start()
            except Exception:
                self._stop()

    def _stop(self, wait: float = 0.0) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            with contextlib.suppress(Exception):  # it may be half dead
                observer.stop()
                observer.join(wait)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop(wait=2.0)

    def _hear(self) -> None:
        self._events += 1
        self._tell()


class _Handler:
    """watchdog calls ``dispatch`` with every event."""

    def __init__(self, hear: Callable[[], None]) -> None:
        self._hear = hear

    def dispatch(self, event: Any) -> None:
        if event.event_type in _TELLING:
            self._hear()
