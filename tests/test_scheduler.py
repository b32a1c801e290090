"""Whose fault and what then, the user's verbs in every state, and starts after every end: scripted histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from moments import STATES, bring, failed, relieve
from world import DIE, HANG, STUCK, World, now, play

from rrd.errors import BadJob, NoSuchJob, RrdError
from rrd.faults import DISK_RETRY
from rrd.gate.simulated import Act
from rrd.journal import Kind
from rrd.messages import Evict, Load, Run
from rrd.states import JobState


def story(tmp: Path, tell: Callable[[World], Awaitable[None]], *lanes: int, **config: Any) -> None:
    async def whole() -> None:
        async with World(tmp, *lanes, **config) as w:
            await tell(w)

    play(whole())


# --- from a file to an adapter ----------------------------------------------------------------------------------------


def test_jobs_are_prepared_placed_trained_and_done_without_a_step_twice(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", "c", "d", "e", max_steps=23)
        await w.until_done(*"abcde")
        for name in "abcde":
            assert w.steps_of(name) == list(range(1, 24))
            assert w.keeper.records[name].state is JobState.DONE and w.keeper.records[name].announced_step == 23
        assert sorted(w.workers.exports) == [(n, 23) for n in "abcde"]
        assert all(w.job(n).die is None for n in "abcde")
        assert w.lines[-1].endswith("loss 2.5") or "steps/min" in w.lines[-1]

    story(tmp_path, tell, 2, 1)


def test_more_jobs_than_room_wait_in_the_order_of_their_files_and_say_why(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        names = [f"j{i:02}" for i in range(12)]
        w.drop(*names, max_steps=10)
        await w.until(lambda: sum(w.state(n) == "running" for n in names) == 4)
        waiting = [n for n in names if w.state(n) == "waiting"]
        assert set(waiting) >= set(names[6:])
        assert all(w.why(n) for n in waiting), [w.why(n) for n in waiting]
        await w.until_done(*names)
        order = [o.job for o in w.workers.orders if isinstance(o, Load)]
        assert set(order[:4]) == set(names[:4]) and abs(order.index("j11") - 11) <= 1

    story(tmp_path, tell, 2, jobs_per_die=2)


def test_a_job_waits_for_the_die_it_wishes_for_and_says_so(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", die=1)
        w.drop("b", die=1)
        w.drop("c", die=7)
        await w.until_step("a", 5)
        assert w.job("a").die == "1" and "die 1 is full" in w.why("b") and "there is no die" in w.why("c")
        await w.until_done("a", "b")
        assert w.state("c") == "waiting"

    story(tmp_path, tell, 2, jobs_per_die=1)


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_costs_the_steps_since_the_last_checkpoint_and_the_others_nothing(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", max_steps=40)
        w.workers.at("a", "step 17", DIE)
        await w.until_done("a", "b")
        assert w.steps_of("a") == [*range(1, 17), *range(11, 41)]
        assert w.steps_of("b") == list(range(1, 41))
        assert w.journal.of(Kind.WORKER_DIED) == [
            "the worker was killed by SIGSEGV at step 16; resuming from the newest checkpoint"]

    story(tmp_path, tell)


@pytest.mark.parametrize("moment", ["step 17", "load", "save", "export", "evict"])
@pytest.mark.parametrize("act", [DIE, HANG, failed("worker", "KeyError: 'x'")])
def test_three_deaths_without_a_new_step_fail_the_job_and_spare_the_die(tmp_path: Path, moment: str, act: Any) -> None:
    async def tell(w: World) -> None:
        w.drop("bad", max_steps=20, die=0)
        w.drop("good", max_steps=2000, die=0)
        w.workers.at("bad", moment, act, act, act)
        await w.until_state("bad", "failed")
        assert "3 times in a row without a new step" in w.why("bad")
        assert w.job("bad").record.hint
        assert w.journal.of(Kind.FAILED, "bad") and w.keeper.records["bad"].state is JobState.FAILED
        assert w.job("bad").die is None
        lane = w.scheduler.lanes["0"]
        assert not lane.dies["0"].fenced and lane.dies["0"].jobs.keys() == {"good"}
        step = w.job("good").step
        await w.until_step("good", step + 50)

    story(tmp_path, tell, 1)


def test_deaths_with_new_steps_in_between_are_borne_for_ever(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=40, checkpoint_every=2)
        for step in range(5, 40, 3):
            w.workers.at("a", f"step {step}", DIE)
        await w.until_done("a")

    story(tmp_path, tell, 1)


def test_deaths_are_counted_across_starts_of_the_daemon(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=40)
        w.workers.at("a", "step 17", DIE, DIE, DIE)
        await w.until(lambda: w.job("a").record.crashes == 1)
        await w.crash()
        w.scan()
        await w.until_state("a", "failed")
        assert sum(s == 17 for s in w.steps_of("a")) == 0 and len(w.journal.of(Kind.WORKER_DIED)) == 3

    story(tmp_path, tell, 1)


def test_two_jobs_in_a_row_fence_the_die_and_all_move(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", "c", die="auto", max_steps=100)
        await w.until_step("c", 5)
        die = w.job("a").die
        mates = [n for n in "abc" if w.job(n).die == die]
        assert len(mates) == 2  # three jobs on two dies
        for n in mates:
            w.workers.at(n, "step", DIE)
        await w.until(lambda: w.journal.of(Kind.DIE_FENCED))
        (other,) = {"0", "1"} - {die}
        await w.until_done(*"abc")
        assert all(w.job(n).record.crashes == 0 for n in "abc")
        fenced = w.scheduler.lanes["0"].dies[die or ""]
        assert "and then on" in fenced.fenced and fenced.jobs == {}
        assert w.scheduler.lanes["0"].dies[other].fenced == ""
        w.drop("d", die=int(die or 0))
        await w.until(lambda: "fenced" in w.why("d"))
        assert w.verbs.unfence(die or "") == f"die {die} is in use again"
        await w.until_done("d")

    story(tmp_path, tell, 2)


def test_one_job_that_crashes_twice_does_not_fence(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", die=0)
        w.workers.at("a", "step 7", DIE, DIE)
        await w.until_done("a", "b")
        assert w.journal.of(Kind.DIE_FENCED) == []

    story(tmp_path, tell, 1)


def test_a_worker_killed_between_visits_is_nobodys_fault(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", die=0, max_steps=200)
        w.drop("c", die=1, max_steps=200, steps_per_visit=50)
        await w.until(lambda: w.job("a").step > 20 and w.job("b").step > 20)
        await w.until(lambda: (c := w.scheduler.lanes["0"].computing) is not None and c[1].name == "1")
        w.workers.on("0").end(-9)
        await w.until_done("a", "b", "c")
        (said,) = w.journal.of(Kind.WORKER_DIED)
        assert said.startswith("the worker was killed by SIGKILL")
        assert w.journal.of(Kind.FAILED) == [] and w.journal.of(Kind.DIE_FENCED) == []
        assert all(w.job(n).record.crashes == 0 for n in "abc")

    story(tmp_path, tell, 2)


def test_a_preparation_that_is_killed_is_tried_again(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "prepare", DIE, HANG)
        await w.until_done("a")
        w.drop("b")
        w.workers.at("b", "prepare", DIE, DIE, DIE)
        await w.until_state("b", "failed")
        assert "3 times in a row" in w.why("b")

    story(tmp_path, tell)


@pytest.mark.parametrize("blame", ["job", "plan"])
@pytest.mark.parametrize("moment", ["prepare", "load", "step 7", "save", "export"])
def test_a_job_at_fault_fails_with_its_reason(tmp_path: Path, blame: str, moment: str) -> None:
    async def tell(w: World) -> None:
        w.drop("bad", "good", die=0)
        w.workers.at("bad", moment, failed(blame, "its loss is no number"))
        await w.until_state("bad", "failed")
        assert w.why("bad") == "its loss is no number" and w.job("bad").record.hint == "do something"
        assert w.journal.of(Kind.FAILED, "bad") == ["its loss is no number"]
        await w.until_done("good")

    story(tmp_path, tell)


# --- tried again by itself --------------------------------------------------------------------------------------------


def test_a_missing_model_fails_the_job_until_it_is_there(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.workers.missing.add("/new")
        w.drop("a", model="/new")
        await w.until_state("a", "failed")
        assert w.why("a") == "there is no model in /new"
        await w.seconds(1)
        w.scan()
        await w.seconds(5)
        assert w.state("a") == "failed" and len(w.journal.of(Kind.FAILED)) == 1  # nothing changed
        w.workers.missing.clear()
        w.keeper.files_changed += 1
        w.scan()
        await w.until_done("a")

    story(tmp_path, tell)


def test_a_model_that_arrives_while_the_job_fails_is_seen(tmp_path: Path) -> None:
    """What a failed job's files looked like is what they looked like before it was tried."""

    async def tell(w: World) -> None:
        w.workers.missing.add("/new")
        w.workers.prepare_seconds = 5.0
        w.drop("a", model="/new")
        await w.until_state("a", "preparing")
        await w.seconds(4.9)
        w.keeper.files_changed += 1  # too late for this attempt
        await w.until_state("a", "failed")
        await w.seconds(1)
        w.workers.missing.clear()
        w.scan()
        await w.until_done("a")

    story(tmp_path, tell)


