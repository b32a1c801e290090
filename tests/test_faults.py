"""rrd.faults: want of memory, dies of no use that come back, jobs bound to a kind of die; scripted histories."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from moments import failed
from world import DIE, HANG, World, now, play

from rrd.die import FENCE_FIRST, FENCE_MOST
from rrd.faults import BUSY_RETRY, RELEASE_STEPS
from rrd.gate.simulated import Act
from rrd.journal import Kind
from rrd.messages import Evict, OutOfMemory, Run
from rrd.savings import Savings, in_force


def story(tmp: Path, tell: Callable[[World], Awaitable[None]], *lanes: int, **config: Any) -> None:
    async def whole() -> None:
        async with World(tmp, *lanes, **config) as w:
            await tell(w)

    play(whole())


def short(step: int, what: str = "training", resident: bool = True) -> OutOfMemory:
    return OutOfMemory(job="", step=step, what=what, resident=resident, needed=2 << 30,  # type: ignore[arg-type]
                       free=310 << 20)


def orders(w: World, name: str) -> list[Run]:
    return [o for o in w.workers.orders if isinstance(o, Run) and o.job == name and o.steps]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_out_of_memory_once_needs_no_rung_only_the_caches(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "step 7", short(7))
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 51))  # the same step again, and none lost
        assert w.job("a").record.rungs == () and w.job("a").view().savings == ""
        assert w.journal.of(Kind.OUT_OF_MEMORY) == [
            "out of memory in step 7: it needed 2.0 GiB more, 310 MiB were free; trying again with the caches let go"]

    story(tmp_path, tell)


def test_the_rungs_are_taken_one_by_one_said_and_kept_for_ever(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", die=0)
        w.workers.at("a", "step 7", *[short(7)] * 4)
        await w.until_step("a", 8)
        record = w.job("a").record
        assert in_force(record.rungs, 7) == Savings(True, 8, 2) and in_force(record.rungs, 6) == Savings()
        said = w.journal.of(Kind.OUT_OF_MEMORY, "a")[-1]
        assert said.endswith("to need less, micro-batches run in 2 parts since step 7")
        assert "2 parts since step 7" in w.job("a").view().savings
        assert w.keeper.records["a"].rungs == record.rungs
        before = len(w.workers.orders)
        await w.crash()
        w.scan()
        await w.until_done("a", "b")
        again = [o for o in w.workers.orders[before:] if isinstance(o, Run) and o.job == "a"]
        assert again and all(o.rungs == record.rungs for o in again)  # the steps before 7 run as they ran then
        assert w.journal.of(Kind.FAILED) == [] and all(o.rungs == () for o in orders(w, "b"))
        assert w.job("a").record.crashes == 0

    story(tmp_path, tell, 1)


def test_what_cannot_fit_fails_with_the_numbers_saved_and_the_others_go_on(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("large", "b", die=0, max_steps=200)
        w.workers.at("large", "step 17", *[short(17)] * 6)
        await w.until_state("large", "failed")
        assert w.why("large") == ("out of memory in step 17: it needed 2.0 GiB more, 310 MiB were free; "
                                  "nothing is left that would need less")
        assert "batch_size" in w.job("large").record.hint
        assert max(w.disk.checkpoints["large"]) == 16  # what it has trained is kept
        assert [o.job for o in w.workers.orders if isinstance(o, Evict)] == ["large"]
        await w.until_done("b")
        assert w.steps_of("b") == list(range(1, 201)) and sum(o.die == "0" for o in w.workers.born) == 1

    story(tmp_path, tell, 1)


@pytest.mark.parametrize("what", ["load", "training"])
def test_out_of_memory_that_cost_the_job_its_place_is_tried_again_from_the_checkpoint(
        tmp_path: Path, what: str) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "load" if what == "load" else "step 17", short(0 if what == "load" else 17, what, False))
        await w.until_done("a")
        assert sorted(set(w.steps_of("a"))) == list(range(1, 51)) and w.job("a").record.crashes == 0

    story(tmp_path, tell)


def test_a_model_that_does_not_load_fails_with_the_numbers(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", die=0)
        w.workers.at("a", "load", *[short(0, "load", False)] * 2)
        await w.until_state("a", "failed")
        assert w.why("a") == "out of memory while it was loaded: it needed 2.0 GiB more, 310 MiB were free"
        await w.until_done("b")

    story(tmp_path, tell)


def test_the_caches_are_tried_again_after_many_good_steps(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=300)
        w.workers.at("a", "step 7", short(7))
        w.workers.at("a", f"step {8 + RELEASE_STEPS}", short(8 + RELEASE_STEPS))
        await w.until_done("a")
        assert w.job("a").record.rungs == ()

    story(tmp_path, tell)


def test_a_fresh_start_forgets_the_rungs(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=10**6)
        w.workers.at("a", "step 7", short(7), short(7))
        await w.until_step("a", 20)
        assert w.job("a").record.rungs
        w.verbs.restart("a", fresh=True)
        await w.until(lambda: w.state("a") == "running" and w.job("a").step < 20)
        assert w.job("a").record.rungs == ()

    story(tmp_path, tell)


def test_a_user_who_cancels_meanwhile_has_the_last_word(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "step 17", *[short(17)] * 6)
        await w.until(lambda: len(w.journal.of(Kind.OUT_OF_MEMORY)) == 5)
        w.verbs.cancel("a")
        await w.until_state("a", "cancelled")
        await w.seconds(5)
        assert w.state("a") == "cancelled"

    story(tmp_path, tell)


# --- dies -------------------------------------------------------------------------------------------------------------

NO_KERNELS = failed("die", "torch has no kernels for this die")


def test_a_die_of_no_use_is_fenced_at_once_and_nobody_is_blamed(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", "c", max_steps=100)
        await w.until_step("c", 5)
        die = w.job("a").die
        assert die is not None
        w.workers.at("a", "step", NO_KERNELS)
        await w.until(lambda: w.journal.of(Kind.DIE_FENCED))
        assert all(w.job(n).record.crashes == 0 for n in "abc")
        view = w.scheduler.lanes["0"].die_views()[int(die)]
        assert view.state == "fenced" and "no kernels" in view.why and view.crashes == 1
        assert view.retry_at == pytest.approx(1.7e9 + now() + FENCE_FIRST, abs=1)
        await w.until_done(*"abc")
        assert w.journal.of(Kind.FAILED) == []

    story(tmp_path, tell, 2)


def test_a_fenced_die_is_probed_ever_more_rarely_and_returns(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.workers.at("", "probe", NO_KERNELS, DIE, HANG)
        w.workers.at("a", "step 17", NO_KERNELS)
        w.drop("a")
        await w.until(lambda: w.journal.of(Kind.DIE_FENCED))
        die, start = w.scheduler.lanes["0"].dies["0"], now()
        await w.until(lambda: "fenced" in w.why("a"))
        await w.until(lambda: w.journal.of(Kind.DIE_RETURNED), 3600)
        assert now() - start == pytest.approx(FENCE_FIRST * (1 + 2 + 4 + 8), abs=20)
        assert [m.split(":")[0] for m in w.journal.of(Kind.DIE_FENCED)] == ["fenced"] + ["still fenced"] * 3
        await w.until_done("a")
        assert not die.fenced and w.steps_of("a")[-1] == 50

    story(tmp_path, tell, 1)


def test_what_befalls_a_probe_is_counted_as_what_it_is(tmp_path: Path) -> None:
    """A worker that dies of it is a crash, and the die is left alone longer; a gate that refuses says nothing of it."""
    async def tell(w: World) -> None:
        w.workers.at("", "probe", DIE)
        w.workers.at("a", "step 17", NO_KERNELS)
        w.drop("a")
        await w.until(lambda: w.journal.of(Kind.DIE_FENCED))
        die = w.scheduler.lanes["0"].dies["0"]
        before, start = die.crashes, now()
        w.script("0", *[Act("refuse")] * 3)
        await w.until(lambda: w.journal.of(Kind.GATE_REFUSED))
        assert die.probe_delay == FENCE_FIRST and die.crashes == before and die.view(
            computing=None, retry_at=None).refusals == 1
        await w.until(lambda: len(w.journal.of(Kind.DIE_FENCED)) == 2)
        assert now() - start < FENCE_FIRST + 20 and die.refusals == 3 and die.probe_delay == 2 * FENCE_FIRST
        assert die.crashes == before + 1
        assert "still fenced: the worker was killed by SIGSEGV" in w.journal.of(Kind.DIE_FENCED)[-1]
        await w.until_done("a")

    story(tmp_path, tell, 1)


def test_a_job_whose_lock_is_taken_keeps_its_place_and_the_lane_goes_on(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        taken = "the job's directory /j/a is in use by another process"
        w.workers.at("a", "load", *[failed("busy", taken)] * 20)
        w.drop("a", "b", die=0)
        await w.until(lambda: w.why("a") == taken)
        assert w.state("a") == "loading" and w.job("a").die == "0"
        start = now()
        await w.until_done("b")
        assert w.state("a") == "loading" and now() - start < 20 * BUSY_RETRY
        await w.until_done("a")
        assert len(w.journal.of(Kind.JOB_WAITS, "a")) == 1 and w.job("a").record.crashes == 0
        w.workers.at("c", "load", *[failed("busy", taken)] * 1000)
        w.drop("c")
        await w.until(lambda: w.why("c") == taken)
        w.verbs.cancel("c")
        await w.until_state("c", "cancelled")

    story(tmp_path, tell, 1)


def test_on_probation_the_next_fence_is_longer_and_good_work_makes_it_short_again(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        die = w.scheduler.lanes["0"].dies["0"]
        w.drop("a", max_steps=10**6)
        for expected in (60, 120, 240):
            w.workers.at("a", "step", NO_KERNELS)
            await w.until(lambda: die.fenced)
            assert die.probe_delay == expected
            await w.until(lambda: not die.fenced)
        await w.until(lambda: die.probe_delay == 0, 300)
        w.workers.at("a", "step", NO_KERNELS)
        await w.until(lambda: die.fenced)
        assert die.probe_delay == FENCE_FIRST < FENCE_MOST

    story(tmp_path, tell, 1)


def test_a_die_that_falls_off_the_bus_is_fenced_and_its_jobs_go_on_elsewhere(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "c", max_steps=2000)
        w.drop("b", die=1, max_steps=2000)
        w.drop("bound", die=0, max_steps=100)
        await w.until(lambda: all(w.job(n).record.announced_step for n in ("a", "b", "c", "bound")))
        there = [n for n in "ac" if w.job(n).die == "0"]
        lane, gate = w.scheduler.lanes["0"], w.gates["0"]
        start = now()
        w.script("0", Act("fall"))
        await w.until(lambda: lane.dies["0"].fenced)
        assert there and all(w.job(n).record.crashes == 0 for n in ("a", "b", "c", "bound"))
        await w.until(lambda: all(w.job(n).die == "1" and w.state(n) == "running" for n in there), 20)
        await w.until(lambda: "fenced" in w.why("bound"))
        view = lane.die_views()[0]
        assert view.state == "fenced" and "the gate refused die 0: the die has vanished" in view.why
        assert view.worker_pid is None and w.journal.of(Kind.WORKER_DIED) == w.journal.of(Kind.GATE_REFUSED) == []
        await w.seconds(300)
        assert 2 <= lane.dies["0"].refusals < 12  # it is asked for again, ever more rarely
        gate.come_back("0")
        await w.until(lambda: w.journal.of(Kind.DIE_RETURNED), 2 * FENCE_FIRST)
        await w.until_done("a", "b", "c", "bound")
        assert sorted(set(w.steps_of("bound"))) == list(range(1, 101)) and now() - start > 300
        assert len(w.journal.of(Kind.DIE_FENCED)) == 1 and lane.dies["0"].crashes == 1

    story(tmp_path, tell, 2)


def test_one_that_is_not_there_from_the_start_takes_nobody_with_it(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.script("0", Act("fall"))
        w.drop("a")
        await w.until_done("a")
        assert w.scheduler.lanes["0"].dies["0"].fenced and w.steps_of("a") == list(range(1, 51))
        assert w.scheduler.lanes["0"].dies["0"].crashes == 0

    story(tmp_path, tell, 2)


def test_the_user_can_put_it_back_before(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "step 17", NO_KERNELS)
        await w.until(lambda: w.journal.of(Kind.DIE_FENCED))
        start = now()
        assert w.verbs.unfence("0") == "die 0 is in use again"
        await w.until_done("a")
        assert now() - start < FENCE_FIRST and w.scheduler.lanes["0"].dies["0"].probe_at is None

    story(tmp_path, tell, 1)


def test_put_back_while_it_is_probed_it_stays_in_use_whatever_the_probe_says(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        die = w.scheduler.lanes["0"].dies["0"]
        w.workers.at("", "probe", HANG)
        w.workers.at("a", "step 17", NO_KERNELS)
        w.drop("a", max_steps=10_000)
        await w.until(lambda: die.fenced)
        await w.until(lambda: die.alive, 2 * FENCE_FIRST)  # to be probed
        w.verbs.unfence("0")
        await w.until_step("a", 20)
        await w.seconds(3 * FENCE_FIRST)
        assert not die.fenced and die.probe_at is None and len(w.journal.of(Kind.DIE_FENCED)) == 1
        await w.until_done("a")

    story(tmp_path, tell, 1)


def test_a_job_moves_only_to_a_die_of_its_kind_or_waits(tmp_path: Path) -> None:
    lanes = ({"dies": ["cpu"], "threads": 1}, {"dies": ["cpu"], "threads": 2}, {"dies": ["cpu"], "threads": 1})

    async def tell(w: World) -> None:
        w.drop("a", max_steps=2000)
        await w.until(lambda: w.job("a").record.announced_step)
        first = w.job("a").die
        assert first == "0"
        w.workers.at("a", "step", NO_KERNELS)
        await w.until(lambda: w.job("a").die not in (first, None))
        assert w.job("a").die == "2"  # die 1 computes with two threads
        step = w.job("a").record.announced_step
        await w.until(lambda: w.job("a").step > step)
        w.workers.at("a", "step", NO_KERNELS)
        await w.until(lambda: w.state("a") == "waiting" and w.job("a").die is None and w.why("a") != "")
        await w.until(lambda: "fenced" in w.why("a"))
        await w.until(lambda: w.job("a").die in ("0", "2"), FENCE_FIRST + 5)
        await w.until_done("a")

    story(tmp_path, tell, lane=lanes)


def test_a_job_that_may_go_on_elsewhere_does(tmp_path: Path) -> None:
    lanes = ({"dies": ["cpu"], "threads": 1}, {"dies": ["cpu"], "threads": 2})

    async def tell(w: World) -> None:
        w.drop("a", max_steps=2000, resume="compatible")
        await w.until(lambda: w.job("a").record.announced_step)
        w.workers.at("a", "step", NO_KERNELS)
        await w.until(lambda: w.job("a").die == "1")

    story(tmp_path, tell, lane=lanes)


def test_a_job_whose_writing_kills_its_worker_is_blamed_in_the_end(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.workers.write_seconds = 3.0
        w.drop("bad", die=0, max_steps=15, steps_per_visit=1)
        w.workers.at("bad", "write", *[DIE] * 9)
        await w.until_state("bad", "failed")
        w.drop("good", die=0)
        await w.until_done("good")

    story(tmp_path, tell, 1)
