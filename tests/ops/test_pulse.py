"""rrd.ops.pulse: signs of life, few enough to cost nothing and honest about a CUDA die."""

from __future__ import annotations

import pytest
import torch

from rrd.ops import pulse

CPU = torch.device("cpu")


def test_of_many_beats_few_are_heard_and_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: clock[0])
    shares: list[float] = []
    with pulse.heard(shares.append, CPU, total=40) as beats:
        for _ in range(50):
            pulse.beat()
            clock[0] += pulse.EVERY / 9.99
    assert beats.count == 50 and shares == [1 / 40, 11 / 40, 21 / 40, 31 / 40, 1.0]
    pulse.beat()  # nobody listens any more
    assert beats.count == 50


def test_how_much_there_is_follows_from_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY", 0.0)
    shares: list[float] = []
    with pulse.heard(shares.append, CPU):
        for _ in range(3):
            pulse.beat()
        pulse.done(0.25)
        pulse.beat()
    assert shares == [0.0, 0.0, 0.0, 4 / 12]


def test_beats_run_ahead_of_a_cuda_die_by_so_many_and_no_more() -> None:
    """A mark is waited for before the one after the next is set: a die that hangs is silent."""
    told: list[str] = []

    class Mark:
        made = 0

        def __init__(self) -> None:
            Mark.made += 1
            self.n = Mark.made

        def record(self) -> None:
            told.append(f"set {self.n}")

        def synchronize(self) -> None:
            told.append(f"reached {self.n}")

    work = pulse.Pulse(lambda _: None, event=Mark)
    for _ in range(3 * pulse.QUEUED):
        work.beat()
    assert told == ["set 1", "set 2", "reached 1", "set 3", "reached 2"]


def test_work_within_work_gives_its_own_signs() -> None:
    with pulse.heard(lambda _: None, CPU) as outer:
        pulse.beat()
        with pulse.heard(lambda _: None, CPU) as inner:
            pulse.beat()
        pulse.beat()
    assert (outer.count, inner.count) == (2, 1)
