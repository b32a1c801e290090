"""A die as the daemon sees it: what it is, who lives there, and what went wrong last."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from rrd.config import Config, DieSpec
from rrd.handle import ASK_SECONDS, Nursery, Worker, WorkerGone
from rrd.host_memory import HostMemory
from rrd.messages import Loaded, Message, Ready, VisitDone
from rrd.placement import DieFacts
from rrd.roster import Job
from rrd.snapshot import DieView, VisitView
from rrd.text import count

VISITS = 48
"""Visits that a die remembers, for the timeline."""

START_PATIENCE = 120.0
"""Seconds for a worker to come up, torch's import on a cold disk included."""
FENCE_FIRST, FENCE_MOST = 60.0, 3600.0
"""Seconds for which a die is fenced at first, and at most, before it is tried again."""
HOST_SPARE = 0.1
"""The share of the host's memory that is left to the system, the daemon and the disk's cache."""
STOP_PATIENCE = 600.0
"""Seconds for a worker to finish writing what was copied aside."""


@dataclass(eq=False)
class Die:
    """One die, its worker and the jobs that live there."""

    spec: DieSpec
    jobs: dict[str, Job] = field(default_factory=dict)
    worker: Worker | None = None
    ready: Ready | None = None
    restarts: int = -1
    refusals: int = 0
    fenced: str = ""
    """Why no job may be here; empty: it may."""
    suspect: str = ""
    """The job on whose visit the worker died last, until steps are made again."""
    since: float | None = None
    """Unix time at which the visit in progress began."""
    visits: deque[VisitView] = field(default_factory=lambda: deque(maxlen=VISITS))
    held_bytes: int | None = None
    """Of its memory, by its worker, when that was last told."""
    crashes: int = 0
    """Ends of its worker that nobody had asked for, since the daemon started."""
    lost: bool = False
    """Its last worker ended because of the die itself, or holds it and cannot be ended."""
    probe_at: float | None = None
    """Monotonic time at which it is tried again, if it is fenced."""
    probe_delay: float = 0.0
    """How long it was, or is, fenced; longer each time it happens again before the die has worked for as long."""
    returned_at: float = 0.0
    """Monotonic time of its last return from a fence."""
    without_kernels: str = ""
    """Why its worker has no compiled kernels, once a job wanted some."""
    refusal: str = ""
    """Why the gate did not grant it last time; empty after a grant."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alive(self) -> bool:
        return self.worker is not None and self.worker.alive

    @property
    def only_writer(self) -> Job | None:
        """The job whose checkpoint is being written, if it is one: between visits that is all that a worker does."""
        writing = [job for job in self.jobs.values() if job.saving]
        return writing[0] if len(writing) == 1 else None

    async def bring_up(self, nursery: Nursery, config: Config, hear: Callable[[Message], None],
                       ended: Callable[[], None]) -> Worker:
        """The die's worker; a new one if there is none, of which ``hear`` hears the reports and ``ended`` the end.

        Raises WorkerGone, also for one that ended unnoticed.
        """
        if self.worker is None:
            worker = Worker(nursery, self.settings(config), hear, ended)
            await worker.start()
            self.worker, self.restarts = worker, self.restarts + 1
            ready = await self.worker.ask(None, Ready, patience=lambda: START_PATIENCE)
            assert isinstance(ready, Ready)
            self.ready, self.without_kernels = ready, ""
        if not self.worker.alive:
            raise WorkerGone(self.worker.end)
        return self.worker

    def hear(self, report: Message) -> None:
        """What a report says about the die itself."""
        if isinstance(report, Loaded | VisitDone) and report.memory_bytes is not None:
            self.held_bytes = report.memory_bytes
        if isinstance(report, Loaded) and report.without_kernels:
            self.without_kernels = report.without_kernels

    async def stop(self) -> None:
        """End its worker, after what it still writes."""
        if self.worker is not None:
            writes = any(job.saving for job in self.jobs.values())
            await self.worker.stop(patience=STOP_PATIENCE if writes else ASK_SECONDS)

    def fence(self, why: str, now: float) -> None:
        """Keep jobs away from it, until a probe says that it computes."""
        self.fenced, self.suspect = why, ""
        self.put_off_probe(now)

    def put_off_probe(self, now: float) -> None:
        """Let it be tried later than the last time."""
        self.probe_delay = min(max(FENCE_FIRST, 2 * self.probe_delay), FENCE_MOST)
        self.probe_at = now + self.probe_delay

    def unfence(self, now: float) -> None:
        """Jobs may be here again; on probation, as long as ``works`` has not said otherwise."""
        self.fenced = self.suspect = ""
        self.probe_at, self.returned_at = None, now

    def works(self, now: float) -> None:
        """Steps were made on it."""
        self.suspect = ""
        if now - self.returned_at > self.probe_delay:
            self.probe_delay = 0.0

    @property
    def kind(self) -> str:
        """The same for dies on which a job gives the same bits; empty for a card that has not said yet what it is."""
        if self.spec.device == "cpu":
            return f"CPU with {count(self.spec.threads, 'thread')}"
        return f"{self.ready.model} with {count(self.spec.threads, 'thread')}" if self.ready else ""

    @property
    def coming_bytes(self) -> int:
        """Of what its jobs need by estimate, what its worker has not taken yet."""
        held = self.held_bytes if self.alive else None
        return max(0, needed_bytes(self.jobs.values())[0] - (held or 0))

    def settings(self, config: Config) -> dict[str, object]:
        """What a new worker of this die has to know."""
        return worker_settings(config, die=self.name, device=self.spec.device, threads=self.spec.threads)

    def view(self, *, computing: str | None, retry_at: float | None) -> DieView:
        """``computing``: the job on the visit in progress; ``retry_at``: Unix time at which its back-off ends."""
        ready = self.ready
        state = ("fenced" if self.fenced else "computing" if computing else "backing off" if retry_at is not None
                 else "idle" if self.alive else "off")
        return DieView(
            name=self.name, lane=self.spec.lane, device=self.spec.device, state=state, why=self.fenced or self.refusal,
            jobs=sorted(self.jobs), computing=computing, since=self.since, visits=list(self.visits),
            worker_pid=self.worker.pid if self.worker and self.alive else None, restarts=max(0, self.restarts),
            crashes=self.crashes,
            refusals=self.refusals, retry_at=retry_at, model=ready.model if ready else "",
            uuid=ready.uuid if ready else "", pci_bus_id=ready.pci_bus_id if ready else "",
            memory_bytes=machine_bytes() if self.spec.device == "cpu" else ready.memory_bytes if ready else None,
            memory_used_bytes=self.held_bytes if self.alive else None,
            without_kernels=self.without_kernels if self.alive else "")


def needed_bytes(jobs: Iterable[Job]) -> tuple[int, frozenset[str]]:
    """What jobs in one memory need by estimate, a base that they share counted once; and those bases."""
    jobs = list(jobs)
    bases = {job.base_key: job.base_bytes for job in jobs if job.base_key}
    return sum(job.needs_bytes - job.base_bytes for job in jobs) + sum(bases.values()), frozenset(bases)


def facts_of(dies: Sequence[Die], config: Config, host: HostMemory | None) -> list[DieFacts]:
    """The dies as placement sees them. CPU dies without a memory of their own by ``die_memory`` share the host's: it
    may be promised but for ``HOST_SPARE``, and what is not free must not be promised, whoever has taken it."""
    sharing = [die for die in dies if die.spec.device == "cpu"] if host and not config.die_memory else []
    facts = []
    for die in dies:
        pool, members = ("the host", sharing) if die in sharing else ("", [die])
        total = config.die_memory or (die.ready.memory_bytes if die.ready else None)
        needed, bases = needed_bytes(job for member in members for job in member.jobs.values())
        free = None if total is None else total - needed
        if pool and host:
            total = int(host.total * (1 - HOST_SPARE))
            free = max(0, min(total - needed, host.available - sum(member.coming_bytes for member in sharing)))
        ready = die.ready
        facts.append(DieFacts(
            index=die.spec.index, lane=die.spec.lane, name=die.name, uuid=ready.uuid if ready else "",
            pci=ready.pci_bus_id if ready else "", jobs=len(die.jobs), slots=config.jobs_per_die, bytes_free=free,
            bytes_total=total, base_keys=bases, fenced=bool(die.fenced), pool=pool, kind=die.kind))
    return facts


def worker_settings(config: Config, *, die: str, device: str, threads: int) -> dict[str, object]:
    """``die`` is empty for a worker that only prepares."""
    return {"die": die, "device": device, "threads": threads, "state_dir": str(config.state_dir),
            "cache_dir": str(config.cache_dir), "model_roots": [str(r) for r in config.model_roots],
            "data_roots": [str(r) for r in config.data_roots],
            "output_root": [str(config.output_root)] if config.output_root else []}


@cache
def machine_bytes() -> int:
    """The memory of this machine, which its CPU dies share."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
