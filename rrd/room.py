"""Whether the checkpoints of a job will fit on the disk, seen before it gets a die: facts in, a sentence out.

A job needs its ``keep`` checkpoints and room to write one more; so do the others that train, and what they have not
written yet is not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rrd import checkpoint, durable
from rrd.text import size


class Wish(NamedTuple):
    """``bytes``: of one checkpoint."""

    job: str
    bytes: int
    keep: int

    def more(self, there: int) -> int:
        """Bytes that it will need beyond the checkpoints that are there."""
        return max(0, self.keep - there) * self.bytes + checkpoint.with_spare(self.bytes)


@dataclass(frozen=True)
class Room:
    """A disk: bytes that may be written, bytes in all, and how many checkpoints each job has on it."""

    free: int
    total: int
    there: Mapping[str, int]


class TooLarge(NamedTuple):
    """``ever``: even an empty disk would be too small."""

    why: str
    hint: str
    ever: bool


def look(state_dir: Path, jobs: Iterable[str]) -> Room | None:
    """The disk of ``state_dir`` as it is now; None if it will not say. Blocks."""
    space = durable.space(state_dir)
    if space is None:
        return None
    return Room(*space, {job: len(checkpoint.listing(state_dir / "jobs" / job)) for job in jobs})


def refusal(wish: Wish, others: Sequence[Wish], room: Room) -> TooLarge | None:
    """Why ``wish`` cannot be granted; None if it can. ``others`` train already."""
    spoken_for = sum(other.more(room.there.get(other.job, 0)) for other in others if other.job != wish.job)
    more = wish.more(room.there.get(wish.job, 0)) + checkpoint.RESERVE
    if more + spoken_for <= room.free:
        return None
    ever = wish.more(0) + checkpoint.RESERVE > room.total
    kept = f"{wish.keep} of {size(wish.bytes)}"
    has = f"is one of {size(room.total)}" if ever else f"has {size(room.free)} free"
    others_need = f", of which other jobs will need {size(spoken_for)}" if spoken_for and not ever else ""
    why = (f"its checkpoints need {size(more)} more ({kept}, another while it is written, and "
           f"{size(checkpoint.RESERVE)} to spare), and the disk {has}{others_need}")
    return TooLarge(why,
                    "a smaller `keep`, or a larger disk for `state_dir`, helps" if ever else
                    "free space, or set a smaller `keep`; it goes on by itself", ever)
