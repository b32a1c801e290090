"""A job as the daemon knows it: how long a visit is, when a checkpoint is due, what it hears and what it shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrd.job import JobSpec
from rrd.ledger import Record
from rrd.messages import CommitFailed, Committed, Evaluated, Loaded, Message, Prepared, Progress, Step, VisitDone
from rrd.roster import LONG_SECONDS, NO_LIMIT, Job, Leave, steps_of
from rrd.states import JobState


def spec(**keys: Any) -> JobSpec:
    return JobSpec.model_validate({"model": "/m", "data": "/d", **keys})


def job(state: JobState = JobState.RUNNING, **keys: Any) -> Job:
    return Job(Record(id="a", state=state, samples=100), spec(**keys))


def step(n: int, loss: float | None = 2.0, seconds: float = 0.5) -> Step:
    return Step(job="a", step=n, loss=loss, lr=1e-4, grad_norm=1.0, tokens=10, seconds=seconds)


def loaded(n: int) -> Loaded:
    return Loaded(job="a", step=n, tokens=10 * n, samples=100, seconds=1.0)


def committed(n: int) -> Committed:
    return Committed(job="a", step=n, bytes=1, seconds=0.1)


def hear(j: Job, *reports: Message, at: float = 0.0) -> Job:
    for report in reports:
        j.hear(report, wall=1e9 + at, now=at)
    return j


# --- how many steps ---


@pytest.mark.parametrize(("epochs", "samples", "batch", "steps"), [
    (1.0, 100, 1, 100), (1.0, 100, 8, 13), (2.0, 100, 8, 25), (0.1, 100, 1, 10), (0.3, 10, 1, 3), (0.001, 10, 1, 1),
    (3.0, 1, 64, 1), (1.1, 10, 1, 11),
])
def test_epochs_in_steps_as_written(epochs: float, samples: int, batch: int, steps: int) -> None:
    assert steps_of(spec(epochs=epochs, batch_size=batch), samples) == steps


def test_the_total_is_known_once_the_samples_are_counted_and_max_steps_wins() -> None:
    j = Job(Record(id="a"), spec(epochs=2.0))
    assert j.total is None and not j.trained
    hear(j, Prepared(job="a", samples=50, tokens=1, bad_lines=0))
    assert j.total == 100
    j.spec = spec(epochs=2.0, max_steps=7)
    assert j.total == 7
    assert not j.trained and hear(j, step(7)).trained


# --- visits ---


@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_a_visit_ends_where_a_checkpoint_or_an_export_is_due(at: int, visit: int, cadence: int, export: int) -> None:
    j = job(steps_per_visit=visit, checkpoint_every=cadence, export_every=export)
    j.step = at
    n, seconds = j.visit()
    assert 1 <= n <= visit and seconds is None
    assert not any((at + i) % cadence == 0 or (at + i) % export == 0 for i in range(1, n))


def test_a_visit_of_so_many_seconds() -> None:
    assert job(visit_seconds=3.0).visit() == (NO_LIMIT, 3.0)
    assert job(visit_seconds=3.0, checkpoint_every=40).visit() == (40, 3.0)


def test_a_visit_lasts_a_cadence_by_the_clock_at_most_however_long_ago_the_last_one_was() -> None:
    j = hear(job(visit_seconds=600.0, checkpoint_every="5s"), loaded(0), step(1))
    j.saved_at = -1e6
    assert j.visit() == (NO_LIMIT, 5.0)
    assert job(visit_seconds=3.0, checkpoint_every="10min").visit() == (NO_LIMIT, 3.0)
    assert job(steps_per_visit=7, checkpoint_every="5s").visit() == (7, 5.0)


# --- checkpoints ---


def test_a_cadence_in_steps() -> None:
    j = hear(job(checkpoint_every=10), loaded(0), *(step(n) for n in range(1, 10)))
    assert not j.checkpoint_due(1e9)
    hear(j, step(10))
    assert j.checkpoint_due(0)
    hear(j, VisitDone(job="a", step=10, steps=0, seconds=0, copied=True))
    assert not j.checkpoint_due(0)  # being written
    hear(j, step(11), committed(10))
    assert not j.checkpoint_due(0)
    assert hear(j, step(25)).checkpoint_due(0)


def test_a_cadence_in_seconds() -> None:
    j = hear(job(checkpoint_every="1min"), loaded(0), at=100)
    assert not j.checkpoint_due(1000)  # nothing new
    hear(j, step(1))
    assert not j.checkpoint_due(159) and j.checkpoint_due(160)
    hear(j, VisitDone(job="a", step=1, steps=1, seconds=1.0, copied=True), at=165)
    hear(j, committed(1), at=170)
    hear(j, step(2))
    assert not j.checkpoint_due(224) and j.checkpoint_due(225)  # a minute after it was copied, not after it was written


@pytest.mark.parametrize("cadence", [10, "1min"])
def test_what_the_disk_refused_is_tried_again_a_cadence_later(cadence: int | str) -> None:
    j = hear(job(checkpoint_every=cadence), loaded(0), step(10))
    hear(j, CommitFailed(job="a", step=10, message="the disk is full"), at=100)
    hear(j, step(11))
    assert not j.checkpoint_due(159) and j.disk_strikes == 1 and j.saved_step == 0
    assert j.view().why == "its last checkpoint was not saved: the disk is full"
    hear(j, step(20))
    assert j.checkpoint_due(160)
    hear(j, CommitFailed(job="a", step=20, message="the disk is full"), at=200)
    assert j.disk_strikes == 2
    hear(j, committed(20))
    assert j.disk_strikes == 0 and j.view().why == ""


def test_a_load_leaves_nothing_unsaved() -> None:
    j = hear(job(checkpoint_every=10), loaded(0), step(12), CommitFailed(job="a", step=12, message="full"))
    j.off_die()
    hear(j, loaded(10), at=50)
    assert (j.disk_strikes, j.saved_step, j.tried_step, j.exported_step, j.resident) == (0, 10, 10, 10, True)


# --- patience, pace, and what is shown ---


def test_patience_is_ten_times_the_median_step_but_never_less_than_asked_for() -> None:
    j = job()
    assert j.patience(60) == 60
    hear(j, *(step(n, seconds=20.0) for n in range(1, 4)), step(4, seconds=1000.0))
    assert j.patience(60) == 200


def test_the_pace_counts_the_turns_of_the_others() -> None:
    j = job(max_steps=100)
    assert j.steps_per_minute() is None and j.eta() is None
    for visit in range(3):
        hear(j, *(step(5 * visit + i) for i in range(1, 6)),
             VisitDone(job="a", step=5 * visit + 5, steps=5, seconds=2.5), at=30.0 * visit)
        hear(j, VisitDone(job="a", step=5 * visit + 5, steps=0, seconds=0, copied=True), at=30.0 * visit)
    assert j.steps_per_minute() == 10
    assert j.eta() == pytest.approx(85 / 10 * 60)
    j.off_die()
    assert j.steps_per_minute() is None


def test_what_is_no_number_is_shown_as_no_loss() -> None:
    j = hear(job(), step(1, 2.5), step(2, math.nan), step(3, None), step(4, math.inf))
    assert j.loss == 2.5 and list(j.losses) == [2.5] and j.step == 4


def test_only_a_new_step_forgives_crashes() -> None:
    j = hear(job(), step(5))
    j.record.crashes = 2
    hear(j, step(4), step(5))
    assert j.record.crashes == 2
    hear(j, step(6))
    assert j.record.crashes == 0 and j.record.best_step == 6


def test_why_a_job_is_where_it_is() -> None:
    j = job(JobState.PREPARING)
    hear(j, Progress(job="a", what="tokenizing the data", share=0.25))
    assert j.view().why == "tokenizing the data, 25%" and j.view().prepared == 0.25
    j = job()
    for at in (100.0, 100.0 + LONG_SECONDS - 1):
        hear(j, Progress(job="a", what="training, step 3", share=0.25), at=at)
        assert j.view().why == ""  # a step is no news
    hear(j, Progress(job="a", what="training, step 3", share=0.5), at=190.0)
    assert j.view().why == "training, step 3: 50%, for 90 s"
    hear(j, step(3))
    assert j.view().why == ""
    hear(j, Progress(job="a", what="exporting", share=0.0), at=190.0)
    hear(j, Progress(job="a", what="exporting", share=0.0), at=400.0)
    assert j.view().why == "exporting, for 4 min"  # how far it has come is not known
    j = job()
    j.refusal, j.refusal_hint = "the edit of `lr` is not in force", "`rrd restart` takes it over"
    assert (j.view().why, j.view().hint) == ("the edit of `lr` is not in force", "`rrd restart` takes it over")
    j.record.why, j.record.hint = "the disk is full", "free space"
    assert (j.view().why, j.view().hint) == ("the disk is full", "free space")
    j.die, j.leave = "3", Leave(JobState.PAUSED, "paused by the user")
    assert j.view().why == "leaving die 3: paused by the user"


def test_beginning_again_shows_nothing_of_before() -> None:
    j = hear(job(), loaded(0), step(5), committed(5), Evaluated(job="a", step=5, loss=1.5))
    j.off_die()
    j.forget_all()
    view = j.view()
    assert (view.step, view.loss, view.eval_loss, view.losses, view.last_checkpoint_step, view.tokens) == (
        0, None, None, [], None, 0)
    assert view.steps_run == 1  # a counter never goes back
