"""The machine as ``rrd doctor`` asks it; tests make up another one."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrd import boards

if TYPE_CHECKING:
    from rrd.cli.checkup import Patient

SECONDS = 10.0
TORCH_SECONDS = 180.0
UNIT_KEYS = ("LoadState", "ActiveState", "User", "ProtectSystem", "ProtectHome", "PrivateTmp", "ReadWritePaths",
             "StateDirectory", "CacheDirectory", "LogsDirectory", "Environment")

ASK_TORCH = """
import json, torch
c = torch.cuda
flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None
seen = [[c.get_device_name(i), list(c.get_device_capability(i))] for i in range(c.device_count())] if flags else []
archs = (flags or "").split()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "archs": archs, "dies": seen}))
"""


class Host:
    """Facts of this machine, each asked for once. ``sys`` and ``proc`` are where the kernel tells."""

    def __init__(self, *, sys_dir: Path = Path("/sys"), proc: Path = Path("/proc"), dev: Path = Path("/dev"),
                 environ: Mapping[str, str] = os.environ) -> None:
        self.sys, self.proc, self.dev, self.environ = sys_dir, proc, dev, environ

    @cached_property
    def unit(self) -> dict[str, str]:
        """Settings of rrd.service; empty without systemd, or without that unit."""
        said = _said("systemctl", "show", "rrd.service", "--property", ",".join(UNIT_KEYS))
        found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        return found if found.get("LoadState") == "loaded" else {}

    @cached_property
    def boards(self) -> list[boards.Board]:
        return boards.boards(self.sys)

    @cached_property
    def torch(self) -> dict[str, Any]:
        """What torch says of itself and its dies: ``version``, ``cuda``, ``archs``, ``dies``; or ``error``."""
        env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, env=env,
                                  timeout=TORCH_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return {"error": str(e)}
        if done.returncode != 0:
            return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def driver_version(self) -> str:
        """Of NVIDIA's kernel driver; empty where none is loaded."""
        try:
            words = (self.proc / "driver/nvidia/version").read_text().split()
        except OSError:
            return ""
        return next((w for w in words if w[0].isdigit() and "." in w), "")

    def has_uvm(self) -> bool:
        return (self.dev / "nvidia-uvm").exists()

    def statvfs(self, path: Path) -> os.statvfs_result:
        return os.statvfs(path)

    def filesystem(self, path: Path) -> str:
        """The kind of file system that ``path`` lies on, or will."""
        best, kind = "", "an unknown file system"
        for line in (self.proc / "self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            at = left.split()[4].encode().decode("unicode_escape")
            if path.is_relative_to(at) and len(at) >= len(best):
                best, kind = at, right.split()[0]
        return kind

    def now(self) -> float:
        return time.time()

    def mtimes(self, p: Patient) -> Iterator[float]:
        """Of files that were certainly written in the past: rrd's own, and its newest state."""
        for path in (Path(__file__), p.config.state_dir, p.config.state_dir / "jobs", p.config.jobs_dir):
            try:
                yield path.stat().st_mtime
            except OSError:
                continue

    def synchronized(self) -> bool | None:
        """Whether the clock follows a time server; None where nobody knows."""
        said = _said("timedatectl", "show", "--property=NTPSynchronized", "--value")
        return {"yes": True, "no": False}.get(said)

    def reader(self, user: str) -> Reader | None:
        """Somebody to ask what ``user`` (of the unit; "" for ourselves) may read; None where we cannot find out."""
        if not user:
            return Reader(None)
        try:
            return Reader(pwd.getpwnam(user)) if os.geteuid() == 0 else None
        except KeyError:
            return None


def _own_name() -> str:
    with contextlib.suppress(KeyError):  # in a container, a user may be a mere number
        return pwd.getpwuid(os.geteuid()).pw_name
    return f"user {os.geteuid()}"


class Reader:
    """A user, and what that user may do to files, as the kernel itself answers."""

    def __init__(self, user: pwd.struct_passwd | None) -> None:
        self.user, self.name = user, user.pw_name if user else _own_name()

    def may_read(self, path: Path) -> bool:
        return self._test("-r", path) and (not path.is_dir() or self._test("-x", path))

    def may_write(self, path: Path) -> bool:
        return self._test("-w", path)

    def _test(self, what: str, path: Path) -> bool:
        if self.user is None or self.user.pw_uid == os.geteuid():
            return os.access(path, {"-r": os.R_OK, "-w": os.W_OK, "-x": os.X_OK}[what])
        groups = os.getgrouplist(self.user.pw_name, self.user.pw_gid)
        done = subprocess.run(["test", what, str(path)], user=self.user.pw_uid, group=self.user.pw_gid,
                              extra_groups=groups, check=False, timeout=SECONDS)
        return done.returncode == 0


def _said(*argv: str) -> str:
    """What a command prints; empty where there is none, or it fails."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
