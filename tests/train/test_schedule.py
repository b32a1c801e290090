from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrd.train.schedule import lr_at


def rates(total: int, warmup: int, schedule: str, min_lr: float = 0.0) -> list[float]:
    return [lr_at(i, lr=1.0, min_lr=min_lr, warmup_steps=warmup, total=total, schedule=schedule)  # type: ignore[arg-type]
            for i in range(total)]


def test_warm_up_rises_evenly_and_reaches_lr() -> None:
    assert rates(10, 4, "constant") == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_linear_and_cosine_fall_to_min_lr_at_the_last_step() -> None:
    assert rates(5, 0, "linear", 0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, 0, "cosine", 0.2) == pytest.approx([1.0, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2])


@given(st.integers(1, 300), st.integers(0, 400), st.sampled_from(["cosine", "linear", "constant"]),
       st.floats(0.0, 1.0))
def test_rates_stay_in_range_and_never_rise_again(total: int, warmup: int, schedule: str, min_lr: float) -> None:
    values = rates(total, warmup, schedule, min_lr)
    assert all(0.0 < v <= 1.0 or (v == 0.0 and min_lr == 0.0) for v in values)
    after = values[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    assert all(v >= min_lr - 1e-12 for v in after)


def test_beyond_the_end_it_stays_at_min_lr() -> None:
    assert lr_at(99, lr=1.0, min_lr=0.1, warmup_steps=2, total=10, schedule="cosine") == pytest.approx(0.1)


def test_one_step_is_taken_at_full_rate() -> None:
    assert rates(1, 0, "cosine") == [1.0]
    assert rates(1, 1, "cosine") == [1.0]
