"""Visits, refusals, hangs, crashes, disks and the end, as one lane sees them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from world import DIE, HANG, STUCK, Disk, Workers, now, play

from rrd.config import Config
from rrd.die import Die
from rrd.errands import COMMIT_SECONDS
from rrd.errors import TryLater
from rrd.gate import SimulatedGate
from rrd.gate.simulated import Act
from rrd.job import JobSpec
from rrd.lane import RETRY_SECONDS, STOP_GATE_SECONDS, Lane
from rrd.ledger import Record
from rrd.messages import CommitFailed, Committed, Evict, Failed, Load, Run, Stop
from rrd.roster import Job, Leave
from rrd.states import JobState


class Host:
    """Writes down what the lane tells it."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.lane: Lane | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: self.told.append((name, *args, *more.values()))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for what, *args in self.told if what == name]

    def heard(self, job: Job | None, die: Die, report: object) -> None:
        if isinstance(report, (Committed, CommitFailed)):
            self.told.append((type(report).__name__, job, die, report))

    def failed(self, job: Job, die: Die, report: Failed) -> None:
        assert self.lane
        self.told.append(("failed", job, die, report))
        if report.blame != "worker":
            self.lane.drop(job)


class Bench:
    """One lane of ``dies`` CPU dies (or cards), its gate and its workers."""

    def __init__(self, tmp: Path, dies: int = 2, *, gate: SimulatedGate | None = None,
                 hang_seconds: float = 60.0, cards: bool = False) -> None:
        devices = [f"cuda:{i}" if cards else "cpu" for i in range(dies)]
        self.config = Config.model_validate({
            "state_dir": str(tmp / "s"), "run_dir": str(tmp / "r"), "cache_dir": str(tmp / "c"),
            "jobs_dir": str(tmp / "j"), "lane": ({"dies": devices},), "hang_seconds": hang_seconds})
        self.gate, self.host, self.disk, self.touches = gate or SimulatedGate(), Host(), Disk(), list[str]()
        self.workers = Workers(self.disk, self._touch)
        self.jobs: dict[str, Job] = {}

    def _touch(self, die: str) -> None:
        if self.gate.held != die:
            self.touches.append(f"die {die} while {self.gate.held} was held")

    async def __aenter__(self) -> Bench:
        self.patch = mock.patch("os.kill", self.workers.kill)
        self.patch.start()
        loop = asyncio.get_running_loop()
        self.lane = self.host.lane = Lane(self.config.lanes[0], self.config, gate=self.gate, nursery=self.workers,
                                          host=self.host, monotonic=loop.time, wall=loop.time)
        self.task = asyncio.create_task(self.lane.run())
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        for worker in self.workers.alive():
            worker.end(0)
        self.patch.stop()
        if kind is None:
            assert self.touches == []
            assert self.task.cancelled() or self.task.exception() is None

    def put(self, name: str, die: int = 0, **keys: Any) -> Job:
        values = {"model": "/m", "data": "/d", "max_steps": 10**6, "steps_per_visit": 5, "checkpoint_every": 10, **keys}
        job = self.jobs[name] = Job(Record(id=name, samples=100), JobSpec.model_validate(values), output=f"/out/{name}")
        self.lane.put(job, str(die))
        return job

    async def until(self, what: Callable[[], Any], seconds: float = 600.0) -> None:
        end = now() + seconds
        while not what():
            assert now() < end, self.host.told[-20:]
            if self.task.done():
                self.task.result()
            await asyncio.sleep(0.02)

    async def until_step(self, name: str, step: int) -> None:
        await self.until(lambda: self.jobs[name].step >= step)

    async def until_told(self, what: str, times: int = 1, seconds: float = 600.0) -> None:
        await self.until(lambda: len(self.host.of(what)) >= times, seconds)

    async def stop(self) -> None:
        """As the daemon ends it."""
        self.lane.stop_soon()
        await self.task
        await self.lane.stop()

    def orders(self, kind: type = Run) -> list[str]:
        """Whose turn it was for an order; visits without a step are copies aside."""
        return [o.job for o in self.workers.orders if isinstance(o, kind) and getattr(o, "steps", 1)]


