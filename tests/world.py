"""A box without a box, for scripted histories: the daemon's scheduler, intake and lanes as they are, on a loop whose
clock moves only when all have nothing to do, with workers that train nothing, a disk that is a dictionary, and gates
that assert their rules.

The workers speak the real messages over real sockets, so that the real handle and its ladder are in play.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rrd.config import Config
from rrd.gate import SimulatedGate
from rrd.gate.simulated import Act
from rrd.handle import Nursery, WorkerGone
from rrd.intake import Intake
from rrd.job import JobSpec, to_toml
from rrd.journal import Kind
from rrd.lane import Lane
from rrd.ledger import Record
from rrd.messages import (
    ORDERS,
    CommitFailed,
    Committed,
    Decoder,
    Evict,
    Evicted,
    Export,
    Exported,
    Failed,
    Load,
    Loaded,
    Message,
    OutOfMemory,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Progress,
    Ready,
    Run,
    Step,
    Stop,
    VisitDone,
    Yield,
    encode,
)
from rrd.metrics import Meters
from rrd.roster import Job
from rrd.scheduler import Scheduler
from rrd.spool import JobFile, Rejection, Scan
from rrd.states import JobState
from rrd.verbs import Verbs

# --- a clock ----------------------------------------------------------------------------------------------------------


REAL_SECONDS = 60.0
"""So long a story may take to be told: they take well under one."""


class Deadlock(Exception):
    """Everybody waits and nothing will ever happen; or somebody runs in a circle."""


class _Selector(selectors.DefaultSelector):
    """Where a loop would wait for files, time passes at once."""

    now = 1000.0

    def __init__(self) -> None:
        super().__init__()
        self._until = time.monotonic() + REAL_SECONDS

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if (not ready and timeout is None) or time.monotonic() > self._until:
            raise Deadlock
        self.now += 1e-8 if ready or not timeout else max(timeout, 1e-8)  # timers ring up to a nanosecond early
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def play(story: Coroutine[Any, Any, None]) -> None:
    """Run ``story`` to its end, in no time."""
    loop = Loop()
    try:
        loop.run_until_complete(story)
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


# --- workers ----------------------------------------------------------------------------------------------------------

DIE, HANG, STUCK = "die", "hang", "stuck"
"""What may befall a worker: it dies; it says nothing more until it is aborted; or not even then, until it is killed."""
Befalls = str | Failed | OutOfMemory


@dataclass
class Disk:
    """What is durable: the steps of each job's checkpoints. ``full``: it takes no more."""

    checkpoints: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    full: bool = False


class Workers(Nursery):
    """Forks workers that only pretend. ``at`` scripts what befalls them; times are in seconds."""

    def __init__(self, disk: Disk, touch: Callable[[str], None]) -> None:
        super().__init__()
        self.disk, self.touch = disk, touch
        self.step_seconds, self.load_seconds, self.write_seconds, self.prepare_seconds = 0.1, 1.0, 0.05, 0.5
        self.samples, self.needs_bytes = 100, 0
        self.missing: set[str] = set()
        """Models that are not there."""
        self.born: list[FakeWorker] = []
        self.exports: list[tuple[str, int]] = []
        self.history: list[tuple[str, int]] = []
        """(job, step) of every step run, repeated ones included."""
        self.orders: list[Message] = []
        self.broken = False
        self._script: dict[tuple[str, str], deque[Befalls]] = defaultdict(deque)

    def at(self, job: str, moment: str, *acts: Befalls) -> None:
        """What happens, one act for each time that ``job`` comes to ``moment``: "prepare", "load", "save", "write",
        "export", "evict", "step 7" or "step" for any; or any worker (``job`` "") to "probe"."""
        self._script[job, moment].extend(acts)

    def act(self, job: str, moment: str) -> Befalls | None:
        acts = self._script[job, moment] or self._script[job, moment.split()[0]]
        return acts.popleft() if acts else None

    async def start(self) -> None:
        """Nothing is forked."""

    async def spawn(self, settings: dict[str, object]) -> tuple[int, socket.socket, asyncio.Future[int]]:
        if self.broken:
            raise WorkerGone("the process that forks workers has ended")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        worker = FakeWorker(self, 2**24 + len(self.born), str(settings["die"]), theirs)
        self.born.append(worker)
        return worker.pid, ours, worker.exit

    async def stop(self) -> None:
        """Nothing was forked."""

    def alive(self) -> list[FakeWorker]:
        return [w for w in self.born if not w.exit.done()]

    def on(self, die: str) -> FakeWorker:
        """The living worker of ``die``."""
        return next(w for w in self.alive() if w.die == die)

    def kill(self, pid: int, number: int) -> None:
        """In place of ``os.kill``."""
        if pid < 2**24:
            raise ProcessLookupError
        self.born[pid - 2**24].signal(number)


