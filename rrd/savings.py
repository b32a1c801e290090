"""How a job gives memory back when its die runs out of it: rungs, each taken when the one before was not enough.

The invariant
=============
- A rung is in force from one step on, for ever: a replay after a crash runs every step as it was run the first time, so
  that the job's numbers depend on its rungs and not on when it was killed.
- The next rung is always one that the job can take and that holds less memory: activations are computed again instead
  of kept; then logits stand in finer slices; then a micro-batch is run in 2, 4, … parts, down to single samples.
- Out of memory before the step from which a rung is in force: that rung comes forward to this step, and no other.
- None left: the job does not fit.

What each does to the numbers stands in ``docs/exact-resume.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

FINER = 8
"""How many times finer the logits' slices become."""


class Rung(BaseModel):
    """One way to hold less memory, in force from ``step`` on (1 is the first). ``factor``: slices or parts."""

    model_config = ConfigDict(frozen=True)

    what: Literal["checkpointing", "logits", "split"]
    step: int
    factor: int = 1


class Savings(NamedTuple):
    """What is in force at one step: recompute activations; logits so many times finer; parts of a micro-batch."""

    checkpointing: bool = False
    finer: int = 1
    parts: int = 1


def in_force(rungs: Sequence[Rung], step: int) -> Savings:
    """What ``rungs`` say of step number ``step``."""
    now = [r for r in rungs if r.step <= step]
    return Savings(any(r.what == "checkpointing" for r in now),
                   max((r.factor for r in now if r.what == "logits"), default=1),
                   max((r.factor for r in now if r.what == "split"), default=1))


def united(a: Sequence[Rung], b: Sequence[Rung]) -> tuple[Rung, ...]:
    """The rungs of two records of one job, in order; one that both know holds from the earlier step on.

    A checkpoint knows those that its steps were run with, the ledger's record those that were taken since.
    """
    first: dict[tuple[str, int], Rung] = {}
    for rung in (*a, *b):
        known = first.setdefault((rung.what, rung.factor), rung)
        if rung.step < known.step:
            first[rung.what, rung.factor] = rung
    return tuple(sorted(first.values(), key=lambda r: r.step))


def climb(rungs: Sequence[Rung], step: int, *, recomputes: bool, most_parts: int) -> tuple[Rung, ...] | None:
    """The rungs of a job that ran out of memory at ``step``, or None where it has none left.

    ``recomputes``: computing activations again would be new to it, and its model can; ``most_parts`` of a micro-batch.
    """
    if later := [r for r in rungs if r.step > step]:
        first = min(later, key=lambda r: r.step)
        return tuple(r.model_copy(update={"step": step}) if r is first else r for r in rungs)
    now = in_force(rungs, step)
    if recomputes and not now.checkpointing:
        return (*rungs, Rung(what="checkpointing", step=step))
    if now.finer == 1:
        return (*rungs, Rung(what="logits", step=step, factor=FINER))
    if now.parts < most_parts:
        return (*rungs, Rung(what="split", step=step, factor=min(2 * now.parts, most_parts)))
    return None


def sentence(rungs: Sequence[Rung]) -> str:
    """What is in force, for people: ``"activations are computed again since step 105"``; empty for none."""
    last = {r.what: r for r in rungs}  # of several splits, the finest
    return "; ".join(f"{_WORDS[r.what].format(r.factor)} since step {r.step}" for r in last.values())


_WORDS = {"checkpointing": "activations are computed again", "logits": "logits stand in {} times finer slices",
          "split": "micro-batches run in {} parts"}
