"""Power cuts: all that the weakest rule allows, replayed from a recording; and real ones, of ext4 on a loop device."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from apart import apart
from disks import CALLS, Killed, RecordingDisk, Tree, lay_out
from saves import STATE, TENSORS, commit, expected, load, steps
from table import Row

from rrd import checkpoint, durable
from rrd.checkpoint import MANIFEST
from rrd.durable import Disk
from rrd.errors import Damaged

# --- from a recording -------------------------------------------------------------------------------------------------


class Judge:
    """Looks at what a power cut left as the next start would; lays each different checkpoint out once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.looked = 0
        self._seen: dict[Tree, bool] = {}

    def __call__(self, tree: Tree) -> dict[int, bool]:
        """Each step with a committed name, and whether its checkpoint verifies."""
        self.looked += 1
        names = {name for name, _ in tree if "/" not in name and name.startswith("ckpt-")}
        found = {name: tuple(entry for entry in tree if entry[0].partition("/")[0] == name) for name in names}
        return {int(name[5:]): self._verifies(name, part) for name, part in found.items()}

    def _verifies(self, name: str, part: Tree) -> bool:
        if part not in self._seen:
            lay_out(part, self.home)
            try:
                self._seen[part] = bool(load(self.home / name))
                assert load(self.home / name) == expected(int(name[5:])), "damaged bytes were loaded"
            except Damaged:
                self._seen[part] = False
            shutil.rmtree(self.home)
        return self._seen[part]


def faults(disk: RecordingDisk, judge: Judge, keep: int, first: int = 0) -> Iterator[str]:
    """What is wrong after any power cut: an announced checkpoint lost, or one with a name that is not whole."""
    for announced, trees in disk.power_cuts(first):
        newest = sorted(map(int, announced), reverse=True)[:keep]  # type: ignore[call-overload]
        for there in map(judge, trees):
            yield from (f"step {step} is lost" for step in newest if not there.get(step))
            yield from (f"step {step} has a name and is not whole" for step, whole in there.items() if not whole)


def some_commits(job_dir: Path, disk: Disk, keep: int, announce: Callable[[int], object]) -> None:
    for step in (10, 20, 30):
        commit(job_dir, step, disk)
        announce(step)
        checkpoint.collect(job_dir, keep, disk=disk)


FORGOTTEN: dict[str, Callable[[Path], bool]] = {
    "tensors": lambda p: p.name == TENSORS,
    "state": lambda p: p.name == STATE,
    "manifest": lambda p: p.name == MANIFEST,
    "temp directory": lambda p: p.name.startswith(durable.TMP),
    "parent": lambda p: p.name == "job",
}
"""The fsyncs of a save, each to be left out once."""


@contextlib.contextmanager
def without_digests() -> Iterator[None]:
    """rrd with a hash that is always the same."""
    blind = SimpleNamespace(sha256=lambda *_: SimpleNamespace(update=lambda _: None, hexdigest=lambda: "0" * 64))
    with mock.patch.object(checkpoint, "hashlib", blind), mock.patch.object(durable, "hashlib", blind):
        yield


def two_lives(job_dir: Path, disk: RecordingDisk) -> int | None:
    """A process is killed at ``disk.kill_at``; the next one loads what it finds, which counts as announced, and saves.

    Returns the number of operations when the second was ready to go on; None if the first was not killed.
    """
    try:
        for step in (10, 20):
            commit(job_dir, step, disk)
            disk.mark(step)
            checkpoint.collect(job_dir, 1, disk=disk)
        return None
    except Killed:
        disk.revive()
    durable.sweep_dirs(job_dir, disk=disk)
    assert {p.name for p in job_dir.iterdir()} == {checkpoint.name_of(step) for step in steps(job_dir)}
    for step, path in checkpoint.listing(job_dir)[:1]:
        assert load(path) == expected(step)
        disk.mark(step)
    ready = len(disk.ops)
    commit(job_dir, 30, disk)
    disk.mark(30)
    return ready