class FakeWorker:
    """Answers as a worker does, and trains nothing."""

    def __init__(self, workers: Workers, pid: int, die: str, sock: socket.socket) -> None:
        self.workers, self.pid, self.die, self._socket = workers, pid, die, sock
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.residents: dict[str, int] = {}
        self.saved: dict[str, int] = {}
        self.writing: dict[str, asyncio.Task[None]] = {}
        self.signals: list[int] = []
        self.hard = False
        self._orders: deque[Message] = deque()
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._live())]

    # --- its life ---

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL or (number == signal.SIGABRT and not self.hard):
            self.end(-number)

    def end(self, status: int) -> None:
        if self.exit.done():
            return
        self.exit.set_result(status)
        for task in (*self._tasks, *self.writing.values()):
            task.cancel()
        self._socket.close()

    async def _read(self) -> None:
        loop, decoder = asyncio.get_running_loop(), Decoder(ORDERS)
        while data := await loop.sock_recv(self._socket, 1 << 16):
            self._orders.extend(decoder.feed(data))
            self._news.set()
        self.end(0)

    async def _live(self) -> None:
        try:
            self._touch()
            self._send(Ready(pid=self.pid, torch="none", preloaded=True))
            while not isinstance(order := await self._next(), Stop):
                await self._obey(order)
            self._touch()
            await asyncio.gather(*self.writing.values())
            self.end(0)
        except _Failed as e:
            raise AssertionError("a failure outside an order") from e

    async def _next(self) -> Message:
        while not self._orders:
            self._news.clear()
            await self._news.wait()
        order = self._orders.popleft()
        self.workers.orders.append(order)
        return order

    def _send(self, report: Message) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(encode(report))

    def _touch(self) -> None:
        if self.die:
            self.workers.touch(self.die)

    async def _befall(self, job: str, moment: str) -> None:
        act = self.workers.act(job, moment)
        if act is None:
            return
        if isinstance(act, Failed | OutOfMemory):
            raise _Failed(act.model_copy(update={"job": job}))
        if act == DIE:
            self.end(-signal.SIGSEGV)
        self.hard = act == STUCK
        await asyncio.Event().wait()

    # --- orders ---

    async def _obey(self, order: Message) -> None:
        job = getattr(order, "job", "")
        try:
            if not isinstance(order, (Yield, Prepare)):
                self._touch()
            match order:
                case Prepare():
                    await self._prepare(order)
                case Load():
                    await self._load(order)
                case Run():
                    await self._run(order)
                case Export():
                    await self._befall(job, "export")
                    self.workers.exports.append((job, self.residents[job]))
                    self._send(Exported(job=job, output=order.output))
                case Probe():
                    await self._befall("", "probe")
                    self._send(Probed())
                case Evict():
                    await self._befall(job, "evict")
                    await self._drop(job)
                    self._send(Evicted(job=job))
        except _Failed as e:
            if not getattr(e.failed, "resident", False):
                await self._drop(job)
            self._send(e.failed)

    async def _prepare(self, order: Prepare) -> None:
        await self._pass(order.job, self.workers.prepare_seconds)
        await self._befall(order.job, "prepare")
        if order.spec.model in self.workers.missing:
            raise _Failed(Failed(job=order.job, blame="job", message=f"there is no model in {order.spec.model}",
                                 hint="put it there"))
        self._send(Prepared(job=order.job, samples=self.workers.samples, tokens=1000, bad_lines=0,
                            needs_bytes=self.workers.needs_bytes))

    async def _load(self, order: Load) -> None:
        await self._pass(order.job, self.workers.load_seconds)
        await self._befall(order.job, "load")
        for other in self.workers.alive():
            assert other is self or order.job not in other.residents, f"{order.job} is resident twice"
        found = max(self.workers.disk.checkpoints[order.job], default=0)
        if order.expect_step and not found:
            raise _Failed(Failed(job=order.job, blame="job", message="no checkpoint of this job can be used any more"))
        self.residents[order.job] = self.saved[order.job] = found
        self._send(Loaded(job=order.job, step=found, tokens=10 * found, samples=self.workers.samples,
                          seconds=self.workers.load_seconds, resumed=found or None, recomputes=True, most_parts=4))

    async def _pass(self, job: str, seconds: float) -> None:
        """Long work, with a sign of life every second."""
        for _ in range(max(1, round(seconds))):
            await asyncio.sleep(seconds / max(1, round(seconds)))
            self._touch()
            self._send(Progress(job=job, what="at work", share=0.5))

    async def _run(self, order: Run) -> None:
        job, start, steps = order.job, now(), 0
        while steps < order.steps and self.residents[job] < order.total:
            if steps and (self._orders or (order.seconds is not None and round(now() - start, 6) >= order.seconds)):
                break
            await self._step(job)
            steps += 1
        if not order.steps and job in self.writing:
            await self.writing[job]
        copied = order.checkpoint and job not in self.writing and self.residents[job] != self.saved[job]
        if copied:
            await self._befall(job, "save")
        self._send(VisitDone(job=job, step=self.residents[job], steps=steps, seconds=now() - start, copied=copied))
        if copied:
            self.writing[job] = asyncio.create_task(self._write(job, self.residents[job]))

    async def _step(self, job: str) -> None:
        await asyncio.sleep(self.workers.step_seconds)
        await self._befall(job, f"step {self.residents[job] + 1}")
        self._touch()
        self.residents[job] += 1
        self.workers.history.append((job, self.residents[job]))
        self._send(Step(job=job, step=self.residents[job], loss=2.5, lr=1e-4, grad_norm=1.0, tokens=10,
                        seconds=self.workers.step_seconds))

    async def _write(self, job: str, step: int) -> None:
        await asyncio.sleep(self.workers.write_seconds)
        await self._befall(job, "write")
        del self.writing[job]
        if self.workers.disk.full:
            self._send(CommitFailed(job=job, step=step, message="the disk is full", hint="free space"))
            return
        self.workers.disk.checkpoints[job].append(step)
        self.saved[job] = step
        self._send(Committed(job=job, step=step, bytes=1000, seconds=self.workers.write_seconds))

    async def _drop(self, job: str) -> None:
        self.residents.pop(job, None)
        if job in self.writing:
            await self.writing[job]


