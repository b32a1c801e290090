"""rrd logs: events and steps from the job's directory, at once and as they come."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from conftest import Rrd
from fake_daemon import HOSTILE

from rrd.cli.logs import Tail, following

EVENTS = [{"time": 1000.0, "level": "info", "message": "accepted", "step": 0, "die": ""},
          {"time": 1020.0, "level": "warning", "message": "the gate refused die 3", "hint": "retried", "die": "3"},
          {"time": 1040.0, "level": "error", "message": "its worker died", "step": 12, "die": "3"}]
STEPS = [{"step": 1, "loss": 2.5, "lr": 1e-4, "grad_norm": 0.5, "tokens": 512, "seconds": 0.25, "die": "3", "round": 1,
          "time": 1010.0},
         {"step": 1, "eval_loss": 2.25}, {"step": 2, "loss": None, "applied": False, "tokens": 64, "time": 1030.0}]


@pytest.fixture
def code(state: Path) -> Path:
    """The directory of the job `code`, with some events and steps."""
    code = state / "jobs/code"
    code.mkdir(parents=True)
    append(code / "events.jsonl", *EVENTS)
    append(code / "history.jsonl", *STEPS)
    return code


def append(path: Path, *records: object) -> None:
    with open(path, "a") as f:
        f.writelines(json.dumps(r) + "\n" for r in records)


def test_events_for_people(rrd: Rrd, code: Path) -> None:
    result = rrd("logs", "code")
    assert result.exit_code == 0
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1000))
    assert result.stdout.splitlines()[0] == f"{when}  accepted"
    assert [line[21:] for line in result.stdout.splitlines()[1:]] == [
        "warning: the gate refused die 3 (retried)  [die 3]", "error: its worker died  [die 3, step 12]"]


def test_steps_stand_between_the_events_of_their_time(rrd: Rrd, code: Path) -> None:
    lines = [line[21:] for line in rrd("logs", "code", "--steps").stdout.splitlines()]
    assert lines[1:5] == ["die 3 step 1: loss 2.5, lr 0.0001, gradient 0.5, tokens 512, seconds 0.25",
                          "step 1: held-out loss 2.25", "warning: the gate refused die 3 (retried)  [die 3]",
                          "step 2: tokens 64 (not applied)"]


def test_the_newest_and_json(rrd: Rrd, code: Path) -> None:
    assert [json.loads(line) for line in rrd("logs", "code", "--json", "-n", "2").stdout.splitlines()] == EVENTS[1:]
    assert rrd("logs", "code", "-n", "0").stdout == ""
    steps = [json.loads(line) for line in rrd("logs", "code", "--json", "--steps").stdout.splitlines()]
    assert [r["time"] for r in steps] == [1000.0, 1010.0, 1010.0, 1020.0, 1030.0, 1040.0]


def test_no_such_job(rrd: Rrd, code: Path) -> None:
    for name in ("kode", "../jobs/code", "code/", "", ".", "x" * 300):
        result = rrd("logs", "--", name)
        assert result.exit_code == 4, name
    assert "hint: did you mean code?" in rrd("logs", "kode").stderr
    assert rrd("logs", HOSTILE).stderr.count("\n") == 2


def test_a_job_without_events_and_damaged_lines(rrd: Rrd, state: Path) -> None:
    (state / "jobs/new").mkdir(parents=True)
    assert rrd("logs", "new", "--steps").exit_code == 0
    (state / "jobs/new/events.jsonl").write_bytes(
        b'\xff\n[]\n3\n{"time": "x"}\n{"time": 1e999, "message": "late"}\n{"time": 5}\n'
        b'{"message": "whole", "level": 3, "die": {}}\n{"time": 7, "mess')
    result = rrd("logs", "new")
    assert result.exit_code == 0, result.output
    assert "late" in result.stdout
    assert "whole" in result.stdout


def test_hostile_text(rrd: Rrd, code: Path) -> None:
    append(code / "events.jsonl", {"time": 2000, "message": HOSTILE, "hint": HOSTILE, "die": HOSTILE, "level": HOSTILE})
    append(code / "history.jsonl", {"time": 2000, "step": HOSTILE, "loss": HOSTILE, "die": HOSTILE})
    for args in ([], ["--json"]):
        text = rrd("logs", "code", "--steps", *args).stdout
        assert not [c for c in text if c in "\x1b\x07\u202e"]
        assert len(text.splitlines()) == 8


def test_following_sees_appended_replaced_and_half_written_files(code: Path) -> None:
    tails = [Tail(code / "events.jsonl"), Tail(code / "history.jsonl")]
    acts = [lambda: append(code / "events.jsonl", {"time": 1050.0, "message": "a"}),
            lambda: (code / "events.jsonl").open("a").write('{"time": 1060.0, "mess'),
            lambda: ((code / "events.jsonl").open("a").write('age": "b"}\n'),
                     append(code / "history.jsonl", {"step": 3, "time": 1055.0})),
            lambda: ((code / "new").write_text('{"time": 9.0, "message": "c"}\n' + " \n" * 1000),
                     (code / "new").rename(code / "events.jsonl"))]

    class Over(Exception):
        pass

    def pause() -> None:
        if not acts:
            raise Over
        acts.pop(0)()

    got = []
    with pytest.raises(Over):
        got.extend(r.get("message") or r["step"] for r in following(tails, pause))
    assert got == ["accepted", 1, 1, "the gate refused die 3", 2, "its worker died", "a", 3, "b", "c"]


def test_follow_starts_with_the_newest_until_ctrl_c(rrd: Rrd, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(code / "events.jsonl", *({"time": 1100.0 + i, "message": f"m{i}"} for i in range(30)))

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    result = rrd("logs", "code", "-f")
    assert [line[21:] for line in result.stdout.splitlines()] == [f"m{i}" for i in range(10, 30)]
    assert "Traceback" not in result.output
