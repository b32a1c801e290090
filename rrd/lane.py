"""A lane: dies of which one computes at a time, their workers, and the visits.

One task per lane. It asks the rotation whose turn it is, has the gate grant the die, has the worker load the job or
run its steps, and gives the die back. What a visit leads to (ended, crashed, refused) it tells the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from rrd import messages
from rrd.config import Config, LaneSpec
from rrd.die import Die
from rrd.errands import COMMIT_SECONDS, Errands
from rrd.errors import TryLater
from rrd.gate import Gate, GateRefused
from rrd.handle import ASK_SECONDS, Nursery, Worker, WorkerGone
from rrd.host import Host
from rrd.messages import CommitFailed, Committed, Message
from rrd.roster import Job, Leave
from rrd.rotation import Rotation, Turn
from rrd.snapshot import DieView, LaneView, VisitView
from rrd.visit import Visit

RETRY_SECONDS = 15.0
"""How often a job that waits for its disk tries to save again."""
STOP_GATE_SECONDS = 30.0
"""How long the end of the lane asks again for dies that its gate refuses."""


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
        self.stopping = self.hurried = False
        self.computing: tuple[Job, Die] | None = None
        self.busy_seconds = 0.0
        self.seconds = 0.0
        self._errands = Errands()
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
        job.leave = leave
        self._errands.want(job.id, self.monotonic())
        self.wake()
        self.interrupt()

    def interrupt(self) -> None:
        """End the visit in progress after its step; a load or an export at once, if its job leaves or the end comes."""
        if self.computing and (worker := self.computing[1].worker):
            now = self.stopping or self.computing[0].leave is not None
            worker.tell(messages.Yield(urgency=2 if self.hurried else int(now)))

    def stop_soon(self, *, hurry: bool = False) -> None:
        """Have ``run`` return; with ``hurry`` without the step in progress, and with little patience."""
        self.stopping, self.hurried = True, hurry or self.hurried
        self.interrupt()
        self.wake()
        for die in self.dies.values() if hurry else ():
            if die.worker:
                die.worker.nudge()

    def wake(self) -> None:
        self._wake.set()

    def drop(self, job: Job) -> None:
        """Take ``job`` out of the books, without a word to its worker, which has forgotten it or is gone."""
        if job.id in self.jobs:
            self.rotation.remove(job.id)
            del self.jobs[job.id]
            self.dies[job.die or ""].jobs.pop(job.id, None)
        self._errands.drop(job.id)
        job.off_die()
        job.die = job.lane = job.leave = None
        job.held = False

    # --- the loop ---

    async def run(self) -> None:
        """Visits, one after another, until ``stopping``."""
        while not self.stopping:
            self._wake.clear()
            start = self.monotonic()
            if die := next((d for d in self.dies.values() if d.worker and not d.alive), None):
                self._crashed(die.only_writer, die, die.worker.end if die.worker else "")
            elif die := next((d for d in self.dies.values() if d.probe_at is not None and d.probe_at <= start), None):
                await self._probe(die)
            elif die := next((d for d in self._unknown() if self._look_at(d) <= start), None):
                await self._look(die)
            elif job := next((j for j in map(self.jobs.get, self._errands) if j and self._due(j) <= start), None):
                await self._errand(job)
            elif turn := self.rotation.next(start):
                await self._turn(turn)
                self.seconds += self.monotonic() - start
            else:
                await self._sleep(start)

    def _unknown(self) -> list[Die]:
        """Cards that have not said yet what they are: jobs may wish for one by UUID, or go on only on one of its kind,
        and placement counts its memory."""
        return [d for d in self.dies.values() if d.spec.device != "cpu" and d.ready is None and not d.fenced]

    def _look_at(self, die: Die) -> float:
        """When such a card is to be asked."""
        return self.rotation.retry_at(die.name) or 0.0

    async def _look(self, die: Die) -> None:
        try:
            async with self._granted(die):
                await self._worker(die)
                self.rotation.granted(die.name)
        except TryLater as e:
            await self._refused(die, e)
        except WorkerGone as e:
            self._crashed(None, die, e.message)

    async def _probe(self, die: Die) -> None:
        """Whether a fenced die computes again."""
        try:
            async with self._granted(die):
                worker = await self._worker(die)
                answer = await worker.ask(messages.Probe(), messages.Probed, patience=lambda: ASK_SECONDS)
                if isinstance(answer, messages.Probed):
                    self.rotation.granted(die.name)
                    self.host.returned(die)
                    return
                await worker.stop()
                die.worker = None
                self._still_fenced(die, getattr(answer, "message", "it gave no answer"))
        except TryLater as e:  # of the gate, or the box has no process to spare: that says nothing about the die
            await self._refused(die, e)
            die.probe_at = self.rotation.retry_at(die.name) if die.fenced else None
        except WorkerGone as e:
            if die.fenced:
                self._lost_worker(None, die)
                self._still_fenced(die, e.message)
            else:  # the user has put it back meanwhile: a die like any other
                self._crashed(None, die, e.message)

    def _still_fenced(self, die: Die, why: str) -> None:
        if die.fenced:
            die.put_off_probe(self.monotonic())
            self.host.still_fenced(die, why)

    async def _sleep(self, now: float) -> None:
        errands = (self._due(self.jobs[j]) for j in self._errands)
        probes = (d.probe_at for d in self.dies.values())
        looks = map(self._look_at, self._unknown())
        times = [t for t in (self.rotation.wake_at(), *errands, *probes, *looks) if t is not None]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, min(times) - now) if times else None)

    async def _turn(self, turn: Turn) -> None:
        job, die = self.jobs[turn.job], self.dies[turn.die]
        try:
            async with self._granted(die):
                await self._visit(job, die, turn)
        except TryLater as e:
            await self._refused(die, e)
        except WorkerGone as e:
            self.rotation.done(turn)
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
                await self._refused(die, e)

    async def _refused(self, die: Die, e: TryLater) -> None:
        die.refusals += 1
        first, die.refusal = not die.refusal, e.message
        now = self.monotonic()
        retry_at = self.rotation.refused(die.name, now)
        if isinstance(e, GateRefused) and e.lost and not (die.fenced or self.stopping):
            await self._fallen(die, e.message)
        elif first:  # said once a streak; the metric counts all
            self.host.refused(die, e.message, retry_at - now)

    async def _fallen(self, die: Die, reason: str) -> None:
        """The die has lost what its worker held there."""
        if die.worker:
            await die.worker.end_now("lost its die")
            self._lost_worker(None, die)
        self.host.fallen(die, reason)

    # --- a visit ---

    async def _visit(self, job: Job, die: Die, turn: Turn) -> None:
        self.computing = job, die
        die.since, before = self.wall(), job.steps_run
        try:
            await Visit(self, job, die, await self._worker(die)).take(turn)
            if job.steps_run > before:  # a load alone says little: dies that load well may still die in a step
                self.rotation.granted(die.name)
        finally:
            die.visits.append(VisitView(job=job.id, start=die.since, end=self.wall(), steps=job.steps_run - before,
                                        round=turn.round))
            self.computing = die.since = None

    async def _worker(self, die: Die) -> Worker:
        return await die.bring_up(self.nursery, self.config, lambda report: self._hear(die, report), self.wake)

    def _hear(self, die: Die, report: Message) -> None:
        job = self.jobs.get(getattr(report, "job", ""))
        if job is not None:
            job.hear(report, self.wall(), self.monotonic())
        self.host.heard(job, die, report)
        if job and isinstance(report, (Committed, CommitFailed)) and self._errands.commit_over(job.id):
            if isinstance(report, CommitFailed) and report.step == job.step and job.needs_save:
                self.hold_for_disk(job)
            else:
                self._errands.want(job.id, self.monotonic())
            self.wake()

    # --- outside the turns ---

    def _due(self, job: Job) -> float:
        """When the job's errand can be run: it waits for the die's back-off if it needs the die."""
        backed_off = self.rotation.retry_at(job.die or "") if job.resident else None
        return max(self._errands.at(job.id), backed_off or 0.0)

    async def _errand(self, job: Job) -> None:
        """Save a job that leaves, and have its worker forget it; or one that waits for its disk, to let it go on."""
        die = self.dies[job.die or ""]
        try:
            if job.resident and not await self._settle(job, die):
                return
        except TryLater as e:
            await self._refused(die, e)
            return
        except WorkerGone as e:
            self._crashed(None, die, e.message)
        if job.id not in self._errands:
            return  # dropped by the host, or lost with its worker
        if (leave := job.leave) is None:
            self._errands.drop(job.id)
            self.rotation.free(job.id)
            if job.held:
                job.held = False
                self.host.disk_back(job)
        elif not job.resident:
            self.drop(job)
            self.host.left(job, leave)

    async def _settle(self, job: Job, die: Die) -> bool:
        """What the errand needs of the worker; False where that is not over yet."""
        if job.saving:
            if self._errands.overdue(job.id, self.monotonic()) and die.worker:
                await die.worker.end_now(f"did not write a checkpoint within {COMMIT_SECONDS:.0f} s")
                raise WorkerGone(die.worker.end)
            self.await_commit(job)  # whatever is wanted: a worker forgets nobody whom it is writing
            return False
        if job.leave is None and not job.needs_save:
            return True
        async with self._granted(die):
            visit = Visit(self, job, die, await self._worker(die))
            if job.needs_save and not await visit.saved() and job.resident:
                return False
            if job.leave and job.resident:
                await visit.evict()
        return True

    def await_commit(self, job: Job) -> None:
        """The job rests until its checkpoint is written; others have their turns."""
        self._errands.await_commit(job.id, self.monotonic())
        self.rotation.hold(job.id)

    def rest(self, job: Job, seconds: float) -> None:
        """No turns for a job that cannot be loaded yet, for so long; it keeps its place."""
        self._errands.want(job.id, self.monotonic() + seconds)
        self.rotation.hold(job.id)

    def hold_for_disk(self, job: Job) -> None:
        """Training went on for a cadence more than the disk could take: rest, resident, until it takes it."""
        if not job.resident:
            return  # it was not the disk
        self._errands.want(job.id, self.monotonic() + RETRY_SECONDS)
        if not job.held:
            job.held = True
            self.rotation.hold(job.id)
            self.host.disk_full(job)

    # --- faults ---

    def _crashed(self, job: Job | None, die: Die, reason: str) -> None:
        """The worker is gone: all who lived there load again, from their newest checkpoints."""
        self._lost_worker(job, die)
        for each in die.jobs.values():
            each.off_die()
            each.held = False  # what the disk did not take is lost
            self.rotation.free(each.id)
            if each.leave is None:
                self._errands.drop(each.id)
        self.rotation.refused(die.name, self.monotonic())  # a moment's pause, longer each time it happens in a row
        if job is not None and job.id in self.rotation:
            self.rotation.step_back(job.id)  # another of the die's jobs is to show whose fault it was
        self.host.crashed(job, die, reason)

    def _lost_worker(self, job: Job | None, die: Die) -> None:
        if die.worker and die.worker.stack:
            self.host.stood(job, die, die.worker.stack)
        die.lost, die.crashes = bool(die.worker and die.worker.die_failed), die.crashes + 1
        die.worker = None

    # --- the end ---

    async def stop(self) -> None:
        """Checkpoint every resident job, then stop the workers. Call it after ``run`` has returned.

        Copying aside holds the die; the writes of one job go on while the next is copied. A process that ends touches
        its die, so that is held for its end, too, unless the gate will not grant it.
        """
        until = self.monotonic() + STOP_GATE_SECONDS
        await self._on_dies(self._copy_all_aside, until)
        await self._on_dies(Die.stop, until)
        await asyncio.gather(*(d.stop() for d in self.dies.values()))
        await self.gate.close()

    async def _on_dies(self, work: Callable[[Die], Awaitable[None]], until: float) -> None:
        """Do ``work`` on each die, held. One that is refused is asked for again, ``until`` then."""
        waiting = [d for d in self.dies.values() if d.alive]
        while waiting:
            die = waiting.pop(0)
            try:
                async with self._granted(die):
                    await work(die)
            except TryLater as e:
                await self._refused(die, e)
                if self.monotonic() < until:
                    waiting.append(die)
                    await asyncio.sleep(1.0)
            except WorkerGone as e:
                self._crashed(None, die, e.message)

    async def _copy_all_aside(self, die: Die) -> None:
        for job in list(die.jobs.values()):
            if job.resident and job.step != job.saved_step:
                await Visit(self, job, die, await self._worker(die)).copy_aside()

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
            retry_at = die.probe_at if die.fenced else self.rotation.retry_at(die.name)
            wall = None if retry_at is None else self.wall() + retry_at - self.monotonic()
            views.append(die.view(computing=computing, retry_at=wall))
        return views
