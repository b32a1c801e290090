"""rrd events: what happened to all of it, in the order in which it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from conftest import Rrd
from fake_daemon import HOSTILE

from rrd.cli.events import Story
from rrd.journal import DAEMON_EVENTS, Event, JobFiles, Kind


@pytest.fixture
def told(state: Path) -> JobFiles:
    sink = JobFiles(state / "jobs")
    sink.write(Event(1000.0, Kind.READY, "info", "ready: 2 dies in 1 lane"))
    sink.write(Event(1001.0, Kind.JOB_ACCEPTED, "info", "accepted, lora on /m", job="b"))
    sink.write(Event(1002.0, Kind.JOB_ACCEPTED, "info", "accepted, lora on /m", job="a"))
    sink.write(Event(1003.0, Kind.GATE_REFUSED, "warning", "the gate refused it; trying again in 1 s", die="1"))
    sink.write(Event(1004.0, Kind.FAILED, "error", "its data is gone", hint="bring it back", job="b", die="0", step=7))
    return sink


def test_the_story_of_everything(rrd: Rrd, told: JobFiles) -> None:
    lines = [line[21:] for line in rrd("events").stdout.splitlines()]
    assert lines == ["rrd: ready: 2 dies in 1 lane", "b: accepted, lora on /m", "a: accepted, lora on /m",
                     "die 1: warning: the gate refused it; trying again in 1 s",
                     "b: error: its data is gone (bring it back)  [die 0, step 7]"]


def test_of_some_jobs_the_newest_and_as_json(rrd: Rrd, told: JobFiles) -> None:
    records = [json.loads(line) for line in rrd("events", "b", "--json").stdout.splitlines()]
    assert [(r["job"], r["kind"]) for r in records] == [("b", "job_accepted"), ("b", "failed")]
    assert len(rrd("events", "-n", "2").stdout.splitlines()) == 2
    assert rrd("events", "nobody").exit_code == 4


def test_new_jobs_are_heard_of(state: Path, told: JobFiles) -> None:
    story = Story(lambda: [state, *sorted((state / "jobs").iterdir())])
    assert len(list(story.new())) == 5 and list(story.new()) == []
    told.write(Event(1005.0, Kind.DONE, "info", "done after 9 steps: /out", job="new"))
    told.write(Event(1004.5, Kind.STOPPED, "info", "stopped"))
    assert [r["message"] for r in story.new()] == ["stopped", "done after 9 steps: /out"]


def test_following_goes_on(state: Path, told: JobFiles) -> None:
    process = subprocess.Popen([sys.executable, "-m", "rrd", "events", "-f", "--state", str(state)],
                               stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout
        first = [process.stdout.readline() for _ in range(5)]
        assert "ready" in first[0]
        told.write(Event(1010.0, Kind.DONE, "info", "done after 9 steps: /out", job="a"))
        assert "a: done after 9 steps: /out" in process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_nothing_hostile_is_obeyed(rrd: Rrd, state: Path, told: JobFiles) -> None:
    with open(state / "jobs" / "a" / "events.jsonl", "a") as f:
        f.write(json.dumps({"time": 1006.0, "level": HOSTILE, "message": HOSTILE, "hint": HOSTILE, "die": HOSTILE}))
        f.write("\n")
    out = rrd("events", color=True).stdout
    assert not [c for c in click.unstyle(out) if c in "\x1b\x07\u202e"] and "evil" in out


def test_the_daemon_s_own_events_do_not_grow_for_ever(state: Path, told: JobFiles) -> None:
    file = state / "events.jsonl"
    os.truncate(file, DAEMON_EVENTS + 1)
    told.write(Event(1010.0, Kind.READY, "info", "ready again"))
    assert len(file.read_text().splitlines()) == 1
