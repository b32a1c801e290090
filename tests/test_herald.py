"""Telling that a job has ended: at least once, and never in the way."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from boxes import box, toy_keys, write_job

from rrd import herald
from rrd.config import Config
from rrd.errors import BadConfig
from rrd.herald import Herald, deliver, untold
from rrd.job import JobSpec
from rrd.ledger import Ledger, Record
from rrd.roster import Job
from rrd.states import JobState

SPEC = JobSpec.model_validate({"model": "/m", "data": "/d", "max_steps": 5})


class Memory:
    """Stands for the keeper and the journal."""

    def __init__(self) -> None:
        self.saved: list[Record] = []
        self.said: list[str] = []

    def save(self, job: Job, *, spec: bool = False) -> None:
        self.saved.append(job.record.model_copy())

    def event(self, kind: Any, level: str, message: str, **more: Any) -> None:
        self.said.append(message)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ended(name: str = "a", state: JobState = JobState.DONE, at: float = 100.0) -> Job:
    return Job(Record(id=name, state=state, finished_at=at), SPEC)


def a_herald(jobs: list[Job], **config: Any) -> tuple[Herald, Memory, Clock]:
    memory, clock, settings = Memory(), Clock(), Config.model_validate(config)
    return Herald(lambda: settings, lambda: jobs, memory, memory, monotonic=clock), memory, clock  # type: ignore[arg-type]


def script(path: Path, body: str) -> list[str]:
    path.write_text(body)
    return [sys.executable, str(path)]


def test_a_program_gets_the_job_as_json_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    hook = script(tmp_path / "x.py", "import sys, os; open(sys.argv[1], 'a').write(sys.stdin.read() + os.environ"
                                     "['RRD_JOB'] + os.environ['RRD_STATE'] + '\\n')")
    job = ended()
    h, memory, _ = a_herald([job], on_done=[*hook, str(out)])
    for _ in range(3):
        asyncio.run(h.tell_all())
    said, _, rest = out.read_text().partition("}")
    assert json.loads(said + "}")["job"] == "a" and rest == "adone\n"
    assert memory.saved[-1].told_at == 100.0 and not untold(job)


def test_a_receiver_that_fails_is_asked_again_ever_more_rarely(tmp_path: Path) -> None:
    flag = tmp_path / "up"
    hook = script(tmp_path / "x.py", "import sys, os; open(sys.argv[1] + '.tries', 'a').write('x')\n"
                                     "sys.exit(0 if os.path.exists(sys.argv[1]) else 'the receiver is down')")
    job = ended(state=JobState.FAILED)
    h, memory, clock = a_herald([job], on_failed=[*hook, str(flag)])
    tried = []
    for second in range(0, 200, 5):
        clock.now = float(second)
        asyncio.run(h.tell_all())
        tried.append(len((tmp_path / "up.tries").read_text()))
    assert [tried[i] for i in (0, 1, 2, 5, 6, 13, 14, 39)] == [1, 1, 2, 2, 3, 3, 4, 5]  # at 0, 10, 30, 70, 150 seconds
    assert len(memory.said) == 1 and memory.said[0].startswith("could not tell that it has failed: ")
    assert "the receiver is down" in memory.said[0]
    flag.touch()
    clock.now = 1000.0
    asyncio.run(h.tell_all())
    assert memory.said[1:] == ["told that it has failed, after all"] and not untold(job)


def test_after_a_crash_it_is_told_and_another_end_too(tmp_path: Path) -> None:
    """The record on disk says whether this end was told."""
    ledger = Ledger(tmp_path)
    ledger.save(ended().record)
    record = ledger.load()[0]["a"]
    assert untold(Job(record, SPEC))
    record.told_at = record.finished_at
    ledger.save(record)
    record = ledger.load()[0]["a"]
    assert not untold(Job(record, SPEC))
    record.finished_at = 200.0  # tried again, and ended again
    assert untold(Job(record, SPEC))
    assert not untold(Job(Record(id="b", state=JobState.RUNNING), SPEC))


def test_ends_from_before_a_hook_was_set_are_not_told(tmp_path: Path) -> None:
    job = ended()
    h, memory, _ = a_herald([job])
    asyncio.run(h.tell_all())
    assert not untold(job) and memory.saved and memory.said == []


def test_a_receiver_that_hangs_is_killed_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herald, "TELL_SECONDS", 0.3)
    begin = time.monotonic()
    trouble = deliver(("/bin/sh", "-c", "sleep 600 & sleep 600"), {"job": "a", "state": "done"})
    assert "had not ended" in trouble and time.monotonic() - begin < 20


def test_what_cannot_be_run_is_a_sentence() -> None:
    assert "No such file" in deliver(("/nowhere/program",), {"job": "a", "state": "done"})
    assert deliver(("http://127.0.0.1:1/",), {"job": "a"}) != ""


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/x", got
    server.shutdown()
    server.server_close()


def test_a_url_gets_a_post(receiver: tuple[str, list[dict[str, Any]]]) -> None:
    url, got = receiver
    h, _, _ = a_herald([ended(), ended("b", JobState.FAILED)], on_done=url)
    asyncio.run(h.tell_all())
    assert [(g["job"], g["state"]) for g in got] == [("a", "done")]


@pytest.mark.parametrize("value", ["tell me", ["tell"], ["bin/tell"], "ftp://x", [1]])
def test_what_is_neither_program_nor_url_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "rrd.toml").write_text(f"on_done = {json.dumps(value)}\n")
    with pytest.raises(BadConfig):
        Config.load(tmp_path / "rrd.toml")


def test_a_daemon_tells(tmp_path: Path, receiver: tuple[str, list[dict[str, Any]]]) -> None:
    url, got = receiver
    with box(tmp_path, f'cpu_dies = 1\non_done = "{url}"\non_failed = "{url}"\n') as b:
        b.start()
        write_job(b.jobs_dir, "good", **toy_keys(tmp_path, max_steps=5))
        write_job(b.jobs_dir, "bad", **toy_keys(tmp_path, data="/nowhere.jsonl"))
        b.wait_state("good", "done")
        b.wait_state("bad", "failed")
        end = time.monotonic() + 30
        while len(got) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert b.stop() == 0
        assert {g["job"]: g["state"] for g in got} == {"good": "done", "bad": "failed"}
        assert next(g for g in got if g["job"] == "bad")["why"].startswith("/nowhere.jsonl: ")
        b.start()
        b.wait(lambda s: len(s.jobs) == 2, "not back")
        assert b.stop() == 0 and len(got) == 2, "told once, not at every start"
