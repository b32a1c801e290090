"""rrd.keeper: disk work in order, off the loop, and its troubles told on the loop."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk

from rrd import checkpoint
from rrd.durable import Disk
from rrd.errors import DiskTrouble, RrdError
from rrd.job import JobSpec
from rrd.keeper import Keeper, facts_of, set_aside
from rrd.ledger import Ledger, Record
from rrd.roster import Job


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "jobs"
    path.mkdir()
    return path


def make_job(job: str = "a") -> Job:
    return Job(Record(id=job), JobSpec(model="/models/m", data="/data/d.jsonl"))


def save_checkpoints(job_dir: Path, *steps: int) -> None:
    job_dir.mkdir(exist_ok=True)
    for step in steps:
        checkpoint.commit(job_dir, job="a", step=step, identity="i", files={"s": [b"%d" % step]})


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


class Blocked(Disk):
    """A disk on which nothing is renamed until it is freed."""

    def __init__(self) -> None:
        self.free_now = threading.Event()

    def rename(self, old: Path, new: Path) -> None:
        assert self.free_now.wait(30)
        super().rename(old, new)


def test_records_are_saved_as_they_were_when_asked_and_in_order(root: Path) -> None:
    async def scene() -> None:
        disk = Blocked()
        keeper, job = Keeper(Ledger(root, disk=disk), pytest.fail), make_job()  # type: ignore[arg-type]
        for step in (1, 2, 3):
            job.record.announced_step = step
            keeper.save(job, spec=step == 2)
        job.record.announced_step = 99
        disk.free_now.set()
        await keeper.flush()
        assert Ledger(root).load()[0]["a"].announced_step == 3
        assert b'model = "/models/m"' in (Ledger(root).job_toml("a") or b"")
        keeper.close()

    run(scene())


def test_a_slow_disk_does_not_stop_the_loop(root: Path) -> None:
    async def scene() -> None:
        disk = Blocked()
        keeper = Keeper(Ledger(root, disk=disk), pytest.fail)  # type: ignore[arg-type]
        keeper.save(make_job())
        flushed = asyncio.ensure_future(keeper.flush())
        await asyncio.sleep(0)  # the loop goes round
        assert not flushed.done()
        disk.free_now.set()
        await flushed
        keeper.close()

    run(scene())


def test_the_loop_is_told_what_could_not_be_written_and_the_next_is_written(root: Path) -> None:
    async def scene() -> None:
        heard: asyncio.Queue[tuple[str, RrdError, int]] = asyncio.Queue()
        keeper = Keeper(Ledger(root, disk=FaultyDisk(1, errno.ENOSPC)),
                        lambda job, e: heard.put_nowait((job, e, threading.get_ident())))
        keeper.save(make_job())
        keeper.save(make_job("b"))
        job, e, thread = await heard.get()
        assert job == "a" and isinstance(e, DiskTrouble) and thread == threading.get_ident()
        await keeper.flush()
        assert list(Ledger(root).load()[0]) == ["b"]
        keeper.close()

    run(scene())


def outcome(ask: Callable[[Keeper, Callable[..., None]], None], ledger: Ledger) -> object:
    """What a keeper calls back with, on the loop."""
    async def scene() -> object:
        heard: asyncio.Queue[object] = asyncio.Queue()
        keeper = Keeper(ledger, lambda _, e: heard.put_nowait(e))
        ask(keeper, lambda *args: heard.put_nowait(args))
        try:
            return await heard.get()
        finally:
            keeper.close()

    return asyncio.run(asyncio.wait_for(scene(), 30))


def test_checkpoints_set_aside_are_no_longer_in_use(root: Path) -> None:
    save_checkpoints(root / "a", 10, 20)
    assert outcome(lambda keeper, then: keeper.set_aside(make_job(), then), Ledger(root)) == ()
    assert checkpoint.listing(root / "a") == []
    assert names(root / "a") == [".old-ckpt-000000000010", ".old-ckpt-000000000020"]


def test_only_the_last_ones_set_aside_are_kept(root: Path) -> None:
    save_checkpoints(root / "a", 10)
    set_aside(root / "a")
    save_checkpoints(root / "a", 10, 20)
    set_aside(root / "a")
    assert names(root / "a") == [".old-ckpt-000000000010", ".old-ckpt-000000000020"]
    set_aside(root / "a")  # nothing new was saved: there is nothing to make room for
    assert names(root / "a") == [".old-ckpt-000000000010", ".old-ckpt-000000000020"]
    set_aside(root / "none")


def test_interrupted_while_setting_aside_the_newest_is_still_in_use(
        root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoints(root / "a", 10, 20)
    monkeypatch.setattr("rrd.durable.DISK", FaultyDisk(2, errno.EIO))
    told = outcome(lambda keeper, then: keeper.set_aside(make_job(), then), Ledger(root))
    assert isinstance(told, DiskTrouble)
    assert [step for step, _ in checkpoint.listing(root / "a")] == [20]


def spec_of(tmp_path: Path) -> JobSpec:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}")
    return JobSpec(model=str(tmp_path / "model"), data=str(tmp_path / "data.jsonl"),
                   tokenizer=str(tmp_path / "tokenizer.json"))


def test_facts_change_when_a_file_does_and_only_then(tmp_path: Path, root: Path) -> None:
    spec = spec_of(tmp_path)
    seen = [facts_of(spec), facts_of(spec)]
    assert seen[0] == seen[1] and "config.json 2 " in seen[0] and f"tokenizer.json {errno.ENOENT}" in seen[0]
    for change in (lambda: (tmp_path / "data.jsonl").write_text("{ }"),
                   lambda: (tmp_path / "tokenizer.json").write_text("{}"),
                   lambda: (tmp_path / "model" / "new.safetensors").write_text(""),
                   lambda: (tmp_path / "model" / "config.json").unlink()):
        change()
        seen.append(facts_of(spec))
    assert len(set(seen)) == len(seen) - 1
    assert outcome(lambda keeper, then: keeper.facts(spec, then), Ledger(root)) == (seen[-1],)


def test_what_is_not_there_or_cannot_be_listed_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path)

    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert facts_of(spec).startswith("model ")
    assert str(errno.ENOENT) in facts_of(JobSpec(model="/no/model", data="/no/data"))


def test_a_file_whose_rights_change_is_worth_another_try(tmp_path: Path) -> None:
    from toys import make_data

    spec = make_job().spec.model_copy(update={"data": str(make_data(tmp_path / "d.jsonl"))})
    before = facts_of(spec)
    (tmp_path / "d.jsonl").chmod(0o600)
    assert facts_of(spec) != before
