"""rrd.savings: the rungs by which a job gives memory back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrd.savings import FINER, Rung, Savings, climb, in_force, sentence, united


def ladder(step: int, *, recomputes: bool = True, most_parts: int = 8) -> list[tuple[Rung, ...]]:
    """What a job comes to that runs out of memory at ``step`` again and again."""
    seen: list[tuple[Rung, ...]] = []
    now: tuple[Rung, ...] | None = ()
    while (now := climb(now, step, recomputes=recomputes, most_parts=most_parts)) is not None:
        seen.append(now)
    return seen


def test_the_rungs_come_in_their_order_and_then_there_are_none() -> None:
    assert [in_force(rungs, 5) for rungs in ladder(5)] == [
        Savings(True), Savings(True, FINER), Savings(True, FINER, 2), Savings(True, FINER, 4), Savings(True, FINER, 8)]
    assert [in_force(r, 5) for r in ladder(5, recomputes=False, most_parts=3)] == [
        Savings(False, FINER), Savings(False, FINER, 2), Savings(False, FINER, 3)]
    assert len(ladder(5, recomputes=False, most_parts=1)) == 1


def test_a_rung_holds_from_its_step_on_and_not_before() -> None:
    rungs = climb((), 105, recomputes=True, most_parts=1)
    assert rungs
    assert in_force(rungs, 104) == Savings()
    assert in_force(rungs, 105) == in_force(rungs, 10**6) == Savings(True)


def test_out_of_memory_in_a_replay_brings_the_next_rung_forward_and_no_other() -> None:
    rungs = (Rung(what="checkpointing", step=105), Rung(what="logits", step=110, factor=FINER))
    earlier = climb(rungs, 103, recomputes=True, most_parts=1)
    assert earlier and [(r.what, r.step) for r in earlier] == [("checkpointing", 103), ("logits", 110)]


@given(steps=st.lists(st.integers(1, 50), max_size=30), recomputes=st.booleans(), most=st.integers(1, 9))
def test_every_rung_saves_and_what_is_in_force_only_grows(steps: list[int], recomputes: bool, most: int) -> None:
    rungs: tuple[Rung, ...] = ()
    for step in steps:
        before = in_force(rungs, step)
        new = climb(rungs, step, recomputes=recomputes, most_parts=most)
        if new is None:
            assert before.parts == most and before.finer > 1 and (before.checkpointing or not recomputes)
            continue
        rungs = new
        assert in_force(rungs, step) > before
        seen = [in_force(rungs, s) for s in range(52)]
        assert all(b.parts >= a.parts and b.finer >= a.finer and b.checkpointing >= a.checkpointing
                   for a, b in pairwise(seen))


@pytest.mark.parametrize(("rungs", "said"), [
    ((), ""), (ladder(7)[0], "activations are computed again since step 7"),
    (ladder(7)[3], "activations are computed again since step 7; logits stand in 8 times finer slices since step 7; "
                   "micro-batches run in 4 parts since step 7")])
def test_people_read_what_is_in_force(rungs: tuple[Rung, ...], said: str) -> None:
    assert sentence(rungs) == said


def test_two_records_are_united_and_the_earlier_step_holds() -> None:
    checkpoint = (Rung(what="checkpointing", step=105), Rung(what="split", step=120, factor=2))
    record = (Rung(what="checkpointing", step=103), Rung(what="logits", step=110, factor=FINER))
    both = united(record, checkpoint)
    assert [(r.what, r.step) for r in both] == [("checkpointing", 103), ("logits", 110), ("split", 120)]
    assert both == united(checkpoint, record)
    assert united((), record) == record