def lives(root: Path, judge: Judge) -> Iterator[list[str]]:
    """The faults of every power cut after a kill, for a kill at every operation."""
    for n in itertools.count():
        job_dir = root / str(n)
        job_dir.mkdir(parents=True)
        disk = RecordingDisk(job_dir, kill_at=n)
        ready = two_lives(job_dir, disk)
        if ready is None:
            assert n > 30
            return
        yield list(faults(disk, judge, 1, ready))


def recorded(root: Path) -> Row:
    """Every power cut of three saves, and of a save that follows a kill at every operation."""
    row, judge = Row("power cut after every operation, every allowed survivor"), Judge(root / "after")
    for keep in (1, 2):
        (job_dir := root / f"keep{keep}" / "job").mkdir(parents=True)
        disk = RecordingDisk(job_dir)
        some_commits(job_dir, disk, keep, disk.mark)
        row.count("cuts of three saves", by=len(disk.ops) + 1)
        row.wrong += faults(disk, judge, keep)
    for found in lives(root / "lives", judge):
        row.count("kills followed by a cut anywhere")
        row.wrong += found
    row.trials = judge.looked
    row.note = "trials are the states that may be on the disk"
    return row


def mutants(root: Path) -> Row:
    """rrd without each of its fsyncs, and without digests: each must be seen to lose something."""
    row = Row("the same with rrd spoiled")
    for what, forgets in FORGOTTEN.items():
        (job_dir := root / what / "job").mkdir(parents=True)
        disk = RecordingDisk(job_dir, forgets=forgets)
        some_commits(job_dir, disk, 2, disk.mark)
        _caught(row, f"no fsync of the {what}", any(faults(disk, Judge(root / "after"), 2)))
    with without_digests():
        (job_dir := root / "digest" / "job").mkdir(parents=True)
        disk = RecordingDisk(job_dir, forgets=FORGOTTEN["tensors"])
        some_commits(job_dir, disk, 2, disk.mark)
        try:
            seen = not list(faults(disk, Judge(root / "after2"), 2))
        except AssertionError:
            seen = True
    _caught(row, "no digests", seen)
    _caught(row, "no fsync after a sweep", _sweep_mutant(root / "sweep"))
    return row


def _sweep_mutant(root: Path) -> bool:
    def sweep(parent: Path, *, disk: Disk) -> None:
        for path in parent.glob(".t*"):
            durable.remove_tree(path, disk=disk)

    with mock.patch.object(durable, "sweep_dirs", sweep):
        return any("lost" in fault for found in lives(root, Judge(root / "after")) for fault in found)


def _caught(row: Row, what: str, seen: bool) -> None:
    row.trials += 1
    row.count("caught", by=seen)
    row.wrong += [] if seen else [f"{what}: not noticed"]


# --- a real disk ------------------------------------------------------------------------------------------------------

EXT4_IOC_SHUTDOWN, NOLOGFLUSH = 0x8004587D, 2  # linux/fs/ext4/ext4.h
OPTIONS = ("defaults", "noauto_da_alloc", "data=writeback,noauto_da_alloc")


