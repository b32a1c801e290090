"""Whose fault it was, and what then: the table of the same name in the design, as decisions.

A worker's death is blamed, provisionally, on the job on whose visit it happened: three without a new step, and the job
has failed. Two different jobs in a row on one die, and it is the die: it is fenced, its jobs wait for another of its
kind, and it is probed, ever more rarely, until it computes again. A die that said itself that it is of no use is fenced
at once, and nobody is blamed. For want of memory a job is run with less, rung by rung, before it fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrd.die import Die
from rrd.handle import SILENT
from rrd.journal import Kind
from rrd.messages import Failed, OutOfMemory
from rrd.roster import CRASHES, Job, Leave
from rrd.savings import climb, sentence
from rrd.stack import summary
from rrd.states import ENDED, JobState
from rrd.text import duration, size

if TYPE_CHECKING:
    from rrd.scheduler import Scheduler

DISK_RETRY = 30.0
"""Seconds until a job that could not be prepared or loaded for want of disk is tried again."""
BUSY_RETRY = 3.0
"""The same where somebody else holds what it needs."""
RELEASE_STEPS = 100
"""So many steps a job must have got on for letting go of the caches to be tried again before a rung is taken."""


class Faults:
    """The part of the scheduler that is told of faults."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.s = scheduler

    # --- of jobs ---

    def failed(self, job: Job, report: Failed) -> None:
        """What was asked of its worker could not be done, and the worker holds it no longer: whose fault is it?"""
        if report.blame == "worker":
            self.blame(job, report.message)
            if job.state not in ENDED and job.leave is None:
                self.s.set(job, JobState.LOADING if job.die else JobState.WAITING, report.message, report.hint)
        elif report.blame == "busy" and job.lane:
            self._rest(job, report)
        elif report.blame in ("disk", "busy"):
            self.off(job, Leave(JobState.WAITING, report.message, report.hint), Kind.DISK)
            job.not_before = max(job.not_before, self.s.monotonic() + DISK_RETRY)
        else:
            self.off(job, Leave(JobState.FAILED, report.message, report.hint), Kind.FAILED)

    def _rest(self, job: Job, report: Failed) -> None:
        """It keeps its place on its die, and the lane goes on with others."""
        if job.leave is not None:
            return
        if job.record.why != report.message:
            self.s.say(Kind.JOB_WAITS, f"{report.message}; trying again every {duration(BUSY_RETRY)}", job,
                       level="warning", hint=report.hint)
        self.s.set(job, JobState.LOADING, report.message, report.hint)
        self.s.lanes[job.lane or ""].rest(job, BUSY_RETRY)

    def off(self, job: Job, leave: Leave, kind: Kind) -> None:
        """A fault ends the job, or sends it back to wait; unless the user has asked for something else meanwhile."""
        self.s.say(kind, leave.why, job, level="error", hint=leave.hint)
        if job.leave and (job.restart or job.leave.state in ENDED):
            leave = job.leave
        if job.lane:
            self.s.lanes[job.lane].drop(job)
        if leave.state is JobState.FAILED:
            job.record.failed_facts = job.facts
        self.s.left(job, leave)

    def blame(self, job: Job, reason: str) -> None:
        """A worker died on this job's visit; after ``CRASHES`` without a new step the job has failed."""
        job.record.crashes += 1
        if job.record.crashes >= CRASHES:
            slow = "if it is merely slow, a smaller batch_size or a larger hang_seconds in rrd.toml helps; "
            self.off(job, Leave(JobState.FAILED, f"{reason}, {CRASHES} times in a row without a new step",
                                slow * (SILENT in reason)
                                + f"`rrd logs {job.id}` has its last words; `rrd restart {job.id}` tries again"),
                     Kind.FAILED)

    # --- of memory ---

    def out_of_memory(self, job: Job, die: Die, report: OutOfMemory) -> None:
        """Everything that was only kept to be quick has been let go. Once that may be enough; else a rung is taken."""
        lack = self._lack(report)
        if job.released_at is None or not 0 <= report.step - job.released_at < RELEASE_STEPS:
            job.released_at = report.step
            self._again(job, report, f"{lack}; trying again with the caches let go")
            return
        rungs = None
        if report.what in ("training", "evaluating"):
            rungs = climb(job.record.rungs, report.step, recomputes=job.recomputes, most_parts=job.most_parts)
        if rungs is None:
            self._too_large(job, die, report, lack)
            return
        new = [r for r in rungs if r not in job.record.rungs]
        job.record.rungs = rungs
        self.s.keeper.save(job)
        self._again(job, report, f"{lack}; to need less, {sentence(new)}")

    def _lack(self, report: OutOfMemory) -> str:
        doing = {"load": "while it was loaded", "export": "while it was exported",
                 "evaluating": f"at the held-out loss before step {report.step}"}.get(
                     report.what, f"in step {report.step}")
        asked = "" if report.needed is None else f": it needed {size(report.needed)} more"
        left = "" if report.free is None else f"{',' if asked else ':'} {size(report.free)} were free"
        return f"out of memory {doing}{asked}{left}"

    def _again(self, job: Job, report: OutOfMemory, said: str) -> None:
        self.s.say(Kind.OUT_OF_MEMORY, said, job, level="warning")
        if not report.resident and job.leave is None:
            self.s.set(job, JobState.LOADING, said)

    def _too_large(self, job: Job, die: Die, report: OutOfMemory, lack: str) -> None:
        """It has failed; what it has trained is saved first, if it is still there."""
        less = "; nothing is left that would need less" if report.what in ("training", "evaluating") else ""
        leave = Leave(JobState.FAILED, lack + less, "a smaller batch_size or seq_len needs less memory, and so does "
                      "quantize; so do fewer jobs on the die")
        if not report.resident:
            self.off(job, leave, Kind.FAILED)
            return
        self.s.say(Kind.FAILED, leave.why, job, level="error", hint=leave.hint)
        if job.leave is None or not (job.restart or job.leave.state in ENDED):
            job.record.failed_facts = job.facts
            self.s.end(job, leave)

    # --- of workers and dies ---

    def stood(self, job: Job | None, die: Die, stack: str) -> None:
        """Where a worker was when it crashed or was aborted: in a line, and whole for the system's journal."""
        self.s.say(Kind.WORKER_STACK, summary(stack) or "its stack says nothing", job, level="error", die=die,
                   RRD_STACK=stack)

    def crashed(self, job: Job | None, die: Die, reason: str) -> None:
        step = f" at step {job.step}" if job else ""
        said = f"{reason}{step}; resuming from the newest checkpoint"
        self.s.say(Kind.WORKER_DIED, said, job, level="error", die=die)
        if die.lost:
            self._fence(die, reason)
        elif job is not None:
            self.blame(job, reason)
            if die.suspect and die.suspect != job.id:
                self._fence(die, f"its worker died on {die.suspect} and then on {job.id}")
            else:
                die.suspect = job.id
        if die.fenced:
            self._clear(die)
        for each in die.jobs.values():
            if each.leave is None:
                self.s.set(each, JobState.LOADING)
        self.s.changed()

    def fallen(self, die: Die, reason: str) -> None:
        """The gate says that it is on the bus no more."""
        self._fence(die, reason)
        self._clear(die)
        self.s.changed()

    def _clear(self, die: Die) -> None:
        """Its jobs go on elsewhere, or wait."""
        for each in list(die.jobs.values()):
            leave = each.leave or Leave(JobState.WAITING)
            self.s.lanes[die.spec.lane].drop(each)
            self.s.left(each, leave)

    def _fence(self, die: Die, why: str) -> None:
        die.fence(why, self.s.monotonic())
        self.s.say(Kind.DIE_FENCED, f"fenced: {why}; it is tried again in {duration(die.probe_delay)}", level="error",
                   die=die, hint=f"`rrd dies --unfence {die.name}` puts it back to use")

    def returned(self, die: Die) -> None:
        """A probe computed, and right."""
        die.unfence(self.s.monotonic())
        self.s.say(Kind.DIE_RETURNED, "it computes again and is back in use", level="notice", die=die)
        self.s.changed()

    def still_fenced(self, die: Die, why: str) -> None:
        self.s.say(Kind.DIE_FENCED, f"still fenced: {why}; it is tried again in {duration(die.probe_delay)}",
                   level="warning", die=die)
