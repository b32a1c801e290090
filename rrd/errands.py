"""What jobs want of their lane outside their turns (to leave their die, or to be saved at last), and from when on.

An errand that waits for a checkpoint to be written is due when the write has ended, or has taken far too long: until
then nobody stands in line for a slow disk, and the lane's other jobs have their turns.
"""

from __future__ import annotations

from collections.abc import Iterator

COMMIT_SECONDS = 600.0
"""Longest that a worker may take to write what was copied aside; then it counts as hung."""


class Errands:
    """At most one errand a job. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._until: dict[str, float] = {}  # of those that wait for a write: when it has taken too long

    def __contains__(self, job: str) -> bool:
        return job in self._at

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def at(self, job: str) -> float:
        """From when on the errand can be run."""
        return self._at[job]

    def want(self, job: str, at: float) -> None:
        """There is an errand for ``job``, from ``at`` on."""
        self._at[job] = at

    def drop(self, job: str) -> None:
        self._at.pop(job, None)
        self._until.pop(job, None)

    def await_commit(self, job: str, now: float) -> None:
        """The errand goes on when the checkpoint being written is durable, or refused."""
        self._at[job] = self._until.setdefault(job, now + COMMIT_SECONDS)

    def commit_over(self, job: str) -> bool:
        """The write has ended: whether the errand was waiting for it."""
        return self._until.pop(job, None) is not None

    def overdue(self, job: str, now: float) -> bool:
        """Whether the write has taken too long."""
        return now >= self._until.get(job, float("inf"))
