"""The spool: which job files there are and what they say. The scan is the truth; events only say when to scan.

A file speaks for a job when it is one regular file with one name, owned and writable by the right people, whole (the
same in two scans), and parses. What is wrong with one file never hides another, and a job that was good goes on as
accepted while its file is being edited or is bad: only a file that is gone ends a job, and a directory that cannot be
read ends none.

The scan blocks and belongs in a thread, one at a time. It costs a ``stat`` per unchanged file.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rrd.config import Config
from rrd.errors import BadJob
from rrd.job import MAX_BYTES, JobSpec, check_paths, id_of, output_of, parse_job
from rrd.text import one_line

STABLE_SECONDS = 0.2
"""A file counts when it looks the same in two scans this far apart: a truncated TOML file can be valid."""

YOUNG_SECONDS = 2.0
"""A file that does not parse and was written less than this ago is perhaps still being written."""


@dataclass(frozen=True)
class JobFile:
    """A job as its file says."""

    id: str
    path: Path
    spec: JobSpec
    digest: str
    """sha256 of ``data``, in hex."""
    mtime: float
    """The file's time, Unix seconds: jobs wait in this order."""
    data: bytes
    output: str = ""
    """Where its adapter goes, symbolic links followed: no two jobs may have the same. Empty: not looked up yet."""


@dataclass(frozen=True)
class Rejection:
    """Why a file, or the whole directory, does not count."""

    file: str
    sentence: str
    hint: str = ""
    line: int = 0
    key: str = ""


@dataclass(frozen=True)
class Scan:
    """What the spool says now."""

    jobs: dict[str, JobFile]
    """By id, in order of the files' times: the good ones, and as last accepted those pending or turned bad."""
    rejected: dict[str, Rejection]
    """By file name."""
    pending: frozenset[str]
    """Names of files that are too new to judge."""
    next_check: float | None
    """When to scan again for their sake, on the monotonic clock (the loop's)."""
    present: frozenset[str]
    """Ids with a file of whatever quality: a known job that is not here was removed."""
    unavailable: Rejection | None = None
    """Why the directory could not be read. Then the rest is as of the last good scan, and no job was removed."""


@dataclass
class _Seen:
    """A file as it looked in the scan that first saw it so, and what was made of it."""

    signature: tuple[int, ...]
    settles_at: float
    verdict: JobFile | Rejection | None = None
    lasting: bool = True
    """Whether the verdict holds as long as the file looks the same."""