class _Failed(Exception):
    def __init__(self, failed: Failed | OutOfMemory) -> None:
        self.failed = failed


# --- the rest of the daemon's surroundings ---------------------------------------------------------------------------


@dataclass
class Said:
    kind: Kind
    level: str
    message: str
    hint: str
    job: str | None
    die: str | None


class MemoryJournal:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.all: list[Said] = []

    def event(self, kind: Kind, level: str, message: str, *, hint: str = "", job: str | None = None,
              die: str | None = None, step: int | None = None, **_: str) -> None:
        self.all.append(Said(kind, level, message, hint, job, die))

    def of(self, kind: Kind, job: str | None = None) -> list[str]:
        return [s.message for s in self.all if s.kind is kind and job in (None, s.job)]


class MemoryKeeper:
    """Remembers what was to be written. What it keeps survives ``World.reboot``."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk, self.ledger = disk, mock.Mock(dir=lambda job: root / job)
        self.records: dict[str, Record] = {}
        self.specs: dict[str, JobSpec] = {}
        self.files_changed = 0
        """Counts changes of the files that jobs name."""

    def save(self, job: Job, *, spec: bool = False) -> None:
        self.records[job.id] = job.record.model_copy()
        if spec:
            self.specs[job.id] = job.spec

    def set_aside(self, job: Job, then: Callable[[], None], failed: object = None) -> None:
        self.disk.checkpoints.pop(job.id, None)
        asyncio.get_running_loop().call_later(0.01, then)

    def facts(self, spec: JobSpec, then: Callable[[str], None]) -> None:
        asyncio.get_running_loop().call_later(0.01, then, f"files {self.files_changed}")


class World:
    """One daemon's world in memory. ``with`` it inside a story; what was broken of a gate's rules comes out at the end.

    ``lanes``: the dies of each lane, which are numbered through.
    """

    def __init__(self, tmp: Path, *lanes: int, **config: Any) -> None:
        table = tuple({"dies": ["cpu"] * n} for n in lanes or (2,))
        self.config = Config.model_validate({
            "state_dir": str(tmp / "state"), "cache_dir": str(tmp / "cache"), "run_dir": str(tmp / "run"),
            "jobs_dir": str(tmp / "jobs.d"), "metrics": "", "lane": table, **config})
        self.gates = {lane.name: SimulatedGate(timeout=10.0) for lane in self.config.lanes}
        self.touches: list[str] = []
        self.clock_error = 0.0
        self.disk = Disk()
        self.workers = Workers(self.disk, self._touch)
        self.keeper = MemoryKeeper(self.disk, tmp / "state" / "jobs")
        self.journal = MemoryJournal()
        self.lines: list[str] = []
        self.files: dict[str, JobFile] = {}
        self.rejected: dict[str, Rejection] = {}
        self._seen = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._patch = mock.patch.object(os, "kill", self.workers.kill)

    def _touch(self, die: str) -> None:
        lane = next(d.lane for d in self.config.dies if d.name == die)
        try:
            self.gates[lane].touch(die)
        except AssertionError as e:
            self.touches.append(str(e))

    def wall(self) -> float:
        """The clock on the wall, which somebody may set."""
        return 1.7e9 + now() + self.clock_error

    def script(self, die: str, *acts: Act) -> None:
        """What the gate of ``die`` does at its next acquires."""
        lane = next(d.lane for d in self.config.dies if d.name == die)
        self.gates[lane]._script[die].extend(acts)

    def obliging(self) -> None:
        """From now on the gates grant everything."""
        for gate in self.gates.values():
            gate._script.clear()

    # --- its life ---

    async def __aenter__(self) -> World:
        self._patch.start()
        self.boot()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end()
        self._patch.stop()
        if kind is None:
            assert self.touches == []

    def boot(self) -> None:
        loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(
            self.config, keeper=self.keeper, nursery=self.workers, journal=self.journal,  # type: ignore[arg-type]
            meters=Meters(), live=self.lines.append, monotonic=loop.time, wall=self.wall)
        self.scheduler.preparer.monotonic = loop.time
        self.intake, self.verbs = Intake(self.scheduler), Verbs(self.scheduler)
        self.intake.restore({k: r.model_copy() for k, r in self.keeper.records.items()}, dict(self.keeper.specs))
        self._wake = asyncio.Event()
        self.scheduler.changed = self._wake.set
        for spec in self.config.lanes:
            self.gates[spec.name].held = None  # a gate takes back what a dead holder held
            lane = Lane(spec, self.config, gate=self.gates[spec.name], nursery=self.workers, host=self.scheduler,
                        monotonic=loop.time, wall=self.wall)
            self.scheduler.lanes[lane.name] = lane
            self._tasks.append(asyncio.create_task(lane.run()))
        self._tasks.append(asyncio.create_task(self._advance()))

    async def _advance(self) -> None:
        """As the daemon does."""
        while not any(lane.stopping for lane in self.scheduler.lanes.values()):
            self._wake.clear()
            self.scheduler.advance()
            at = self.scheduler.wake_at()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 1.0 if at is None else min(1.0, max(0.0, at - now())))

    async def stop(self) -> None:
        """As on SIGTERM."""
        lanes = list(self.scheduler.lanes.values())
        self._tasks.pop().cancel()
        await self.scheduler.preparer.stop()
        for lane in lanes:
            lane.stop_soon()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(lane.stop() for lane in lanes))
        for job in self.scheduler.jobs.values():
            self.keeper.save(job)
        self._tasks = []

    async def crash(self) -> None:
        """As on SIGKILL, and the start after it."""
        await self._end()
        self.boot()

    async def _end(self) -> None:
        for worker in self.workers.alive():
            worker.end(0)
        for lane in self.scheduler.lanes.values():
            lane.stopping = True
        for task in self._tasks:
            task.cancel()
        await self.scheduler.preparer.stop()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for e in ends:
            if isinstance(e, Exception):
                raise e

    # --- the user ---

    def drop(self, *names: str, scan: bool = True, **keys: Any) -> None:
        """Put job files into the spool, or edit them."""
        for name in names:
            self._seen += 1
            spec = JobSpec.model_validate({"model": "/m", "data": "/d", "max_steps": 50, "steps_per_visit": 5,
                                           "checkpoint_every": 10, **keys})
            old = self.files.get(name)
            self.files[name] = JobFile(name, self.config.jobs_dir / f"{name}.toml", spec, f"digest {to_toml(spec)}",
                                       old.mtime if old else float(self._seen), b"", f"/out/{name}")
        if scan:
            self.scan()

    def remove(self, *names: str) -> None:
        for name in names:
            del self.files[name]
        self.scan()

    def scan(self) -> None:
        ids = frozenset(self.files)
        self.intake.apply(Scan(dict(self.files), dict(self.rejected), frozenset(), None, ids))

    # --- waiting and looking ---

    def job(self, name: str) -> Job:
        return self.scheduler.jobs[name]

    def state(self, name: str) -> JobState | None:
        job = self.scheduler.jobs.get(name)
        return job.state if job else None

    def why(self, name: str) -> str:
        return self.job(name).view().why

    async def until(self, what: Callable[[], Any], seconds: float = 600.0) -> None:
        """Let time pass until ``what`` holds."""
        end = now() + seconds
        while not what():
            assert now() < end, self.tell()
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)
        assert not self.touches, self.touches

    async def until_state(self, name: str, *states: str, seconds: float = 600.0) -> None:
        await self.until(lambda: self.state(name) in states, seconds)

    async def until_step(self, name: str, step: int) -> None:
        await self.until(lambda: name in self.scheduler.jobs and self.job(name).step >= step)

    async def until_done(self, *names: str, seconds: float = 3600.0) -> None:
        await self.until(lambda: all(self.state(n) == "done" for n in names), seconds)

    async def seconds(self, n: float) -> None:
        end = now() + n
        await self.until(lambda: now() >= end, n + 1)

    def steps_of(self, name: str) -> list[int]:
        """The steps run for ``name``, in order, repeated ones included."""
        return [step for job, step in self.workers.history if job == name]

    def visits(self) -> Iterator[str]:
        """The jobs in the order in which they were loaded or visited."""
        return (o.job for o in self.workers.orders if isinstance(o, (Load, Run)))

    def tell(self) -> str:
        """All that is known, for a test that failed."""
        jobs = "\n".join(f"{j.id}: {j.state} step {j.step} on {j.die}: {j.view().why}" for j in
                         self.scheduler.jobs.values())
        said = "\n".join(f"{s.kind.name} {s.job or ''} {s.message}" for s in self.journal.all[-30:])
        return f"at {now():.1f}\n{jobs}\n{said}"
