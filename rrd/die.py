"""A die as the daemon sees it: what it is, who lives there, and what went wrong last."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from rrd.config import Config, DieSpec
from rrd.handle import ASK_SECONDS, Nursery, Worker, WorkerGone
from rrd.messages import Loaded, Message, Ready, VisitDone
from rrd.roster import Job
from rrd.snapshot import DieView, VisitView

VISITS = 48
"""Visits that a die remembers, for the timeline."""

START_PATIENCE = 120.0
"""Seconds for a worker to come up, torch's import on a cold disk included."""
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
    refusal: str = ""
    """Why the gate did not grant it last time; empty after a grant."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alive(self) -> bool:
        return self.worker is not None and self.worker.alive

    async def bring_up(self, nursery: Nursery, config: Config, hear: Callable[[Message], None]) -> Worker:
        """The die's worker; a new one if there is none. Raises WorkerGone, also for one that ended unnoticed."""
        if self.worker is None:
            worker = Worker(nursery, self.settings(config), hear)
            await worker.start()
            self.worker, self.restarts = worker, self.restarts + 1
            ready = await self.worker.ask(None, Ready, patience=lambda: START_PATIENCE)
            assert isinstance(ready, Ready)
            self.ready = ready
        if not self.worker.alive:
            raise WorkerGone(self.worker.end)
        return self.worker

    def hear(self, report: Message) -> None:
        """What a report says about the die itself."""
        if isinstance(report, Loaded | VisitDone) and report.memory_bytes is not None:
            self.held_bytes = report.memory_bytes

    async def stop(self) -> None:
        """End its worker, after what it still writes."""
        if self.worker is not None:
            writes = any(job.saving for job in self.jobs.values())
            await self.worker.stop(patience=STOP_PATIENCE if writes else ASK_SECONDS)

    def settings(self, config: Config) -> dict[str, object]:
        """What a new worker of this die has to know."""
        return {"die": self.name, "device": self.spec.device, "threads": self.spec.threads,
                "state_dir": str(config.state_dir), "cache_dir": str(config.cache_dir)}

    def view(self, *, computing: str | None, retry_at: float | None) -> DieView:
        """``computing``: the job on the visit in progress; ``retry_at``: Unix time at which its back-off ends."""
        ready = self.ready
        state = ("fenced" if self.fenced else "computing" if computing else "backing off" if retry_at is not None
                 else "idle" if self.alive else "off")
        return DieView(
            name=self.name, lane=self.spec.lane, device=self.spec.device, state=state, why=self.fenced or self.refusal,
            jobs=sorted(self.jobs), computing=computing, since=self.since, visits=list(self.visits),
            worker_pid=self.worker.pid if self.worker and self.alive else None, restarts=max(0, self.restarts),
            refusals=self.refusals, retry_at=retry_at, model=ready.model if ready else "",
            uuid=ready.uuid if ready else "", pci_bus_id=ready.pci_bus_id if ready else "",
            memory_bytes=machine_bytes() if self.spec.device == "cpu" else ready.memory_bytes if ready else None,
            memory_used_bytes=self.held_bytes if self.alive else None)


@cache
def machine_bytes() -> int:
    """The memory of this machine, which its CPU dies share."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
