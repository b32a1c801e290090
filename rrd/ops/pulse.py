"""Signs of life from within long work: what may take long calls ``beat`` as it goes on.

A step of a large model may take minutes. Its products, forward and backward, and the slices of its loss say that they
were reached; the worker passes that on, or the daemon would take the silence for a hang. On a CUDA die
what beats here only queues work, so there a beat waits for what was queued some beats ago: one that hangs is silent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

EVERY = 0.1
"""Seconds for which beats are only counted, so that one costs no more than a look at the clock."""
QUEUED = 16
"""Beats that a CUDA die may be behind; it may be twice as many at the most."""

Listener = Callable[[float], None]
"""Hears the share done, 0 where that is not known. What it raises comes out of the work, backward passes included."""


class Pulse:
    """The beats of one piece of work. ``total``: how many it takes, 0 for not known (yet)."""

    def __init__(self, listener: Listener, *, total: float = 0.0, event: Callable[[], Any] | None = None) -> None:
        self.count, self.total = 0, total
        self._listener, self._next = listener, 0.0
        self._new_event, self._event = event, None

    def beat(self) -> None:
        self.count += 1
        if self._new_event is not None and self.count % QUEUED == 0:
            self._catch_up(self._new_event())
        if (now := time.monotonic()) >= self._next:
            self._next = now + EVERY
            self._listener(min(1.0, self.count / self.total) if self.total else 0.0)

    def _catch_up(self, event: Any) -> None:
        """Set a mark, and wait until the die has reached the one before."""
        event.record()
        if self._event is not None:
            self._event.synchronize()
        self._event = event


_heard: Pulse | None = None


def beat() -> None:
    """Something long has been reached. May raise, so not where that would leave things half-done."""
    if _heard is not None:
        _heard.beat()


def done(share: float) -> None:
    """So much of the work was done by now: from that follows how much there is."""
    if _heard is not None:
        _heard.total = _heard.count / share


@contextlib.contextmanager
def heard(listener: Listener, device: torch.device, *, total: float = 0.0) -> Iterator[Pulse]:
    """Within it ``listener`` hears the beats of work on ``device``."""
    global _heard
    before = _heard
    _heard = pulse = Pulse(listener, total=total, event=torch.cuda.Event if device.type == "cuda" else None)
    try:
        yield pulse
    finally:
        _heard = before
