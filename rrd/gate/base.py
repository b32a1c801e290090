"""What every gate promises."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from rrd.errors import TryLater
from rrd.text import one_line

T = TypeVar("T")


class GateRefused(TryLater):
    """The gate did not do what it was asked, in time. Blames the die, never the job. ``lost``: the die has fallen off
    the bus, and what is in its memory is gone."""

    def __init__(self, verb: str, die: str, reason: str, *, hint: str = "", lost: bool = False) -> None:
        self.die, self.reason, self.lost = die, one_line(reason, 200), lost
        said = "refused" if verb == "acquire" else f"could not {verb}"
        super().__init__(f"the gate {said} die {one_line(die)}: {self.reason}", hint=hint)


class Gate(Protocol):
    """Grants and takes back the dies of one lane, one at a time.

    - ``acquire`` returns once the die may be touched, or raises. After it has raised, cancelled included, the die is
      not held: what may have been half granted has been given back.
    - ``release`` returns once the die may no longer be touched. It is carried through even if it is cancelled, and
      is harmless for a die that is not held. If it raises, nobody knows; do not touch the die.
    - Both end within about the gate's deadline (twice that where a grant must be undone), whatever the other side does.
    - A refusal leaves the gate usable.
    """

    async def acquire(self, die: str) -> None:
        """Get ``die``; raises GateRefused."""

    async def release(self, die: str) -> None:
        """Give ``die`` back; raises GateRefused."""

    async def close(self) -> None:
        """Give back what is held and let go of the other side. The gate is not used again."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives, or TimeoutError after ``seconds``. It never swallows a cancellation, as asyncio.wait_for
    did before Python 3.12, and leaves nothing running."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if task.cancel():
            await asyncio.wait({task})
        elif not task.cancelled():
            task.exception()  # seen


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, which has a deadline of its own, to its end even if cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation takes its place
        raise cancelled
    return task.result()