def test_a_retried_job_has_all_its_chances(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "step 7", DIE, DIE, DIE)
        await w.until_state("a", "failed")
        w.workers.at("a", "step 7", DIE)
        w.drop("a", keep=5)  # the user looked at it
        await w.until_done("a")

    story(tmp_path, tell)


def test_want_of_disk_is_waited_for(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "load", failed("disk", "the disk is full"), failed("disk", "the disk is full"))
        await w.until(lambda: w.state("a") == "waiting" and w.why("a") == "the disk is full")
        start = now()
        await w.until_done("a")
        assert 2 * DISK_RETRY < now() - start < 2 * DISK_RETRY + 30

    story(tmp_path, tell)


def test_a_full_disk_pauses_and_lets_go_on_by_itself(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=60)
        await w.until_step("a", 12)
        w.disk.full = True
        await w.until_state("a", "paused")
        assert w.why("a") == "no checkpoint can be saved: the disk is full" and "by itself" in w.job("a").record.hint
        with pytest.raises(RrdError, match="is not paused"):
            w.verbs.resume("a")
        await w.seconds(100)
        assert 30 <= w.job("a").step <= 35 and len(w.journal.of(Kind.DISK)) == 1
        w.disk.full = False
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 61))

    story(tmp_path, tell)


def test_a_job_paused_by_its_disk_goes_on_after_a_restart_of_the_daemon(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=60)
        await w.until_step("a", 12)
        w.disk.full = True
        await w.until_state("a", "paused")
        await w.stop()
        w.disk.full = False
        await w.crash()
        await w.until_done("a")

    story(tmp_path, tell)


