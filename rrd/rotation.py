"""Whose turn it is on a lane: facts in, a decision out; no clock and no I/O.

The invariant
=============
Virtual time is measured in visits per unit of weight. Every job that can take a visit (it is ready: not held, its die
not backed off) owes its next visit to an interval of virtual time one stride long, stride = 1 / weight:

    start  <=  visit  <  deadline = start + 1 / weight

``now`` advances by 1 / (sum of the ready weights) with each visit, so that over any stretch of it a job is due
exactly its share. A job is *eligible* once now has reached its start; the next turn goes to **the eligible job with the
earliest deadline**. After its visit a job's start moves up by one stride. From this follows:

- Shares: at any moment a job has had at most one visit more or less than its share of those made while it was ready.
  (Plain stride scheduling, without the eligibility rule, lets many light jobs that fall due together push a heavy one
  aside for as many visits as there are of them.)
- Now never passes the deadline of a ready job. While all stay, it cannot; when a job leaves that was ahead of its
  share, now waits at the earliest deadline for the others to catch up.
- Nobody starves: now advances with every visit, whoever takes it, until it stands at a deadline, and that job is next.
  What arrives later starts at now or after, so that its deadline is no rival: not even when jobs are removed and put
  back for ever.
- No bursts: a job that was held, or whose die was backed off, past its deadline starts again at now, not where it left
  off. What it missed is missed.
- Equal weights give plain round-robin: ties go by (slot on the die, order of the dies), so that the first job of each
  die has its turn, die by die, then the second of each. A newcomer falls in with the next pass over the dies.

One turn is in flight at a time, because only one die of a lane computes. It ends with ``done`` or with ``refused``.

This is earliest eligible virtual deadline first (Stoica and Abdel-Wahab, 1995), with visits as the quantum.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, isfinite

BACKOFF_FIRST, BACKOFF_MOST = 1.0, 60.0
"""Seconds that a die is left alone after its first refusal in a row, and after very many."""

_SAME = 1e-9
"""Virtual times nearer than this are the same: sums of 1/weight do not meet exactly."""


@dataclass(frozen=True)
class Turn:
    """It is ``job``'s turn on ``die``, in the lane's ``round``-th pass over its dies (from 1)."""

    job: str
    die: str
    round: int


@dataclass(eq=False)
class _Die:
    """A die's place in the order, its jobs, and how long it is left alone."""

    order: int
    jobs: set[str] = field(default_factory=set)
    freed: list[int] = field(default_factory=list)  # slots given back: a heap
    ready: int = 0
    delay: float = 0.0  # last back-off in seconds; 0 after a grant
    retry_at: float | None = None  # None: not backed off

    def take_slot(self) -> int:
        """The lowest slot that is free; call before the job is added."""
        return heappop(self.freed) if self.freed else len(self.jobs)


@dataclass(eq=False)
class _Entry:
    """A job known to the rotation. ``ready`` entries stand in exactly one of the two queues, or are in flight."""

    job: str
    die: str
    weight: float
    slot: int
    order: int
    start: float
    held: bool = False
    ready: bool = False

    @property
    def deadline(self) -> float:
        return self.start + 1 / self.weight


_Key = tuple[float, int, int]  # (virtual time, slot, order of the die): unique, because a slot holds one job


