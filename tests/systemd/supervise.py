"""Keeps one machine: mounts its disk, boots it, boots it again when it asks for that, and cleans up when it is off.

``python supervise.py DIR`` inside a mount namespace of its own; ``DIR/plan.json`` says what (see ``machine.py``). When
its standard input ends, because the tests have, it pulls the plug.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

REBOOT = 133
"""Exit status of systemd-nspawn, with --keep-unit, when the machine wants to be booted again."""


def main(directory: Path) -> None:
    plan: dict[str, Any] = json.loads((directory / "plan.json").read_text())
    (directory / "supervisor.pid").write_text(str(os.getpid()))
    cgroup = Path("/sys/fs/cgroup") / plan["name"]
    root = mount(directory, plan["lower"])
    threading.Thread(target=pull_the_plug_at_the_end, args=(cgroup,), daemon=True).start()
    try:
        if not (directory / "mnt" / "seeded").exists():
            seed(root, plan)
            (directory / "mnt" / "seeded").touch()
            run("sync", "-f", str(directory / "mnt"))
        refused = 0
        while (code := boot(directory, cgroup, root, plan)) == REBOOT or (code > 0 and refused < 3):
            refused += code != REBOOT  # now and then nspawn does not start again at once after a reboot
    finally:
        (directory / "nspawn.pid").unlink(missing_ok=True)
        for place in (root, directory / "mnt"):
            run("umount", "-l", str(place), check=False)
        remove_cgroups(cgroup)
        (directory / "supervisor.pid").unlink()


def pull_the_plug_at_the_end(cgroup: Path) -> None:
    os.read(0, 1)
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.kill").write_text("1")


def run(*argv: str, check: bool = True) -> None:
    subprocess.run(argv, check=check)


def mount(directory: Path, lower: str) -> Path:
    """The machine's root: an overlay over ``lower``, what changes kept in an ext4 file. Nothing of it is seen
    outside of this namespace."""
    run("umount", "-l", "-R", "/sys/fs/cgroup")
    run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    Path("/run/systemd").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run/systemd")
    at = directory / "mnt"
    run("mount", "-o", "loop", str(directory / "state.img"), str(at))
    for name in ("up", "work", "root"):
        (at / name).mkdir(exist_ok=True)
    run("mount", "-t", "overlay", "-o", f"lowerdir={lower},upperdir={at}/up,workdir={at}/work", "overlay", f"{at}/root")
    return at / "root"


def seed(root: Path, plan: dict[str, Any]) -> None:
    """What is different from the host before the first boot: none of its own services, and what the plan says."""
    shutil.rmtree(root / "etc/systemd/system", ignore_errors=True)
    (root / "usr/sbin/policy-rc.d").unlink(missing_ok=True)  # a container's way to have packages start nothing
    for name, target in plan["links"].items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    for name, (text, mode) in plan["files"].items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(mode)


def boot(directory: Path, cgroup: Path, root: Path, plan: dict[str, Any]) -> int:
    cgroup.mkdir(exist_ok=True)

    def enter() -> None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        (directory / "nspawn.pid").write_text(str(os.getpid()))

    argv = ["systemd-nspawn", "--quiet", "-D", str(root), "-M", plan["name"], "--boot", "--register=no", "--keep-unit",
            "--console=pipe", "--link-journal=no", "--private-network", *plan["options"]]
    return subprocess.run(argv, preexec_fn=enter, check=False, stdin=subprocess.DEVNULL).returncode


def remove_cgroups(cgroup: Path) -> None:
    end = time.monotonic() + 5
    while cgroup.exists() and time.monotonic() < end:
        for path, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
