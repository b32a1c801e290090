"""The daemon's decisions about jobs: which there are, what becomes of each, and where it trains.

Facts come from the spool (``rrd.intake``), from the user (``rrd.verbs``) and from the lanes (the ``Host`` methods).
After each of them ``advance`` brings every job as far as it can go.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rrd import host_memory
from rrd.config import Config
from rrd.die import Die, facts_of
from rrd.errors import RrdError
from rrd.faults import DISK_RETRY, Faults
from rrd.handle import Nursery
from rrd.host_memory import HostMemory
from rrd.job import JobSpec, output_of
from rrd.journal import Journal, Kind
from rrd.keeper import Keeper
from rrd.lane import Lane
from rrd.messages import (
    CommitFailed,
    Committed,
    Evaluated,
    Exported,
    Failed,
    Loaded,
    Message,
    OutOfMemory,
    Prepared,
    Progress,
    Ready,
    Step,
    VisitDone,
)
from rrd.metrics import Meters
from rrd.placement import Candidate, place
from rrd.preparer import Preparer
from rrd.roster import Job, Leave
from rrd.rotation import Turn
from rrd.savings import united
from rrd.snapshot import JobView
from rrd.states import ENDED, JobState, may_follow
from rrd.text import count, duration

LIVE_SECONDS = 2.0
"""A job's live lines are at least so far apart, the last one excepted: short visits would flood a terminal."""
LONG_LIVE_SECONDS = 10.0
"""The same for how far a step, or whatever else takes long, has come."""
PREPARED_AHEAD = 2
"""Jobs prepared beyond those that have room: the next in line should not keep a die waiting."""


