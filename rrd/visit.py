"""A visit: what is done for one job on its die while the gate grants that, order by order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrd.die import Die
from rrd.handle import Worker, WorkerGone
from rrd.messages import (
    Evict,
    Evicted,
    Export,
    Exported,
    Failed,
    GaveUp,
    Load,
    Loaded,
    Message,
    OutOfMemory,
    VisitDone,
)
from rrd.roster import Job
from rrd.rotation import Turn

if TYPE_CHECKING:
    from rrd.lane import Lane

HURRIED_PATIENCE = 10.0
"""Seconds of silence after which a worker counts as hung when the end is to come quickly."""


class Visit:
    """One job with its die's worker. Every method may raise WorkerGone."""

    def __init__(self, lane: Lane, job: Job, die: Die, worker: Worker) -> None:
        self.lane, self.job, self.die, self.worker = lane, job, die, worker

    async def take(self, turn: Turn) -> None:
        """The job's turn: it is loaded, or trains, or ends."""
        if not self.job.resident:
            await self.load()
        elif self.job.disk_strikes > 1:
            self.lane.hold_for_disk(self.job)
        elif self.job.trained and not self.job.owes_evaluation:
            await self.finish()
        else:
            await self.steps(turn)

    async def load(self) -> None:
        job = self.job
        order = Load(job=job.id, spec=job.spec, expect_step=job.record.announced_step)
        answer = await self._ask(order, Loaded)
        if isinstance(answer, Loaded):
            self.lane.host.loaded(job, self.die, answer)

    async def steps(self, turn: Turn) -> None:
        """A visit's steps, a checkpoint where one is due, an export where one is due; and the end of the job."""
        job, lane = self.job, self.lane
        assert job.total is not None
        n, seconds = job.visit()
        answer = await self._ask(job.order(n, seconds, round=turn.round), VisitDone)
        if not isinstance(answer, VisitDone):
            return
        if answer.steps:
            self.die.works(lane.monotonic())  # even if what follows kills its worker
        lane.busy_seconds += answer.seconds
        lane.host.visited(job, self.die, turn, answer)
        if lane.stopping or job.owes_evaluation:
            return
        if job.trained:
            await self.finish()
            return
        if job.checkpoint_due(lane.monotonic()):
            await self.copy_aside()
        if job.export_due and job.resident:
            await self.export()

    async def copy_aside(self) -> bool:
        """Have a checkpoint of the state as it is copied aside; it is written while others have their turns."""
        return await self._ask(self.job.order(0, checkpoint=True), VisitDone) is not None

    async def export(self) -> bool:
        answer = await self._ask(Export(job=self.job.id, output=self.job.output), Exported)
        if not isinstance(answer, Exported):
            return False
        self.job.exported_step = self.job.step
        self.lane.host.exported(self.job, answer)
        return True

    async def finish(self) -> None:
        """The end of a trained job: its last checkpoint, its adapter, and off the die."""
        self.lane.host.finishing(self.job)
        if await self.saved() and await self.export() and await self.evict() and not self.job.leave:
            self.lane.drop(self.job)
            self.lane.host.finished(self.job)

    async def saved(self) -> bool:
        """Whether a checkpoint of the state as it is, is durable. If not, it is made one; the job rests meanwhile, and
        the end of the write is an errand: the die and the lane are free for others."""
        job = self.job
        if job.step != job.saved_step and not job.saving and not await self.copy_aside():
            return False
        if job.saving:
            self.lane.await_commit(job)
            return False
        if job.step != job.saved_step:
            self.lane.hold_for_disk(job)
        return job.step == job.saved_step

    async def evict(self) -> bool:
        if await self._ask(Evict(job=self.job.id), Evicted) is None:
            return False
        self.job.off_die()
        return True

    async def _ask(self, order: Message, *answers: type[Message]) -> Message | None:
        """The answer, or None when the worker gives an excuse in its place; the host then knows."""
        job, host = self.job, self.lane.host
        answer = await self.worker.ask(order, *answers, patience=self._patience)
        if isinstance(answer, Failed | OutOfMemory | GaveUp) and not getattr(answer, "resident", False):
            job.off_die()
        if isinstance(answer, Failed) and answer.blame == "die":
            self.worker.die_failed = True
            await self.worker.stop()
            raise WorkerGone(answer.message, hint=answer.hint)
        if isinstance(answer, Failed) and answer.resident and not job.trained:
            job.exported_step = job.step  # the next is due as if this one had been written
            host.not_exported(job, answer)
        elif isinstance(answer, Failed):
            if answer.resident:
                await self.evict()
            host.failed(job, self.die, answer)
        elif isinstance(answer, OutOfMemory):
            host.out_of_memory(job, self.die, answer)
        return None if isinstance(answer, Failed | OutOfMemory | GaveUp) else answer

    def _patience(self) -> float:
        return HURRIED_PATIENCE if self.lane.hurried else self.job.patience(self.lane.config.hang_seconds)
