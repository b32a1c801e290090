"""Job files that come, change, go and come back, at every moment of a job's life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from moments import STATES, bring, failed, relieve
from world import DIE, World, play

from rrd import checkpoint
from rrd.edits import LIVE_KEYS
from rrd.journal import Kind
from rrd.ledger import Record
from rrd.messages import Load, Run
from rrd.spool import Rejection
from rrd.states import JobState
from rrd.toml import dump


def story(tmp: Path, tell: Callable[[World], Awaitable[None]], *lanes: int, **config: Any) -> None:
    async def whole() -> None:
        async with World(tmp, *lanes, **config) as w:
            await tell(w)

    play(whole())


# --- gone and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_file_removed_and_put_back_in_every_state(tmp_path: Path, state: str, restarts: bool) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        before, done = w.state("a"), w.steps_of("a")
        why = w.why("a")
        w.remove("a")
        relieve(w)
        await w.until(lambda: "a" not in w.scheduler.jobs, 60)
        assert w.keeper.records["a"].state is JobState.REMOVED
        assert len(w.journal.of(Kind.JOB_REMOVED, "a")) == 1
        trained = w.steps_of("a")
        assert max(w.disk.checkpoints["a"], default=0) == (10 if state == "failed" else len(trained))
        await w.seconds(60)
        assert w.steps_of("a") == trained and all("a" not in x.residents for x in w.workers.born)
        if restarts:
            await w.crash()
        w.drop("a")
        await w.seconds(1)
        if state in ("paused", "done", "failed", "cancelled"):
            assert w.state("a") == before
            assert w.why("a") == why
            if state != "done":
                (w.verbs.resume if state == "paused" else w.verbs.restart)("a")
        await w.until_done("a")
        again = w.steps_of("a")[len(trained):]
        if state == "failed":
            assert again == list(range(11, 51))
        else:
            assert trained + again == list(range(1, 51)) and trained[: len(done)] == done

    story(tmp_path, tell, 1, jobs_per_die=1)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.5, 2.5])
@pytest.mark.parametrize("state", ["loading", "running", "saving", "disk", "exporting"])
def test_a_file_back_before_its_job_was_off_the_die(tmp_path: Path, state: str, delay: float) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        w.remove("a")
        await w.seconds(delay)
        w.drop("a")
        relieve(w)
        await w.until_done("a", seconds=120)  # without another scan
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell, 1)


def test_files_that_come_and_go_all_the_time(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        for i in range(60):
            await w.seconds(0.37 + i / 100)
            (w.remove if "a" in w.files else w.drop)("a")
        if "a" not in w.files:
            w.drop("a")
        w.scan()
        await w.until_done("a", seconds=60)
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell, 1)


def test_removed_while_the_daemon_was_down(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", max_steps=200)
        await w.until_step("b", 13)
        await w.stop()
        del w.files["a"]
        await w.crash()
        w.scan()
        await w.until_done("b")
        assert "a" not in w.scheduler.jobs and w.keeper.records["a"].state is JobState.REMOVED

    story(tmp_path, tell, 1)


# --- edits ------------------------------------------------------------------------------------------------------------

LIVE: dict[str, tuple[Any, Callable[[World], bool]]] = {
    "steps_per_visit": (2, lambda w: w.workers.orders[-1].steps == 2),  # type: ignore[union-attr]
    "visit_seconds": (0.3, lambda w: w.workers.orders[-1].seconds == 0.3),  # type: ignore[union-attr]
    "weight": (7.0, lambda w: w.scheduler.lanes["0"].rotation._jobs["a"].weight == 7.0),
    "max_steps": (77, lambda w: w.workers.orders[-1].total == 77),  # type: ignore[union-attr]
    "epochs": (2.0, lambda w: w.workers.orders[-1].total == 200),  # type: ignore[union-attr]
    "checkpoint_every": (3, lambda w: 3 * (w.job("a").step // 3) in w.disk.checkpoints["a"][-2:]),
    "keep": (9, lambda w: w.workers.orders[-1].keep == 9),  # type: ignore[union-attr]
    "on_nan": ("skip", lambda w: w.workers.orders[-1].on_nan == "skip"),  # type: ignore[union-attr]
    "paused": (True, lambda w: w.state("a") == "paused"),
    "eval_every": (4, lambda w: w.workers.orders[-1].eval_every == 4),  # type: ignore[union-attr]
    "export_every": (6, lambda w: ("a", 6 * (w.job("a").step // 6)) in w.workers.exports),
}


def test_every_live_key_has_its_test() -> None:
    assert LIVE.keys() == LIVE_KEYS


@pytest.mark.parametrize("key", LIVE)
def test_a_live_edit_is_in_force_at_the_next_visit(tmp_path: Path, key: str) -> None:
    async def tell(w: World) -> None:
        base: dict[str, Any] = {"max_steps": 10_000, "eval_data": "/e"}
        if key == "epochs":
            base["max_steps"] = None
        if key == "visit_seconds":
            base["steps_per_visit"] = "auto"
        w.drop("a", **base)
        await w.until_step("a", 13)
        value, holds = LIVE[key]
        w.drop("a", **{**base, key: value})
        said = w.journal.of(Kind.EDIT_TAKEN)
        assert len(said) == 1 and dump({key: value}).rstrip() in said[0]
        assert getattr(w.keeper.specs["a"], key) == value  # and after a new start
        loads = sum(isinstance(o, Load) for o in w.workers.orders)
        visits = [o for o in w.workers.orders if isinstance(o, Run)]
        await w.until(lambda: (isinstance(w.workers.orders[-1], Run) and w.workers.orders[-1].steps and holds(w))
                      or (key == "paused" and holds(w)), 20)
        assert sum(isinstance(o, Load) for o in w.workers.orders) == loads  # without loading anew
        if key in ("steps_per_visit", "max_steps", "keep"):
            assert len([o for o in w.workers.orders if isinstance(o, Run)]) - len(visits) <= 3
        w.scan()
        assert len(w.journal.of(Kind.EDIT_TAKEN)) == 1  # said once

    story(tmp_path, tell, 1)


def test_weights_change_shares(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b", max_steps=100_000)
        await w.until_step("b", 50)
        w.drop("a", max_steps=100_000, weight=4.0)
        a, b = w.job("a").step, w.job("b").step
        await w.until_step("a", a + 800)
        assert w.job("b").step - b == pytest.approx(200, abs=15)

    story(tmp_path, tell, 2)


@pytest.mark.parametrize("total", [1, 13, 30])
def test_max_steps_lowered_ends_the_job_where_it_is(tmp_path: Path, total: int) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=1000)
        await w.until_step("a", 13)
        w.drop("a", max_steps=total)
        await w.until_done("a", seconds=10)
        assert w.steps_of("a")[-1] <= max(total, 15)
        assert w.workers.exports == [("a", w.job("a").step)] and w.disk.checkpoints["a"][-1] == w.job("a").step

    story(tmp_path, tell, 1)


@pytest.mark.parametrize("state", STATES)
def test_max_steps_raised_in_every_state(tmp_path: Path, state: str) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        w.drop("a", max_steps=70)
        relieve(w)
        await w.seconds(1)
        if state in ("paused", "cancelled"):
            assert w.state("a") == state
            (w.verbs.resume if state == "paused" else w.verbs.restart)("a")
        await w.until(lambda: w.state("a") == "done" and w.job("a").step == 70)
        assert set(w.steps_of("a")) == set(range(1, 71))
        assert w.workers.exports[-1] == ("a", 70)

    story(tmp_path, tell, 1, jobs_per_die=1)


def test_max_steps_lowered_below_a_done_jobs_steps_leaves_it_done(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        await w.until_done("a")
        w.drop("a", max_steps=20)
        await w.seconds(10)
        assert w.state("a") == "done" and len(w.workers.exports) == 1

    story(tmp_path, tell)


def test_another_path_is_taken_over_by_a_restart_from_the_checkpoint(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=500)
        await w.until_step("a", 13)
        w.drop("a", max_steps=500, data="/moved/data.jsonl")
        assert w.why("a") == "the edit of `data` is not in force: a running job does not take it over"
        assert w.job("a").refusal_hint.endswith("from the newest checkpoint if what lies there is the same")
        assert w.verbs.restart("a").endswith("from its newest checkpoint")
        await w.until(lambda: str(w.job("a").spec.data) == "/moved/data.jsonl" and w.state("a") == "running")

    story(tmp_path, tell)


def test_an_edit_that_would_change_what_is_trained_is_refused_and_said_once(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", max_steps=500)
        await w.until_step("a", 13)
        w.drop("a", max_steps=500, lora_rank=8, seed=3, keep=7)  # and one live key with them
        (said,) = w.journal.of(Kind.EDIT_REFUSED)
        assert said == "the edit of `lora_rank`, `seed` is not in force: it would change what is being trained"
        hint = next(s.hint for s in w.journal.all if s.kind is Kind.EDIT_REFUSED)
        assert hint == "`rrd restart a` takes it over, from step 0"
        assert w.job("a").spec.keep == 7 and w.job("a").spec.lora_rank == 32
        assert w.why("a") == said
        for _ in range(3):
            w.scan()
        assert len(w.journal.of(Kind.EDIT_REFUSED)) == 1
        step = w.job("a").step
        await w.until_step("a", step + 20)
        w.drop("a", max_steps=500, keep=7)  # edited back
        assert w.why("a") == "" and w.job("a").offered is None

    story(tmp_path, tell)


def test_an_edit_of_where_it_writes_needs_a_restart_but_no_step(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        await w.until_step("a", 13)
        w.drop("a", output="/out/elsewhere")
        hint = next(s.hint for s in w.journal.all if s.kind is Kind.EDIT_REFUSED)
        assert hint == "`rrd restart a` takes it over, from the newest checkpoint"
        w.verbs.restart("a")
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 51)) and w.job("a").output.endswith("/elsewhere")

    story(tmp_path, tell)


@pytest.mark.parametrize("state", ["waiting", "preparing", "in line"])
def test_before_anything_is_trained_every_edit_is_taken(tmp_path: Path, state: str) -> None:
    async def tell(w: World) -> None:
        await bring(w, state)
        w.drop("a", lora_rank=8, data="/other", output="/out/b")
        assert w.journal.of(Kind.EDIT_REFUSED) == []
        relieve(w)
        await w.until_done("a")
        assert [o.spec.data for o in w.workers.orders if isinstance(o, Load) and o.job == "a"] == ["/other"]
        assert w.keeper.specs["a"].lora_rank == 8

    story(tmp_path, tell, 1, jobs_per_die=1)


def test_a_failed_job_whose_file_is_mended_is_tried_again(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.workers.missing.add("/typo")
        w.drop("a", model="/typo")
        await w.until_state("a", "failed")
        w.drop("a", model="/m")
        await w.until_done("a")

    story(tmp_path, tell)


def test_a_failed_job_whose_edit_is_refused_stays_failed(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "step 13", failed("job", "its loss is no number"))
        await w.until_state("a", "failed")
        w.drop("a", lr=1e-5)
        await w.seconds(5)
        assert w.state("a") == "failed" and w.why("a") == "its loss is no number"
        w.verbs.restart("a")
        await w.until_done("a")
        assert w.steps_of("a")[-50:] == list(range(1, 51))

    story(tmp_path, tell)


def test_the_die_of_an_edit_counts_at_the_next_placement(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", die=0)
        await w.until_step("a", 13)
        w.drop("a", die=1)
        await w.seconds(1)
        assert w.job("a").die == "0"
        w.verbs.restart("a")
        await w.until(lambda: w.job("a").die == "1")
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell, 2)


# --- what is no job ---------------------------------------------------------------------------------------------------


def test_a_rejected_file_is_said_once_and_shown_until_it_is_mended(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.rejected["bad.toml"] = Rejection("bad.toml", "bad.toml:1: `lr` must be a number", "lr = 1e-4", 1, "lr")
        w.drop("good")
        w.scan()
        await w.until_done("good")
        assert w.journal.of(Kind.FILE_REJECTED) == ["bad.toml:1: `lr` must be a number"]
        (view,) = w.intake.rejected_views()
        assert (view.file, view.line, view.key, view.hint) == ("bad.toml", 1, "lr", "lr = 1e-4")
        w.rejected["bad.toml"] = Rejection("bad.toml", "bad.toml:2: `lr` must be a number", "lr = 1e-4", 2, "lr")
        w.scan()
        assert len(w.journal.of(Kind.FILE_REJECTED)) == 2
        w.rejected.clear()
        w.scan()
        assert w.intake.rejected_views() == []

    story(tmp_path, tell)


# --- what the ledger knows, or lost -----------------------------------------------------------------------------------


def test_a_lost_ledger_does_not_start_the_job_again(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        await w.until_step("a", 23)
        await w.stop()
        w.keeper.records.clear()
        w.keeper.specs.clear()
        with mock.patch.object(checkpoint, "listing",
                               lambda d: [(s, d) for s in reversed(w.disk.checkpoints[d.name])]):
            await w.crash()
            w.scan()
        assert w.job("a").record.announced_step == w.disk.checkpoints["a"][-1]
        await w.until_done("a")
        assert w.steps_of("a") == list(range(1, 51))

    story(tmp_path, tell)


def test_a_record_without_its_job_file_waits_for_the_spool(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.keeper.records["a"] = Record(id="a", state=JobState.RUNNING, announced_step=10, submitted_at=5.0)
        w.disk.checkpoints["a"] = [10]
        await w.crash()
        assert w.scheduler.jobs == {}
        w.drop("a")
        assert w.job("a").record.submitted_at == 5.0
        await w.until_done("a")
        assert w.steps_of("a") == list(range(11, 51))

    story(tmp_path, tell)


def test_an_announced_checkpoint_that_is_gone_fails_the_job_instead_of_starting_over(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a")
        w.workers.at("a", "step 23", DIE)
        await w.until(lambda: w.journal.of(Kind.WORKER_DIED))
        w.disk.checkpoints["a"].clear()
        await w.until_state("a", "failed")
        assert "no checkpoint" in w.why("a")
        w.verbs.restart("a", fresh=True)
        await w.until_done("a")

    story(tmp_path, tell)


def test_an_edit_is_said_in_the_words_of_the_file(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", export_every=6, on_nan="skip")
        await w.until_step("a", 3)
        w.drop("a", paused=True)
        said = w.journal.of(Kind.EDIT_TAKEN)
        assert [s for s in said if 'now export_every left out, on_nan = "stop", paused = true' in s] == said != []

    story(tmp_path, tell, 1)


def test_files_that_do_not_count_are_listed_by_name(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.intake.rejected = {f"{n}.toml": Rejection(f"{n}.toml", "no") for n in "cab"}
        assert [r.file for r in w.intake.rejected_views()] == ["a.toml", "b.toml", "c.toml"]

    story(tmp_path, tell, 1)


def test_jobs_of_the_ledger_go_on_before_the_spool_can_be_read(tmp_path: Path) -> None:
    async def tell(w: World) -> None:
        w.drop("a", "b")
        await w.until_step("b", 13)
        await w.crash()
        await w.until_done("a", "b")  # no scan

    story(tmp_path, tell)
