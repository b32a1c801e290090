"""From the spool's job files to jobs: who is new, whose file changed and how far that may go, and who is gone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rrd import checkpoint, toml
from rrd.edits import changes, identity, with_live
from rrd.history import History
from rrd.job import INPUT_KEYS, JobSpec, output_of
from rrd.journal import Kind
from rrd.ledger import Record
from rrd.roster import Job, Leave
from rrd.scheduler import Scheduler
from rrd.snapshot import RejectedView
from rrd.spool import JobFile, Rejection, Scan
from rrd.states import ENDED, PLACED, JobState


class Intake:
    """Makes the scheduler's jobs those that the spool names. Runs on the loop; nothing blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.rejected: dict[str, Rejection] = {}
        self._orphans: dict[str, Record] = {}
        self._gone: dict[str, Job] = {}
        scheduler.gone = lambda job: self._gone.update({job.id: job})

    def restore(self, records: dict[str, Record], specs: dict[str, JobSpec],
                pasts: Mapping[str, History] = MappingProxyType({})) -> None:
        """Take over the ledger's records, and the ends of their histories. A record without a readable job file waits
        for the spool to bring one."""
        s = self.scheduler
        for job_id, record in records.items():
            if job_id not in specs:
                self._orphans[job_id] = record
                continue
            if record.state in PLACED or record.state is JobState.PREPARING:
                record.state = JobState.WAITING  # nobody trains yet
            job = Job(record, specs[job_id], output=str(output_of(job_id, specs[job_id], s.config)))
            if record.state is JobState.PAUSED and not job.paused:
                record.state = JobState.WAITING  # for its disk; whether that has room, it will find out
            job.step = job.saved_step = record.announced_step
            if past := pasts.get(job_id):
                job.remember(past)
            (self._gone if record.state is JobState.REMOVED else s.jobs)[job_id] = job

    def apply(self, scan: Scan) -> None:
        """Take in one scan."""
        s = self.scheduler
        for file in scan.jobs.values():
            if file.id in self._gone:
                self._put_back(self._gone.pop(file.id))
            if job := s.jobs.get(file.id):
                self._call_back(job)
                self._offer(job, file)
            else:
                self._admit(file)
        for job in list(s.jobs.values()):
            if job.id not in scan.present:
                self._remove(job)
        self._say_rejected(scan.rejected)
        s.retry_failed()
        s.changed()

    def _admit(self, file: JobFile) -> None:
        s = self.scheduler
        record = self._orphans.pop(file.id, None) or Record(id=file.id, submitted_at=file.mtime)
        if not record.announced_step and (saved := checkpoint.listing(s.keeper.ledger.dir(file.id))):
            record.announced_step = saved[0][0]  # its ledger was lost, its work was not
        record.state, record.why, record.hint = JobState.WAITING, "", ""
        job = s.jobs[file.id] = Job(record, file.spec, file=str(file.path), output=file.output, digest=file.digest)
        s.keeper.save(job, spec=True)
        s.say(Kind.JOB_ACCEPTED, f"accepted, {file.spec.method} on {file.spec.model}", job)

    def _offer(self, job: Job, file: JobFile) -> None:
        """A known job's file as it is now: take over what may change, refuse the rest, say so once."""
        s = self.scheduler
        if file.digest == job.digest and file.spec in (job.spec, job.offered):
            return
        edited, job.digest, job.file = job.digest not in ("", file.digest), file.digest, str(file.path)
        taken, refused = changes(job.spec, file.spec)
        if refused and self._untouched(job):
            taken, refused = taken | refused, set()
            s.replace(job, file.spec, file.output)
        elif refused and job.state is JobState.FAILED and identity(job.spec) == identity(file.spec):
            taken, refused = taken | refused, set()  # nothing of it is running that the edit could disturb
            job.restart = file.spec, False
            s.end(job, Leave(JobState.WAITING))
        elif taken:
            job.spec = with_live(job.spec, file.spec)
        self._note_refused(job, file.spec, refused)
        if taken:
            self._took_over(job, taken)
        if edited and job.state is JobState.FAILED and not refused:
            s.retry(job)

    @staticmethod
    def _untouched(job: Job) -> bool:
        """Whether nothing was trained yet, so that there is nothing to keep."""
        return not (job.record.best_step or job.record.announced_step or job.state in PLACED)

    def _note_refused(self, job: Job, spec: JobSpec, refused: set[str]) -> None:
        before, job.offered = job.refusal, spec if refused else None
        keys = ", ".join(f"`{k}`" for k in sorted(refused))
        anew = bool(refused) and identity(job.spec) != identity(spec)
        why = "it would change what is being trained" if anew else "a running job does not take it over"
        job.refusal = f"the edit of {keys} is not in force: {why}" if refused else ""
        where = ("step 0" if anew else "the newest checkpoint" if refused.isdisjoint(INPUT_KEYS)
                 else "the newest checkpoint if what lies there is the same")
        job.refusal_hint = f"`rrd restart {job.id}` takes it over, from {where}" if refused else ""
        if job.refusal and job.refusal != before:
            self.scheduler.say(Kind.EDIT_REFUSED, job.refusal, job, level="warning", hint=job.refusal_hint)

    def _took_over(self, job: Job, taken: set[str]) -> None:
        s = self.scheduler
        s.keeper.save(job, spec=True)
        s.say(Kind.EDIT_TAKEN, "now " + ", ".join(_as_written(k, getattr(job.spec, k)) for k in sorted(taken)), job)
        if job.lane and "weight" in taken:
            s.lanes[job.lane].rotation.set_weight(job.id, job.spec.weight)
        if "paused" in taken:
            s.pause_or_resume(job)
        if job.state is JobState.DONE and job.total is not None and job.total > job.record.announced_step:
            s.set(job, JobState.WAITING)  # there is more to train now

    def _put_back(self, job: Job) -> None:
        """Its file is there again: carry on where it was."""
        ended = job.record.outcome
        self.scheduler.jobs[job.id] = job
        self.scheduler.set(job, ended or JobState.WAITING, job.record.why if ended else "",
                           job.record.hint if ended else "")
        self.scheduler.say(Kind.JOB_ACCEPTED, "its job file is back; carrying on", job)

    def _call_back(self, job: Job) -> None:
        """Its file is there again before it was off its die."""
        if job.leave and job.leave.state is JobState.REMOVED:
            job.leave = Leave(JobState.WAITING)
            self.scheduler.say(Kind.JOB_ACCEPTED, "its job file is back; carrying on", job)

    def _remove(self, job: Job) -> None:
        if job.leave and job.leave.state is JobState.REMOVED:
            return  # on its way already
        r = job.record
        now = job.leave or Leave(job.state, r.why, r.hint)
        r.outcome = now.state if now.state in ENDED else None
        self.scheduler.say(Kind.JOB_REMOVED, "its job file is gone; its checkpoints are kept", job)
        self.scheduler.end(job, now._replace(state=JobState.REMOVED))

    def _say_rejected(self, rejected: dict[str, Rejection]) -> None:
        for name, r in rejected.items():
            if self.rejected.get(name) != r:
                self.scheduler.say(Kind.FILE_REJECTED, r.sentence, level="error", hint=r.hint)
        self.rejected = dict(rejected)

    def rejected_views(self) -> list[RejectedView]:
        """The files that do not count, by name, for the snapshot."""
        return [RejectedView(file=r.file, line=r.line, key=r.key, message=r.sentence, hint=r.hint)
                for _, r in sorted(self.rejected.items())]


def _as_written(key: str, value: object) -> str:
    """``paused = true``, as in the job file; a key that does not stand there has no value to show."""
    return f"{key} left out" if value is None else toml.dump({key: value}).rstrip()
