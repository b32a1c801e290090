"""What ``rrd doctor`` looks at: each check reads facts of a :class:`Host` and says what it finds in one sentence.

A check decides nothing and changes nothing. The machine comes in through :class:`Host`, so that tests can make one up.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrd.cli.host import Host, Reader
from rrd.errors import BadJob
from rrd.text import count, duration, one_line, size

if TYPE_CHECKING:
    from rrd.config import Config
    from rrd.job import JobSpec

LOW_SPACE, NO_SPACE = 5 << 30, 512 << 20
"""Bytes free below which a disk is worth a word, and below which checkpoints will soon find no room."""
MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 13)
FORGETFUL = {"tmpfs": "is gone after a reboot", "ramfs": "is gone after a reboot",
             "overlay": "belongs to a container and is gone with it"}
"""File systems that a state directory should not lie on, and why."""
DISTANT = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "fuse.glusterfs", "vboxsf", "vfat", "exfat"}
"""File systems whose locks, links or fsyncs are not those of a local disk."""


@dataclass(frozen=True)
class Finding:
    """``level``: "ok", "warn" (it may bite later) or "bad" (it will not work). ``fix``: what to do about it."""

    check: str
    level: str
    sentence: str
    fix: str = ""


@dataclass
class Patient:
    """What is examined: the daemon that ``config`` describes, with the jobs of its spool, on ``host``."""

    config: Config
    host: Host
    jobs: dict[str, JobSpec] = field(default_factory=dict)
    bad_files: list[str] = field(default_factory=list)
    config_error: tuple[str, str] | None = None

    @property
    def unit(self) -> dict[str, str]:
        """The unit's settings where the daemon is the machine's service; else empty."""
        return self.host.unit if str(self.config.run_dir) == "/run/rrd" else {}


Check = Callable[[Patient], Iterator[Finding]]


def read_jobs(p: Patient) -> None:
    """Read the spool's job files, good and bad. Raises nothing."""
    from rrd.job import check_paths, id_of, parse_job

    try:
        names = sorted(os.listdir(p.config.jobs_dir))
    except OSError:
        return
    for name in names:
        if (job := id_of(name)) is None:
            continue
        try:
            p.jobs[job] = parse_job(name, (p.config.jobs_dir / name).read_bytes())
            check_paths(job, p.jobs[job], p.config)
        except BadJob as e:
            p.bad_files.append(e.message)
        except OSError as e:
            p.bad_files.append(f"{name}: cannot be read: {e.strerror}")


# ---- configuration ----------------------------------------------------------------------------------------------


def python(p: Patient) -> Iterator[Finding]:
    now = sys.version_info[:2]
    said = f"Python {now[0]}.{now[1]} in {sys.prefix}"
    if MIN_PYTHON <= now <= MAX_PYTHON:
        yield Finding("python", "ok", said)
    else:
        yield Finding("python", "warn", f"{said}: rrd is made for 3.10 to 3.13", "make the environment anew with one")


def configuration(p: Patient) -> Iterator[Finding]:
    if p.config_error:
        yield Finding("configuration", "bad", *p.config_error)
    else:
        yield Finding("configuration", "ok", f"{count(len(p.config.dies), 'die')} in "
                                             f"{count(len(p.config.lanes), 'lane')}, jobs from {p.config.jobs_dir}")


def daemon(p: Patient) -> Iterator[Finding]:
    from rrd import __version__
    from rrd.client import call
    from rrd.errors import Denied, NotRunning, RrdError

    try:
        theirs = call(p.config.run_dir, "status")["version"]
    except NotRunning:
        state = p.host.unit.get("ActiveState") if p.unit else None
        if state == "failed":
            yield Finding("daemon", "bad", "the service rrd has failed", "`systemctl status rrd` says why")
        else:
            yield Finding("daemon", "warn", "rrd is not running", "`systemctl enable --now rrd`" if p.unit else
                          "`rrd daemon` starts it here; `rrd install-service` makes it a service of the machine")
        return
    except Denied as e:
        yield Finding("daemon", "warn", e.message, e.hint)
        return
    except RrdError as e:
        yield Finding("daemon", "bad", e.message, e.hint)
        return
    if theirs == __version__:
        yield Finding("daemon", "ok", f"rrd {theirs} is running")
    else:
        yield Finding("daemon", "warn", f"the daemon that is running is rrd {theirs}, this one is {__version__}",
                      "`systemctl restart rrd`: every job is saved first, and goes on")