class Spool:
    """The job files of ``config.jobs_dir``. ``accepted`` are jobs known from before, such as the ledger's."""

    def __init__(self, config: Config, *, accepted: Iterable[JobFile] = (), wall: Callable[[], float] = time.time,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._config = self._next_config = config
        self._wall, self._monotonic = wall, monotonic
        self._seen: dict[str, _Seen] = {}
        self._accepted = {f"{job.id}.toml": job for job in accepted}
        self._missing: dict[str, float] = {}  # accepted files that are gone, and since when: perhaps being replaced
        self._last = Scan({job.id: job for job in self._accepted.values()}, {}, frozenset(), None,
                          frozenset(job.id for job in self._accepted.values()))

    def reconfigure(self, config: Config) -> None:
        """Have the next scan judge every file anew under ``config``. From any thread, also while a scan runs."""
        self._next_config = config

    def scan(self) -> Scan:
        """Read the directory. Raises nothing, whatever lies in it."""
        now = self._monotonic()
        if self._config is not self._next_config:
            self._config = self._next_config
            self._seen = {}
        try:
            fd = os.open(self._config.jobs_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                changed = self._look(fd, now)
            finally:
                os.close(fd)
        except OSError as e:
            return self._unavailable(e)
        if changed or self._last.next_check is not None:
            self._last = self._conclude(now)
        return self._last

    def _unavailable(self, e: OSError) -> Scan:
        where = str(self._config.jobs_dir)
        said, hint = {
            errno.ENOENT: ("there is no such directory", f"mkdir {where}"),
            errno.ENOTDIR: ("this is no directory", "make it one"),
            errno.EACCES: ("the daemon may not read this directory", f"chmod o+rx {where}"),
        }.get(e.errno or 0, (f"cannot be read: {e.strerror}", ""))
        refusal = Rejection(where, f"{one_line(where)}: {said}; jobs go on as they are", hint)
        return replace(self._last, unavailable=refusal, next_check=None)

    def _look(self, fd: int, now: float) -> bool:
        """Note every file that is new or changed, and judge those that have settled. Whether anything is new."""
        before, after, changed = self._seen, {}, False
        for name in os.listdir(fd):
            if id_of(name) is None:
                continue  # editors' and packagers' files
            with contextlib.suppress(FileNotFoundError):
                signature = _signature(os.stat(name, dir_fd=fd, follow_symlinks=False))
                seen = before.get(name)
                if seen is None or seen.signature != signature:
                    seen = _Seen(signature, now + STABLE_SECONDS)
                    changed = True
                after[name] = seen
        for name, seen in after.items():
            if (seen.verdict is None or not seen.lasting) and now >= seen.settles_at:
                self._judge(fd, name, seen, now)
                changed = True
        self._seen = after
        return changed or len(before) != len(after)

    def _judge(self, fd: int, name: str, seen: _Seen, now: float) -> None:
        """Give ``seen`` its verdict, or a later time to settle at."""
        seen.lasting = True
        try:
            data, info = _read(fd, name, self._config)
        except BadJob as e:
            seen.verdict = _rejection(name, e)
            return
        except OSError as e:  # the next scan tries again; a file that has just gone is not seen then
            seen.verdict, seen.lasting = Rejection(name, f"{name}: cannot be read: {e.strerror}", _read_hint(e)), False
            return
        if _signature(info) != seen.signature:
            seen.settles_at = now + STABLE_SECONDS  # written while we read
            return
        verdict = self._parse(name, data, info.st_mtime)
        age = self._wall() - info.st_mtime
        if isinstance(verdict, Rejection) and -YOUNG_SECONDS < age < YOUNG_SECONDS:
            seen.settles_at = now + YOUNG_SECONDS - age
        else:
            seen.verdict = verdict

    def _parse(self, name: str, data: bytes, mtime: float) -> JobFile | Rejection:
        job_id = id_of(name)
        assert job_id
        try:
            spec = parse_job(name, data)
            check_paths(job_id, spec, self._config)
        except BadJob as e:
            return _rejection(name, e)
        digest = hashlib.sha256(data).hexdigest()
        return self._placed(JobFile(job_id, self._config.jobs_dir / name, spec, digest, mtime, data))

    def _conclude(self, now: float) -> Scan:
        """Put the verdicts together: who keeps what was accepted, and who gets which output."""
        self._drop_missing(now)
        verdicts = {name: seen.verdict for name, seen in self._seen.items()}
        rejected = {name: v for name, v in verdicts.items() if isinstance(v, Rejection)}
        offers = {name: v for name, v in verdicts.items() if isinstance(v, JobFile)}
        jobs, refused = settle_outputs(offers, {name: self._placed(job) for name, job in self._accepted.items()})
        self._accepted = jobs
        pending = frozenset(name for name, v in verdicts.items() if v is None)
        waits = [self._seen[name].settles_at for name in pending]
        waits += [since + STABLE_SECONDS for since in self._missing.values()]
        ordered = sorted(jobs.values(), key=lambda job: (job.mtime, job.id))
        present = frozenset(name[: -len(".toml")] for name in (*self._seen, *self._missing))
        return Scan({job.id: job for job in ordered}, rejected | refused, pending, min(waits, default=None), present)

    def _placed(self, job: JobFile) -> JobFile:
        """``job`` with its output, which jobs from the ledger come without."""
        return job if job.output else replace(job, output=os.path.realpath(output_of(job.id, job.spec, self._config)))

    def _drop_missing(self, now: float) -> None:
        """Forget accepted jobs whose files have been gone for as long as a file must be there to count."""
        gone = self._accepted.keys() - self._seen.keys()
        self._missing = {name: self._missing.get(name, now) for name in gone}
        for name in [name for name, since in self._missing.items() if now - since >= STABLE_SECONDS]:
            del self._missing[name], self._accepted[name]


def settle_outputs(offers: Mapping[str, JobFile],
                   accepted: Mapping[str, JobFile]) -> tuple[dict[str, JobFile], dict[str, Rejection]]:
    """Which jobs count, by file name, and which offers are refused because another job writes to the same place.

    Invariant: of the jobs returned, no two outputs are equal or inside each other (an export replaces its directory),
    if that held for those accepted before. An output is given only when nobody has it: first to edits of accepted
    jobs, then to new ones, each in order of the files' times, then names. An accepted job whose edit is refused, or
    that offers nothing, stays as accepted.
    """
    jobs, claims = dict(accepted), _Claims()
    for name, job in accepted.items():
        claims.take(job.output, name)
    order = sorted(offers, key=lambda name: (name not in accepted, offers[name].mtime, name))
    while True:
        refused: dict[str, Rejection] = {}
        freed = False
        for name in order:
            old, offer = jobs.get(name), offers[name]
            if old is offer:
                continue
            if other := claims.holder(offer.output, name):
                refused[name] = _taken(name, other)
                continue
            if old and old.output != offer.output:
                claims.free(old.output, name)
                freed = True
            claims.take(offer.output, name)
            jobs[name] = offer
        if not freed:
            return jobs, refused


def _taken(name: str, other: str) -> Rejection:
    said = f"{name}: `output` is, or overlaps, that of {other}, which came first"
    return Rejection(name, said, "give each job an output of its own, or leave `output` out", key="output")


class _Claims:
    """Directories, none of which may be inside another's."""

    def __init__(self) -> None:
        self._at: dict[str, set[str]] = {}
        self._below: dict[str, set[str]] = {}

    def take(self, directory: str, name: str) -> None:
        self._at.setdefault(directory, set()).add(name)
        for parent in _parents(directory):
            self._below.setdefault(parent, set()).add(name)

    def free(self, directory: str, name: str) -> None:
        self._at[directory].remove(name)
        for parent in _parents(directory):
            self._below[parent].remove(name)

    def holder(self, directory: str, but: str) -> str | None:
        """Who, other than ``but``, holds ``directory``, something inside it, or something around it."""
        holders = [self._below.get(directory, ()), *(self._at.get(d, ()) for d in (directory, *_parents(directory)))]
        return next((name for names in holders for name in names if name != but), None)


def _parents(directory: str) -> Iterator[str]:
    at = len(directory)
    while (at := directory.rfind("/", 0, at)) > 0:
        yield directory[:at]


# ---- one file ---------------------------------------------------------------------------------------------------


def _signature(info: os.stat_result) -> tuple[int, ...]:
    """What changes when a file does. The change time catches edits that put the modification time back."""
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_mode, info.st_uid,
            info.st_nlink)


def _read(fd: int, name: str, config: Config) -> tuple[bytes, os.stat_result]:
    """The bytes of a file that may speak for a job, and its stat after reading. Raises ``BadJob``, ``OSError``."""
    _check_kind(name, os.stat(name, dir_fd=fd, follow_symlinks=False))  # before opening: a device acts on open
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=fd)
    try:
        info = os.fstat(file)
        _check_kind(name, info)
        _check_rights(name, info, config)
        data = b""
        while more := os.read(file, MAX_BYTES + 1 - len(data)):  # of a file that has grown, one byte too many
            data += more
        return data, os.fstat(file)
    finally:
        os.close(file)


