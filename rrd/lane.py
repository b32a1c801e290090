"""A lane: dies of which one computes at a time, their workers, and the visits.

One task per lane. It asks the rotation whose turn it is, has the gate grant the die, has the worker load the job or
run its steps, and gives the die back. What a visit leads to (ended, crashed, refused) it tells the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from rrd.config import Config
from rrd.config import Lane as LaneSpec
from rrd.die import Die
from rrd.errors import TryLater
from rrd.gate import Gate
from rrd.handle import Nursery, Worker, WorkerGone
from rrd.messages import (
    CommitFailed,
    Committed,
    Evict,
    Evicted,
    Export,
    Exported,
    Failed,
    Load,
    Loaded,
    Message,
    Ready,
    Run,
    VisitDone,
    Yield,
)
from rrd.roster import Job, Leave
from rrd.rotation import Rotation, Turn
from rrd.snapshot import DieView, LaneView, VisitView

RETRY_SECONDS = 15.0
"""How often a job that waits for its disk tries to save again."""
START_PATIENCE = 120.0
"""Seconds for a worker to come up, torch's import on a cold disk included."""
STOP_PATIENCE = 600.0
"""Seconds for a worker to finish writing what was copied aside before a stop."""


class Host(Protocol):
    """Whom a lane tells what happened. None of these may block."""

    def heard(self, job: Job | None, die: Die, report: Message) -> None: ...
    def visited(self, job: Job, die: Die, turn: Turn, done: VisitDone) -> None: ...
    def loaded(self, job: Job, die: Die, report: Loaded) -> None: ...
    def exported(self, job: Job, report: Exported) -> None: ...
    def finishing(self, job: Job) -> None: ...
    def finished(self, job: Job) -> None: ...
    def granted(self, die: Die, seconds: float) -> None: ...
    def refused(self, die: Die, reason: str, retry_in: float) -> None: ...
    def failed(self, job: Job, die: Die, report: Failed) -> None: ...
    def crashed(self, job: Job | None, die: Die, reason: str) -> None: ...
    def disk_full(self, job: Job) -> None: ...
    def disk_back(self, job: Job) -> None: ...
    def left(self, job: Job, leave: Leave) -> None: ...


