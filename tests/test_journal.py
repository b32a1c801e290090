"""Where events go, what they look like there, and that nothing there can hold anybody up."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

import rrd.journal as module
from rrd.journal import EVENTS_FILE, QUEUED, Event, JobFiles, Journal, Journald, Kind, Lines, standard_sink


class Box:
    """A sink that keeps events, and may be blocked or broken."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.open = threading.Event()
        self.open.set()
        self.fault: Exception | None = None

    def write(self, event: Event) -> None:
        self.open.wait(20)
        if self.fault:
            raise self.fault
        self.events.append(event)


def an_event(**changes: object) -> Event:
    facts = {"time": 1.0, "kind": Kind.LOADED, "level": "info", "message": "loaded in 2 s"} | changes
    return Event(**facts)  # type: ignore[arg-type]


# --- the journal itself ---


def test_events_arrive_in_order_with_their_time_and_escaped() -> None:
    box, clock = Box(), iter([10.0, 20.0])
    with Journal([box], wall=lambda: next(clock)) as journal:
        journal.event(Kind.LOADED, "info", "one\n\x1b[2Jtwo", job="a", die="3", step=7)
        journal.event(Kind.FAILED, "error", "bad", hint="do\nthis", job="b")
    first, second = box.events
    assert (first.time, first.message, first.job, first.die, first.step) == (10.0, "one \\u001b[2Jtwo", "a", "3", 7)
    assert second.line == "b: bad (do this)"


def test_below_the_level_nothing_is_told() -> None:
    box = Box()
    with Journal([box]) as journal:
        journal.event(Kind.LOADED, "debug", "quiet")
        journal.event(Kind.LOADED, "notice", "loud")
    assert [e.message for e in box.events] == ["loud"]


def test_a_blocked_sink_blocks_nobody_and_what_is_lost_is_counted_and_said() -> None:
    box = Box()
    box.open.clear()
    with Journal([box]) as journal:
        start = time.monotonic()
        for n in range(QUEUED + 500):
            journal.event(Kind.LOADED, "info", str(n))
        assert time.monotonic() - start < 5
        assert not journal.flush(0.01)
        assert journal.dropped >= 499
        dropped = journal.dropped
        box.open.set()
        assert journal.flush(20)
        journal.event(Kind.LOADED, "info", "after")
    said = [e.message for e in box.events if e.kind is Kind.DROPPED]
    assert said == [f"{dropped} events came too fast to tell"]
    assert box.events[-1].message == "after"


def test_a_broken_sink_is_counted_and_the_others_go_on() -> None:
    bad, good = Box(), Box()
    bad.fault = OSError("no space")
    with Journal([bad, good]) as journal:
        journal.event(Kind.DISK, "error", "full")
        journal.event(Kind.DISK, "info", "well")
        assert journal.flush()
        assert journal.failed == 2
    assert [e.message for e in good.events] == ["full", "well"]


def test_closing_a_stuck_journal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    box = Box()
    box.open.clear()
    journal = Journal([box])
    journal.event(Kind.STOPPED, "info", "stopped")
    start = time.monotonic()
    journal.close()
    assert time.monotonic() - start < 4
    assert not box.events
    box.open.set()
    journal._thread.join(20)
    assert [e.message for e in box.events] == ["stopped"]


def test_message_ids_are_128_bit_fixed_and_each_its_own() -> None:
    ids = [kind.value for kind in Kind]
    assert len(set(ids)) == len(Kind)
    assert all(re.fullmatch(r"[0-9a-f]{32}", i) for i in ids)
    assert Kind.READY.value == "106f27344a73434e9e6f46e504615fc6", "people's filters depend on it"


# --- lines ---


def test_lines_have_the_time_or_a_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    plain, marked = StringIO(), StringIO()
    Lines(plain).write(an_event(time=86400.0, level="warning", die="3", hint="wait"))
    Lines(marked, priorities=True).write(an_event(level="error", job="a"))
    assert plain.getvalue() == "1970-01-02 00:00:00 warning: die 3: loaded in 2 s (wait)\n"
    assert marked.getvalue() == "<3>a: loaded in 2 s\n"


# --- journald ---


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "socket"))
        end.settimeout(5)
        yield end


def fields(data: bytes) -> dict[str, str]:
    """The native protocol, read as journald reads it."""
    out = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, end = rest[8 : 8 + size], rest[8 + size : 9 + size]
            assert end == b"\n"
            rest = rest[9 + size :]
        out[name.decode()] = value.decode()
        data = rest
    return out