def test_the_user_pauses_a_job_that_waits_for_its_disk(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=60)
        w.disk.full = True
        await w.until_state("a", "paused")
        w.verbs.pause("a")
        await w.seconds(20)
        w.disk.full = False
        await w.until(lambda: w.job("a").die is None)
        await w.seconds(60)
        assert w.state("a") == "paused" and w.why("a") == "paused by the user"
        w.verbs.resume("a")
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 61))

    story(tmp_path, tell)


# --- gates ------------------------------------------------------------------------------------------------------------


def test_a_refused_die_blames_no_job_and_is_said_once(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.script("0", *[Act("refuse", reason="the helper is away")] * 5)
        w.drop("a", die=0)
        w.drop("b", die=1)
        await w.until(lambda: w.scheduler.lanes["0"].dies["0"].refusal)
        assert [v.why for v in w.scheduler.views()] == ["the gate refused die 0: the helper is away", ""]
        w.verbs.pause("a")
        assert w.scheduler.views()[0].why.endswith("paused by the user; the gate refused die 0: the helper is away")
        w.verbs.resume("a")
        await w.until_done("b")
        assert w.state("a") != "failed"
        await w.until_done("a")
        (said,) = w.journal.of(Kind.GATE_REFUSED)
        assert "the helper is away" in said and "trying again in" in said
        assert w.job("a").record.crashes == 0

    story(tmp_path, tell)


@pytest.mark.parametrize("seed", range(4))
def test_nobody_touches_a_die_that_is_not_held_whatever_happens(tmp_path: Path, seed: int) -> None:
    """The world asserts it at its end; every job that can is done, with every step."""

    async def tell(w: World) -> None:
        chance = random.Random(seed)
        names = [f"j{i}" for i in range(7)]
        for i, name in enumerate(names):
            w.drop(name, scan=False, max_steps=60, checkpoint_every=chance.choice([3, 10, "1s"]),
                   steps_per_visit=chance.choice([1, 5, "auto"]), visit_seconds=1.0)
            for _ in range(2):
                w.workers.at(name, f"step {chance.randint(1, 59)}", chance.choice([DIE, DIE, HANG, STUCK]))
            if i % 2:
                w.workers.at(name, chance.choice(["load", "save", "export", "evict"]), chance.choice([DIE, HANG]))
        for die in "012":
            w.script(die, *(Act(chance.choice(["grant"] * 4 + ["refuse", "hang"]), after=chance.random())  # type: ignore[arg-type]
                            for _ in range(40)))
        w.scan()
        for _ in range(30):
            await w.seconds(chance.uniform(0.1, 30))
            name = chance.choice(names)
            if chance.random() < 0.1:
                w.disk.full = not w.disk.full
            elif chance.random() < 0.1:
                w.obliging()  # else workers are ended without the die: tests of the lane
                await w.stop()
                await w.crash()
            else:
                _some_verb(w, chance, name)
        w.disk.full = False
        for _ in range(200):
            for die in "012":
                w.verbs.unfence(die)
            for name in names:
                _help(w, name)
            await w.seconds(30)
            if all(w.state(n) == "done" for n in names):
                break
        await w.until_done(*names)
        for name in names:
            assert set(w.steps_of(name)) == set(range(1, 61)), name
            assert w.disk.checkpoints[name][-1] == 60

    story(tmp_path, tell, 2, 1, jobs_per_die=2)


def _some_verb(w: World, chance: random.Random, name: str) -> None:
    try:
        match chance.randrange(6):
            case 0:
                w.verbs.pause(name)
            case 1:
                w.verbs.resume(name)
            case 2:
                w.verbs.restart(name)
            case 3:
                w.drop(name, max_steps=60, keep=chance.randint(1, 9), checkpoint_every=chance.choice([2, 7, "2s"]))
            case 4:
                w.remove(name)
            case 5:
                w.verbs.cancel(name)
    except (RrdError, KeyError):
        pass


def _help(w: World, name: str) -> None:
    """What a user does who wants the job done after all."""
    if name not in w.files or name not in w.scheduler.jobs:
        w.drop(name, max_steps=60)
    elif w.state(name) in ("failed", "cancelled"):
        w.verbs.restart(name)
    elif w.job(name).record.user_paused:
        w.verbs.resume(name)


# --- the user's verbs -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_restart_in_every_state(tmp_path: Path, state: str, fresh: bool) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        done = w.steps_of("a")
        saved = max(w.disk.checkpoints["a"], default=0)
        said = w.verbs.restart("a", fresh=fresh)
        assert said.endswith("at step 0" if fresh else "from its newest checkpoint")
        if state != "disk" or fresh:
            await w.until(lambda: w.journal.of(Kind.JOB_RESTARTED, "a"), 30)
        relieve(w)
        await w.until_done("a")
        again = w.steps_of("a")[len(done):]
        if fresh:
            assert again[-50:] == list(range(1, 51))
        elif state == "failed":
            assert again == list(range(saved + 1, 51))
        else:
            assert done + again == list(range(1, 51))  # nothing was done twice

    story(tmp_path, tell, 1, jobs_per_die=1)


@pytest.mark.parametrize("state", STATES)
def test_restart_with_another_identity_begins_at_step_0_in_every_state(tmp_path: Path, state: str) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        w.drop("a", lr=0.5)
        if w.job("a").refusal:
            assert "`lr` is not in force" in w.job("a").refusal
            assert len(w.journal.of(Kind.EDIT_REFUSED)) == 1
            w.scan()
            assert len(w.journal.of(Kind.EDIT_REFUSED)) == 1  # said once
            n = len(w.steps_of("a"))
            assert w.verbs.restart("a").endswith("at step 0")
            relieve(w)
            await w.until(lambda: w.journal.of(Kind.JOB_RESTARTED))
            await w.until_done("a")
            assert w.steps_of("a")[n:][-50:] == list(range(1, 51))
        else:  # nothing was trained: it is simply taken over
            relieve(w)
            await w.until_done("a")
            assert w.steps_of("a") == list(range(1, 51))
        assert w.job("a").spec.lr == 0.5 and w.keeper.specs["a"].lr == 0.5
        assert [o.spec.lr for o in w.workers.orders if isinstance(o, Load) and o.job == "a"][-1] == 0.5
        assert not w.job("a").refusal

    story(tmp_path, tell, 1, jobs_per_die=1)


@pytest.mark.parametrize("state", STATES)
def test_pause_and_resume_in_every_state(tmp_path: Path, state: str) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        if state in ("done", "failed", "cancelled"):
            with pytest.raises(RrdError, match="nothing to pause"):
                w.verbs.pause("a")
            return
        w.verbs.pause("a")
        relieve(w)
        await w.until(lambda: w.state("a") in ("paused", "done") and w.job("a").die is None)
        await w.seconds(60)
        if w.state("a") == "done":
            assert state == "exporting"
            return
        assert w.state("a") == "paused" and w.why("a") == "paused by the user"
        assert w.keeper.records["a"].user_paused
        with pytest.raises(RrdError):
            w.verbs.restart("nobody")
        w.verbs.resume("a")
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell, 1, jobs_per_die=1)