class LoopDisk:
    """An ext4 in a file, whose power can be cut: from then on nothing reaches the file, not even the journal."""

    def __init__(self, root: Path, options: str = "defaults", *, size: int = 160 << 20,
                 inodes: int | None = None) -> None:
        self.image, self.at, self.options = root / "image", root / "state", options
        self.at.mkdir(parents=True)
        with open(self.image, "wb") as f:
            f.truncate(size)
        few = ["-N", str(inodes)] if inodes else []
        _run("mkfs.ext4", "-q", "-F", "-m", "0", *few, str(self.image))

    def __enter__(self) -> LoopDisk:
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.umount()

    def mount(self, options: str = "") -> None:
        _run("mount", "-o", f"loop,{options or self.options}", str(self.image), str(self.at))

    def umount(self) -> None:
        _run("umount", str(self.at))

    def release(self) -> None:
        """Unmount, once those that still have files open there have ended."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                return self.umount()
            time.sleep(0.1)
        return self.umount()

    def cut(self) -> None:
        """Cut the power."""
        fd = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        finally:
            os.close(fd)

    def power_cycle(self) -> None:
        self.cut()
        self.umount()
        self.mount()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def why_no_loop(root: Path) -> str:
    """Why there can be no real power cut here; empty if there can."""
    def probe() -> Row:
        try:
            with LoopDisk(root / "probe") as disk:
                disk.power_cycle()
        except OSError as e:
            return Row("", note=str(e))
        return Row("")

    try:
        why = apart(probe).note
    except AssertionError as e:
        why = str(e).strip().splitlines()[-1]
    return why and f"needs root, mkfs.ext4 and loop devices: {why}"


class DyingDisk(Disk):
    """Kills its process before the ``nth`` call. ``forgets`` as with RecordingDisk."""

    def __init__(self, nth: int, forgets: Callable[[Path], bool] = lambda _: False) -> None:
        self.nth, self.forgets = nth, forgets

    def _call(self, name: str, *args: Any) -> Any:
        self.nth -= 1
        if self.nth == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "fsync" and self.forgets(Path(os.readlink(f"/proc/self/fd/{args[0]}"))):
            return None
        return getattr(Disk, name)(self, *args)


def _dying(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._call(name, *args)


for _name in CALLS:
    setattr(DyingDisk, _name, _dying(_name))


def write_until_killed(job_dir: Path, disk: Disk, keep: int) -> tuple[bool, list[int]]:
    """Save in another process until ``disk`` kills it. Whether it did, and which steps it announced."""
    r, w = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            some_commits(job_dir, disk, keep, lambda step: os.write(w, b"%d\n" % step))
            os._exit(0)
        os._exit(1)
    os.close(w)
    with open(r, "rb") as f:
        announced = [int(line) for line in f]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0, announced


def real(root: Path, options: str, *, every: int = 1, forgets: Callable[[Path], bool] = lambda _: False,
         keep: int = 2) -> Row:
    """Kill the writer before its n-th call for each n (each ``every``-th), cut the power, mount again, look."""
    return apart(lambda: _real(root, options, every, forgets, keep))


def _real(root: Path, options: str, every: int, forgets: Callable[[Path], bool], keep: int) -> Row:
    row = Row(f"real power cut, ext4 ({options}), writer killed before its n-th call")
    with LoopDisk(root, options) as disk:
        for nth in itertools.count(1, every):
            job_dir = disk.at / f"n{nth}" / "job"
            durable.make_dir(job_dir)
            killed, announced = write_until_killed(job_dir, DyingDisk(nth, forgets), keep)
            disk.power_cycle()
            row.trials += 1
            row.count("checkpoints announced before the cut", by=len(announced))
            row.wrong += [f"killed at call {nth}: {fault}" for fault in _after(job_dir, announced[-keep:])]
            shutil.rmtree(job_dir.parent)
            if not killed:
                return row
    raise AssertionError


def _after(job_dir: Path, announced: list[int]) -> Iterator[str]:
    there = dict(checkpoint.listing(job_dir))
    for step in announced:
        if step not in there:
            yield f"step {step} is lost"
    for step, path in there.items():
        try:
            if load(path) != expected(step):
                yield f"damaged bytes were loaded for step {step}"
        except Damaged as e:
            yield f"step {step} has a name and is not whole: {e.message}"
    durable.sweep_dirs(job_dir)
    commit(job_dir, 40)
    if load(job_dir / checkpoint.name_of(40)) != expected(40):
        yield "the next save is not whole"


def real_mutants(root: Path) -> Row:
    """What a real disk makes of rrd without one of its fsyncs. Some are covered by what ext4 happens to do."""
    row = Row("the same with rrd spoiled", note="ext4 happens to do the rest itself")
    for what, forgets in FORGOTTEN.items():
        found = real(root / what, OPTIONS[-1], forgets=forgets, every=2)
        row.trials += 1
        row.count(f"no fsync of the {what}: " + ("caught" if found.wrong else "covered by ext4"))
    return row