def spool(p: Patient) -> Iterator[Finding]:
    from rrd.config import is_service

    where = p.config.jobs_dir
    if not where.is_dir():
        mine = not is_service(p.host.environ)
        yield Finding("spool", "ok" if mine else "bad", f"there is no directory {where}" + (" yet" if mine else ""),
                      "" if mine else "`systemd-tmpfiles --create`" if p.unit else f"mkdir -p {where}")
        return
    if p.bad_files:
        more = f", and {len(p.bad_files) - 1} more" if len(p.bad_files) > 1 else ""
        yield Finding("spool", "warn", f"not taken: {p.bad_files[0]}{more}", "`rrd status` lists them")
    reader = _reader(p)
    if reader and not reader.may_read(where):
        yield Finding("spool", "bad", f"{where} cannot be read by {reader.name}", f"chmod o+rx {where}")
    elif not p.bad_files:
        yield Finding("spool", "ok", f"{count(len(p.jobs), 'job file')} in {where}")


# ---- paths ------------------------------------------------------------------------------------------------------


def outputs(p: Patient) -> Iterator[Finding]:
    """Whether the unit lets the daemon write where the jobs want their adapters."""
    from rrd.job import output_of

    blocked: dict[Path, str] = {}
    refused = False
    for job, spec in p.jobs.items():
        out = Path(os.path.realpath(output_of(job, spec, p.config)))
        above = next(d for d in out.parents if os.path.lexists(d))
        if p.unit and not _unit_lets_write(p.unit, out):
            blocked.setdefault(above, job)
        elif (reader := _reader(p)) and not reader.may_write(above) and not above.is_relative_to(p.config.state_dir):
            refused = True
            yield Finding("outputs", "bad", f"job {job}: {above} is not for {reader.name} to write to",
                          f"install -d -o {reader.name} {out.parent}")
    for above, job in blocked.items():
        yield Finding("outputs", "bad", f"job {job}: its output is in {above}, which the unit makes read-only",
                      f"`systemctl edit rrd`, two lines: [Service] and ReadWritePaths={above}; then restart it")
    if not blocked and not refused:
        said = "the jobs' outputs can be written" if p.jobs else "no job names any"
        yield Finding("outputs", "ok", said if not p.jobs or _reader(p) else f"{said}, as far as {_UNASKED}")


def inputs(p: Patient) -> Iterator[Finding]:
    """Whether the models and data that jobs name are there, and visible to the daemon."""
    from rrd.job import INPUT_KEYS

    reader, seen, trouble = _reader(p), set(), False
    for job, spec in p.jobs.items():
        for key in INPUT_KEYS:
            name = getattr(spec, key)
            if not name or name in seen:
                continue
            seen.add(name)
            found = _input_trouble(p, reader, job, key, Path(os.path.realpath(name)))
            if found:
                trouble = True
                yield found
    if not trouble:
        said = f"{count(len(seen), 'model or data path')} can be read" if seen else "no job names any"
        yield Finding("inputs", "ok", said if not seen or reader else f"{said}, as far as {_UNASKED}")


_UNASKED = "the unit is concerned; what its user may, only root sees"


def _input_trouble(p: Patient, reader: Reader | None, job: str, key: str, path: Path) -> Finding | None:
    if hidden := _unit_hides(p.unit, path):
        return Finding("inputs", "bad", f"job {job}: `{key}` is {path}, and the unit hides {hidden[0]}", hidden[1])
    if not path.exists():
        return Finding("inputs", "warn", f"job {job}: `{key}` is not there: {path}", "put it there")
    if reader and not reader.may_read(path):
        return Finding("inputs", "bad", f"job {job}: `{key}` cannot be read by {reader.name}: {path}",
                       f"chmod -R a+rX {path}")
    return None


def _unit_hides(unit: dict[str, str], path: Path) -> tuple[str, str] | None:
    """What the unit keeps out of the daemon's sight, and how to change that."""
    if unit.get("ProtectHome") in ("yes", "tmpfs"):
        for home in ("/home", "/root", "/run/user"):
            if path.is_relative_to(home):
                return home, "`systemctl edit rrd`, two lines: [Service] and ProtectHome=read-only; then restart it"
    if unit.get("PrivateTmp") == "yes":
        for tmp in ("/tmp", "/var/tmp"):
            if path.is_relative_to(tmp):
                return tmp, "move it elsewhere: a service has a /tmp of its own"
    return None


def _unit_lets_write(unit: dict[str, str], path: Path) -> bool:
    if unit.get("ProtectSystem") != "strict":
        return _unit_hides(unit, path) is None
    allowed = [word.lstrip("-+") for word in unit.get("ReadWritePaths", "").split()]
    for key, base in (("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache"), ("LogsDirectory", "/var/log")):
        allowed += [f"{base}/{name}" for name in unit.get(key, "").split()]
    return any(path.is_relative_to(place) for place in allowed)


