"""rrd history and rrd plot."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import click
import pytest
from conftest import Rrd
from pasts import make_past

import rrd as rrd_package
from rrd.cli.braille import chart


@pytest.fixture
def jobs(state: Path) -> Path:
    make_past(state / "jobs/code-a", 1200, torn=True)
    make_past(state / "jobs/code-b", 900, seed=1, end=1.4)
    (state / "jobs/new").mkdir()
    return state / "jobs"


def test_csv_has_every_step(rrd: Rrd, jobs: Path) -> None:
    table = list(csv.DictReader(rrd("history", "code-a", "--csv").stdout.splitlines()))
    assert len(table) == 1201 and table[-1]["step"] == "1200" and float(table[-1]["eval_loss"]) > 0
    assert ",".join(table[0]) == "step,loss,eval_loss,lr,grad_norm,tokens,seconds,die,round,time,applied"


def test_json_has_the_marks_too(rrd: Rrd, jobs: Path) -> None:
    h = json.loads(rrd("history", "code-a", "--json", "-n", "5").stdout)
    assert [s["step"] for s in h["steps"]] == [1196, 1197, 1198, 1199, 1200]
    assert {m["kind"] for m in h["marks"]} == {"checkpoint", "died", "resumed"} and h["evals"][-1]["step"] == 1200


def test_a_table_of_the_newest(rrd: Rrd, jobs: Path) -> None:
    lines = rrd("history", "code-a").stdout.splitlines()
    assert len(lines) == 21 and lines[0].split()[:3] == ["STEP", "LOSS", "HELD-OUT"] and lines[-1].startswith("1200")
    assert rrd("history", "nobody").exit_code == 4
    assert rrd("history", "new").stdout.splitlines() == [] or "STEP" not in rrd("history", "new").stdout


def test_curves_in_the_terminal(rrd: Rrd, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = rrd("plot", "code-a", "code-b")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == 17 and max(map(len, lines)) <= 80
    ends = {name: next(i for i, line in enumerate(lines) if name in line) for name in ("code-a", "code-b")}
    assert ends["code-a"] < ends["code-b"], "each name stands where its curve ends: a's loss is higher"
    assert not re.search(r"\x1b", result.stdout)


def test_a_job_without_steps(rrd: Rrd, jobs: Path) -> None:
    result = rrd("plot", "new")
    assert result.exit_code == 1 and "new made no step yet" in result.stderr
    assert "new made no step yet" in rrd("plot", "new", "code-a").stderr


@pytest.mark.parametrize(("name", "magic"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.pdf", b"%PDF")])
def test_pictures(rrd: Rrd, jobs: Path, tmp_path: Path, name: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'rrd[plot]')")
    result = rrd("plot", "code-a", "code-b", "-o", tmp_path / name)
    assert result.exit_code == 0, result.stderr
    data = (tmp_path / name).read_bytes()
    assert data.startswith(magic) and len(data) > 10_000
    if name == "x.svg":
        text = data.decode()
        for word in ("code-a", "code-b", "held out", "checkpoints | and restarts", "learning rate", "tokens a second"):
            assert f">{word}" in text, word
        assert "stroke-dasharray" in text, "jobs can be told apart without colour"
        rrd("plot", "code-a", "code-b", "-o", tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == data, "the same history, the same picture"


@pytest.mark.parametrize(("steps", "more"), [(1, ["--log"]), (2, ["--smooth", "1"]), (20_000, [])])
def test_jobs_of_any_length_are_drawn(rrd: Rrd, jobs: Path, tmp_path: Path, steps: int, more: list[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'rrd[plot]')")
    make_past(jobs / "other", steps, evals=steps > 2)
    result = rrd("plot", "other", *more, "-o", tmp_path / "x.svg")
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "x.svg").read_text()
    assert f">other: loss, {steps:,} step" in text and len(text) < 1_000_000, "thinned"
    assert rrd("plot", "other").exit_code == 0


def test_another_format_is_refused(rrd: Rrd, jobs: Path, tmp_path: Path) -> None:
    result = rrd("plot", "code-a", "-o", tmp_path / "x.gif")
    assert result.exit_code == 1 and "end it in .png, .svg or .pdf" in result.stderr
    assert not (tmp_path / "x.gif").exists()


def test_without_matplotlib_it_says_what_to_install(rrd: Rrd, jobs: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "rrd.figure", raising=False)
    monkeypatch.delattr(rrd_package, "figure", raising=False)
    result = rrd("plot", "code-a", "-o", tmp_path / "x.png")
    assert result.exit_code == 1 and "pip install 'rrd[plot]'" in result.stderr


def test_one_point_and_a_flat_line_can_be_drawn() -> None:
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)]):
        lines = chart([("a", points, True)], 60, 8)
        assert len(lines) == 9 and max(len(click.unstyle(line)) for line in lines) <= 60
    narrow = chart([("a-very-long-name-of-a-job", [(0.0, 1.0), (5.0, 0.0)], True)], 30, 6)
    assert len(narrow) == 7
