"""Which waiting job gets which die: facts in, a decision out.

The invariant
=============
- A job is placed only where its wish allows, on a die that has a free slot, is not fenced, and has the memory it needs.
  Dies of one pool have one memory: what is placed on one of them is taken from all.
- A job that has been trained on one kind of die is placed on that kind only, as long as the box has any, sound or not,
  or may have, for a die has not said yet what it is: elsewhere it would not be the same job. It waits sooner than that.
- Jobs are taken in the order given, which is that of their files' times. A job that cannot be placed now waits, with
  one sentence why; it holds up nobody who wishes for another die.
- A job that waits **only for memory** keeps one die, the one that lacks least (and all of its pool), from those behind
  it: else a stream of small jobs could keep a large one waiting for ever. One that could never fit keeps nothing.
- Among the dies that would do: the one with fewest jobs, then the lane with fewest, then one that already holds the
  same frozen base (it is kept once), then the lowest index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rrd.text import count, one_line


@dataclass(frozen=True)
class Candidate:
    """A job that waits for a die. ``bytes_needed`` counts the base too; ``base_key`` ``""`` shares with nobody."""

    job: str
    die_wish: str | int = "auto"  # "auto", or a die by index, name, UUID or PCI address
    bytes_needed: int = 0
    base_key: str = ""
    base_bytes: int = 0  # of bytes_needed, what a die that holds the base already need not hold again
    kind: str = ""  # the kind of die that it is bound to


@dataclass(frozen=True)
class DieFacts:
    """A die as placement sees it. ``bytes_free`` None: memory is not counted there. ``jobs``: how many it has."""

    index: int
    lane: str
    name: str
    uuid: str = ""
    pci: str = ""
    jobs: int = 0
    slots: int = 4
    bytes_free: int | None = None
    bytes_total: int | None = None  # what jobs may use of it when it is empty
    base_keys: frozenset[str] = field(default_factory=frozenset)
    fenced: bool = False
    pool: str = ""  # dies of one pool share one memory, of which these facts are then the same; empty: one of its own
    kind: str = ""  # dies of one kind give the same bits; empty: not known (yet)

    def answers_to(self, wish: str | int) -> bool:
        """Whether ``wish`` means this die."""
        said = str(wish).strip().lower()
        return said in {"auto", str(self.index), *(n.lower() for n in (self.name, self.uuid, self.pci) if n)}


class Placed(NamedTuple):
    """Put ``job`` on the die with index ``die``."""

    job: str
    die: int


def place(waiting: Sequence[Candidate], dies: Sequence[DieFacts]) -> tuple[list[Placed], dict[str, str]]:
    """Place what can be placed now, and say of every other job why it waits.

    ``waiting`` is in the order of the job files' times; a job already placed is not in it.
    """
    facts = {die.index: die for die in dies}
    lanes = Counter({die.lane: 0 for die in dies})
    for die in dies:
        lanes[die.lane] += die.jobs
    placed: list[Placed] = []
    waits: dict[str, str] = {}
    kept: dict[int, str] = {}  # dies kept for the memory of a job further ahead
    ahead: Counter[tuple[int, ...]] = Counter()  # jobs that wait, by the dies that would do for them
    for job in waiting:
        bound = job.kind if any(die.kind in ("", job.kind) for die in dies) else ""
        answering = [die for die in facts.values() if die.answers_to(job.die_wish)]
        wished = [die for die in answering if bound in ("", die.kind)]
        choice = _best(job, [die for die in wished if die.index not in kept], lanes)
        if choice is not None:
            placed.append(Placed(job.job, choice.index))
            lanes[choice.lane] += 1
            for die in _pool(choice, facts.values()):
                facts[die.index] = _with(die, job, on=choice)
            continue
        key = tuple(die.index for die in wished)
        waits[job.job] = _of_another_kind(job, answering, dies) if answering and not wished else _why(
            job, wished, dies, kept, ahead[key])
        ahead[key] += 1
        hopeful = [die for die in wished if _has_slot(die) and die.index not in kept and _could_fit(job, die)]
        if hopeful:
            best = min(hopeful, key=lambda die: _missing(job, die))
            kept |= {die.index: job.job for die in _pool(best, facts.values())}
    return placed, waits


def _best(job: Candidate, dies: Iterable[DieFacts], lanes: Counter[str]) -> DieFacts | None:
    fits = (die for die in dies if _has_slot(die) and _missing(job, die) <= 0)
    return min(fits, key=lambda die: (die.jobs, lanes[die.lane], not _shares(job, die), die.index), default=None)


def _has_slot(die: DieFacts) -> bool:
    return not die.fenced and die.jobs < die.slots


def _could_fit(job: Candidate, die: DieFacts) -> bool:
    """Whether ``job`` would fit on ``die`` if nothing else were there."""
    return die.bytes_total is None or job.bytes_needed <= die.bytes_total


def _shares(job: Candidate, die: DieFacts) -> bool:
    return bool(job.base_key) and job.base_key in die.base_keys


def _cost(job: Candidate, die: DieFacts) -> int:
    """Bytes that ``job`` would take on ``die``."""
    return job.bytes_needed - (job.base_bytes if _shares(job, die) else 0)


def _missing(job: Candidate, die: DieFacts) -> int:
    return 0 if die.bytes_free is None else _cost(job, die) - die.bytes_free


def _pool(die: DieFacts, dies: Iterable[DieFacts]) -> list[DieFacts]:
    """``die`` and those that share its memory."""
    return [other for other in dies if other.index == die.index or (die.pool and other.pool == die.pool)]


def _with(die: DieFacts, job: Candidate, *, on: DieFacts) -> DieFacts:
    """``die`` after ``job`` has been placed ``on`` it, or on one of its pool."""
    return replace(
        die,
        jobs=die.jobs + (die.index == on.index),
        bytes_free=None if die.bytes_free is None else die.bytes_free - _cost(job, die),
        base_keys=die.base_keys | {job.base_key} if job.base_key else die.base_keys,
    )


def _why(job: Candidate, wished: list[DieFacts], dies: Sequence[DieFacts], kept: dict[int, str], ahead: int) -> str:
    """One sentence for a job that cannot be placed now."""
    if not wished:
        return _no_such_die(job.die_wish, dies)
    sound = [die for die in wished if not die.fenced]
    if not sound:
        return f"{_name(wished, dies)} {'is' if len(wished) == 1 else 'are'} fenced off after repeated faults"
    if not any(_could_fit(job, die) for die in sound):
        most = max(die.bytes_total or 0 for die in sound)
        return f"it needs {_gib(job.bytes_needed)}, and {_name(sound, dies)} can give a job at most {_gib(most)}"
    line = f"; next in line behind {count(ahead, 'job')}" if ahead else "; next in line"
    room = [die for die in sound if _has_slot(die)]
    if not room:
        return f"{_name(sound, dies)} {'is' if len(sound) == 1 else 'are'} full ({_load(sound)}){line}"
    free = [die for die in room if die.index not in kept]
    if not free:
        return f"the room on {_name(room, dies)} is kept for {one_line(kept[room[0].index])}, which came first{line}"
    best = min(free, key=lambda die: _missing(job, die))
    where = best.pool or f"die {best.name}"
    return f"it needs {_gib(_cost(job, best))}, and {where} has {_gib(best.bytes_free or 0)} free now{line}"


def _of_another_kind(job: Candidate, dies: list[DieFacts], all_dies: Sequence[DieFacts]) -> str:
    if silent := [die for die in dies if not die.kind]:
        return f"{_name(silent, all_dies)} may be of the kind that it began on ({one_line(job.kind, 60)}): to be seen"
    return (f"it began on another kind of die ({one_line(job.kind, 60)}) than {_name(dies, all_dies)}, and would not "
            'go on exactly there; `resume = "compatible"` lets it')


def _no_such_die(wish: str | int, dies: Sequence[DieFacts]) -> str:
    names = ", ".join(one_line(die.name) for die in sorted(dies, key=lambda die: die.index)) or "none"
    return f"there is no die {one_line(repr(wish))}; the dies are {names}"


def _name(some: Sequence[DieFacts], dies: Sequence[DieFacts]) -> str:
    if len(some) == 1:
        return f"die {some[0].name}"
    if len(some) == len(dies) == 2:
        return "both dies"
    return f"all {len(some)} dies" if len(some) == len(dies) else f"{len(some)} of {len(dies)} dies"


def _load(dies: Sequence[DieFacts]) -> str:
    slots = {die.slots for die in dies}
    each = " each" if len(dies) > 1 else ""
    return f"{count(slots.pop(), 'job')}{each}" if len(slots) == 1 else count(sum(d.jobs for d in dies), "job")


def _gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB"
