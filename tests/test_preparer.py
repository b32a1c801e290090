"""Preparations side by side, each in a worker of its own that is gone afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from moments import failed
from world import DIE, HANG, World, now, play

from rrd.job import JobSpec
from rrd.ledger import Record
from rrd.messages import Failed, Prepared
from rrd.preparer import SILENCE_SECONDS, TELL_SECONDS, Preparer
from rrd.roster import Job
from rrd.states import JobState


class Bench:
    """A preparer of two at once, and what came of its jobs."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.preparer = Preparer(w.config, w.workers, limit=2, monotonic=now, wall=now)
        self.done: dict[str, Prepared | Failed] = {}

    def start(self, name: str, model: str = "/m") -> Job:
        job = Job(Record(id=name, state=JobState.PREPARING), JobSpec.model_validate({"model": model, "data": "/d"}))
        self.preparer.start(job, lambda job, outcome: self.done.update({job.id: outcome}))
        return job


def story(tmp: Path, tell: Callable[[Bench, World], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with World(tmp) as w:
            await tell(Bench(w), w)

    play(whole())


def test_it_counts_and_its_worker_is_gone_afterwards(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        job = b.start("a")
        assert b.preparer.room == 1
        await w.until(lambda: b.done)
        assert isinstance(b.done["a"], Prepared) and job.record.samples == 100
        assert w.workers.alive() == [] and b.preparer.room == 2

    story(tmp_path, tell)


def test_the_log_hears_of_a_long_one_now_and_then(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        said: list[tuple[float, str]] = []
        b.preparer.tell = lambda job, text: said.append((now(), f"{job.id}: {text}"))
        w.workers.prepare_seconds = 100.0
        start = now()
        b.start("long")
        await w.until(lambda: b.done)
        assert 4 <= len(said) <= 6 and {text for _, text in said} == {"long: at work, 50%"}
        assert said[0][0] - start >= TELL_SECONDS

    story(tmp_path, tell)


def test_one_that_dies_fails_or_hangs_is_told_and_the_others_do_not_wait(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        w.workers.missing.add("/typo")
        w.workers.at("dies", "prepare", DIE)
        w.workers.at("hangs", "prepare", HANG)
        b.start("hangs")
        start = now()
        for name in ("dies", "fails", "good"):
            b.start(name, "/typo" if name == "fails" else "/m")
            await w.until(lambda name=name: name in b.done, 5)  # type: ignore[misc]
        assert isinstance(b.done["good"], Prepared)
        dead, bad = b.done["dies"], b.done["fails"]
        assert isinstance(dead, Failed) and dead.blame == "worker"
        assert dead.message == "preparing its data failed: the worker was killed by SIGSEGV"
        assert isinstance(bad, Failed) and (bad.blame, bad.hint) == ("job", "put it there")
        await w.until(lambda: "hangs" in b.done, SILENCE_SECONDS + 30)
        assert now() - start >= SILENCE_SECONDS
        assert "reported nothing" in b.done["hangs"].message  # type: ignore[union-attr]
        assert w.workers.alive() == []

    story(tmp_path, tell)


def test_what_takes_long_and_says_so_is_no_hang(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        w.workers.prepare_seconds = 10 * SILENCE_SECONDS
        job = b.start("a")
        await w.seconds(5)
        assert job.progress and job.progress[0] == "at work"
        await w.until(lambda: b.done, 20 * SILENCE_SECONDS)
        assert isinstance(b.done["a"], Prepared)

    story(tmp_path, tell)


def test_a_forgotten_one_is_ended_and_never_told_and_may_begin_again(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        w.workers.prepare_seconds = 30.0
        job = b.start("a")
        await w.seconds(2)
        b.preparer.forget(job)
        assert b.preparer.room == 2
        w.workers.prepare_seconds = 1.0
        b.start("a")
        await w.until(lambda: b.done, 5)
        await w.seconds(60)
        assert isinstance(b.done["a"], Prepared) and w.workers.alive() == []

    story(tmp_path, tell)


def test_the_end_waits_for_none(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        w.workers.prepare_seconds = 1000.0
        b.start("a")
        b.start("b")
        await w.seconds(2)
        start = now()
        await b.preparer.stop()
        assert now() - start <= 5 and b.done == {}

    story(tmp_path, tell)


def test_a_failed_one_makes_room(tmp_path: Path) -> None:
    async def tell(b: Bench, w: World) -> None:
        w.workers.at("a", "prepare", failed("disk", "the disk is full"))
        b.start("a")
        await w.until(lambda: b.done)
        assert b.done["a"].blame == "disk" and b.preparer.room == 2  # type: ignore[union-attr]

    story(tmp_path, tell)