class Lane:
    """One lane at work. ``run`` until ``stop``; ``put`` and ``take_off`` move jobs."""

    def __init__(self, spec: LaneSpec, config: Config, *, gate: Gate, nursery: Nursery, host: Host,
                 monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.name, self.config, self.gate, self.nursery, self.host = spec.name, config, gate, nursery, host
        self.gate_kind = spec.gate.kind
        self.monotonic, self.wall = monotonic, wall
        self.dies = {d.name: Die(d) for d in spec.dies}
        self.rotation = Rotation([d.name for d in spec.dies])
        self.jobs: dict[str, Job] = {}
        self.stopping = False
        self.computing: tuple[Job, Die] | None = None
        self.busy_seconds = 0.0
        self.seconds = 0.0
        self._leaving: list[Job] = []
        self._retry_at: dict[str, float] = {}
        self._wake = asyncio.Event()

    # --- moving jobs ---

    def put(self, job: Job, die_name: str) -> None:
        """Give ``job`` a place on a die; its next turn loads it."""
        die = self.dies[die_name]
        job.die, job.lane = die.name, self.name
        self.jobs[job.id] = die.jobs[job.id] = job
        self.rotation.add(job.id, die.name, job.spec.weight)
        self.wake()

    def take_off(self, job: Job, leave: Leave) -> None:
        """Take ``job`` off its die as soon as the step in progress has ended; ``host.left`` follows."""
        if job.leave is None:
            self._leaving.append(job)
        job.leave = leave
        self.wake()
        self.interrupt()

    def interrupt(self) -> None:
        """End the visit in progress after its step."""
        if self.computing and (worker := self.computing[1].worker):
            worker.tell(Yield())

    def wake(self) -> None:
        self._wake.set()

    def _forget(self, job: Job) -> None:
        """Take ``job`` out of the books; its worker has forgotten it, or is gone."""
        if job.id in self.jobs:
            self.rotation.remove(job.id)
            del self.jobs[job.id]
            self.dies[job.die or ""].jobs.pop(job.id, None)
        self._retry_at.pop(job.id, None)
        if job in self._leaving:
            self._leaving.remove(job)
        job.off_die()
        job.die = job.lane = job.leave = None

    # --- the loop ---

    async def run(self) -> None:
        """Visits, one after another, until ``stopping``."""
        while not self.stopping:
            self._wake.clear()
            start = self.monotonic()
            if self._leaving:
                await self._see_off(self._leaving[0])
            elif job := self._due_retry(start):
                await self._retry(job)
            elif turn := self.rotation.next(start):
                await self._turn(turn)
                self.seconds += self.monotonic() - start
            else:
                await self._sleep(start)

    async def _sleep(self, now: float) -> None:
        times = [t for t in (self.rotation.wake_at(), *self._retry_at.values()) if t is not None]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, min(times) - now) if times else None)

    async def _turn(self, turn: Turn) -> None:
        job, die = self.jobs[turn.job], self.dies[turn.die]
        try:
            async with self._granted(die):
                await self._visit(job, die, turn)
        except TryLater as e:
            self._refused(die, e.message)
        except WorkerGone as e:
            self._crashed(job, die, e.message)
        finally:
            if self.rotation.in_flight is turn:
                self.rotation.done(turn)

    @contextlib.asynccontextmanager
    async def _granted(self, die: Die) -> AsyncIterator[None]:
        """Hold ``die``. Raises TryLater when the gate does not give it. Nothing touches the die outside."""
        start = self.monotonic()
        await self.gate.acquire(die.name)
        self.host.granted(die, self.monotonic() - start)
        die.refusal = ""
        try:
            yield
        finally:
            try:
                await self.gate.release(die.name)
            except TryLater as e:
                self._refused(die, e.message)

    def _refused(self, die: Die, reason: str) -> None:
        die.refusals += 1
        first, die.refusal = not die.refusal, reason
        now = self.monotonic()
        retry_at = self.rotation.refused(die.name, now)
        if first:  # said once a streak; the metric counts all
            self.host.refused(die, reason, retry_at - now)

    # --- a visit ---

    async def _visit(self, job: Job, die: Die, turn: Turn) -> None:
        self.computing = job, die
        die.since, before = self.wall(), job.steps_run
        try:
            worker = await self._worker(die)
            if not job.resident:
                await self._load(job, die, worker)
            elif job.disk_strikes > 1:
                self._hold_for_disk(job)
            elif job.trained:
                await self._finish(job, die, worker)
            else:
                await self._steps(job, die, worker, turn)
            die.suspect = ""
            self.rotation.granted(die.name)  # not before: a die whose workers keep dying is left alone ever longer
        finally:
            die.visits.append(VisitView(job=job.id, start=die.since, end=self.wall(), steps=job.steps_run - before,
                                        round=turn.round))
            self.computing = die.since = None

    async def _worker(self, die: Die) -> Worker:
        if die.worker is None or not die.worker.alive:
            die.worker = Worker(self.nursery, die.settings(self.config), lambda report: self._hear(die, report))
            die.restarts += 1
            await die.worker.start()
            ready = await die.worker.ask(None, Ready, patience=lambda: START_PATIENCE)
            assert isinstance(ready, Ready)
            die.ready = ready
        return die.worker

    async def _load(self, job: Job, die: Die, worker: Worker) -> None:
        order = Load(job=job.id, spec=job.spec, expect_step=job.record.announced_step)
        answer = await self._ask(job, die, worker, order, Loaded)
        if isinstance(answer, Loaded):
            self.host.loaded(job, die, answer)

    async def _steps(self, job: Job, die: Die, worker: Worker, turn: Turn) -> None:
        """A visit's steps, a checkpoint where one is due, an export where one is due; and the end of the job."""
        assert job.total is not None
        n, seconds = job.visit()
        due = job.checkpoint_due(self.monotonic(), n, seconds)
        answer = await self._ask(job, die, worker, self._run_order(job, n, seconds, due, turn.round), VisitDone)
        if not isinstance(answer, VisitDone):
            return
        self.busy_seconds += answer.seconds
        self.host.visited(job, die, turn, answer)
        if job.trained and not self.stopping:
            await self._finish(job, die, worker)
        elif job.export_due and not self.stopping:
            await self._export(job, die, worker)

    def _run_order(self, job: Job, steps: int, seconds: float | None, checkpoint: bool, round: int = 0) -> Run:
        s = job.spec
        return Run(job=job.id, steps=steps, seconds=seconds, total=job.total or 0, round=round, checkpoint=checkpoint,
                   keep=s.keep, eval_every=s.eval_every, on_nan=s.on_nan)

    async def _export(self, job: Job, die: Die, worker: Worker) -> Exported | None:
        answer = await self._ask(job, die, worker, Export(job=job.id, output=job.output), Exported)
        if not isinstance(answer, Exported):
            return None
        job.exported_step = job.step
        self.host.exported(job, answer)
        return answer

    async def _finish(self, job: Job, die: Die, worker: Worker) -> None:
        """The end of a trained job: its last checkpoint, its adapter, and off the die."""
        self.host.finishing(job)
        if not await self._save(job, die, worker):
            self._hold_for_disk(job)
        elif await self._export(job, die, worker) and await self._evict(job, die, worker):
            self._forget(job)
            self.host.finished(job)

    async def _save(self, job: Job, die: Die, worker: Worker) -> bool:
        """A checkpoint of the state as it is, durable when this returns True."""
        if job.step == job.saved_step:
            return True
        if await self._ask(job, die, worker, self._run_order(job, 0, None, True), VisitDone) is None:
            return False
        while job.saving:
            await worker.ask(None, Committed, CommitFailed, patience=lambda: STOP_PATIENCE)
        return job.saved_step == job.step

    async def _evict(self, job: Job, die: Die, worker: Worker) -> bool:
        return await self._ask(job, die, worker, Evict(job=job.id), Evicted) is not None

    async def _ask(self, job: Job, die: Die, worker: Worker, order: Message, *answers: type[Message]) -> Message | None:
        """The answer, or None when the worker says that it failed; the host then knows."""
        answer = await worker.ask(order, *answers, patience=lambda: job.patience(self.config.hang_seconds))
        if isinstance(answer, Failed):
            job.off_die()
            self.host.failed(job, die, answer)
            return None
        return answer

    def _hear(self, die: Die, report: Message) -> None:
        job = self.jobs.get(getattr(report, "job", ""))
        if job is not None:
            job.hear(report, self.wall(), self.monotonic())
        self.host.heard(job, die, report)

    # --- off the die ---

    async def _see_off(self, job: Job) -> None:
        """Save a job that leaves and have its worker forget it."""
        leave = job.leave
        assert leave is not None
        die = self.dies[job.die or ""]
        try:
            if job.resident and die.alive:
                async with self._granted(die):
                    worker = await self._worker(die)
                    if leave.save and not await self._save(job, die, worker) and job.resident:
                        self._leaving.remove(job)
                        self._hold_for_disk(job)
                        return
                    if job.resident:
                        await self._evict(job, die, worker)
        except TryLater as e:
            self._refused(die, e.message)  # it goes without a word to the die; the checkpoint is what is there
            if leave.save and job.step != job.saved_step:
                await asyncio.sleep(0.1)
                return  # still in the list: try again, as long as the die may come back
        except WorkerGone as e:
            self._crashed(None, die, e.message)
        if job.id in self.jobs and job.leave is not None:
            self._forget(job)
            self.host.left(job, leave)

    def drop(self, job: Job) -> None:
        """Take a job that its worker no longer holds off its die at once, without a word to it."""
        self._forget(job)

    def _hold_for_disk(self, job: Job) -> None:
        """Training went on for a cadence more than the disk could take: rest, resident, until it takes it."""
        if job.id not in self.jobs:
            return
        if job.id not in self._retry_at:
            self.rotation.hold(job.id)
            self.host.disk_full(job)
        self._retry_at[job.id] = self.monotonic() + RETRY_SECONDS

    def _due_retry(self, now: float) -> Job | None:
        return next((self.jobs[j] for j, t in self._retry_at.items() if t <= now), None)

    async def _retry(self, job: Job) -> None:
        """Try again to save a job that waits for its disk."""
        die = self.dies[job.die or ""]
        self._retry_at[job.id] = self.monotonic() + RETRY_SECONDS
        try:
            if job.resident:
                async with self._granted(die):
                    if not await self._save(job, die, await self._worker(die)):
                        return
        except TryLater as e:
            self._refused(die, e.message)
            return
        except WorkerGone as e:
            self._crashed(None, die, e.message)
        if job.id in self._retry_at:
            del self._retry_at[job.id]
            self.rotation.free(job.id)
            if job.leave is not None:
                self._leaving.append(job)
            self.host.disk_back(job)

    # --- faults ---

    def _crashed(self, job: Job | None, die: Die, reason: str) -> None:
        """The worker is gone: all who lived there load again, from their newest checkpoints."""
        die.worker = None
        for each in die.jobs.values():
            each.off_die()
        self.rotation.refused(die.name, self.monotonic())  # a moment's pause, longer each time it happens in a row
        self.host.crashed(job, die, reason)

    # --- the end ---

    async def stop(self) -> None:
        """Checkpoint every resident job, then stop the workers. Call it after ``run`` has returned.

        Copying aside holds the die; the writes of one job go on while the next is copied.
        """
        for die in self.dies.values():
            for job in list(die.jobs.values()):
                if job.resident and die.worker and die.alive and job.step != job.saved_step:
                    with contextlib.suppress(WorkerGone, TryLater):
                        async with self._granted(die):
                            await self._ask(job, die, die.worker, self._run_order(job, 0, None, True), VisitDone)
        await asyncio.gather(*(d.worker.stop(patience=STOP_PATIENCE) for d in self.dies.values() if d.worker))
        await self.gate.close()

    # --- what it looks like ---

    def view(self) -> LaneView:
        return LaneView(name=self.name, gate=self.gate_kind, dies=list(self.dies), round=self.rotation.round,
                        computing=self.computing[0].id if self.computing else None, busy_seconds=self.busy_seconds,
                        seconds=self.seconds)

    def die_views(self) -> list[DieView]:
        """The lane's dies, each at this instant."""
        views = []
        for die in self.dies.values():
            computing = self.computing[0].id if self.computing and self.computing[1] is die else None
            retry_at = self.rotation.retry_at(die.name)
            wall = None if retry_at is None else self.wall() + retry_at - self.monotonic()
            views.append(die.view(computing=computing, retry_at=wall))
        return views
