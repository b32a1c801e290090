"""rrd status, dies and watch: what is shown, how fast, and that nothing shown is obeyed."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path

import pytest
from conftest import Rrd
from fake_daemon import HOSTILE, FakeDaemon, busy, job, snapshot
from rich.console import Console

from rrd.cli import views
from rrd.cli.show import sparkline
from rrd.cli.watch import changes, frame
from rrd.errors import NotRunning
from rrd.snapshot import DieView, LaneView, RejectedView, Snapshot
from rrd.states import JobState


def test_every_state_with_its_reason(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy())
    result = rrd("status")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("rrd 0.1.0, up 3.2 h: 3 running, 1 loading, 1 preparing, 1 failed,")
    code = next(line for line in lines if line.startswith("code-a "))
    assert code.split() == ["code-a", "running", "3", "150/1500", "10", "2.341", "28.5", "47", "min", "2", "min"]
    broken = next(line for line in lines if line.startswith("broken "))
    assert broken.endswith("is missing (put it there, or change `model`; the job is tried again by itself)")
    assert any(line.startswith("4 ") and "the gate refused it; next try in 12 s" in line for line in lines)
    assert result.stderr == ""


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_fits_the_terminal(width: int) -> None:
    now = time.time()
    s = busy()
    lines = views.overview(s, now, width, curves=True)[2:]
    lines += views.dies(s, now, width, full=True)
    too_long = [line for line in map(unstyled, lines) if len(line) > width]
    assert not too_long
    heads = [line.split() for line in map(unstyled, views.overview(s, now, width, curves=True))]
    assert {40: ["JOB", "STATE", "STEP"], 80: ["JOB", "STATE", "DIE", "STEP", "%", "LOSS", "ETA"],
            100: ["JOB", "STATE", "DIE", "STEP", "%", "LOSS", "/MIN", "ETA", "SAVED"],
            120: ["JOB", "STATE", "DIE", "STEP", "%", "LOSS", "/MIN", "ETA", "SAVED", "LOSSES"]}[width] in heads


def test_off_a_terminal_nothing_is_cut(rrd: Rrd, daemon: FakeDaemon) -> None:
    name = "x" * 63
    daemon.show(snapshot(job(name, JobState.WAITING, why="because " * 40)))
    line = next(x for x in rrd("status").stdout.splitlines() if x.startswith(name))
    assert line.count("because") == 40


def test_everything_about_one_job(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy())
    shown = rrd("status", "code-a").stdout
    for text in ("code-a  running on die 3 (lane 1)", "150 of 1500 (10 %), epoch 0.31, 47 min left", "2.341  ",
                 "step 120, 2 min ago, 11.6 MiB, every 10min", "76,800 tokens", "/models/smollm2", "5 times"):
        assert text in shown
    failed = rrd("status", "broken").stdout
    assert "the model directory /models/gone is missing" in failed
    assert "hint        put it there" in failed


@pytest.mark.parametrize(("name", "says"), [
    ("broken", "tried again when its job file or a file that it names changes, or by `rrd restart broken`"),
    ("quiet", "`rrd resume quiet` lets it go on"), ("rest", "take `paused = true` out of /jobs.d/rest.toml"),
    ("prose", "begins by itself; `rrd dies` shows what the dies do"), ("code-a", "")])
def test_a_job_that_does_not_move_says_what_will_move_it(rrd: Rrd, daemon: FakeDaemon, name: str, says: str) -> None:
    there = busy()
    rest = job("rest", JobState.PAUSED, why="paused by its job file", file="/jobs.d/rest.toml")
    daemon.show(there.model_copy(update={"jobs": [*there.jobs, rest]}))
    found = [line[14:] for line in rrd("status", name).stdout.splitlines() if line.startswith("  next ")]
    assert [text.startswith(says) for text in found] == [True] * bool(says)


def test_a_job_shortened_below_its_step_is_at_no_percentage(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(snapshot(job("code-a", step=10060, target_steps=5)))
    shown = rrd("status", "code-a").stdout
    assert "10060 (its file now asks for 5)," in shown and "100 %" not in shown


def test_an_unknown_job(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy())
    result = rrd("status", "cod-a")
    assert result.exit_code == 4
    assert result.stderr == "error: there is no job cod-a\nhint: did you mean code-a?\n"


def test_json_is_the_snapshot(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy())
    body = json.loads(rrd("status", "--json").stdout)
    assert body.pop("running") is True
    assert Snapshot.model_validate(body).job("code-a").step == 150
    one = json.loads(rrd("status", "code-a", "--json").stdout)
    assert (one["id"], one["state"], one["loss"]) == ("code-a", "running", 2.3412)
    s = busy()
    s.dies[0].memory_bytes, s.dies[0].memory_used_bytes, s.dies[1].memory_bytes = 12 << 30, 7 << 30, 12 << 30
    daemon.show(s)
    shown = [line for line in rrd("dies").stdout.splitlines() if "GiB" in line]
    assert ["of" in line for line in shown] == [True, False] and "7.0 GiB of 12.0 GiB" in shown[0]
    listed = json.loads(rrd("dies", "--json").stdout)
    assert [d["name"] for d in listed["dies"]] == list("012345")
    assert [v["name"] for v in listed["lanes"]] == ["0", "1"]


def test_only_some_states(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy())
    body = json.loads(rrd("status", "--json", "--only", "failed", "--only", "paused").stdout)
    assert [j["id"] for j in body["jobs"]] == ["broken", "quiet"]
    assert rrd("status", "--only", "sleeping").exit_code == 2


def test_with_the_daemon_down_the_last_status_is_shown_and_said_to_be_that(rrd: Rrd, state: Path) -> None:
    (state / "run/status").mkdir(parents=True)
    (state / "run/status/snapshot.json").write_text(
        busy().model_copy(update={"time": time.time() - 300}).model_dump_json())
    result = rrd("status")
    assert result.exit_code == 0
    assert result.stderr == "warning: rrd is not running; this is from 5 min ago, when it last wrote\n"
    assert "code-a" in result.stdout
    assert json.loads(rrd("status", "--json").stdout)["running"] is False


NEWER = "error: the daemon's status is of format 2, and this rrd knows 1"


def test_a_newer_daemons_status_is_not_guessed_at(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy().model_copy(update={"format": 2}))
    result = rrd("status")
    assert result.exit_code == 65 and result.stderr.startswith(NEWER) and "newer one" in result.stderr


def test_nor_is_what_it_left(rrd: Rrd, state: Path) -> None:
    (state / "run/status").mkdir(parents=True)
    (state / "run/status/snapshot.json").write_text(busy().model_copy(update={"format": 2}).model_dump_json())
    assert rrd("status").stderr.startswith(NEWER)


@pytest.mark.parametrize("left", [None, b"", b"{", b'{"jobs": 3}', b"\xff"])
def test_with_the_daemon_down_and_nothing_to_show(rrd: Rrd, state: Path, left: bytes | None) -> None:
    if left is not None:
        (state / "run/status").mkdir(parents=True)
        (state / "run/status/snapshot.json").write_bytes(left)
    for command in (["status"], ["dies"], ["watch"], ["status", "x"], ["pause", "x"], ["reload"]):
        result = rrd(*command)
        assert result.exit_code == 3, command
        assert result.stdout == ""
        assert result.stderr.startswith("error: rrd is not running")


def test_no_text_from_a_file_reaches_the_terminal_raw(rrd: Rrd, daemon: FakeDaemon) -> None:
    evil = job(HOSTILE, why=HOSTILE, hint=HOSTILE, model=HOSTILE, output=HOSTILE, file=HOSTILE, die=HOSTILE,
               lane=HOSTILE, method=HOSTILE, checkpoint_every=HOSTILE)
    die = DieView(name=HOSTILE, lane=HOSTILE, device=HOSTILE, state=HOSTILE, why=HOSTILE, jobs=[HOSTILE],
                  computing=HOSTILE, model=HOSTILE, uuid=HOSTILE, pci_bus_id=HOSTILE)
    lane = LaneView(name=HOSTILE, gate=HOSTILE, dies=[HOSTILE], computing=HOSTILE)
    rejected = [RejectedView(file=HOSTILE, message=HOSTILE, hint=HOSTILE)]
    daemon.show(snapshot(evil, dies=[die], lanes=[lane], rejected=rejected, version=HOSTILE, config_error=HOSTILE,
                         spool_error=HOSTILE))
    for command in (["status"], ["status", HOSTILE], ["status", "--json"], ["dies"], ["dies", "--json"],
                    ["status", HOSTILE + "x"]):
        text = rrd(*command).output
        assert "evil" in text, command
        assert not [c for c in text if c in "\x1b\x07\u202e"], command
        assert "second" not in [line.strip()[:6] for line in text.splitlines()], command


def test_rich_markup_is_text(tmp_path: Path) -> None:
    s = snapshot(job("a", why="[bold red]x[/] [link=http://e]y[/link]"))
    out = io.StringIO()
    console = Console(file=out, width=200, height=40, markup=False, highlight=False)
    console.print(frame(s, "", 200, 40))
    assert "[bold red]x[/] [link=http://e]y[/link]" in out.getvalue()


def test_colour_only_where_it_is_wanted(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.show(busy())
    assert "\x1b[32mrunning" in rrd("status", color=True).stdout
    assert "\x1b" not in rrd("status", color=True, env={"NO_COLOR": "1"}).stdout
    assert "\x1b" not in rrd("status").stdout


def test_a_thousand_jobs_are_shown_quickly(rrd: Rrd, daemon: FakeDaemon) -> None:
    jobs = [job(f"job-{i:04}", JobState.WAITING if i > 20 else JobState.RUNNING, why="no room") for i in range(1000)]
    daemon.show(snapshot(*jobs))
    rrd("status")  # imports
    start = time.perf_counter()
    result = rrd("status")
    assert time.perf_counter() - start < 1.0  # 0.1 on an idle machine
    assert sum(line.startswith("job-") for line in result.stdout.splitlines()) == 1000
    start = time.perf_counter()
    screen = frame(snapshot(*jobs), "", 100, 40)
    assert time.perf_counter() - start < 0.5
    assert screen.plain.count("\n") < 40
    assert "more jobs" in screen.plain


def test_the_screen_fills_but_never_overflows() -> None:
    for height in (10, 24, 50):
        lines = frame(busy(), "rrd is not running; waiting for it", 100, height).plain.split("\n")
        assert len(lines) <= height
    assert "gone" in frame(busy(), "", 100, 50).plain


def test_watching_off_a_terminal_prints_changes_only() -> None:
    seen = [snapshot(job("a", step=1), job("b", JobState.WAITING, why="no room")),
            snapshot(job("a", step=1), job("b", JobState.WAITING, why="no room")),
            snapshot(job("a", step=2), job("b", JobState.WAITING, why="no room")),
            snapshot(job("a", step=2))]

    def look() -> Snapshot:
        if not seen:
            raise NotRunning("rrd is not running")
        return seen.pop(0)

    got: list[str] = []
    with pytest.raises(NotRunning):
        got.extend(line[9:] for line in changes(look, lambda: got.append("--")))
    assert got == ["a: running, step 1/1500, loss 2.341, 28.5 steps/min, eta 47 min", "b: waiting, no room", "--", "--",
                   "a: running, step 2/1500, loss 2.341, 28.5 steps/min, eta 47 min", "--", "b: gone", "--"]


def test_watch_off_a_terminal_ends_with_the_daemon(rrd: Rrd, daemon: FakeDaemon) -> None:
    answers = [{"ok": True, "result": json.loads(busy().model_dump_json())}]
    daemon.answers["status"] = lambda _: answers.pop() if answers else b""
    result = rrd("watch", "--interval", "0.2")
    assert result.exit_code == 3
    assert "code-a: running, step 150/1500" in result.stdout


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "soon"])
def test_watch_wants_an_interval_it_can_keep(rrd: Rrd, daemon: FakeDaemon, seconds: str) -> None:
    result = rrd("watch", "--interval", seconds)
    assert result.exit_code == 2 and "Invalid value for '--interval'" in result.stderr


def test_sparkline() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2, 2]) == "▄▄"
    assert sparkline([1, math.nan, 2, math.inf]) == "▁ █ "
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert len(sparkline(range(100), 16)) == 16


def unstyled(text: str) -> str:
    import click

    return click.unstyle(text)
