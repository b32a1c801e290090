"""What the user may ask of jobs and dies over the control socket. Each answers with the sentence to show."""

from __future__ import annotations

from rrd.edits import identity
from rrd.errors import BadJob, NoSuchJob, RrdError
from rrd.roster import Job, Leave
from rrd.scheduler import Scheduler
from rrd.states import ENDED, JobState


class Verbs:
    """The user's wishes. What was asked last holds, also for a job that is still on its way off its die."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def _job(self, job_id: str) -> Job:
        if job := self.scheduler.jobs.get(job_id):
            return job
        raise NoSuchJob(f"there is no job {job_id}", hint="`rrd status` lists them")

    def pause(self, job_id: str) -> str:
        job = self._job(job_id)
        if job.state in ENDED:
            raise RrdError(f"{job.id} is {job.state}; there is nothing to pause")
        job.record.user_paused = True
        self.scheduler.pause_or_resume(job)
        return f"{job.id} rests after its step in progress"

    def resume(self, job_id: str) -> str:
        job = self._job(job_id)
        if job.state in ENDED:
            hint = "" if job.state is JobState.DONE else f"`rrd restart {job.id}` carries on"
            raise RrdError(f"{job.id} is {job.state}; there is nothing to resume", hint=hint)
        if job.spec.paused:
            raise BadJob(f"{job.id} is paused by its job file", hint=f"take `paused = true` out of {job.file}")
        if not job.record.user_paused:
            raise RrdError(f"{job.id} is not paused", hint=f"it is {job.state}")
        job.record.user_paused = False
        self.scheduler.pause_or_resume(job)
        return f"{job.id} carries on"

    def cancel(self, job_id: str) -> str:
        job = self._job(job_id)
        if job.state in ENDED:
            raise RrdError(f"{job.id} is {job.state}; there is nothing to cancel")
        job.restart, job.record.user_paused = None, False
        hint = f"`rrd restart {job.id}` carries on"
        self.scheduler.end(job, Leave(JobState.CANCELLED, "cancelled by the user", hint))
        return f"{job.id} ends after its step in progress; its checkpoints are kept"

    def restart(self, job_id: str, *, fresh: bool = False) -> str:
        """Take over the job file as it is and try again: from the newest checkpoint, or from step 0 if ``fresh`` or
        if the file now asks for another identity."""
        job = self._job(job_id)
        spec = job.offered or job.spec
        fresh = fresh or identity(spec) != identity(job.spec)
        job.restart, job.record.user_paused = (spec, fresh), False
        self.scheduler.end(job, Leave(JobState.WAITING, "restarting", save=not fresh))
        return f"{job.id} starts again " + ("at step 0" if fresh else "from its newest checkpoint")

    def unfence(self, die_name: str) -> str:
        for lane in self.scheduler.lanes.values():
            if die := lane.dies.get(die_name):
                die.unfence(self.scheduler.monotonic())
                die.probe_delay = 0.0
                self.scheduler.changed()
                return f"die {die_name} is in use again"
        raise RrdError(f"there is no die {die_name}", hint="`rrd dies` lists them")
