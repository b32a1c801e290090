"""A job's past, read back from its directory."""

from __future__ import annotations

import math
from pathlib import Path

from boxes import box, toy_keys, write_job
from pasts import START, make_past, write

from rrd.history import Mark, newest, read, rows, smooth, thin


def test_all_of_it_is_there(tmp_path: Path) -> None:
    h = read(make_past(tmp_path / "code", 200))
    assert [s.step for s in h.steps] == list(range(1, 201)) and h.job == "code"
    assert [e[0] for e in h.evals] == list(range(0, 201, 20))
    assert [m.step for m in h.marks if m.kind == "checkpoint"] == list(range(25, 201, 25))
    assert [m for m in h.marks if m.kind != "checkpoint"] == [
        Mark("died", 103, START + 200), Mark("resumed", 100, START + 200)]
    assert h.throughput()[0][1] == 1024 / h.steps[0].seconds


def test_of_steps_that_were_run_again_only_the_last_count(tmp_path: Path) -> None:
    def line(step: int, loss: float) -> dict[str, object]:
        return {"step": step, "loss": loss, "lr": 1e-4, "grad_norm": 1.0, "tokens": 8, "seconds": 0.1, "die": "0",
                "round": 1, "time": START}

    write(tmp_path / "history.jsonl", [line(1, 5), line(2, 4), {"step": 2, "eval_loss": 9.0}, line(3, 3.5),
                                       line(2, 4.1), {"step": 2, "eval_loss": 8.0}, line(3, 3.2)])
    h = read(tmp_path)
    assert h.losses() == [(1, 5), (2, 4.1), (3, 3.2)] and h.evals == [(2, 8.0)]


def test_damaged_lines_cost_only_themselves(tmp_path: Path) -> None:
    make_past(tmp_path / "a", 30, torn=True)
    path = tmp_path / "a" / "history.jsonl"
    path.write_bytes(b'null\n{"step": "x"}\n\xff\xfe\n[1]\n{"step": 3}\n' + b"[" * 100_000 + b"\n" + path.read_bytes())
    assert len(read(tmp_path / "a").steps) == 30
    assert read(tmp_path / "none").steps == []


def test_losses_that_are_none_are_left_out_of_the_curve(tmp_path: Path) -> None:
    common = {"lr": 0.1, "tokens": 1, "seconds": 0.1}
    write(tmp_path / "history.jsonl", [{"step": 1, "loss": None, "applied": False, **common},
                                       {"step": 2, "loss": 1.5, **common},
                                       {"step": 3, "loss": float("nan"), "grad_norm": float("inf"), **common}])
    h = read(tmp_path)
    assert h.losses() == [(2, 1.5)] and [s.applied for s in h.steps] == [False, True, True]
    assert h.steps[2].grad_norm is None


def test_an_evaluation_before_the_first_step_has_its_row(tmp_path: Path) -> None:
    table = list(rows(read(make_past(tmp_path / "a", 20))))
    assert (table[0]["step"], table[0]["loss"], table[0]["eval_loss"]) == (0, None, 4.0)
    assert table[2]["eval_loss"] is not None and table[1]["eval_loss"] is None and len(table) == 21


def test_smoothing_follows_and_does_not_start_low() -> None:
    flat = [(i, 3.0) for i in range(100)]
    assert all(math.isclose(y, 3.0) for _, y in smooth(flat))
    noisy = [(i, 3.0 + (-1) ** i) for i in range(1000)]
    assert max(abs(y - 3.0) for _, y in smooth(noisy, 50)[50:]) < 0.1
    assert smooth(noisy, 1) == noisy


def test_thinning_keeps_the_spikes() -> None:
    points = [(i, 50.0 if i == 5123 else math.sin(i)) for i in range(10_000)]
    few = thin(points, 500)
    assert len(few) <= 500 and (5123, 50.0) in few and few == sorted(few)
    assert thin(points[:10], 500) == points[:10]


def test_after_kills_no_step_is_there_twice(tmp_path: Path) -> None:
    """In the file itself, not only as it is read: a real daemon, killed in the middle."""
    with box(tmp_path, "cpu_dies = 1\n") as b:
        b.start()
        write_job(b.jobs_dir, "a", **toy_keys(tmp_path))
        b.wait_job("a", lambda j: j.step > 10)
        b.kill()
        b.start()
        b.wait_done("a")
        h = read(b.state / "jobs" / "a")
        lines = (b.state / "jobs" / "a" / "history.jsonl").read_text().splitlines()
    assert [s.step for s in h.steps] == list(range(1, 31)) and len(lines) == 30
    assert any(m.kind == "resumed" for m in h.marks)


def test_the_newest_lines_are_read_alone_and_only_those_that_count(tmp_path: Path) -> None:
    line = '{{"step": {0}, "loss": {0}.5, "lr": 0.1, "grad_norm": 1.0, "tokens": 8, "seconds": 0.1}}\n'
    text = "".join(line.format(n) + (f'{{"step": {n}, "eval_loss": {n}.25}}\n' if n % 50 == 0 else "")
                   for n in range(1, 1001))
    (tmp_path / "history.jsonl").write_text(text + '{"step": 1001, "lo')
    past = newest(tmp_path, 990, size=8000)
    assert 20 < len(past.steps) < 100 and [s.step for s in past.steps][-1] == 990
    assert past.evals[-1] == (950, 950.25)
    assert newest(tmp_path / "none", 5).steps == []