def test_what_was_cancelled_in_its_pause_is_not_said_to_carry_on(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        await w.until_step("a", 13)
        w.verbs.pause("a")
        await w.until(lambda: w.state("a") == "paused" and w.job("a").die is None)
        w.verbs.cancel("a")
        assert not w.keeper.records["a"].user_paused
        with pytest.raises(RrdError, match=r"a is cancelled; there is nothing to resume \(`rrd restart a` carries on"):
            w.verbs.resume("a")
        w.verbs.restart("a")
        await w.until_done("a")
        with pytest.raises(RrdError, match=r"a is done; there is nothing to resume$"):
            w.verbs.resume("a")

    story(tmp_path, tell, 1)


@pytest.mark.parametrize("state", STATES)
def test_pause_then_resume_at_once_in_every_state(tmp_path: Path, state: str) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        if state in ("done", "failed", "cancelled"):
            return
        if state != "paused":
            w.verbs.pause("a")
        await w.seconds(0.05)
        if w.state("a") != "done":
            w.verbs.resume("a")
        relieve(w)
        await w.until_done("a", seconds=120)
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell, 1, jobs_per_die=1)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3, 1.0, 2.0, 2.1, 2.5])
@pytest.mark.parametrize("second", ["resume", "cancel", "restart", "fresh", "remove"])
@pytest.mark.parametrize("first", ["pause", "cancel", "restart", "fresh", "remove"])
def test_one_wish_after_another_while_it_leaves(tmp_path: Path, first: str, second: str, delay: float) -> None:
    """Whatever is asked for while a job is on its way off the die: what was asked last holds."""

    async def tell(w: World) -> None:
        w.workers.write_seconds = 2.0
        w.drop("a", checkpoint_every=1000)
        await w.until_step("a", 13)
        _wish(w, first)
        await w.seconds(delay)
        if not _wish(w, second):
            return  # it made no sense any more
        await w.seconds(10)
        match second:
            case "cancel":
                assert w.state("a") == "cancelled" and (w.disk.checkpoints["a"] or first == "fresh")
            case "remove":
                assert w.state("a") is None
                assert w.disk.checkpoints["a"] or first == "fresh"
                w.drop("a", checkpoint_every=1000)
                await w.seconds(1)
        if w.state("a") == "paused" and second != "resume":
            w.verbs.resume("a")
        if w.state("a") == "cancelled":
            w.verbs.restart("a")
        await w.until_done("a")
        steps = w.steps_of("a")
        if "fresh" in (first, second) and second not in ("cancel", "restart"):
            assert steps[-50:] == list(range(1, 51)) and len(steps) > 50
        assert steps[-1] == 50

    story(tmp_path, tell, 1)


