"""A machine for tests: a real systemd as PID 1, in half a second, in a container over this host's own files, or over
those of another Linux in a directory.

What it writes lands in an ext4 file on a loop device, so that it outlives a reboot, a kill and a power cut as a disk
would: what was not yet synced when the power is cut is gone. The host is seen, never changed; the network is its own
and empty. Needs root, systemd-nspawn, overlayfs, a loop device and a cgroup2 hierarchy; ``why_not`` says what is not
there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

DISK = "2G"
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
"""For EXT4_IOC_SHUTDOWN: as if the power were gone. Not even the file system's journal is written any more."""

WITHHELD = "sys_time,sys_module,sys_rawio,syslog,wake_alarm"
"""Capabilities that commands in the machine do not have: they are the host's, and `date -s` would move its clock."""

BOOT_SECONDS = 60.0

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
"""The memory controller, on a host that has it in a cgroup v1 hierarchy: then the machine's own groups have none."""


def why_not() -> str:
    """Why there can be no machine here; empty when there can."""
    if os.geteuid() != 0:
        return "a machine needs root"
    tools = {"systemd-nspawn": "systemd-container", "unshare": "util-linux", "mkfs.ext4": "e2fsprogs"}
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            return f"a machine needs {tool} (apt-get install {package})"
    if not Path("/lib/systemd/systemd").exists():
        return "a machine needs systemd itself (apt-get install systemd)"
    if _cgroups() is None:
        return "a machine needs a cgroup2 hierarchy at /sys/fs/cgroup that can be written"
    return _mounts()


def _cgroups() -> Path | None:
    for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (root / "cgroup.procs").exists() and os.access(root, os.W_OK):
            return root
    return None


def _mounts() -> str:
    """Tried, because a container's root may be anything but almighty."""
    script = ("set -e; d=$(mktemp -d); trap 'umount -q $d/m || :; rm -rf $d' EXIT; truncate -s 8M $d/i;"
              "mkfs.ext4 -q $d/i; mkdir $d/m; mount -o loop $d/i $d/m; mkdir $d/m/u $d/m/w $d/m/r;"
              "mount -t overlay -o lowerdir=/,upperdir=$d/m/u,workdir=$d/m/w overlay $d/m/r; umount $d/m/r")
    tried = subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                           capture_output=True, text=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else f"a machine needs loop devices and overlayfs: {tried.stderr.strip()[-200:]}"