class _Queue:
    """Entries sorted by a virtual time, then slot, then die; no key twice. Removal is exact, nothing stale is kept."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._entries: dict[tuple[int, int], tuple[_Key, _Entry]] = {}

    def push(self, time: float, entry: _Entry) -> None:
        key = (time, entry.slot, entry.order)
        insort(self._keys, key)
        self._entries[key[1:]] = (key, entry)

    def pop(self) -> _Entry:
        return self._entries.pop(self._keys.pop(0)[1:])[1]

    def discard(self, entry: _Entry) -> None:
        key, _ = self._entries.pop((entry.slot, entry.order), (None, None))
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def first(self) -> float:
        """The earliest time in the queue; infinite when it is empty."""
        return self._keys[0][0] if self._keys else inf


class Rotation:
    """The turns of one lane over ``dies``, in their order, while jobs come and go. What holds is said above."""

    def __init__(self, dies: Sequence[str]) -> None:
        self._dies = {die: _Die(order) for order, die in enumerate(dies)}
        assert len(self._dies) == len(dies), "each die once"
        self._jobs: dict[str, _Entry] = {}
        self._early = _Queue()  # ready, not yet eligible: by start
        self._due = _Queue()  # eligible: by deadline
        self._weights: Counter[float] = Counter()  # of the ready jobs, and their sum
        self._total = 0.0
        self._now = 0.0
        self._flight: tuple[Turn, _Entry] | None = None
        self._round = 0
        self._visited: set[str] = set()  # dies visited in this round

    # --- what is known ---

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def round(self) -> int:
        """Passes over the lane's dies begun so far. A die with nothing to visit does not hold a pass up."""
        return self._round

    @property
    def in_flight(self) -> Turn | None:
        """The turn handed out and not yet ended."""
        return self._flight[0] if self._flight else None

    def die_of(self, job: str) -> str:
        return self._jobs[job].die

    def retry_at(self, die: str) -> float | None:
        """Until when ``die`` is backed off; None when it is not."""
        return self._dies[die].retry_at

    # --- jobs ---

    def add(self, job: str, die: str, weight: float = 1.0) -> None:
        """Place ``job`` on ``die``. Its first turn comes with the next pass."""
        assert job not in self._jobs, f"{job} is placed already"
        assert weight > 0 and isfinite(weight), f"weight {weight}"
        at = self._dies[die]
        entry = self._jobs[job] = _Entry(job, die, weight, at.take_slot(), at.order, start=-inf)
        at.jobs.add(job)
        self._enter(entry)

    def remove(self, job: str) -> None:
        """Forget ``job``; a turn of it that is in flight is still to be ended, and then counts for nobody."""
        entry = self._jobs.pop(job)
        self._leave(entry)
        at = self._dies[entry.die]
        at.jobs.discard(job)
        heappush(at.freed, entry.slot)

    def set_weight(self, job: str, weight: float) -> None:
        """Change a job's share from now on; what is left of its wait shrinks or grows with the stride."""
        assert weight > 0 and isfinite(weight), f"weight {weight}"
        entry = self._jobs[job]
        was_ready = entry.ready
        self._leave(entry)
        entry.start = self._now + (entry.start - self._now) * entry.weight / weight
        entry.weight = weight
        if was_ready:
            self._enter(entry)

    def hold(self, job: str) -> None:
        """``job`` cannot take a visit for now. Its turn in flight, if any, goes on to its end."""
        self._jobs[job].held = True
        self._leave(self._jobs[job])

    def free(self, job: str) -> None:
        """``job`` can take visits again."""
        self._jobs[job].held = False
        self._enter(self._jobs[job])

    # --- turns ---

    def next(self, now: float) -> Turn | None:
        """The next turn, or None when no job can take one; ``now`` in seconds only ends back-offs."""
        assert self._flight is None, f"{self._flight and self._flight[0]} is still in flight"
        self._readmit(now)
        if not self._due and not self._early:
            return None
        if not self._due:
            self._now = max(self._now, self._early.first)  # nobody is eligible: skip ahead
        while self._early.first <= self._now + _SAME:
            entry = self._early.pop()
            self._due.push(entry.deadline, entry)
        entry = self._due.pop()
        turn = Turn(entry.job, entry.die, self._count_round(entry.die))
        self._flight = turn, entry
        return turn

    def done(self, turn: Turn) -> None:
        """The visit has been made, well or badly: its job is charged one stride."""
        assert self._flight is not None and self._flight[0] is turn, f"{turn} is not in flight"
        entry = self._flight[1]
        self._flight = None
        self._pass_time(1 / (self._total if entry.ready else self._total + entry.weight))
        entry.start += 1 / entry.weight
        if entry.ready:
            self._early.push(entry.start, entry)

    def granted(self, die: str) -> None:
        """The gate gave ``die``: its next refusal starts from the shortest back-off again."""
        self._dies[die].delay = 0.0

    def refused(self, die: str, now: float) -> float:
        """The gate did not give ``die``: leave it alone, and say until when (seconds, as ``now``).

        Its jobs are set aside. A turn in flight on it ends uncharged.
        """
        at = self._dies[die]
        at.delay = min(at.delay * 2 or BACKOFF_FIRST, BACKOFF_MOST)
        at.retry_at = now + at.delay
        if self._flight and self._flight[0].die == die:
            self._flight = None
        for job in at.jobs:
            self._leave(self._jobs[job])
        return at.retry_at

    def step_back(self, job: str) -> None:
        """``job``, whose die is backed off, comes after the other jobs of its die from now on."""
        entry = self._jobs[job]
        last = max((self._jobs[j] for j in self._dies[entry.die].jobs), key=lambda e: e.slot)
        assert not entry.ready and not last.ready, "their places in the queues stand by their slots"
        entry.slot, last.slot = last.slot, entry.slot

    def wake_at(self) -> float | None:
        """After ``next`` gave None: when to ask again if nothing else happens; None: only a change helps."""
        retries = (
            at.retry_at
            for at in self._dies.values()
            if at.retry_at is not None and any(not self._jobs[job].held for job in at.jobs)
        )
        return min(retries, default=None)

    # --- inside ---

    def _enter(self, entry: _Entry) -> None:
        """Make an entry ready, if it can be."""
        if entry.ready or entry.held or self._dies[entry.die].retry_at is not None:
            return
        entry.ready = True
        self._dies[entry.die].ready += 1
        self._weights[entry.weight] += 1
        self._total += entry.weight
        if self._flight and self._flight[1] is entry:
            return  # held and freed during its visit
        if entry.deadline < self._now - _SAME:
            entry.start = self._next_beat()
        if entry.start > self._now + _SAME:
            self._early.push(entry.start, entry)
        else:
            self._due.push(entry.deadline, entry)

    def _next_beat(self) -> float:
        """Where a newcomer starts: now, or soon after it, when the jobs already visited in this pass start again.

        The latter keeps jobs of equal weight in the order of the dies, whenever they come.
        """
        beat = self._early.first
        return max(beat, self._now) if beat <= self._now + 1 / max(self._weights) + _SAME else self._now

    def _leave(self, entry: _Entry) -> None:
        """Take a ready entry out of the queues and of the sum of weights."""
        if not entry.ready:
            return
        entry.ready = False
        self._dies[entry.die].ready -= 1
        self._weights[entry.weight] -= 1
        if not self._weights[entry.weight]:
            del self._weights[entry.weight]
        self._total = self._total - entry.weight if self._weights else 0.0
        self._early.discard(entry)
        self._due.discard(entry)

    def _readmit(self, now: float) -> None:
        """Let the jobs of dies whose back-off is over in again."""
        for at in self._dies.values():
            if at.retry_at is not None and at.retry_at <= now:
                at.retry_at = None
                for job in at.jobs:
                    self._enter(self._jobs[job])

    def _pass_time(self, amount: float) -> None:
        self._now = max(self._now, min(self._now + amount, self._due.first))
        if abs(self._early.first - self._now) < _SAME:
            self._now = self._early.first

    def _count_round(self, die: str) -> int:
        """A new pass begins when every die with something to visit has been visited in this one."""
        if not self._visited or not any(at.ready and name not in self._visited for name, at in self._dies.items()):
            self._visited.clear()
            self._round += 1
        self._visited.add(die)
        return self._round
