"""The states of a job, and which may follow which."""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """Where a job is in its life. The value is the word shown to people and used as a metric label."""

    WAITING = "waiting"      # accepted; no room on any die yet, or what it needs is not there yet
    PREPARING = "preparing"  # its data is being tokenized and its base model digested
    LOADING = "loading"      # has a place on a die; its first visit will load it
    RUNNING = "running"      # resident, taking its turns
    PAUSED = "paused"        # by the user, or by a disk that cannot take its checkpoints
    EXPORTING = "exporting"  # trained; the adapter is being written and checked
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the user; its checkpoints are kept
    REMOVED = "removed"      # its job file is gone; its checkpoints are kept

    def __str__(self) -> str:
        return self.value


S = JobState
ENDED = frozenset({S.DONE, S.FAILED, S.CANCELLED, S.REMOVED})
"""States that hold no place on a die and take no turns by themselves."""

PLACED = frozenset({S.LOADING, S.RUNNING, S.EXPORTING})
"""States that hold a place on a die."""

_ANYTIME = {S.PAUSED, S.FAILED, S.CANCELLED, S.REMOVED, S.WAITING}
_NEXT: dict[JobState, set[JobState]] = {
    S.WAITING: {S.PREPARING, S.LOADING} | _ANYTIME,
    S.PREPARING: {S.LOADING} | _ANYTIME,
    S.LOADING: {S.RUNNING, S.EXPORTING, S.DONE} | _ANYTIME,
    S.RUNNING: {S.EXPORTING, S.LOADING} | _ANYTIME,
    S.EXPORTING: {S.DONE, S.LOADING} | _ANYTIME,
    S.PAUSED: {S.RUNNING, S.LOADING} | _ANYTIME,  # straight back, if it was resident and waited for its disk
    S.DONE: {S.WAITING, S.REMOVED},
    S.FAILED: {S.WAITING, S.CANCELLED, S.REMOVED},
    S.CANCELLED: {S.WAITING, S.REMOVED},
    S.REMOVED: {S.WAITING, S.DONE, S.FAILED, S.CANCELLED},
}


def may_follow(now: JobState, then: JobState) -> bool:
    """Whether a job in state ``now`` may go to ``then``; staying is always allowed."""
    return now is then or then in _NEXT[now]
