"""rrd.worker.writer: only what is durable is announced, and no trouble ends the writing."""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rrd import checkpoint, durable
from rrd.messages import CommitFailed, Committed, Message
from rrd.worker import writer as writing
from rrd.worker.channel import Closed
from rrd.worker.resident import Saved
from rrd.worker.writer import Writer

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Bench:
    """A writer, a job's directory and what was reported."""

    def __init__(self, job_dir: Path) -> None:
        self.reports: queue.Queue[Message] = queue.Queue()
        self.writer = Writer(self.hear)
        self.resident: Any = SimpleNamespace(
            job="a", dir=job_dir, committed_step=0, written=threading.Event(),
            history=durable.Log(job_dir / "history.jsonl", 0))
        self.resident.written.set()

    def hear(self, report: Message) -> None:
        self.reports.put(report)

    def save(self, step: int, keep: int = 3) -> Message:
        """Have a checkpoint written; what is reported of it."""
        self.resident.history.append(b"%d\n" % step)
        self.writer.submit(self.resident, Saved(step, "identity", {"state": [b"%d" % step]}), keep)
        report = self.reports.get(timeout=30)
        assert self.resident.written.wait(30)
        return report

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in checkpoint.listing(self.resident.dir)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_is_announced_is_there(bench: Bench) -> None:
    report = bench.save(10)
    assert isinstance(report, Committed) and (report.job, report.step) == ("a", 10)
    manifest = checkpoint.verify(bench.resident.dir / checkpoint.name_of(10))
    assert (manifest.job, manifest.step, manifest.identity) == ("a", 10, "identity")
    assert report.bytes == manifest.size and bench.resident.committed_step == 10


def test_old_ones_are_collected(bench: Bench) -> None:
    for step in (10, 20, 30):
        bench.save(step, keep=2)
    assert bench.steps == [30, 20]


def test_the_history_is_durable_before_its_checkpoint(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = durable.DISK.fsync

    def remember(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(durable.DISK, "fsync", remember)
    bench.save(10)
    assert synced[:3] == ["history.jsonl", "state", "MANIFEST.json"]


@pytest.mark.parametrize("call", ["write", "fsync", "allocate", "mkdir", "rename", "open", "free"])
def test_a_full_disk_is_reported_and_the_next_is_written(
        bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> None:
        raise FULL

    bench.save(10)
    with monkeypatch.context() as patch:
        patch.setattr(durable.DISK, call, refuse)
        report = bench.save(20)
        assert isinstance(report, CommitFailed) and report.step == 20
        assert report.message.startswith("the disk is full") and report.hint
        assert bench.resident.committed_step == 10
    assert bench.steps == [10]
    assert isinstance(bench.save(20), Committed)  # the very same step, too
    assert bench.steps == [20, 10]
    assert (bench.resident.dir / "history.jsonl").read_bytes() == b"10\n20\n20\n"


def test_a_disk_that_cannot_collect_has_still_saved(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = durable.DISK.rename

    def no_trash(old: Path, new: Path) -> None:
        if new.name.startswith(durable.TRASH):
            raise FULL
        rename(old, new)

    monkeypatch.setattr(durable.DISK, "rename", no_trash)
    assert [type(bench.save(step, keep=1)) for step in (10, 20, 30)] == [Committed] * 3
    assert bench.steps == [30, 20, 10]
    monkeypatch.undo()
    bench.save(40, keep=1)
    assert bench.steps == [40]


def test_the_staging_buffer_is_in_use_until_the_write_has_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = durable.DISK.write

    def slow(fd: int, data: durable.Bytes) -> int:
        assert go_on.wait(30)
        return write(fd, data)

    monkeypatch.setattr(durable.DISK, "write", slow)
    bench.writer.submit(bench.resident, Saved(10, "i", {"state": [b"x"]}), 3)
    assert not bench.resident.written.is_set()
    go_on.set()
    assert bench.resident.written.wait(30)


def test_finishing_waits_for_all_that_was_submitted(bench: Bench) -> None:
    for step in (10, 20, 30):
        bench.writer.submit(bench.resident, Saved(step, "i", {"state": [b"x"]}), 3)
    bench.writer.finish()
    assert bench.steps == [30, 20, 10]
    assert [bench.reports.get_nowait().step for _ in range(3)] == [10, 20, 30]  # type: ignore[attr-defined]


def test_a_daemon_that_is_gone_does_not_end_the_writing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: Message) -> None:
        raise Closed

    bench.writer._report = gone
    for step in (10, 20):
        bench.writer.submit(bench.resident, Saved(step, "i", {"state": [b"x"]}), 3)
    bench.writer.finish()
    assert bench.steps == [20, 10] and bench.resident.written.is_set()


def test_a_bug_while_saving_ends_the_worker(
        bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A writer's thread that died in silence would leave its job waiting for it for ever."""
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(writing.os, "_exit", ended.put)
    bench.writer.submit(bench.resident, Saved(10, "i", {"state": ["no bytes"]}), 3)  # type: ignore[list-item]
    assert ended.get(timeout=30) == 1
    assert bench.resident.written.wait(30)
    assert "Traceback" in capfd.readouterr().err and bench.steps == []