def test_journald_gets_structured_fields_and_any_text(journald: socket.socket, tmp_path: Path) -> None:
    stack = "line 1\nPRIORITY=0\n\nMESSAGE=fake ü"
    Journald(tmp_path / "socket").write(
        an_event(level="error", job="code-a", die="3", step=0, hint="read it", fields={"RRD_STACK": stack})
    )
    assert fields(journald.recv(65536)) == {
        "MESSAGE": "code-a: loaded in 2 s (read it)",
        "MESSAGE_ID": Kind.LOADED.value,
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "rrd",
        "RRD_JOB": "code-a",
        "RRD_DIE": "3",
        "RRD_STEP": "0",
        "RRD_HINT": "read it",
        "RRD_STACK": stack,
    }


def test_journald_fields_that_do_not_apply_are_left_out(journald: socket.socket, tmp_path: Path) -> None:
    Journald(tmp_path / "socket").write(an_event())
    assert set(fields(journald.recv(65536))) == {"MESSAGE", "MESSAGE_ID", "PRIORITY", "SYSLOG_IDENTIFIER"}


def test_a_journald_that_is_gone_is_only_counted(tmp_path: Path) -> None:
    with Journal([Journald(tmp_path / "nobody")]) as journal:
        journal.event(Kind.READY, "info", "x")
        assert journal.flush()
        assert journal.failed == 1


def test_the_native_journal_only_if_it_reads_our_standard_error(
    tmp_path: Path, journald: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "stderr", "w") as stream:
        at = os.fstat(stream.fileno())
        monkeypatch.setattr(module, "JOURNAL_SOCKET", tmp_path / "socket")
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert isinstance(standard_sink(stream), Lines)
        monkeypatch.setenv("JOURNAL_STREAM", f"{at.st_dev}:{at.st_ino + 1}")
        assert isinstance(standard_sink(stream), Lines)
        monkeypatch.setenv("JOURNAL_STREAM", f"{at.st_dev}:{at.st_ino}")
        assert isinstance(standard_sink(stream), Journald)
        monkeypatch.setattr(module, "JOURNAL_SOCKET", tmp_path / "none")
        sink = standard_sink(stream)
        sink.write(an_event())
    assert (tmp_path / "stderr").read_text() == "<6>loaded in 2 s\n"
    assert isinstance(standard_sink(StringIO()), Lines)


# --- the jobs' files ---


def test_each_job_has_its_events_as_json_lines(tmp_path: Path) -> None:
    for job in ("a", "b"):
        (tmp_path / job).mkdir()
    files = JobFiles(tmp_path)
    files.write(an_event(job="a", die="0", step=5, hint="h", message="größer"))
    files.write(an_event(job="b"))
    files.write(an_event(job="a", time=2.5))
    files.write(an_event())
    first, second = map(json.loads, (tmp_path / "a" / EVENTS_FILE).read_text().splitlines())
    assert first == {"time": 1.0, "kind": "loaded", "level": "info", "message": "größer", "hint": "h", "step": 5,
                     "die": "0"}
    assert second["time"] == 2.5
    assert len((tmp_path / "b" / EVENTS_FILE).read_text().splitlines()) == 1


def test_a_line_cut_short_by_a_crash_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / EVENTS_FILE
    file.write_text('{"time": 1, "mess')
    JobFiles(tmp_path).write(an_event(job="a"))
    cut, whole = file.read_text().splitlines()
    assert cut == '{"time": 1, "mess'
    assert json.loads(whole)["message"] == "loaded in 2 s"


def test_an_unwritable_log_is_only_counted(tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / EVENTS_FILE).symlink_to("/etc/passwd")
    (tmp_path / "file").touch()
    with Journal([JobFiles(tmp_path)]) as journal:
        journal.event(Kind.LOADED, "info", "x", job="file")
        journal.event(Kind.LOADED, "info", "x", job="linked")
        assert journal.flush()
        assert journal.failed == 2


def test_the_first_event_of_a_job_may_come_before_its_directory(tmp_path: Path) -> None:
    JobFiles(tmp_path).write(an_event(job="new"))
    assert (tmp_path / "new" / EVENTS_FILE).exists()


def test_for_process_writes_lines_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    stream = StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Journal.for_process(tmp_path) as journal:
        journal.event(Kind.DONE, "info", "done after 3 steps", job="a")
    assert stream.getvalue().endswith("a: done after 3 steps\n")
    assert (tmp_path / "a" / EVENTS_FILE).exists()
