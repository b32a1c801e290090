"""rrd watch on a terminal: what is on it, what its keys do, how little it sends, and how it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import HOSTILE, FakeDaemon, busy, job, snapshot
from pasts import make_past
from stage import a_busy_box

from rrd.cli.panels import Choice, lines, next_save, timeline
from rrd.cli.watch import frame
from rrd.snapshot import DieView, JobView, Snapshot, VisitView
from rrd.states import JobState


def plain(s: Snapshot, width: int = 80, height: int = 24, choice: Choice | None = None, silent: str = "") -> list[str]:
    return frame(s, silent, width, height, choice).plain.split("\n")


# ---- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (40, 10)])
def test_everything_fits_and_the_chosen_job_is_there(width: int, height: int) -> None:
    s = a_busy_box()
    for j in s.jobs:
        shown = plain(s, width, height, Choice(job=j.id))
        assert len(shown) <= height and max(map(len, shown)) <= width
        assert any(line.startswith("▸ " + j.id[:6]) for line in shown), (j.id, shown)


def test_at_80_by_24_there_are_dies_jobs_and_keys() -> None:
    shown = "\n".join(plain(a_busy_box()))
    for text in ("lane 0: round 12, 98.5% training", "4   ▶ corpus-4", "running", "ETA", "LOSSES", "q end", "▁",
                 "17 jobs", "not taken: unknown key `lrr`"):
        assert text in shown, text


def test_what_is_wrong_is_there_wherever_the_table_stands() -> None:
    s = a_busy_box()
    for height in (24, 50):
        shown = "\n".join(plain(s, 80, height, Choice(job="code-a")))
        for text in ("die 4: the gate refused it", "broken: the model directory /models/gone is", "not taken: "):
            assert text in shown, text
    s.jobs += [job(f"bad-{i}", JobState.FAILED, why="no data") for i in range(30)]
    assert "  and 31 more: `rrd status`" in plain(s)


def test_the_chosen_job_says_what_a_narrow_table_leaves_out() -> None:
    s = snapshot(job("a", checkpoint_every="100", step=130), job("b"))
    assert "    on die 3, saved 2 min ago, next checkpoint: 70 steps" in plain(s, choice=Choice(job="a"))
    assert "on die 3" not in "\n".join(plain(s, 160, choice=Choice(job="a")))


def test_many_dies_leave_room_for_jobs() -> None:
    dies = [DieView(name=str(i), lane="0", device="cpu", state="idle") for i in range(64)]
    dies[40].computing, dies[40].since, dies[7].why = "code-a", 0.0, "fenced: it died"
    s = snapshot(job("code-a"), dies=dies)
    s.lanes = [s.lanes[0].model_copy(update={"dies": [d.name for d in dies]})]
    shown = "\n".join(plain(s))
    assert "64 dies in 1 lane" in shown and "▶ code-a" in shown and "\n  7 " in shown and "q end" in shown


def test_a_timeline_tells_jobs_apart_without_colour() -> None:
    d = DieView(name="0", lane="0", device="cpu", state="computing", computing="b", since=90.0, visits=[
        VisitView(job="a", start=0.0, end=20.0, steps=1), VisitView(job="b", start=40.0, end=60.0, steps=1)])
    assert re.sub(r"\x1b\[\d+m", "", timeline(d, 100.0, 100.0, 10)) == "██··▓▓···▓"
    assert timeline(DieView(name="0", lane="0", device="cpu", state="idle"), 100.0, 60.0, 5) == "·····"


def test_when_the_next_checkpoint_is_due() -> None:
    def at(**more: object) -> str:
        return next_save(JobView(id="a", state=JobState.RUNNING, **more), 1000.0)  # type: ignore[arg-type]

    assert at(checkpoint_every_seconds=600.0, last_checkpoint_at=700.0, loaded_at=100.0) == "5 min"
    assert at(checkpoint_every_seconds=600.0, last_checkpoint_at=None, loaded_at=900.0) == "8 min"
    assert at(checkpoint_every_seconds=600.0, last_checkpoint_at=1.0, loaded_at=2.0) == "due"
    assert at(checkpoint_every="100", step=130) == "70 steps" and at() == "-"


def test_a_daemon_that_is_gone_is_said_above_all() -> None:
    assert plain(busy(), silent="rrd is not running; waiting for it")[0] == "rrd is not running; waiting for it"


def test_hostile_names_stay_on_their_line() -> None:
    s = snapshot(job(HOSTILE, why=HOSTILE), dies=[DieView(
        name=HOSTILE, lane=HOSTILE, device="cpu", state=HOSTILE, computing=HOSTILE, since=1.0)])
    s.lanes = [s.lanes[0].model_copy(update={"name": HOSTILE, "gate": HOSTILE})]
    for view in ("jobs", "log", "curve", "help"):
        shown = lines(s, Choice(job=HOSTILE, view=view, message=HOSTILE), HOSTILE, 80, 24)
        text = re.sub(r"\x1b\[\d+m", "", "".join(shown))
        assert not [c for c in text if c in "\x1b\x07\u202e\n"], view


# ---- on a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """``rrd watch`` on a pseudo-terminal."""

    def __init__(self, state: Path, rows: int = 24, columns: int = 80) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.slave, self.before = slave, termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rrd", "watch", "--interval", "0.3", "--state", str(state)], stdin=slave,
            stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True)
        self.seen = ""

    def read(self, seconds: float) -> str:
        """What came within so many seconds."""
        end, new = time.monotonic() + seconds, ""
        while (left := end - time.monotonic()) > 0 and select.select([self.master], [], [], left)[0]:
            new += os.read(self.master, 1 << 16).decode(errors="replace")
        self.seen += new
        return new

    def until(self, text: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while text not in unstyled(self.seen):
            assert time.monotonic() < end, f"{text!r} never came: {unstyled(self.seen)[-3000:]}"
            self.read(0.1)

    def until_raw(self, text: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} never came: {self.seen[-3000:]!r}"
            self.read(0.1)

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self.master, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def terminal(state: Path, daemon: FakeDaemon) -> Iterator[Terminal]:
    s = busy()
    s.state_dir = str(state)
    s.jobs = [j for j in s.jobs if j.id in ("code-a", "code-b")]
    make_past(state / "jobs" / "code-a", 300)
    daemon.answers["status"] = {"ok": True, "result": json.loads(s.model_dump_json())}
    daemon.answers["pause"] = lambda r: {"ok": True, "result": f"{r['job']} rests after its step in progress"}
    daemon.refuse("resume", "code-a is not paused", 1, "it is running")
    t = Terminal(state)
    yield t
    t.close()


def test_keys_pause_resume_and_open_logs(terminal: Terminal, daemon: FakeDaemon) -> None:
    terminal.until("code-a")
    terminal.press("p")
    terminal.until("choose a job first")
    terminal.press("\x1b[B")  # down
    terminal.until("▸ code-a")
    terminal.press("p")
    terminal.until("code-a rests after its step in progress")
    terminal.press("r")
    terminal.until("code-a is not paused (it is running)")
    assert [a for a in daemon.asked if a["verb"] != "status"] == [
        {"verb": "pause", "job": "code-a"}, {"verb": "resume", "job": "code-a"}]
    terminal.press("l")
    terminal.until("resumed from step 150")
    terminal.press("c")
    terminal.until("held out 2")
    terminal.press("?")
    terminal.until("let it carry on")
    terminal.press("\x1b")
    terminal.until("lane 0")
    terminal.press("j")
    terminal.until("▸ code-b")
    terminal.press("q")
    terminal.read(5)
    assert terminal.process.wait(20) == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_it_leaves_the_terminal_as_it_was(terminal: Terminal, number: int, status: int) -> None:
    terminal.until("code-a")
    assert "\x1b[?1049h" in terminal.seen
    assert termios.tcgetattr(terminal.slave) != terminal.before
    terminal.process.send_signal(number)
    terminal.read(3)
    assert terminal.process.wait(20) == status
    assert terminal.seen.endswith("\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_a_line_that_is_cut_ends_it(terminal: Terminal) -> None:
    """As sshd does it: the other side of the terminal is gone, and a hangup comes where it is the controlling one."""
    terminal.until("code-a")
    os.close(terminal.slave)
    os.close(terminal.master)
    try:
        assert terminal.process.wait(20) in (0, 1), "it noticed"
    finally:
        terminal.master, terminal.slave = os.open("/dev/null", os.O_RDWR), os.open("/dev/null", os.O_RDWR)


def test_it_stops_for_ctrl_z_and_comes_back(terminal: Terminal) -> None:
    terminal.until("code-a")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.until_raw("\x1b[?1049l")
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and termios.tcgetattr(terminal.slave) == terminal.before
    terminal.seen = ""
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until("code-a")
    assert "\x1b[?1049h" in terminal.seen


def test_a_second_in_which_nothing_happens_costs_nothing(terminal: Terminal, daemon: FakeDaemon) -> None:
    terminal.until("q end")
    terminal.read(1.0)
    looks = len(daemon.asked)
    assert len(terminal.read(2.0)) < 200 and len(daemon.asked) > looks + 2
    first = daemon.answers["status"]["result"]["jobs"][0]
    first["step"] = 151
    new = terminal.read(2.0)
    assert "151/1500" in unstyled(new) and len(new) < 600, "only the line that changed"


def test_another_size_is_drawn_anew(terminal: Terminal) -> None:
    terminal.until("q end")
    terminal.seen = ""
    fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    terminal.until("NEXT SAVE")
    assert "\x1b[2J" in terminal.seen
