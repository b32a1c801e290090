"""One job as the daemon sees it: its record, the spec in force, and what its worker said last.

Facts and questions only; who acts on the answers is the lane and the daemon.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median
from typing import NamedTuple

from rrd.history import History
from rrd.job import JobSpec
from rrd.ledger import Record
from rrd.messages import CommitFailed, Committed, Evaluated, Loaded, Message, Prepared, Progress, Run, Step, VisitDone
from rrd.room import Wish
from rrd.savings import sentence
from rrd.snapshot import JobView
from rrd.states import JobState
from rrd.text import duration

CRASHES = 3
"""So many worker deaths without a new step, and the job has failed."""
LONG_SECONDS = 5.0
"""What takes longer is said, with how far it is."""
NO_LIMIT = 10**9
"""Steps of a visit that ends by time."""


class Leave(NamedTuple):
    """Where a job goes when it is taken off its die, and why."""

    state: JobState
    why: str = ""
    hint: str = ""
    save: bool = True


@dataclass(eq=False)
class Job:
    """One job. ``record`` is what the ledger keeps; the rest is lost with the daemon and learnt again."""

    record: Record
    spec: JobSpec
    file: str = ""
    output: str = ""
    offered: JobSpec | None = None
    """The job file as it stands now, where it asks for more than a running job can take over."""
    refusal: str = ""
    refusal_hint: str = ""
    """Why ``offered`` is not in force, in one sentence."""
    restart: tuple[JobSpec, bool] | None = None
    """What to begin again with once it is off its die, and whether from step 0."""
    digest: str = ""
    """sha256 of the job file as last seen."""
    facts: str = ""
    """What the files that it names looked like before it was prepared."""
    die: str | None = None
    lane: str | None = None
    resident: bool = False
    prepared: bool = False
    needs_bytes: int = 0
    base_bytes: int = 0
    """Of a die's memory, by estimate: all that it needs, and what of it is shared with jobs on the same base."""
    saved_bytes: int = 0
    """Of one checkpoint, by estimate."""
    leave: Leave | None = None
    held: bool = False
    """Resident, and without turns until its disk takes a checkpoint."""
    not_before: float = 0.0
    """Monotonic time before which nothing is tried for this job."""

    step: int = 0
    tokens: int = 0
    steps_run: int = 0
    tokens_run: int = 0
    loss: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    eval_loss: float | None = None
    lr: float | None = None
    progress: tuple[str, float] | None = None
    progress_began: float = 0.0
    progress_at: float = 0.0
    """Monotonic times of the first and the newest sign of life of what its worker is at."""
    last_step_at: float | None = None
    loaded_at: float | None = None
    told_at: float = float("-inf")
    """Monotonic time of its newest live line."""
    saving: bool = False
    """A checkpoint was copied aside and is being written."""
    saved_at: float = 0.0
    """Monotonic time at which the newest checkpoint was copied aside, or of the load: a cadence by the clock counts
    from it, however long the disk takes."""
    saved_step: int = 0
    tried_step: int = 0
    """Step of the newest checkpoint, whether the disk took it or not: a cadence in steps counts from it."""
    exported_step: int = 0
    disk_strikes: int = 0
    """Checkpoints in a row that the disk did not take."""
    disk_trouble: str = ""
    disk_hint: str = ""
    checkpoint_bytes: int | None = None
    checkpoint_seconds: float | None = None
    commits: int = 0
    failures: int = 0
    fallbacks: int = 0
    skipped: int = 0
    """Steps of the job left out because their loss or gradient was no number."""
    skipping: int = 0
    """How many of them in a row, just now."""
    evaluated: int | None = None
    """The step of its newest held-out loss; None: it takes none, or has not said."""
    recomputes: bool = False
    most_parts: int = 1
    """What its worker says it could do to need less memory."""
    released_at: int | None = None
    """The step at which it last ran out of memory and was to try again with nothing but the caches let go."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=33))
    visits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=33))
    """(wall time, steps run) at the end of the newest visits."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> JobState:
        return self.record.state

    @property
    def paused(self) -> bool:
        """Whether the user wants it to rest."""
        return self.record.user_paused or self.spec.paused

    @property
    def total(self) -> int | None:
        """Steps of the whole job; None before its samples were counted."""
        s = self.spec
        if s.max_steps is not None:
            return s.max_steps
        return None if self.record.samples is None else steps_of(s, self.record.samples)

    @property
    def base_key(self) -> str:
        """The same for jobs that share a frozen base on one die; empty for one that trains all weights."""
        s = self.spec
        return f"{s.model} {s.dtype} {s.quantize}" if s.method == "lora" else ""

    @property
    def trained(self) -> bool:
        return self.total is not None and self.step >= self.total

    @property
    def owes_evaluation(self) -> bool:
        """Trained, but the last held-out loss is still to be taken."""
        return self.trained and self.evaluated not in (None, self.step)

    @property
    def kind(self) -> str:
        """The kind of die on which alone it may go on; empty where any will do."""
        r = self.record
        return r.kind if r.announced_step and self.spec.resume == "exact" else ""

    # --- questions the lane asks ---

    def visit(self) -> tuple[int, float | None]:
        """How long the next visit may be: (steps, seconds). It ends where a checkpoint or an export is due by steps. By
        the clock it lasts a cadence at most, due or not: one that was due when it began would have lasted no step."""
        n, seconds = NO_LIMIT, None
        if self.spec.steps_per_visit == "auto":
            seconds = self.spec.visit_seconds
        else:
            n = int(self.spec.steps_per_visit)
        for every in (self.spec.checkpoint_steps, self.spec.export_every):
            if every:
                n = min(n, every - self.step % every)
        if cadence := self.spec.checkpoint_seconds:
            seconds = min(seconds or cadence, cadence)
        return n, seconds

    def order(self, steps: int, seconds: float | None = None, *, checkpoint: bool = False, round: int = 0) -> Run:
        """What its worker is told for a visit."""
        s = self.spec
        return Run(job=self.id, steps=steps, seconds=seconds, total=self.total or 0, round=round, checkpoint=checkpoint,
                   keep=s.keep, eval_every=s.eval_every, on_nan=s.on_nan, rungs=self.record.rungs)

    def checkpoint_due(self, now: float) -> bool:
        """Whether it should be copied aside before its visit ends; not while the copy before is being written."""
        if self.saving or self.step == self.saved_step:
            return False
        if every := self.spec.checkpoint_steps:
            return self.step // every > self.tried_step // every
        return now - self.saved_at >= (self.spec.checkpoint_seconds or math.inf)

    @property
    def wish(self) -> Wish:
        """What it asks of the disk."""
        return Wish(self.id, self.saved_bytes, self.spec.keep)

    @property
    def needs_save(self) -> bool:
        """Whether it may not leave its die, or end, as it is: what it has learnt is not on disk."""
        return self.step != self.saved_step and (self.leave is None or self.leave.save)

    @property
    def export_due(self) -> bool:
        every = self.spec.export_every
        return bool(every) and self.step // (every or 1) > self.exported_step // (every or 1)

    @property
    def step_seconds(self) -> float:
        """Median seconds of the newest steps; 0 before the first."""
        return median(self.durations) if self.durations else 0.0

    def patience(self, least: float) -> float:
        """Seconds without a report after which its worker counts as hung: ever more, where it may be merely slow."""
        return max(math.ldexp(least, self.record.crashes), 10 * self.step_seconds)

    # --- what it is told ---

    def remember(self, past: History) -> None:
        """Take over what it came to before the daemon was started."""
        for step in past.steps:
            self.lr = step.lr
            if step.loss is not None:
                self.loss = step.loss
                self.losses.append(step.loss)
        if past.evals:
            self.eval_loss = past.evals[-1][1]

    def hear(self, report: Message, wall: float, now: float) -> None:
        """Take in one report of its worker; ``wall`` is Unix time, ``now`` monotonic."""
        match report:
            case Step():
                self.progress = None
                self._hear_step(report, wall)
            case Evaluated():
                self.eval_loss, self.progress = report.loss, None
            case VisitDone():
                self.progress = None
                if report.copied:
                    self.saving, self.saved_at = True, now
                self.evaluated = report.evaluated
                if report.steps:
                    self.visits.append((wall, self.steps_run))
            case Committed():
                self._hear_committed(report, wall)
            case CommitFailed():
                self.saving = False
                self.failures += 1
                self.disk_strikes += 1
                self.disk_trouble, self.disk_hint = report.message, report.hint
                self.tried_step, self.saved_at = report.step, now  # the next try comes a cadence later
            case Progress():
                if self.progress is None:
                    self.progress_began = now
                self.progress, self.progress_at = (report.what, report.share), now
            case Prepared():
                self.record.samples, self.progress = report.samples, None
                self.needs_bytes, self.base_bytes = report.needs_bytes, report.base_bytes
                self.saved_bytes = report.saved_bytes
            case Loaded():
                self._hear_loaded(report, wall, now)
            case _:
                pass

    def _hear_step(self, report: Step, wall: float) -> None:
        self.step, self.lr, self.last_step_at = report.step, report.lr, wall
        self.tokens += report.tokens
        self.steps_run += 1
        self.tokens_run += report.tokens
        self.skipping = self.skipping + 1 if report.skipped > self.skipped else 0
        self.skipped = report.skipped
        self.durations.append(report.seconds)
        if report.loss is not None and math.isfinite(report.loss):
            self.loss = report.loss
            self.losses.append(report.loss)
        if report.step > self.record.best_step:
            self.record.best_step, self.record.crashes = report.step, 0

    def _hear_committed(self, report: Committed, wall: float) -> None:
        self.saving = False
        self.disk_strikes, self.disk_trouble = 0, ""
        self.saved_step = self.tried_step = report.step
        self.checkpoint_bytes, self.checkpoint_seconds = report.bytes, report.seconds
        self.commits += 1
        self.record.announced_step, self.record.announced_at = report.step, wall

    def _hear_loaded(self, report: Loaded, wall: float, now: float) -> None:
        self.resident, self.saving, self.progress, self.loaded_at = True, False, None, wall
        self.step, self.tokens, self.record.samples = report.step, report.tokens, report.samples
        self.saved_step = self.tried_step = self.exported_step = report.step
        self.saved_at = now
        self.skipped, self.evaluated = report.skipped, report.evaluated
        self.recomputes, self.most_parts = report.recomputes, report.most_parts
        self.disk_strikes, self.disk_trouble = 0, ""  # nothing is unsaved
        self.fallbacks += len(report.fallbacks)
        self.visits.clear()

    def off_die(self) -> None:
        """Its worker is gone, or has forgotten it."""
        self.resident = self.saving = False
        self.progress = self.loaded_at = None
        self.visits.clear()

    def forget_all(self) -> None:
        """Nothing has been trained, and nothing was."""
        r = self.record
        r.announced_step = r.best_step = self.step = self.tokens = self.saved_step = 0
        r.rungs, r.kind, self.skipped, self.released_at = (), "", 0, None
        r.announced_at = r.samples = self.loss = self.eval_loss = self.lr = None
        self.losses.clear()

    # --- what it looks like ---

    def steps_per_minute(self) -> float | None:
        """Steps a minute in the rotation, other jobs' turns included."""
        if len(self.visits) < 2:
            return None
        (t0, n0), (t1, n1) = self.visits[0], self.visits[-1]
        return 60 * (n1 - n0) / (t1 - t0) if t1 > t0 else None

    def eta(self) -> float | None:
        """Seconds until it has trained, at the present pace."""
        rate, total = self.steps_per_minute(), self.total
        return None if not rate or total is None else 60 * max(0, total - self.step) / rate

    @property
    def doing(self) -> str:
        """What its worker has been at for some seconds: ``training, step 12: 35%, for 2 min``; empty before."""
        seconds = self.progress_at - self.progress_began
        if self.progress is None or seconds < LONG_SECONDS:
            return ""
        what, share = self.progress
        return what + (f": {share:.0%}" if share else "") + f", for {duration(seconds)}"

    def line(self, die: str, round: int) -> str:
        """``[round 12] die 3 code-a: step 150/1500 loss 2.34 28.5 steps/min eta 47 min``"""
        parts = [f"[round {round}] die {die} {self.id}: step {self.step}/{self.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if (rate := self.steps_per_minute()) is not None:
            parts.append(f"{rate:.1f} steps/min")
        if (eta := self.eta()) is not None and not self.trained:
            parts.append(f"eta {duration(eta)}")
        return " ".join(parts)

    def view(self, refusal: str = "") -> JobView:
        """``refusal``: why its die cannot be had just now."""
        r, s = self.record, self.spec
        per_epoch = (r.samples or 0) / (s.batch_size * s.grad_accum)
        why, hint = self._why(refusal)
        return JobView(
            id=r.id, state=r.state, why=why, hint=hint, file=self.file, output=self.output, method=s.method,
            model=s.model, submitted_at=r.submitted_at, die=self.die, lane=self.lane, weight=s.weight, step=self.step,
            target_steps=self.total, epoch=self.step / per_epoch if per_epoch else 0.0, loss=self.loss,
            losses=list(self.losses), eval_loss=self.eval_loss, lr=self.lr, tokens=self.tokens,
            steps_run=self.steps_run, tokens_run=self.tokens_run, steps_per_minute=self.steps_per_minute(),
            eta_seconds=self.eta(), last_step_at=self.last_step_at, loaded_at=self.loaded_at,
            last_checkpoint_at=r.announced_at, last_checkpoint_step=r.announced_step or None,
            checkpoint_every=str(s.checkpoint_every),
            checkpoint_every_seconds=s.checkpoint_seconds, checkpoint_every_steps=s.checkpoint_steps,
            checkpoint_bytes=self.checkpoint_bytes,
            checkpoint_commits=self.commits, checkpoint_failures=self.failures, checkpoint_fallbacks=self.fallbacks,
            crashes=r.crashes, skipped=self.skipped, savings=sentence(r.rungs),
            prepared=self.progress[1] if self.progress and r.state is JobState.PREPARING else None)

    def _why(self, refusal: str) -> tuple[str, str]:
        if self.progress and self.state in (JobState.PREPARING, JobState.LOADING):
            return f"{self.progress[0]}, {self.progress[1]:.0%}", ""
        if self.leave:
            reasons = "; ".join(s for s in (self.leave.why, refusal) if s)
            return f"leaving die {self.die}" + (f": {reasons}" if reasons else ""), self.leave.hint
        if refusal:
            return refusal, ""
        if self.record.why:
            return self.record.why, self.record.hint
        if self.doing:
            return self.doing, ""
        if self.disk_trouble:
            return f"its last checkpoint was not saved: {self.disk_trouble}", self.disk_hint
        return self.refusal, self.refusal_hint


def steps_of(spec: JobSpec, samples: int) -> int:
    """Steps that ``epochs`` passes over ``samples`` make: at least one, the last one counted whole.

    The epochs are taken as written: 0.1 means a tenth, not the binary number next to it.
    """
    return max(1, math.ceil(Fraction(repr(spec.epochs)) * samples / (spec.batch_size * spec.grad_accum)))
