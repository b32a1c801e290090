"""A daemon whose disk fills up, has no inodes left, turns read-only: jobs pause, say why, and go on by themselves."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from apart import apart
from boxes import Box, box, digest_of, toy_keys, write_job
from cuts import LoopDisk
from table import Row

SAVES = {"max_steps": 800, "checkpoint_every": 20, "seed": 1}
TRAINS = {"max_steps": 10**6, "checkpoint_every": "1h", "seed": 2}
"""A job that saves often, and one whose cadence is longer than the trouble: it has no reason to stop."""
ANSWER_SECONDS = 2.0
"""Longest that the daemon may take for its status; it takes milliseconds, but the box may be busy with other tests."""


def troubled(root: Path) -> Row:
    return apart(lambda: _troubled(root))


SAID = {"full": "full", "without inodes": "no inodes left", "read-only": "read-only"}
"""What the reason must name, for each trouble."""
SAID_TO_NEW = {"full": "its checkpoints need", "without inodes": "no inodes left"}


def _troubled(root: Path) -> Row:
    """Each trouble once, on a real ext4, in the life of one job, which comes out as if there had been none."""
    row = Row("a real disk full, without inodes, read-only, under a daemon that trains")
    (inputs := root / "inputs").mkdir(parents=True)
    wanted = _straight(inputs)
    with LoopDisk(root / "box", inodes=300) as disk, box(root / "box", "cpu_dies = 2\n") as b:
        write_job(b.jobs_dir, "saves", **toy_keys(inputs, **SAVES))
        write_job(b.jobs_dir, "trains", **toy_keys(inputs, **TRAINS))
        b.start()
        _through(row, b, "full", _fill, _empty)
        _through(row, b, "without inodes", _use_inodes, _empty)
        _read_only(row, b, disk)
        b.ask("cancel", job="trains")
        b.wait_done("saves", "late-full", "late-inodes")
        if digest_of(b.state / "adapters" / "saves") != wanted:
            row.wrong.append("another adapter")
        b.stop()
    row.note = "each: one cadence more, paused with the reason, `status` answers, the other job trains, it goes on"
    return row


def _straight(root: Path) -> str:
    with box(root, "cpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "saves", **toy_keys(root, **SAVES))
        b.start()
        b.wait_done("saves")
        return digest_of(b.state / "adapters" / "saves")


def _through(row: Row, b: Box, what: str, begin: Callable[[Box], None], end: Callable[[Box], None]) -> None:
    """The trouble comes, and goes; the job goes on by itself. One that comes meanwhile waits, and is then trained."""
    _settled(b)
    begin(b)
    _paused(row, b, what)
    late = f"late-{what.split()[-1]}"
    write_job(b.jobs_dir, late, **toy_keys(b.root.parent / "inputs", max_steps=3, seed=3))
    b.wait_job(late, lambda j: j.state in ("waiting", "paused") and SAID_TO_NEW[what] in j.why and bool(j.hint), 60)
    end(b)
    b.wait_state("saves", "running", 300)
    _settled(b)


def _settled(b: Box) -> None:
    """The job has saved something new, and both train."""
    b.wait_job("trains", lambda j: j.state == "running" and j.step > 0, 300)
    now = (b.job("saves") or _gone()).last_checkpoint_step or 0
    b.wait_job("saves", lambda j: j.state == "running" and (j.last_checkpoint_step or 0) > now, 300)


def _paused(row: Row, b: Box, what: str) -> None:
    row.trials += 1
    row.count(what)
    j = b.wait_state("saves", "paused", 300)
    saved = j.last_checkpoint_step or 0
    if "no checkpoint can be saved" not in j.why or SAID[what] not in j.why or not j.hint:
        row.wrong.append(f"{what}: the reason is {j.why!r}")
    if j.step - saved > 2 * 20 + 3:
        row.wrong.append(f"{what}: it trained {j.step - saved} steps beyond its newest checkpoint")
    before = (b.job("trains") or _gone()).step
    b.wait_job("trains", lambda j: j.step > before + 20 and j.state == "running", 300)
    start = time.monotonic()
    b.ask("status")
    if time.monotonic() - start > ANSWER_SECONDS:
        row.wrong.append(f"{what}: `status` took {time.monotonic() - start:.1f} s")


def _fill(b: Box) -> None:
    with open(b.state / "ballast", "wb") as f:
        os.posix_fallocate(f.fileno(), 0, max(1, (s := os.statvfs(b.state)).f_bavail * s.f_frsize - (1 << 20)))


def _use_inodes(b: Box) -> None:
    for n in range(10_000):
        try:
            (b.state / f"ballast{n}").touch(exist_ok=False)
        except OSError:
            return


def _empty(b: Box) -> None:
    for path in b.state.glob("ballast*"):
        path.unlink()


def _read_only(row: Row, b: Box, disk: LoopDisk) -> None:
    """As ext4 does it after an error. It does not come back without being mounted anew, and so the daemon neither."""
    _settled(b)
    subprocess.run(["mount", "-o", "remount,abort", str(disk.at)], check=True)
    _paused(row, b, "read-only")
    b.kill()
    disk.release()
    disk.mount()
    b.start()
    _settled(b)


def _gone() -> None:  # type: ignore[misc]
    raise AssertionError("the job is gone")
