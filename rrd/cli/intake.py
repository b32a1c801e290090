"""Jobs on their way in: job files and the older tool's arrays, read, checked, made independent of where they lay."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rrd import durable, inputs, toml
from rrd.client import call
from rrd.errors import BadJob, Denied, DiskTrouble, RrdError
from rrd.job import MAX_BYTES, PATH_KEYS, JobSpec, check_paths, id_of, parse_job, parse_legacy, to_toml
from rrd.text import one_line
from rrd.toml import show

if TYPE_CHECKING:
    from rrd.config import Config

MAX_ARRAY = 16 << 20
"""Bytes of a JSON array of jobs."""


@dataclass(frozen=True, eq=False)
class Incoming:
    """A checked job and the job file that says the same with full paths."""

    id: str
    spec: JobSpec
    text: bytes
    source: str
    warnings: tuple[str, ...] = ()
    """What is odd about it but may be meant, one sentence each."""

    @property
    def file(self) -> str:
        return f"{self.id}.toml"

    def missing(self) -> list[str]:
        """A sentence for each input that is not there yet; the job begins when it is."""
        named = {k: getattr(self.spec, k) for k in PATH_KEYS if k != "output"}
        return [f"{self.id}: `{k}` is not there yet: {v}" for k, v in named.items() if v and not os.path.exists(v)]


def read(source: str, config: Config) -> list[Incoming]:
    """The jobs in the file ``source``, a job file or a JSON array. Relative paths count from the current directory.

    Raises BadJob.
    """
    base, data = Path.cwd(), _bytes(Path(source))
    if source.endswith(".json"):
        jobs = [Incoming(i, spec, to_toml(spec.model_dump(exclude_unset=True)).encode(), source)
                for i, spec in parse_legacy(data, name=source, base=base)]
    else:
        job_id = id_of(Path(source).name)
        if job_id is None:
            raise BadJob(f"{source} cannot be the name of a job file",
                         hint="call it NAME.toml, NAME of letters, digits, _ and -, at most 63 of them")
        spec = parse_job(source, data, base=base)
        jobs = [Incoming(job_id, spec, with_full_paths(data.decode(), spec).encode(), source)]
    return [replace(job, warnings=tuple(_look(job, config))) for job in jobs]


def _bytes(path: Path) -> bytes:
    try:
        return _read_regular(path, max(MAX_BYTES, MAX_ARRAY if path.suffix == ".json" else 0) + 1)
    except FileNotFoundError:
        raise BadJob(f"there is no file {path}") from None


def _read_regular(path: Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a regular file; waits for no pipe's writer. Raises BadJob, OSError."""
    mode = path.stat().st_mode  # before opening: a device acts on open, a socket cannot be opened
    if stat.S_ISDIR(mode):
        raise BadJob(f"{path} is a directory", hint="name the job files in it")
    if not stat.S_ISREG(mode):
        raise BadJob(f"{path} is not a regular file", hint="a job is a text file")
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as f:
        return f.read(limit)


def _look(job: Incoming, config: Config) -> list[str]:
    """What is odd about ``job``. Raises BadJob for what would only be found out when its turn has come."""
    try:
        check_paths(job.id, job.spec, config)
        _check_die(job.spec.die, config)
        return [f"{job.id}: {sentence}" for sentence in inputs.look(job.spec)]
    except BadJob as e:
        source = one_line(job.source, 100)
        raise e if e.file == source else BadJob(e.message, hint=e.hint, file=source, key=e.key) from None


def _check_die(wish: int | str, config: Config) -> None:
    """Whether the box has the die that is wished for, as far as it is known: the running daemon's, else rrd.toml's."""
    if wish == "auto":
        return
    try:
        dies = call(config.run_dir, "status")["dies"]
    except RrdError:
        dies = [{"name": die.name, "device": die.device} for die in config.dies]
    answers = {str(die.get(key) or "").lower() for die in dies for key in ("name", "uuid", "pci_bus_id")}
    silent = any(die["device"] != "cpu" and not die.get("uuid") for die in dies)  # its worker has not been started yet
    if str(wish).lower() not in answers and (isinstance(wish, int) or not silent):
        raise BadJob(f"`die`: there is no die {show(wish)}; the dies are {', '.join(die['name'] for die in dies)}",
                     key="die", hint='leave it out, or die = "auto", for whichever is free; `rrd dies` lists them')


def with_full_paths(text: str, spec: JobSpec) -> str:
    """The job file ``text`` with the full paths of ``spec``, its comments and order kept."""
    values = toml.read(text.encode())
    moved = {k: getattr(spec, k) for k in PATH_KEYS if values.get(k) is not None and values[k] != getattr(spec, k)}
    new = text
    for key, path in moved.items():
        line = toml.dump({key: path}).rstrip("\n").replace("\\", "\\\\")
        new = re.sub(rf"""^[ \t]*{key}[ \t]*=[ \t]*("[^"\\\n]*"|'[^'\n]*')""", line, new, count=1, flags=re.MULTILINE)
    try:
        if parse_job("", new.encode()) == spec:
            return new
    except BadJob:  # a path written in a way that the pattern does not know
        pass
    return to_toml({**values, **moved})


def distinct(jobs: Iterable[Incoming]) -> list[Incoming]:
    """``jobs``, of which no two may have one name. Raises BadJob."""
    seen: dict[str, Incoming] = {}
    for job in jobs:
        if other := seen.get(job.id.lower()):
            raise BadJob(f"two jobs would be called {job.id}: {other.source} and {job.source}", hint="rename one")
        seen[job.id.lower()] = job
    return list(seen.values())


def unlike_spool(jobs: Iterable[Incoming], jobs_dir: Path) -> Iterator[tuple[Incoming, bytes | None]]:
    """The jobs whose file in ``jobs_dir`` is missing (None) or other than theirs (how it begins)."""
    for job in jobs:
        try:
            there = _read_regular(jobs_dir / job.file, len(job.text) + 1)
        except FileNotFoundError:
            yield job, None
            continue
        if there != job.text:
            yield job, there


def put(job: Incoming, jobs_dir: Path) -> Path:
    """Write the job file into the spool: whole or not at all, and such that the daemon may read it.

    Raises Denied, or DiskTrouble.
    """
    path, umask = jobs_dir / job.file, os.umask(0o027)
    try:
        durable.make_dir(jobs_dir)
        durable.replace_file(path, job.text)
    except (DiskTrouble, PermissionError) as e:
        if isinstance(e.__cause__ or e, PermissionError):
            raise Denied(f"no permission to write {path}", hint="become a member of the group rrd, or use sudo, or "
                         "train in the foreground with `rrd run`") from e
        raise
    finally:
        os.umask(umask)
    return path
