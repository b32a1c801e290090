"""Preparing jobs: each in a short-lived worker without a die, so that data or tokenizers that are large, slow or
deadly cost no die a turn and no other job anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from rrd.config import Config
from rrd.die import worker_settings
from rrd.handle import CannotStart, Nursery, Worker, WorkerGone
from rrd.messages import Failed, Message, Prepare, Prepared, Progress, Ready
from rrd.room import look, refusal
from rrd.roster import Job

SILENCE_SECONDS = 120.0
"""Seconds without a sign of life after which a preparation counts as hung."""
TELL_SECONDS = 15.0
"""Seconds after which the log says how far a preparation is, again and again."""


class Preparer:
    """Runs preparations side by side, up to ``limit``."""

    def __init__(self, config: Config, nursery: Nursery, *, limit: int, monotonic: Callable[[], float] = time.monotonic,
                 wall: Callable[[], float] = time.time) -> None:
        self.config, self.nursery, self.limit = config, nursery, limit
        self.monotonic, self.wall = monotonic, wall
        self.others: Callable[[], Iterable[Job]] = lambda: ()
        """The jobs that train, and so will need their part of the disk."""
        self.tell: Callable[[Job, str], None] = lambda job, text: None
        """Says something to the job's log."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def room(self) -> int:
        return self.limit - len(self._tasks)

    def start(self, job: Job, done: Callable[[Job, Prepared | Failed], None]) -> None:
        """Prepare ``job``; ``done`` gets the outcome, unless ``forget`` came first."""
        assert job.id not in self._tasks
        self._tasks[job.id] = asyncio.create_task(self._run(job, done))

    def forget(self, job: Job) -> None:
        """Whatever comes of it is not wanted any more."""
        if task := self._tasks.pop(job.id, None):
            task.cancel()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    async def _run(self, job: Job, done: Callable[[Job, Prepared | Failed], None]) -> None:
        me = asyncio.current_task()
        outcome = await self._prepare(job)
        if self._tasks.get(job.id) is me:
            del self._tasks[job.id]
            done(job, outcome)

    async def _prepare(self, job: Job) -> Prepared | Failed:
        c = self.config
        settings = worker_settings(c, die="", device="cpu", threads=1)
        told = [self.monotonic()]
        worker = Worker(self.nursery, settings, lambda report: self._hear(job, report, told))
        try:
            await worker.start()
            await worker.ask(None, Ready, patience=lambda: SILENCE_SECONDS)
            order = Prepare(job=job.id, spec=job.spec, output=job.output)
            answer = await worker.ask(order, Prepared, patience=lambda: SILENCE_SECONDS)
            assert isinstance(answer, (Prepared, Failed))
            return answer if isinstance(answer, Failed) else await self._with_room(job, answer)
        except CannotStart as e:
            return Failed(job=job.id, blame="disk", message=e.message, hint=e.hint)
        except WorkerGone as e:
            return Failed(job=job.id, blame="worker", message=f"preparing its data failed: {e.message}", hint=e.hint)
        finally:
            await worker.stop(patience=2)

    async def _with_room(self, job: Job, answer: Prepared) -> Prepared | Failed:
        """``answer``, unless the job's checkpoints would not fit on the disk."""
        if not job.saved_bytes:
            return answer  # not known
        others = [other.wish for other in self.others()]
        jobs = [job.id, *(other.job for other in others)]
        room = await asyncio.to_thread(look, self.config.state_dir, jobs)
        if room is None or (no := refusal(job.wish, others, room)) is None:
            return answer
        return Failed(job=job.id, blame="job" if no.ever else "disk", message=no.why, hint=no.hint)

    def _hear(self, job: Job, report: Message, told: list[float]) -> None:
        now = self.monotonic()
        job.hear(report, self.wall(), now)
        if isinstance(report, Progress) and now - told[0] >= TELL_SECONDS:
            told[0] = now
            self.tell(job, f"{report.what}, {report.share:.0%}")