class Machine:
    """One machine below ``directory``. ``binds``: host path to path inside, read-only; ``files`` and ``links``: what
    is there before the first boot, by path inside; ``lower``: whose files it has."""

    def __init__(self, directory: Path, *, binds: Mapping[Path, str] | None = None,
                 files: Mapping[str, tuple[str, int]] | None = None, links: Mapping[str, str] | None = None,
                 lower: Path = Path("/")) -> None:
        self.directory, self.name = directory, f"rrd-{os.getpid()}-{directory.name}"[:60]
        cgroups = _cgroups()
        assert cgroups is not None, why_not()
        self._cgroup = cgroups / self.name
        (directory / "mnt").mkdir(parents=True)
        image = directory / "state.img"
        subprocess.run(["truncate", "-s", DISK, str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        plan = {"name": self.name, "lower": str(lower),
                "options": [f"--bind-ro={host}:{inside}" for host, inside in (binds or {}).items()],
                "links": dict(links or {}),
                "files": {"/etc/machine-id": (f"{os.urandom(16).hex()}\n", 0o444), **(files or {})}}
        (directory / "plan.json").write_text(json.dumps(plan))
        self._supervisor: subprocess.Popen[bytes] | None = None

    # --- power ---

    def up(self) -> None:
        """Switch it on, and wait until it has booted."""
        with open(self.directory / "console.log", "ab") as log:
            self._supervisor = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", sys.executable,
                 str(Path(__file__).with_name("supervise.py")), str(self.directory)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        self.booted()

    def booted(self, *, unlike: str = "") -> None:
        """Wait until it has booted; with ``unlike``, a boot id, until it has booted anew."""
        self.wait(lambda: self._state() in ("running", "degraded") and self.boot_id() != unlike, "it never booted",
                  BOOT_SECONDS)

    def _state(self) -> str:
        return self._if_up("systemctl", "is-system-running")

    def boot_id(self) -> str:
        return self._if_up("cat", "/proc/sys/kernel/random/boot_id")

    def _if_up(self, *argv: str) -> str:
        """What it says, or nothing: whoever asks a systemd that is going down may wait for an answer for ever."""
        try:
            return self.run(*argv, check=False, seconds=10)
        except (NotUp, subprocess.TimeoutExpired):
            return ""

    def reboot(self) -> None:
        """``systemctl reboot``, and wait until it is there again."""
        before = self.boot_id()
        self.run("systemctl", "reboot", check=False)
        self.booted(unlike=before)

    def cut_power(self) -> None:
        """As if the plug were pulled: what was not synced is lost. ``up`` starts it again."""
        supervisor = int((self.directory / "supervisor.pid").read_text())
        disk = os.open(f"/proc/{supervisor}/root{self.directory}/mnt", os.O_RDONLY)
        try:
            fcntl.ioctl(disk, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(disk)
        self._kill()

    def _kill(self) -> None:
        """All its processes at once. (SIGKILL of systemd-nspawn would leave the rest running over the mounts.)"""
        with contextlib.suppress(OSError):
            (self._cgroup / "cgroup.kill").write_text("1")
        if self._supervisor is not None:
            self._supervisor.wait(60)
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.close()
            self._supervisor = None

    def close(self) -> None:
        """Switch it off and forget its disk."""
        self._kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- inside ---

    def run(self, *argv: str, user: str = "root", check: bool = True, stdin: str | None = None,
            seconds: float = 120) -> str:
        """Output of a command in the machine, both streams, stripped. Raises ``NotUp``, ``AssertionError``."""
        done = self.attempt(*argv, user=user, stdin=stdin, seconds=seconds)
        assert not check or done.returncode == 0, f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout.strip()

    def attempt(self, *argv: str, user: str = "root", stdin: str | None = None,
                seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """A command in the machine, whatever becomes of it; both streams in ``stdout``."""
        become = [] if user == "root" else ["runuser", "-u", user, "--"]
        home = "/root" if user == "root" else f"/home/{user}"
        clean = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", f"HOME={home}",
                 "LANG=C.UTF-8", "SYSTEMD_PAGER=", "SYSTEMD_COLORS=0", "COLUMNS=250"]
        less = ["setpriv", "--bounding-set=" + ",".join(f"-{c}" for c in WITHHELD.split(","))]
        enter = ["nsenter", "-t", str(self._leader()), "-a", "--wdns=/"]
        return subprocess.run([*enter, *less, *clean, *become, *argv], input=stdin, text=True, timeout=seconds,
                              stdin=subprocess.DEVNULL if stdin is None else None,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)

    def _leader(self) -> int:
        """The machine's PID 1, as the host counts."""
        try:
            nspawn = (self.directory / "nspawn.pid").read_text()
            children = Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split()
            return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd")
        except (OSError, StopIteration, ValueError):
            raise NotUp(self.console()) from None

    def path(self, inside: str) -> Path:
        """Where the host sees a path of the running machine. Symbolic links in it lead to the host's files."""
        return Path(f"/proc/{self._leader()}/root{inside}")

    @contextlib.contextmanager
    def memory_group(self, unit: str) -> Iterator[Path]:
        """Have the processes of a service, and all that they start, in a group below ``MEMORY_GROUPS`` that is made for
        them; below the one that they are in, so that they leave no limit of the host's."""
        known = Path(f"/proc/{self._leader()}/cgroup").read_text()
        above = MEMORY_GROUPS / known.partition(":memory:/")[2].split("\n")[0]
        group = above / self.name
        group.mkdir()
        try:
            for pid in self.path(f"/sys/fs/cgroup/system.slice/{unit}/cgroup.procs").read_text().split():
                (group / "cgroup.procs").write_text(pid)
            yield group
        finally:
            self.wait(lambda: _merged(group), f"{group} is still in use", 10)

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file, whole or not at all."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(text)
        beside.chmod(mode)
        beside.rename(path)

    def wait(self, what: Callable[[], object], why: str, seconds: float = 60.0) -> None:
        """Until ``what`` holds; fails with the end of the journal."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"{why}\n{self.tail()}"
            time.sleep(0.05)

    def tail(self) -> str:
        """What the machine says of late."""
        with contextlib.suppress(NotUp):
            return self.run("journalctl", "-n", "60", "--no-pager", "-o", "short-precise", check=False)
        return self.console()

    def console(self) -> str:
        log = self.directory / "console.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""


def _merged(group: Path) -> bool:
    """Whether a group is gone, and its processes are in the one above; a process that is just ending is in its way."""
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()
    return not group.exists()


class NotUp(AssertionError):
    """The machine is off, or not that far yet."""
