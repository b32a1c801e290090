"""The ledger: the daemon's durable record of each job, one small JSON file in the job's directory, format version 1.

It carries a sha256 of itself, by which damage is seen; one without (written by hand, say) is believed.
What training needs to go on is in the checkpoints; the ledger holds what only the daemon knows: whether the job ended
and how, what was announced, and what the user asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rrd import durable
from rrd.durable import DISK, Disk
from rrd.errors import Damaged
from rrd.job import JOB_FILE, JOB_ID
from rrd.savings import Rung
from rrd.states import JobState
from rrd.text import one_line

FORMAT = 1
FILE = "ledger.json"


class Record(BaseModel):
    """One job as the daemon remembers it across restarts."""

    model_config = ConfigDict(extra="ignore")

    format: int = FORMAT
    id: str
    state: JobState = JobState.WAITING
    why: str = ""
    hint: str = ""
    submitted_at: float = 0.0
    """The job file's time, Unix seconds: the order of the queue."""
    announced_step: int = 0
    """The newest checkpoint said to be durable. With none valid on disk the job must not start at step 0."""
    announced_at: float | None = None
    crashes: int = 0
    """Worker deaths on this job's visits since its last new step."""
    best_step: int = 0
    """The furthest step ever reported, so that a new step can be told from a repeated one."""
    fresh: bool = False
    """It is to begin at step 0, and its old checkpoints are not out of the way yet."""
    user_paused: bool = False
    outcome: JobState | None = None
    """Of a removed job: how it had ended before, if it had."""
    samples: int | None = None
    rungs: tuple[Rung, ...] = ()
    """What it does to need less memory, and since which step; for good."""
    kind: str = ""
    """What kind of die it was last loaded on: only there do its checkpoints go on bit for bit."""
    finished_at: float | None = None
    told_at: float | None = None
    """The ``finished_at`` that ``on_done`` or ``on_failed`` was last told of: another one is still to be told."""
    failed_facts: str = ""
    """What the files named by a failed job looked like; when that changes, it is tried again."""


class Ledger:
    """Reads and writes the records below ``root`` (``<state_dir>/jobs``). Its calls block."""

    def __init__(self, root: Path, *, disk: Disk = DISK) -> None:
        self.root, self.disk = root, disk

    def dir(self, job: str) -> Path:
        assert JOB_ID.fullmatch(job)
        return self.root / job

    def load(self) -> tuple[dict[str, Record], list[str]]:
        """All records, and a sentence for each that could not be read; those are kept aside, and the job is known
        again by its job file and its checkpoints."""
        records, faults = {}, []
        with contextlib.suppress(OSError):  # a directory whose maker was killed before its fsync is durable from now on
            durable.fsync_dir(self.root, disk=self.disk)
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if not JOB_ID.fullmatch(path.name) or not path.is_dir():
                continue
            try:
                durable.sweep_files(path, disk=self.disk)
                records[path.name] = _read(path / FILE, path.name)
            except FileNotFoundError:
                continue  # a crash between making the directory and writing the first record
            except OSError as e:
                faults.append(f"{path / FILE} cannot be read: {(e.strerror or str(e)).lower()}")
            except Damaged as e:
                faults.append(f"{e.message}; {self._set_aside(path / FILE)}")
        return records, faults

    def _set_aside(self, path: Path) -> str:
        aside = path.with_name(f".bad-{FILE}-{secrets.token_hex(4)}")
        try:
            self.disk.rename(path, aside)
        except OSError as e:
            return f"it could not be set aside: {(e.strerror or str(e)).lower()}"
        return f"it was set aside as {aside.name}"

    def save(self, record: Record, job_toml: str | None = None) -> None:
        """Write the record (and the job file as accepted) durably. Raises DiskTrouble."""
        path = self.dir(record.id)
        try:
            durable.make_dir(path, disk=self.disk)
        except OSError as e:
            raise durable.trouble(e, path) from e
        if job_toml is not None:
            durable.replace_file(path / JOB_FILE, job_toml.encode(), disk=self.disk)
        body = record.model_dump(mode="json")
        data = json.dumps({**body, "self": _digest(body)}, indent=1).encode() + b"\n"
        durable.replace_file(path / FILE, data, disk=self.disk)

    def job_toml(self, job: str) -> bytes | None:
        """The job file as it was accepted, or None."""
        try:
            return (self.dir(job) / JOB_FILE).read_bytes()
        except OSError:
            return None


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path, job: str) -> Record:
    data = path.read_bytes()
    try:
        body = json.loads(data)
        if isinstance(body, dict) and isinstance(body.get("format"), int) and body["format"] > FORMAT:
            raise Damaged(f"{path} is of format {body['format']}, and this rrd knows {FORMAT}")
        if isinstance(body, dict) and (digest := body.pop("self", None)) not in (None, _digest(body)):
            raise ValueError(f"its digest is not {one_line(str(digest), 70)!r}")
        record = Record.model_validate(body)
    except (ValueError, RecursionError) as e:
        reason = e.errors()[0]["msg"] if isinstance(e, ValidationError) else str(e)
        raise Damaged(f"{path} is damaged: {one_line(reason, 200)}") from e
    if record.id != job:
        raise Damaged(f"{path} is of another job, {one_line(record.id, 70)!r}")
    return record
