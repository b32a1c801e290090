"""What the daemon knows, at one instant, as data: the one source of ``rrd status``, metrics and the status file.

Times are Unix seconds, durations seconds, memory bytes. ``None`` means not known (yet).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from rrd.errors import Damaged
from rrd.states import JobState

FORMAT = 1


class JobView(BaseModel):
    id: str
    state: JobState
    why: str = ""
    """One sentence: why it waits, is paused, or failed."""
    hint: str = ""
    file: str = ""
    output: str = ""
    method: str = ""
    model: str = ""
    submitted_at: float = 0.0
    die: str | None = None
    lane: str | None = None
    weight: float = 1.0
    step: int = 0
    target_steps: int | None = None
    epoch: float = 0.0
    loss: float | None = None
    losses: list[float] = Field(default_factory=list)
    """The newest losses, oldest first, at most 64."""
    eval_loss: float | None = None
    lr: float | None = None
    tokens: int = 0
    steps_run: int = 0
    """Steps run since the daemon started, repeats after a crash included; never goes back."""
    tokens_run: int = 0
    steps_per_minute: float | None = None
    """In the rotation, waiting for other dies included."""
    eta_seconds: float | None = None
    last_step_at: float | None = None
    loaded_at: float | None = None
    """When it last became resident; None while it is not."""
    last_checkpoint_at: float | None = None
    last_checkpoint_step: int | None = None
    checkpoint_every: str = ""
    checkpoint_every_seconds: float | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_commits: int = 0
    checkpoint_failures: int = 0
    checkpoint_fallbacks: int = 0
    crashes: int = 0
    """Worker deaths on this job's visits since its last new step."""
    skipped: int = 0
    """Steps left out because their loss or gradient was no number."""
    savings: str = ""
    """What it does to need less memory, since its die ran out of it; one sentence."""
    prepared: float | None = None
    """Share of the preparation done, 0 to 1, while preparing."""


class VisitView(BaseModel):
    """A turn that has ended: a load, steps, or the end of a job."""

    job: str
    start: float
    end: float
    steps: int = 0
    round: int = 0


class DieView(BaseModel):
    name: str
    lane: str
    device: str
    state: str
    """``off``, ``idle``, ``computing``, ``backing off`` or ``fenced``."""
    why: str = ""
    jobs: list[str] = Field(default_factory=list)
    computing: str | None = None
    since: float | None = None
    """When the visit in progress began."""
    visits: list[VisitView] = Field(default_factory=list)
    """The newest visits, oldest first, at most 48."""
    worker_pid: int | None = None
    restarts: int = 0
    crashes: int = 0
    """Ends of its worker that nobody had asked for."""
    refusals: int = 0
    retry_at: float | None = None
    model: str = ""
    uuid: str = ""
    pci_bus_id: str = ""
    memory_bytes: int | None = None
    """Of a card its own, of a CPU die the machine's."""
    without_kernels: str = ""
    """Why torch computes there what there are compiled kernels for; empty where it does not, or no job asked."""
    memory_used_bytes: int | None = None
    """What the die's worker holds of it, as it last told; None without a worker."""


class LaneView(BaseModel):
    name: str
    gate: str
    dies: list[str]
    round: int = 0
    computing: str | None = None
    busy_seconds: float = 0.0
    """Seconds inside steps."""
    seconds: float = 0.0
    """Seconds in which the lane had a job that could take a visit."""


class RejectedView(BaseModel):
    file: str
    line: int = 0
    key: str = ""
    message: str
    hint: str = ""


class Snapshot(BaseModel):
    format: int = FORMAT
    """Counted up when an older rrd would misread it."""
    version: str
    pid: int
    time: float
    started_at: float
    state_dir: str
    jobs_dir: str
    stopping: bool = False
    config_error: str = ""
    spool_error: str = ""
    spool_watch_healthy: bool = True
    disk_free_bytes: int | None = None
    """Of the file system that holds the state directory: what an ordinary user may still write."""
    disk_size_bytes: int | None = None
    jobs: list[JobView] = Field(default_factory=list)
    dies: list[DieView] = Field(default_factory=list)
    lanes: list[LaneView] = Field(default_factory=list)
    rejected: list[RejectedView] = Field(default_factory=list)

    @classmethod
    def read(cls, data: Any) -> Snapshot:
        """A snapshot from decoded JSON. Raises Damaged for one of a newer rrd; ValueError for what is none."""
        if isinstance(data, dict) and isinstance(n := data.get("format"), int) and n > FORMAT:
            raise Damaged(f"the daemon's status is of format {n}, and this rrd knows {FORMAT}",
                          hint="use the command of the rrd that runs, or a newer one")
        return cls.model_validate(data)

    def job(self, job_id: str) -> JobView | None:
        return next((j for j in self.jobs if j.id == job_id), None)