def _check_kind(name: str, info: os.stat_result) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise BadJob("is a symbolic link, which is not followed", hint="copy the file itself", file=name)
    if not stat.S_ISREG(info.st_mode):
        raise BadJob("is not a regular file", hint="a job is a text file", file=name)
    if info.st_size > MAX_BYTES:
        raise BadJob(f"is larger than {MAX_BYTES // 1024} KiB", hint="is this a job file?", file=name)


def _check_rights(name: str, info: os.stat_result, config: Config) -> None:
    if info.st_nlink != 1:
        raise BadJob(f"has {info.st_nlink} names (hard links), so others may change it", file=name,
                     hint="copy the file itself")
    if info.st_uid not in config.spool_owners and not is_member(info.st_uid, config.group):
        raise BadJob(f"belongs to {_user(info.st_uid)}, whose job files do not count", file=name,
                     hint=f"make the user a member of the group {config.group} and `rrd reload`, or chown root {name}")
    if info.st_mode & 0o022:
        raise BadJob("may be written by its group or by others", hint=f"chmod go-w {name}", file=name)


def is_member(uid: int, group: str) -> bool:
    """Whether the user is in the group, as the machine's directory of users has it now."""
    try:
        user, gid = pwd.getpwuid(uid), grp.getgrnam(group).gr_gid
        return gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _read_hint(e: OSError) -> str:
    return "the daemon's user must be able to read it: chmod o+r, or chgrp" if e.errno == errno.EACCES else ""


def _rejection(name: str, e: BadJob) -> Rejection:
    sentence = e.message if e.file else f"{name}: {e.message}"
    return Rejection(name, sentence, e.hint, e.line, e.key)