def _wish(w: World, wish: str) -> bool:
    """Ask for it; False if that was refused."""
    try:
        match wish:
            case "pause" | "resume" | "cancel" | "restart":
                getattr(w.verbs, wish)("a")
            case "fresh":
                w.verbs.restart("a", fresh=True)
            case "remove":
                w.remove("a")
    except (RrdError, KeyError):
        return False
    return True


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state(tmp_path: Path, state: str) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        if state in ("done", "failed", "cancelled"):
            with pytest.raises(RrdError, match="nothing to cancel"):
                w.verbs.cancel("a")
            return
        w.verbs.cancel("a")
        relieve(w)
        await w.until_state("a", "cancelled", "done", seconds=60)
        if state == "exporting" and w.state("a") == "done":
            return
        trained = w.steps_of("a")
        await w.seconds(60)
        assert w.steps_of("a") == trained and w.job("a").die is None
        assert max(w.disk.checkpoints["a"], default=0) == len(trained)
        w.verbs.restart("a")
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell, 1, jobs_per_die=1)


def test_verbs_for_nobody(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        for verb in (w.verbs.pause, w.verbs.resume, w.verbs.cancel, w.verbs.restart):
            with pytest.raises(NoSuchJob):
                verb("nobody")
        with pytest.raises(RrdError, match="there is no die 9"):
            w.verbs.unfence("9")
        w.drop("a", paused=True)
        await w.until_state("a", "paused")
        assert w.why("a") == "paused by its job file"
        with pytest.raises(BadJob, match="paused by its job file"):
            w.verbs.resume("a")

    story(tmp_path, tell)


# --- the daemon ends and starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gracefully", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_a_new_daemon_carries_on_from_every_state(tmp_path: Path, state: str, gracefully: bool) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        before = w.state("a")
        if gracefully:
            await w.stop()
        await w.crash()
        relieve(w)
        await w.seconds(5)
        if state in ("paused", "done", "failed", "cancelled"):
            assert w.state("a") == before
            assert state != "failed" or w.why("a") == "no"
            if state == "paused":
                w.verbs.resume("a")
            elif state != "done":
                w.verbs.restart("a")
        await w.until_done("a")
        if gracefully and state not in ("disk", "failed"):
            assert w.steps_of("a") == list(range(1, 51))
        assert set(w.steps_of("a")) == set(range(1, 51))
        assert w.disk.checkpoints["a"][-1] == 50

    story(tmp_path, tell, 1, jobs_per_die=1)


def test_everything_resident_is_saved_at_the_end(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        names = [f"j{i}" for i in range(6)]
        w.drop(*names, max_steps=10_000, checkpoint_every="1h")
        await w.until(lambda: all(w.job(n).step > 5 for n in names))
        await w.stop()
        assert {n: w.disk.checkpoints[n] for n in names} == {n: [w.job(n).step] for n in names}
        assert {n: w.keeper.records[n].announced_step for n in names} == {n: w.job(n).step for n in names}
        assert w.workers.alive() == []

    story(tmp_path, tell, 2, 1)


def test_a_cadence_by_the_clock_is_kept_within_a_long_visit(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=500, steps_per_visit="auto", visit_seconds=600.0, checkpoint_every="5s")
        await w.until_done("a")
        saved = [0, *w.disk.checkpoints["a"]]
        assert max(b - a for a, b in pairwise(saved)) <= 60, saved  # a step takes 0.1 s

    story(tmp_path, tell, 1)


def test_a_cadence_shorter_than_a_round_makes_no_visit_shorter(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        names = [f"j{i}" for i in range(6)]
        w.drop(*names, max_steps=400, steps_per_visit="auto", visit_seconds=2.0, checkpoint_every="3s")
        await w.until_done(*names)
        runs = Counter(o.job for o in w.workers.orders if isinstance(o, Run) and o.steps)
        assert set(runs.values()) == {20}, runs  # of 20 steps each

    story(tmp_path, tell, 6, 1)


def test_a_failure_while_it_leaves_does_not_undo_the_wish(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        for n, (verb, state) in enumerate([("cancel", "cancelled"), ("restart", "done")]):
            name = f"j{n}"
            w.drop(name, steps_per_visit=1000, checkpoint_every=1000)
            await w.until_step(name, 13)
            w.workers.at(name, "step", failed("job", "its loss is no number"))
            getattr(w.verbs, verb)(name)
            await w.until_state(name, state)
            assert w.job(name).restart is None and w.job(name).leave is None
            assert "its loss is no number" in " ".join(s.message for s in w.journal.all if s.job == name)

    story(tmp_path, tell, 1)


def test_a_job_evicted_is_forgotten_by_its_worker(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", die=0)
        await w.until_step("b", 5)
        w.verbs.pause("a")
        await w.until_state("a", "paused")
        assert w.workers.on("0").residents.keys() == {"b"}
        assert [o.job for o in w.workers.orders if isinstance(o, Evict)] == ["a"]

    story(tmp_path, tell)