class Scheduler:
    """All jobs of the daemon. Everything here runs on the loop; nothing blocks."""

    def __init__(self, config: Config, *, keeper: Keeper, nursery: Nursery, journal: Journal, meters: Meters,
                 live: Callable[[str], None] | None = None, monotonic: Callable[[], float] = time.monotonic,
                 wall: Callable[[], float] = time.time) -> None:
        self.config, self.keeper, self.journal, self.meters, self.live = config, keeper, journal, meters, live
        self.monotonic, self.wall = monotonic, wall
        self.memory: Callable[[], HostMemory | None] = host_memory.look
        self.jobs: dict[str, Job] = {}
        self.lanes: dict[str, Lane] = {}
        self.preparer = Preparer(config, nursery, limit=max(2, len(config.lanes)), monotonic=monotonic, wall=wall)
        self.preparer.others = lambda: [job for job in self.jobs.values() if job.die]
        self.preparer.tell = lambda job, text: self.say(Kind.JOB_NOTE, text, job)
        self.gone: Callable[[Job], None] = lambda job: None
        """Called with a job whose file is gone, once it is off its die and out of the books."""
        self.faults = Faults(self)
        self.changed: Callable[[], None] = lambda: None
        """Called when something happened after which ``advance`` may have work."""

    # --- tried again ---

    def retry_failed(self) -> None:
        """Failed jobs whose model, data or tokenizer have changed since are tried again."""
        for job in self.jobs.values():
            if job.state is JobState.FAILED and job.record.failed_facts:
                self.keeper.facts(job.spec, lambda facts, job=job: self._compare_facts(job, facts))  # type: ignore[misc]

    def _compare_facts(self, job: Job, facts: str) -> None:
        if job.state is JobState.FAILED and job.record.failed_facts not in ("", facts):
            self.say(Kind.JOB_RETRIED, "a file it needs has changed; trying again", job)
            self.retry(job)

    def retry(self, job: Job) -> None:
        """Another try for a failed job, with all its chances."""
        job.record.crashes, job.record.failed_facts, job.prepared = 0, "", False
        self.set(job, JobState.WAITING)
        self.changed()

    def replace(self, job: Job, spec: JobSpec, output: str) -> None:
        """Another spec for a job of which nothing was trained."""
        self.preparer.forget(job)
        job.spec, job.output, job.prepared = spec, output, False
        if job.state is JobState.PREPARING:
            self.set(job, JobState.WAITING)

    def try_again(self) -> None:
        """Whoever runs jobs in the foreground wants them run: those that failed or were cancelled before, too."""
        for job in self.jobs.values():
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                self.say(Kind.JOB_RETRIED, f"{job.state} before: {job.record.why}; trying again", job)
                job.record.crashes = 0
                self.set(job, JobState.WAITING)

    # --- moving on ---

    def advance(self) -> None:
        """Prepare the jobs at the head of the queue, and place those that are ready."""
        now = self.monotonic()
        queue = sorted((j for j in self.jobs.values() if j.state is JobState.WAITING),
                       key=lambda j: (j.record.submitted_at, j.id))
        for job in [j for j in queue if j.paused]:
            self.set(job, JobState.PAUSED, self._pause_reason(job))
        queue = [j for j in queue if not j.paused and j.not_before <= now]
        for job in [j for j in queue if j.record.fresh]:
            self._set_aside(job)
        queue = [j for j in queue if not j.record.fresh]
        for job in self._worth_preparing(queue)[: self.preparer.room]:
            self.set(job, JobState.PREPARING)
            self.keeper.facts(job.spec, lambda facts, job=job: self._keep_facts(job, facts))  # type: ignore[misc]
            self.preparer.start(job, self._prepared)
        self._place([j for j in queue if j.prepared])
        for job in queue:
            if job.state is JobState.WAITING and not job.prepared and not job.record.why:
                job.record.why = "in line: jobs whose files are older come first"

    def _worth_preparing(self, queue: list[Job]) -> list[Job]:
        """Those that may soon have room; jobs that wait for one die are not in the way of those that want another."""
        free = sum(max(0, self.config.jobs_per_die - len(d.jobs)) for d in self._dies() if not d.fenced)
        ahead: Counter[str | int] = Counter()
        soon = []
        for job in queue:
            ahead[job.spec.die] += 1
            if not job.prepared and ahead[job.spec.die] <= free + PREPARED_AHEAD:
                soon.append(job)
        return soon

    def _place(self, ready: list[Job]) -> None:
        wishes = [Candidate(j.id, j.spec.die, j.needs_bytes, j.base_key, j.base_bytes, j.kind) for j in ready]
        placed, waits = place(wishes, facts_of(self._dies(), self.config, self.memory()))
        for job_id, index in placed:
            lane, die = self._numbered()[index]
            self.set(self.jobs[job_id], JobState.LOADING)
            lane.put(self.jobs[job_id], die.name)
        for job_id, why in waits.items():
            job = self.jobs[job_id]
            if not job.record.why:  # told once a wait: the numbers in the reason change all the time
                self.say(Kind.JOB_WAITS, f"waiting: {why}", job)
            job.record.why = why

    def _numbered(self) -> dict[int, tuple[Lane, Die]]:
        return {die.spec.index: (lane, die) for lane in self.lanes.values() for die in lane.dies.values()}

    def _dies(self) -> list[Die]:
        return [die for lane in self.lanes.values() for die in lane.dies.values()]

    def wake_at(self) -> float | None:
        """Monotonic time at which ``advance`` has work again by itself."""
        return min((j.not_before for j in self.jobs.values() if j.state is JobState.WAITING
                    and self.monotonic() < j.not_before < float("inf")), default=None)

    def _prepared(self, job: Job, outcome: Prepared | Failed) -> None:
        if isinstance(outcome, Failed):
            self.faults.failed(job, outcome)
        else:
            job.prepared = True
            for note in outcome.notes:
                self.say(Kind.JOB_NOTE, note, job, level="warning")
            self.set(job, JobState.WAITING)
        self.changed()

    def pause_or_resume(self, job: Job) -> None:
        """Do what ``job.paused`` says, wherever the job is."""
        if job.paused:
            if job.state not in ENDED and (job.die or job.state is not JobState.PAUSED):
                self.end(job, Leave(JobState.PAUSED, self._pause_reason(job)))
        elif job.leave and job.leave.state is JobState.PAUSED:
            job.leave = Leave(JobState.WAITING)  # changed their mind before it was off the die
        elif job.state is JobState.PAUSED and not job.die:
            self.set(job, JobState.WAITING)
        self.keeper.save(job)
        self.changed()

    def _pause_reason(self, job: Job) -> str:
        return "paused by its job file" if job.spec.paused else "paused by the user"

    def end(self, job: Job, leave: Leave) -> None:
        """Take ``job`` off whatever it is on, then let it be what ``leave`` says."""
        self.preparer.forget(job)
        if job.lane:
            self.lanes[job.lane].take_off(job, leave)
        else:
            self.left(job, leave)

    def set(self, job: Job, state: JobState, why: str = "", hint: str = "") -> None:
        r = job.record
        assert may_follow(r.state, state), f"{job.id}: {r.state} -> {state}"
        if (r.state, r.why, r.hint) == (state, why, hint):
            return
        r.state, r.why, r.hint = state, why, hint
        r.finished_at = self.wall() if state in ENDED else None
        self.keeper.save(job)

    def say(self, kind: Kind, message: str, job: Job | None = None, *, level: str = "info", hint: str = "",
            die: Die | None = None, **fields: str) -> None:
        self.journal.event(kind, level, message, hint=hint, job=job.id if job else None,
                           die=die.name if die else job.die if job else None, step=job.step if job else None, **fields)

    # --- what the lanes tell (Host) ---

    def heard(self, job: Job | None, die: Die, report: Message) -> None:
        die.hear(report)
        if isinstance(report, Step):
            self.meters.step(die.name, report.seconds)
            if job is not None and job.skipping == 1:
                what = f"the loss is {report.loss}, the gradient's norm {report.grad_norm}"
                self.say(Kind.STEP_SKIPPED, f"step {report.step} was left out: {what}; "
                         f"{count(report.skipped, 'such step')} so far", job, level="warning")
        elif isinstance(report, Ready):
            self.changed()  # a job may have waited for just this die
        elif job is None:
            return
        elif isinstance(report, Progress):
            self._tell_long(job, die)
        elif isinstance(report, Committed):
            self.keeper.save(job)
            self.meters.save(die.name, report.seconds)
            self.say(Kind.CHECKPOINT, f"checkpoint of step {report.step} is safe ({report.bytes / 1e6:.1f} MB in "
                     f"{duration(report.seconds)})", job)
        elif isinstance(report, CommitFailed) and not job.held:  # said already
            self.say(Kind.CHECKPOINT_FAILED, f"the checkpoint of step {report.step} was not saved: {report.message}",
                     job, level="error", hint=report.hint)
        elif isinstance(report, Evaluated):
            self.say(Kind.EVALUATED, f"held-out loss {report.loss:.4f}", job)

    def _tell_long(self, job: Job, die: Die) -> None:
        now = self.monotonic()
        if self.live and job.doing and now - job.told_at >= LONG_LIVE_SECONDS:
            job.told_at = now
            self.live(f"die {die.name} {job.id}: {job.doing}")

    def visited(self, job: Job, die: Die, turn: Turn, done: VisitDone) -> None:
        now = self.monotonic()
        if self.live and (job.trained or now - job.told_at >= LIVE_SECONDS):
            job.told_at = now
            self.live(job.line(die.name, turn.round))

    def loaded(self, job: Job, die: Die, report: Loaded) -> None:
        for sentence in report.fallbacks:
            self.say(Kind.CHECKPOINT_DAMAGED, f"a damaged checkpoint was put aside: {sentence}", job, level="error")
        for note in report.notes:
            self.say(Kind.JOB_NOTE, note, job, level="warning")
        where = f"resumed from step {report.resumed}" if report.resumed is not None else "starting at step 0"
        job.record.kind = die.kind
        job.record.rungs = united(job.record.rungs, report.rungs)  # a crash may have come before the record was written
        self.say(Kind.LOADED, f"loaded in {duration(report.seconds)}, {where}", job)
        if job.leave is None:
            self.set(job, JobState.RUNNING)

    def exported(self, job: Job, report: Exported) -> None:
        for note in report.notes:
            self.say(Kind.JOB_NOTE, note, job, level="warning")
        self.say(Kind.EXPORTED, f"wrote {report.output}", job)

    def not_exported(self, job: Job, report: Failed) -> None:
        self.say(Kind.DISK, f"the export of step {job.step} was not written: {report.message}; training goes on", job,
                 level="error", hint=report.hint)

    def finishing(self, job: Job) -> None:
        self.set(job, JobState.EXPORTING)

    def finished(self, job: Job) -> None:
        self.set(job, JobState.DONE)
        self.say(Kind.DONE, f"done after {count(job.step, 'step')}: {job.output}", job)
        if not job.trained:
            self.set(job, JobState.WAITING)  # it was given more steps meanwhile
        self.changed()

    def granted(self, die: Die, seconds: float) -> None:
        self.meters.grant(die.name, seconds)

    def refused(self, die: Die, reason: str, retry_in: float) -> None:
        self.say(Kind.GATE_REFUSED, f"{reason}; trying again in {duration(retry_in)}", level="warning", die=die)

    def failed(self, job: Job, die: Die, report: Failed) -> None:
        self.faults.failed(job, report)
        self.changed()

    def out_of_memory(self, job: Job, die: Die, report: OutOfMemory) -> None:
        self.faults.out_of_memory(job, die, report)
        self.changed()

    def stood(self, job: Job | None, die: Die, stack: str) -> None:
        self.faults.stood(job, die, stack)

    def crashed(self, job: Job | None, die: Die, reason: str) -> None:
        self.faults.crashed(job, die, reason)

    def fallen(self, die: Die, reason: str) -> None:
        self.faults.fallen(die, reason)

    def returned(self, die: Die) -> None:
        self.faults.returned(die)

    def still_fenced(self, die: Die, why: str) -> None:
        self.faults.still_fenced(die, why)

    def _keep_facts(self, job: Job, facts: str) -> None:
        """What its files look like before it is tried: a change while it is, is a reason to try again."""
        job.facts = facts
        if job.state is JobState.FAILED:
            job.record.failed_facts = facts
            self.keeper.save(job)

    def disk_full(self, job: Job) -> None:
        self.set(job, JobState.PAUSED, f"no checkpoint can be saved: {job.disk_trouble}",
                  "free space; it goes on by itself")
        self.say(Kind.DISK, f"paused, because no checkpoint can be saved: {job.disk_trouble}", job, level="error",
                 hint="free space; it goes on by itself")

    def disk_back(self, job: Job) -> None:
        self.say(Kind.DISK, "the disk takes checkpoints again; going on", job)
        if job.leave is None:
            self.set(job, JobState.RUNNING if job.resident else JobState.LOADING)

    def left(self, job: Job, leave: Leave) -> None:
        """The job is off its die, or had none: now it is what ``leave`` says."""
        if job.restart is not None:
            self._restart(job)
            leave = Leave(leave.state) if leave.state is JobState.WAITING else leave
        self.set(job, leave.state, leave.why, leave.hint)
        if leave.state in (JobState.PAUSED, JobState.CANCELLED):
            self.say(Kind.JOB_LEFT, f"{leave.why}, at step {job.step}", job)
        elif leave.state is JobState.REMOVED:
            del self.jobs[job.id]
            self.gone(job)
        self.changed()

    def _restart(self, job: Job) -> None:
        """Begin again, as asked for."""
        assert job.restart is not None
        job.spec, fresh = job.restart
        job.restart = job.offered = None
        job.refusal, job.refusal_hint, job.prepared = "", "", False
        job.output = str(output_of(job.id, job.spec, self.config))
        r = job.record
        r.crashes, r.failed_facts = 0, ""
        if fresh:
            job.forget_all()
            r.fresh = True
            self._set_aside(job)
        self.keeper.save(job, spec=True)
        self.say(Kind.JOB_RESTARTED, "restarted " + ("at step 0" if fresh else "from its newest checkpoint"), job)

    def _set_aside(self, job: Job) -> None:
        """Get the old checkpoints out of the way; the job waits for that."""
        job.not_before = float("inf")
        self.keeper.set_aside(job, lambda: self._may_start(job), lambda e: self._may_not_start(job, e))

    def _may_start(self, job: Job) -> None:
        job.not_before, job.record.fresh = 0.0, False
        self.keeper.save(job)
        self.changed()

    def _may_not_start(self, job: Job, e: RrdError) -> None:
        job.not_before = self.monotonic() + DISK_RETRY
        if job.state is JobState.WAITING:
            self.set(job, JobState.WAITING, e.message, e.hint)

    # --- how it stands ---

    def views(self) -> list[JobView]:
        """Of all jobs; one whose die is refused by its gate stands still for that."""
        dies = {die.name: die for die in self._dies()}
        return [j.view(dies[j.die].refusal if j.die else "") for j in self.jobs.values()]

    @property
    def all_ended(self) -> bool:
        return all(j.state in ENDED or (j.state is JobState.PAUSED and j.paused) for j in self.jobs.values())
