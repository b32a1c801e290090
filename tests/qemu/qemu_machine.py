"""A machine that boots a kernel and one Python program, with devices of its own: QEMU, without KVM or root.

Its whole disk is an archive in memory: the running interpreter, the modules that the program imports, and the shared
libraries that these pulled in, all at the paths they have here.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import guest_kernel
import pytest

QEMU = "qemu-system-x86_64"
ROOT = Path(__file__).resolve().parents[2]
REPORT = "RRD-REPORT "
PYTHON = "/usr/bin/python3"

needs_qemu = pytest.mark.skipif(
    shutil.which(QEMU) is None or guest_kernel.find() is None,
    reason=f"needs {QEMU} (apt-get install qemu-system-x86) and a kernel (python tests/qemu/guest_kernel.py)")


class Machine:
    """Built below ``path`` to run ``program``, a file, as its first process; it imports ``modules``. With ``systemd``,
    the first process is that, as this host has it, and the program is a service of it, beside rrd-gate's own units."""

    def __init__(self, path: Path, program: Path, modules: Sequence[str], *, systemd: bool = False) -> None:
        self._path = path
        self._initrd = path / "initrd"
        python, files = _needed(sys.executable, modules)
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p.endswith("-packages"))]),
                       "PYTHONDONTWRITEBYTECODE": "1"}
        archive = _Archive(self._initrd)
        archive.put("/sbin/init-of-tests", 0o755, f"#!{python} -S\nimport os, sys\nos.environ.update({environment!r})\n"
                    f"os.execv({python!r}, [{python!r}, '-S', {str(program)!r}, *sys.argv[1:]])\n".encode())
        for file in {*files, program}:
            archive.copy(file)
        archive.link("/init", "/lib/systemd/systemd" if systemd else "/sbin/init-of-tests")
        if systemd:
            _put_systemd(archive)
        for directory in ("dev", "proc", "sys", "run", "tmp", "etc/rrd"):
            archive.directory(f"/{directory}")
        archive.close()

    def run(self, devices: Sequence[str], *, seconds: float, words: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Boot with ``devices``, wait for the end, and return what the program reported; ``words`` are for it, on the
        kernel's command line. Whatever goes wrong, the console is in the failure."""
        console = self._path / "console"
        argv = [QEMU, "-machine", "q35,accel=tcg", "-cpu", "max", "-m", "512", "-nodefaults", "-display", "none",
                "-no-reboot", "-serial", f"file:{console}",
                "-kernel", str(guest_kernel.find()), "-initrd", str(self._initrd),
                "-append", " ".join(["console=ttyS0", "quiet", "panic=-1", *(f"rrd.{w}" for w in words)]), *devices]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
            said = done.stderr
        except subprocess.TimeoutExpired:
            said = f"no end within {seconds:g} s"
        text = console.read_text(errors="replace") if console.exists() else ""
        reports = [json.loads(line.partition(REPORT)[2]) for line in text.splitlines() if REPORT in line]
        assert reports and reports[-1].get("end"), f"{said}\n{text[-6000:]}"
        return reports


def why_no_systemd() -> str:
    """Empty where there is a systemd to boot."""
    needed = ["/lib/systemd/systemd", "/lib/systemd/systemd-journald", PYTHON]
    return "".join(f"needs {path}" for path in needed if not os.access(path, os.X_OK))


def _put_systemd(archive: _Archive) -> None:
    """systemd with its targets, its journal, and the units of rrd-gate as they are installed: run by an interpreter
    that ProtectHome= does not hide."""
    modules = ["rrd.helper.main", "rrd.helper.check", "tempfile", "subprocess", "encodings.ascii"]
    python, files = _needed(PYTHON, modules)
    programs = [Path("/lib/systemd") / name for name in ("systemd", "systemd-journald", "systemd-shutdown")]
    programs.append(Path("/usr/bin/systemctl"))
    for file in (f for f in files if not f.is_relative_to(ROOT)):
        archive.copy(file)
    for program in programs:
        for file in (program, *_libraries(program)):
            archive.copy(file)
    units = Path("/lib/systemd/system")
    for unit in (*units.glob("*.target"), *units.glob("systemd-journald*")):
        archive.copy(unit)
    for source in (ROOT / "rrd" / "__init__.py", *(ROOT / "rrd" / "helper").glob("*.py")):
        archive.put(f"/usr/lib/rrd/lib/{source.relative_to(ROOT)}", 0o644, source.read_bytes())
    archive.put("/usr/lib/rrd/venv/bin/rrd-gate", 0o755, f"#!{python} -S\nimport sys\n"
                "sys.path.insert(0, '/usr/lib/rrd/lib')\nfrom rrd.helper.main import main\nsys.exit(main())\n".encode())
    for unit in (ROOT / "units").glob("rrd-gate.*"):
        archive.put(f"/etc/systemd/system/{unit.name}", 0o644, unit.read_bytes())
    archive.put("/etc/systemd/system/default.target", 0o644,
                b"[Unit]\nRequires=guest.service basic.target\nAfter=basic.target\nAllowIsolate=yes\n")
    archive.put("/etc/systemd/system/guest.service", 0o644, b"[Unit]\nAfter=basic.target\n[Service]\n"
                b"ExecStart=/sbin/init-of-tests\nStandardOutput=tty\nStandardError=tty\nTTYPath=/dev/ttyS0\n"
                b"StandardInput=null\n")
    archive.put("/etc/passwd", 0o644, b"root:x:0:0::/:/bin/sh\nrrd:x:900:900::/:/bin/sh\n")
    archive.put("/etc/group", 0o644, b"root:x:0:\ntty:x:5:\nrrd:x:900:\n")
    archive.put("/etc/machine-id", 0o644, b"0123456789abcdef0123456789abcdef\n")
    archive.put("/etc/os-release", 0o644, b"ID=tests\n")


def _libraries(program: Path) -> list[Path]:
    shown = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    return [Path(word) for word in shown.split() if word.startswith("/")]


def _needed(python: str, modules: Sequence[str]) -> tuple[str, set[Path]]:
    """The interpreter itself, and every file that it has opened once it has imported ``modules``."""
    code = ("import importlib, json, os, sys\n"
            f"for name in {list(modules)!r}: importlib.import_module(name)\n"
            "files = {f for m in list(sys.modules.values()) for f in (getattr(m, '__file__', None), "
            "getattr(m, '__cached__', None)) if f and os.path.exists(f)}\n"
            "maps = {line.split(None, 5)[5].strip() for line in open('/proc/self/maps') if line.count('/')}\n"
            "print(json.dumps([os.path.realpath(sys.executable), sorted(files | maps)]))")
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    real, files = json.loads(run.stdout)
    found = {Path(f) for f in files if os.path.isfile(f)}
    names = {link for f in found if ".so" in f.name for link in f.parent.glob(f.name.split(".so")[0] + ".so*")}
    return real, {Path("/lib64/ld-linux-x86-64.so.2"), *found, *(n for n in names if n.is_symlink())}


class _Archive:
    """A cpio archive ("newc", Documentation/driver-api/early-userspace/buffer-format.rst of Linux), for the kernel."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._seen: set[str] = set()

    def copy(self, file: Path) -> None:
        """``file``, with its directories, and through links what it leads to."""
        for place in (*reversed(file.parents), file):
            if place.is_symlink():
                self._entry(str(place), stat.S_IFLNK | 0o777, os.readlink(place).encode())
                target = Path(os.path.normpath(place.parent / os.readlink(place)))
                self.copy(target / file.relative_to(place))
                return
            if place.is_dir():
                self._entry(str(place), stat.S_IFDIR | 0o755, b"")
        if file.is_file():
            self._entry(str(file), stat.S_IFREG | 0o755, file.read_bytes(), mtime=int(file.stat().st_mtime))

    def put(self, path: str, mode: int, data: bytes) -> None:
        self.directory(str(Path(path).parent))
        self._entry(path, stat.S_IFREG | mode, data)

    def link(self, path: str, target: str) -> None:
        self.directory(str(Path(path).parent))
        self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def directory(self, path: str) -> None:
        for place in (*reversed(Path(path).parents), Path(path)):
            self._entry(str(place), stat.S_IFDIR | 0o755, b"")

    def close(self) -> None:
        self._entry("/TRAILER!!!", 0, b"")
        self._file.close()

    def _entry(self, path: str, mode: int, data: bytes, mtime: int = 0) -> None:
        if path in self._seen or path == "/":
            return
        self._seen.add(path)
        name = path.lstrip("/").encode() + b"\0"
        fields = (len(self._seen), mode, 0, 0, 1, mtime, len(data), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08x" % f for f in fields)
        for part in (header + name, data):
            self._file.write(part + b"\0" * (-len(part) % 4))


def options(*pairs: tuple[str, str]) -> list[str]:
    """``-device x -object y`` from pairs."""
    return [word for flag, value in pairs for word in (f"-{flag}", value)]