def story(tmp: Path, tell: Callable[[Bench], Awaitable[None]], *args: Any, **keys: Any) -> None:
    async def whole() -> None:
        async with Bench(tmp, *args, **keys) as b:
            await tell(b)

    play(whole())


# --- whose turn -------------------------------------------------------------------------------------------------------


def test_cards_say_what_they_are_before_any_job_comes_each_while_it_is_granted(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        await b.until(lambda: all(die.ready for die in b.lane.dies.values()))
        b.put("a", 1)
        await b.until_step("a", 5)

    story(tmp_path, tell, 3, cards=True)


def test_a_card_that_is_refused_at_first_is_asked_again_what_it_is(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        await b.until(lambda: all(die.ready for die in b.lane.dies.values()), 60)
        assert len(b.host.of("refused")) == 1  # once a streak

    story(tmp_path, tell, 2, gate=SimulatedGate({"1": [Act("refuse"), Act("refuse")]}), cards=True)


def test_cpu_dies_start_no_worker_before_they_have_a_job(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 1)
        await b.until_step("a", 5)
        assert [bool(die.ready) for die in b.lane.dies.values()] == [False, True]

    story(tmp_path, tell, 2)


def test_the_first_visit_loads_and_the_others_train_in_rotation(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        for die, name in enumerate("abc"):
            b.put(name, die)
        await b.until_step("c", 15)
        assert b.orders(Load) == ["a", "b", "c"]
        assert b.orders(Run)[:9] == ["a", "b", "c"] * 3
        visits = b.host.of("visited")
        assert [(job.id, die.name, done.steps) for job, die, _, done in visits[:3]] == [
            ("a", "0", 5), ("b", "1", 5), ("c", "2", 5)]

    story(tmp_path, tell, 3)


def test_a_heavier_job_has_more_turns(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("light", 0)
        b.put("heavy", 1, weight=3.0)
        await b.until_step("heavy", 300)
        assert b.jobs["light"].step == pytest.approx(100, abs=10)
        b.lane.rotation.set_weight("light", 3.0)
        before = b.jobs["light"].step, b.jobs["heavy"].step
        await b.until_step("heavy", before[1] + 300)
        assert b.jobs["light"].step - before[0] == pytest.approx(300, abs=10)

    story(tmp_path, tell)


def test_a_visit_fills_its_seconds_and_ends_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("timed", 0, steps_per_visit="auto", visit_seconds=2.0, checkpoint_every=35)
        await b.until_step("timed", 100)
        steps = [done.steps for _, _, _, done in b.host.of("visited")]
        assert steps[:4] == [20, 15, 20, 15]
        assert b.disk.checkpoints["timed"][:2] == [35, 70]

    story(tmp_path, tell)


def test_a_checkpoint_is_written_during_the_turns_of_the_others(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.workers.write_seconds = 0.3
        b.put("a", 0, checkpoint_every=5)
        b.put("b", 1)
        await b.until_told("Committed")
        assert b.jobs["b"].step >= 2  # it trained while a's was being written
        assert b.jobs["a"].saved_step == 5

    story(tmp_path, tell)


def test_an_export_is_made_where_it_is_due(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, export_every=7, steps_per_visit=5)
        await b.until_step("a", 22)
        assert b.workers.exports == [("a", 7), ("a", 14), ("a", 21)]

    story(tmp_path, tell)


def test_a_trained_job_is_saved_exported_and_evicted(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0, max_steps=12)
        await b.until_told("finished")
        assert b.disk.checkpoints["a"] == [10, 12] and b.workers.exports == [("a", 12)]
        assert b.workers.on("0").residents == {} and job.die is None and not job.resident
        assert "a" not in b.lane.rotation

    story(tmp_path, tell)


@pytest.mark.parametrize(("cadence", "saved"), [(1000, [1000, 2000]), ("5min", [3000, 6050])])
def test_long_cadences_are_kept_with_short_visits(tmp_path: Path, cadence: int | str, saved: list[int]) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, steps_per_visit="auto", visit_seconds=10.0, checkpoint_every=cadence)
        await b.until_told("Committed", 2, 1000)
        assert b.disk.checkpoints["a"] == pytest.approx(saved, abs=0 if cadence == 1000 else 60)

    story(tmp_path, tell)


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_a_refused_die_is_left_alone_longer_each_time_and_the_others_go_on(tmp_path: Path) -> None:
    gate = SimulatedGate({"0": [Act("refuse", reason="busy")] * 4})

    async def tell(b: Bench) -> None:
        b.put("a", 0)
        b.put("b", 1)
        await b.until(lambda: b.lane.dies["0"].refusals == 4)
        assert now() - 1000 == pytest.approx(1 + 2 + 4, abs=1.0)
        ((die, reason, retry_in),) = b.host.of("refused")  # said once, not four times
        assert (die.name, retry_in) == ("0", pytest.approx(1.0)) and "busy" in reason
        view = b.lane.die_views()[0]
        assert view.state == "backing off" and "busy" in view.why and view.refusals == 4
        assert b.jobs["b"].step > 30
        await b.until_step("a", 5)
        assert b.lane.die_views()[0].why == ""

    story(tmp_path, tell, gate=gate)


def test_a_die_that_never_comes_is_asked_for_once_a_minute_for_ever(tmp_path: Path) -> None:
    gate = SimulatedGate()
    gate.vanish("0")

    async def tell(b: Bench) -> None:
        b.put("a", 0)
        await b.until(lambda: b.lane.dies["0"].refusals == 12)
        start = now()
        await b.until(lambda: b.lane.dies["0"].refusals == 22)
        assert now() - start == pytest.approx(600, abs=5)
        gate.come_back("0")
        await b.until_step("a", 5)

    story(tmp_path, tell, gate=gate)


def test_a_gate_that_hangs_costs_its_deadline_and_no_more(tmp_path: Path) -> None:
    gate = SimulatedGate({"0": [Act("hang")]}, timeout=10)

    async def tell(b: Bench) -> None:
        b.put("a", 0)
        b.put("b", 1)
        await b.until_step("b", 5)
        assert now() - 1000 < 10 + 5
        await b.until_step("a", 5)

    story(tmp_path, tell, gate=gate)


def test_a_die_whose_release_fails_is_left_alone_and_its_visit_counts(tmp_path: Path) -> None:
    class Sticky(SimulatedGate):
        sticks = True

        async def release(self, die: str) -> None:
            await super().release(die)
            if self.sticks and die == "0":
                raise TryLater("the gate could not release die 0: no answer")

    gate = Sticky()

    async def tell(b: Bench) -> None:
        b.put("a", 0)
        b.put("b", 1)
        await b.until_step("b", 20)
        assert b.jobs["a"].resident
        assert "no answer" in b.host.of("refused")[0][1]
        gate.sticks = False
        await b.until_step("a", 10)

    story(tmp_path, tell, gate=gate)


# --- workers that die and hang ----------------------------------------------------------------------------------------


def test_when_a_worker_dies_all_who_lived_there_load_again_from_their_checkpoints(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0)
        b.put("b", 0)
        b.put("c", 1)
        b.workers.at("a", "step 18", DIE)
        await b.until_told("crashed")
        ((job, die, reason),) = b.host.of("crashed")
        assert (job.id, die.name, reason) == ("a", "0", "the worker was killed by SIGSEGV")
        assert not b.jobs["a"].resident and not b.jobs["b"].resident and b.jobs["c"].resident
        await b.until(lambda: b.jobs["a"].step >= 25 and b.jobs["b"].step >= 25)
        steps = [s for j, s in b.workers.history if j == "a"]
        assert steps[:27] == [*range(1, 18), *range(11, 21)]  # 18 was never reached; on from the checkpoint of 10
        assert b.lane.dies["0"].restarts == 1

    story(tmp_path, tell)


@pytest.mark.parametrize(("act", "signals", "seconds"), [
    (HANG, [signal.SIGABRT], 60), (STUCK, [signal.SIGABRT, signal.SIGKILL], 65)])
@pytest.mark.parametrize("moment", ["load", "step 3", "save", "export", "evict"])
def test_a_worker_that_says_nothing_is_aborted_then_killed(tmp_path: Path, act: str, signals: list[int], seconds: float,
                                                           moment: str) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, max_steps=12)
        b.put("b", 1)
        b.workers.at("a", moment, act)
        await b.until_told("crashed")
        hung = b.workers.born[0]
        assert [s for s in hung.signals if s in (signal.SIGABRT, signal.SIGKILL)] == signals
        assert b.host.of("crashed")[0][2] == "the worker reported nothing for 60 s and was ended"
        assert now() - 1000 < seconds + 10
        await b.until_told("finished")
        assert [job.id for (job,) in b.host.of("finished")] == ["a"]

    story(tmp_path, tell)


def test_slow_steps_are_no_hang(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.workers.step_seconds = 30.0
        b.put("a", 0)
        await b.until_step("a", 3)
        b.workers.step_seconds = 250.0  # under ten times the median
        await b.until_step("a", 5)
        assert b.host.of("crashed") == []

    story(tmp_path, tell)


def test_a_die_whose_workers_keep_dying_is_left_alone_longer_each_time(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.workers.broken = True
        b.put("a", 0)
        await b.until_told("crashed", 8)
        assert now() - 1000 == pytest.approx(1 + 2 + 4 + 8 + 16 + 32 + 60, abs=2)
        b.workers.broken = False
        await b.until_step("a", 5)

    story(tmp_path, tell)


@pytest.mark.parametrize("blame", ["job", "disk", "plan"])
def test_what_a_worker_could_not_do_goes_to_the_host(tmp_path: Path, blame: str) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0)
        b.put("b", 0)
        b.workers.at("a", "step 3", Failed(job="", blame=blame, message="no"))
        await b.until_told("failed")
        assert b.host.of("failed")[0][2].message == "no"
        assert "a" not in b.lane.jobs and b.lane.dies["0"].jobs.keys() == {"b"}
        await b.until_step("b", 10)
        assert b.host.of("crashed") == []

    story(tmp_path, tell)


# --- leaving ----------------------------------------------------------------------------------------------------------

OFF = Leave(JobState.PAUSED, "rest")


def test_a_job_that_leaves_in_its_visit_ends_its_step_is_saved_and_evicted(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0, steps_per_visit=1000, checkpoint_every=1000)
        await b.until_step("a", 7)
        b.lane.take_off(job, OFF)
        await b.until_told("left", seconds=2)
        assert b.host.of("left") == [[job, OFF]]
        assert b.disk.checkpoints["a"] == [job.step] and 7 <= job.step <= 9
        assert b.orders(Evict) == ["a"] and job.die is job.lane is job.leave is None

    story(tmp_path, tell)


def test_a_job_that_leaves_while_another_computes_does_not_wait_for_its_visit(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        a, _ = b.put("a", 0), b.put("b", 1, steps_per_visit=10_000)
        await b.until_step("b", 3)
        b.lane.take_off(a, OFF)
        await b.until_told("left", seconds=2)

    story(tmp_path, tell)


def test_a_job_that_leaves_while_it_is_loaded_goes_when_it_is(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0)
        await b.until(lambda: b.workers.orders)
        b.lane.take_off(job, OFF)
        await b.until_told("left", seconds=3)
        assert b.orders(Run) == [] and b.orders(Evict) == ["a"] and b.workers.on("0").residents == {}

    story(tmp_path, tell)


def test_a_job_not_yet_loaded_goes_at_once_without_the_die(tmp_path: Path) -> None:
    gate = SimulatedGate()
    gate.vanish("0")

    async def tell(b: Bench) -> None:
        job = b.put("a", 0)
        await b.until_told("refused")
        b.lane.take_off(job, OFF)
        await b.until_told("left", seconds=1)

    story(tmp_path, tell, gate=gate)


@pytest.mark.parametrize("save", [True, False])
def test_leaving_waits_for_a_refused_die_and_nobody_else_does(tmp_path: Path, save: bool) -> None:
    gate = SimulatedGate()

    async def tell(b: Bench) -> None:
        a, other = b.put("a", 0), b.put("b", 1)
        await b.until_step("a", 13)
        gate._script["0"].append(Act("vanish"))
        await b.until_told("refused")
        b.lane.take_off(a, Leave(JobState.WAITING, save=save))
        before, start = other.step, now()
        await b.until_step("b", before + 100)
        assert now() - start < 20  # b has nearly all the time
        assert b.host.of("left") == [] and b.workers.on("0").residents == {"a": a.step}
        assert b.lane.dies["0"].refusals < 8  # asked as rarely as for a visit
        gate.come_back("0")
        await b.until_told("left", seconds=70)
        assert b.workers.on("0").residents == {}
        assert (max(b.disk.checkpoints["a"]) == a.step) is save

    story(tmp_path, tell, gate=gate)


def test_where_it_goes_is_what_was_asked_last(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.workers.write_seconds = 5.0
        job = b.put("a", 0, checkpoint_every=1000)
        await b.until_step("a", 7)
        b.lane.take_off(job, OFF)
        await b.until(lambda: job.saving)  # it is on its way
        b.lane.take_off(job, last := Leave(JobState.CANCELLED, "enough"))
        await b.until_told("left")
        assert b.host.of("left") == [[job, last]]

    story(tmp_path, tell)


def test_a_worker_that_dies_as_its_job_leaves_takes_nothing_with_it(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0, checkpoint_every=5)
        b.put("b", 0)
        await b.until_step("a", 7)
        b.workers.at("a", "evict", DIE)
        b.lane.take_off(job, OFF)
        await b.until_told("left")
        await b.until_step("b", 20)
        assert b.host.of("crashed")[0][0] is None  # nobody was on a visit

    story(tmp_path, tell)


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_one_more_cadence_then_the_job_rests_and_goes_on_by_itself(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0, steps_per_visit=2, checkpoint_every=10)
        other = b.put("b", 1, checkpoint_every=10**6)
        await b.until_step("a", 12)
        b.disk.full = True
        await b.until_told("disk_full")
        assert job.step == 30  # refused at 20, went on to 30
        assert [r.step for _, _, r in b.host.of("CommitFailed")] == [20, 30]
        assert job.resident
        before = other.step
        await b.until_step("b", before + 600)
        assert job.step == 30 and len(b.host.of("disk_full")) == 1
        b.disk.full = False
        await b.until_told("disk_back", seconds=RETRY_SECONDS + 2)
        assert job.saved_step == 30
        await b.until_step("a", 60)
        assert b.disk.checkpoints["a"][:4] == [10, 30, 40, 50]

    story(tmp_path, tell)


def test_a_disk_full_at_the_end_delays_the_end(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.disk.full = True
        b.put("a", 0, max_steps=8)
        await b.until_told("disk_full")
        await b.until_told("CommitFailed", 4)
        assert b.workers.exports == [] and len(b.host.of("disk_full")) == 1
        b.disk.full = False
        await b.until_told("finished")
        assert b.disk.checkpoints["a"] == [8] and b.workers.exports == [("a", 8)]

    story(tmp_path, tell)


@pytest.mark.parametrize("why", ["end", "leave", "cancel"])
def test_a_slow_disk_at_a_jobs_end_costs_the_others_no_turn(tmp_path: Path, why: str) -> None:
    """The die is held while the state is copied aside, and again to export and evict; not while it is written."""
    async def tell(b: Bench) -> None:
        b.workers.write_seconds = 100.0
        job = b.put("a", 0, max_steps=30 if why == "end" else 10**6, checkpoint_every=30)
        mate, other = b.put("mate", 0, checkpoint_every=10**6), b.put("b", 1, checkpoint_every=10**6)
        await b.until_step("a", 30)
        if why != "end":
            await b.until(lambda: job.saving)
            b.lane.take_off(job, Leave(JobState.PAUSED if why == "leave" else JobState.CANCELLED, save=why == "leave"))
        start, before = now(), (mate.step, other.step)
        await b.until_told("finished" if why == "end" else "left")
        assert (b.disk.checkpoints["a"] or [30])[0] == 30 and now() - start > 90
        run = 0.1 * (mate.step - before[0] + other.step - before[1])
        assert run > 0.95 * (now() - start), "the lane stood"
        assert b.orders(Evict) == ["a"] and b.workers.on("0").residents.keys() == {"mate"}

    story(tmp_path, tell)


def test_a_worker_that_dies_while_it_writes_a_last_checkpoint_is_noticed_at_once(tmp_path: Path) -> None:
    """Nobody waits for it then, and nothing else may be due."""
    async def tell(b: Bench) -> None:
        b.workers.write_seconds = 100.0
        job = b.put("a", 0, max_steps=30, checkpoint_every=10**6)
        await b.until(lambda: job.saving)
        await asyncio.sleep(1)
        b.workers.on("0").end(-signal.SIGKILL)
        b.workers.write_seconds = 0.1
        await b.until_told("crashed", seconds=5)
        await b.until_told("finished", seconds=60)
        assert b.disk.checkpoints["a"] == [30]

    story(tmp_path, tell)


def test_a_write_that_never_ends_is_a_hang_in_the_end(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.workers.write_seconds = 10**6
        job = b.put("a", 0, max_steps=30, checkpoint_every=10**6)
        await b.until(lambda: job.saving)
        start = now()
        await b.until_told("crashed", seconds=COMMIT_SECONDS + 10)
        assert now() - start > COMMIT_SECONDS - 10
        assert b.host.of("crashed")[0][2] == "the worker did not write a checkpoint within 600 s and was ended"
        b.workers.write_seconds = 0.1
        await b.until_told("finished")

    story(tmp_path, tell)


def test_a_job_that_waits_for_its_disk_survives_the_death_of_its_worker(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0, checkpoint_every=5)
        await b.until_step("a", 5)
        b.disk.full = True
        await b.until_told("disk_full")
        b.workers.at("a", "save", DIE)
        await b.until_told("crashed")
        b.disk.full = False
        await b.until_step("a", 40)
        assert job.disk_strikes == 0 and len(b.host.of("disk_back")) <= 2

    story(tmp_path, tell)


@pytest.mark.parametrize("save", [True, False])
def test_a_job_that_waits_for_its_disk_leaves_when_it_is_saved_or_need_not_be(tmp_path: Path, save: bool) -> None:
    async def tell(b: Bench) -> None:
        job = b.put("a", 0, checkpoint_every=5)
        b.disk.full = True
        await b.until_told("disk_full")
        b.lane.take_off(job, Leave(JobState.CANCELLED, save=save))
        if save:
            await b.until_told("CommitFailed", 5)
            assert b.host.of("left") == []
            b.disk.full = False
        await b.until_told("left", seconds=RETRY_SECONDS + 1 if save else 1)
        assert b.disk.checkpoints["a"] == ([job.step] if save else [])
        assert b.workers.on("0").residents == {}

    story(tmp_path, tell)


def test_an_export_that_the_disk_does_not_take_costs_no_step(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, export_every=7, checkpoint_every=10**6, max_steps=30)
        b.workers.at("a", "export", Failed(job="", blame="disk", message="the disk is full", resident=True))
        await b.until_told("finished")
        assert b.workers.exports == [("a", 14), ("a", 21), ("a", 28), ("a", 30)]
        assert [s for j, s in b.workers.history if j == "a"] == list(range(1, 31))
        assert b.host.of("failed") == [] and len(b.host.of("not_exported")) == 1

    story(tmp_path, tell)


def test_a_last_export_that_the_disk_does_not_take_is_the_hosts_to_try_again(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, max_steps=8)
        b.workers.at("a", "export", Failed(job="", blame="disk", message="the disk is full", resident=True))
        await b.until_told("failed")
        assert b.disk.checkpoints["a"] == [8] and b.workers.on("0").residents == {}

    story(tmp_path, tell)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_saves_every_resident_job_and_stops_the_workers(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        jobs = [b.put("a", 0, checkpoint_every=10**6), b.put("b", 0, checkpoint_every=10**6),
                b.put("c", 1, checkpoint_every=10**6, steps_per_visit=200)]
        await b.until(lambda: jobs[1].step and jobs[2].step % 200 > 5)  # c is in a visit
        await b.stop()
        assert {j.id: j.step for j in jobs} == {j: s[-1] for j, s in b.disk.checkpoints.items() if s}
        assert 5 < jobs[2].step % 200 < 10
        assert [w.exit.result() for w in b.workers.born] == [0, 0]

    story(tmp_path, tell)


@pytest.mark.parametrize("act", [Act("refuse"), Act("hang")])
def test_the_end_asks_a_refusing_gate_again(tmp_path: Path, act: Act) -> None:
    gate = SimulatedGate()

    async def tell(b: Bench) -> None:
        b.put("a", 0, checkpoint_every=10**6)
        b.put("b", 1, checkpoint_every=10**6)
        await b.until_step("b", 5)
        gate._script["0"].extend([act])
        gate._script["1"].extend([act])
        await b.stop()
        assert {j.id: [j.step] for j in b.jobs.values()} == b.disk.checkpoints

    story(tmp_path, tell, gate=gate)


def test_the_end_comes_even_if_a_die_does_not(tmp_path: Path) -> None:
    gate = SimulatedGate()

    async def tell(b: Bench) -> None:
        b.put("a", 0, checkpoint_every=10**6)
        b.put("b", 1, checkpoint_every=10**6)
        await b.until_step("b", 5)
        gate._script["0"].append(Act("vanish"))
        start = now()
        await b.stop()
        assert now() - start < STOP_GATE_SECONDS + 15
        assert b.disk.checkpoints["b"] == [b.jobs["b"].step]
        assert "vanished" in b.host.of("refused")[-1][1]
        b.touches.clear()  # its worker was ended without the die: there was no other way

    story(tmp_path, tell, gate=gate)


@pytest.mark.parametrize("act", [DIE, HANG, STUCK])
def test_the_end_comes_even_if_a_worker_dies_of_saving(tmp_path: Path, act: str) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, checkpoint_every=10**6)
        b.put("b", 1, checkpoint_every=10**6)
        await b.until_step("b", 5)
        b.workers.at("a", "save", act)
        start = now()
        await b.stop()
        assert now() - start < 100
        assert b.disk.checkpoints["b"] == [b.jobs["b"].step] and not b.disk.checkpoints["a"]
        assert b.host.of("crashed")
        assert b.workers.alive() == []

    story(tmp_path, tell)


def test_the_end_does_not_wait_long_for_an_idle_worker_that_hangs(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.put("a", 0, checkpoint_every=5, max_steps=5)
        await b.until_told("finished")
        worker = b.workers.on("0")
        worker._tasks[1].cancel()  # it reads its orders, and does nothing about them
        start = now()
        await b.stop()
        assert now() - start < 30 and b.workers.alive() == []

    story(tmp_path, tell)


def test_the_end_waits_for_a_checkpoint_that_takes_minutes(tmp_path: Path) -> None:
    async def tell(b: Bench) -> None:
        b.workers.write_seconds = 300.0
        job = b.put("a", 0, checkpoint_every=10**6)
        await b.until_step("a", 5)
        await b.stop()
        assert b.disk.checkpoints["a"] == [job.step]

    story(tmp_path, tell)


def test_workers_are_stopped_while_their_die_is_held(tmp_path: Path) -> None:
    """A process that ends with a context on a die touches it."""

    async def tell(b: Bench) -> None:
        b.put("a", 0)
        b.put("b", 1)
        await b.until_step("b", 5)
        await b.stop()
        assert sum(isinstance(o, Stop) for o in b.workers.orders) == 2
        assert b.touches == [] and b.gate.held is None

    story(tmp_path, tell)