def _reader(p: Patient) -> Reader | None:
    """Who reads and writes for the jobs, where we may find out what that user may."""
    return p.host.reader(p.unit.get("User", "") if p.unit else "")


# ---- disk and clock ---------------------------------------------------------------------------------------------


def disk(p: Patient) -> Iterator[Finding]:
    """Each file system once, by the first that lies on it."""
    seen: set[int] = set()
    for what, path in (("state_dir", p.config.state_dir), ("cache_dir", p.config.cache_dir)):
        above = next(d for d in (path, *path.parents) if d.exists())
        device = above.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        stat = p.host.statvfs(above)
        free = stat.f_bavail * stat.f_frsize
        said = f"{size(free)} free for {what} ({path})"
        fix = f"free some, or choose another {what}; each job keeps `keep` checkpoints of 12 bytes a trained parameter"
        if free < NO_SPACE or (stat.f_files and stat.f_favail < 1000):
            yield Finding("disk", "bad", said if free < NO_SPACE else f"no more files fit where {path} is", fix)
        else:
            yield Finding("disk", "warn" if free < LOW_SPACE else "ok", said, fix if free < LOW_SPACE else "")


def filesystem(p: Patient) -> Iterator[Finding]:
    kind = p.host.filesystem(p.config.state_dir)
    said = f"state_dir ({p.config.state_dir}) is on {kind}"
    if kind in FORGETFUL:
        yield Finding("filesystem", "warn", f"{said}, which {FORGETFUL[kind]}", "choose a state_dir on a disk")
    elif kind in DISTANT:
        yield Finding("filesystem", "warn", f"{said}, whose locks and syncs are not those of a local disk",
                      "choose a state_dir on a local disk (ext4, xfs, btrfs, zfs)")
    else:
        yield Finding("filesystem", "ok", said)


def clock(p: Patient) -> Iterator[Finding]:
    """A clock that is behind makes every age wrong, and lets make-like tools of others misjudge files."""
    now, newest = p.host.now(), max(p.host.mtimes(p), default=0.0)
    if newest > now + 120:
        yield Finding("clock", "bad", f"the clock is behind by at least {duration(newest - now)}: it says "
                      f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC, and files here are newer",
                      "set it: `timedatectl set-ntp true`")
    elif p.host.synchronized() is False:
        yield Finding("clock", "warn", "the clock is not kept right by the network", "`timedatectl set-ntp true`")
    else:
        yield Finding("clock", "ok", f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC")


# ---- gates ------------------------------------------------------------------------------------------------------


def gates(p: Patient) -> Iterator[Finding]:
    for lane in p.config.lanes:
        if lane.gate.kind == "command":
            for argv in (lane.gate.acquire, lane.gate.release):
                if not os.access(argv[0], os.X_OK):
                    yield Finding("gate", "bad", f"lane {lane.name}: its gate's program {argv[0]} cannot be run",
                                  "install it, or correct [lane.gate] in rrd.toml")
                    break
            else:
                yield Finding("gate", "ok", f"lane {lane.name}: {lane.gate.acquire[0]}")
        elif lane.gate.kind == "socket":
            yield _ask_gate(lane.name, lane.gate.socket, lane.gate.timeout)


def _ask_gate(lane: str, path: str, timeout: float) -> Finding:
    """A request that no helper grants; that it answers is what we want to know."""
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(min(timeout, 10.0))
            s.connect(path)
            s.sendall(b'{"id": 0, "verb": "hello", "die": ""}\n')
            answered = bool(s.recv(4096))
    except OSError as e:
        why = "no answer" if isinstance(e, TimeoutError) else (e.strerror or str(e)).lower()
        return Finding("gate", "bad", f"lane {lane}: its gate at {path} does not answer: {one_line(why)}",
                       "`systemctl enable --now rrd-gate.socket`; `journalctl -u rrd-gate` says more")
    if not answered:
        return Finding("gate", "bad", f"lane {lane}: its gate at {path} hangs up", "`journalctl -u rrd-gate` says why")
    return Finding("gate", "ok", f"lane {lane}: {path} answers")


CHECKS: dict[str, Check] = {c.__name__: c for c in (
    python, configuration, daemon, spool, outputs, inputs, disk, filesystem, clock, gates)}
"""The checks of this module, in the order in which they are made."""


def examine(p: Patient, checks: dict[str, Check]) -> Iterator[Finding]:
    """All findings. A check that fails itself is one."""
    for name, check in checks.items():
        try:
            yield from check(p)
        except Exception as e:  # whatever a strange machine does to one check, the others count
            yield Finding(name, "warn", f"this check failed itself: {one_line(f'{type(e).__name__}: {e}', 200)}",
                          "please report it as a bug of rrd")


def facts(findings: list[Finding]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [vars(f) for f in findings]
