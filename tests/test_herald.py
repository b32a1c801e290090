"""Telling that a job has ended: at least once, and never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
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


def told(hook: tuple[str, ...]) -> str:
    return asyncio.run(deliver(hook, {"job": "a", "state": "done"}))


def gone(pid: int) -> bool:
    """Whether the process has ended; it may still be waited for by whoever inherited it."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
    return False


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
    trouble = told(("/bin/sh", "-c", "sleep 600 & echo $! > " + str(tmp_path / "pid") + "; sleep 600"))
    assert trouble == "/bin/sh: it had not ended after 300 ms" and time.monotonic() - begin < 20
    assert gone(int((tmp_path / "pid").read_text()))


def test_one_that_cannot_even_be_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herald, "TELL_SECONDS", 0.2)
    monkeypatch.setattr(herald, "KILLED_WITHIN", 0.2)
    with monkeypatch.context() as deaf:
        deaf.setattr(os, "killpg", lambda *_: None)
        begin = time.monotonic()
        trouble = told(("/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"))
        assert trouble == "/bin/sh: it had not ended after 200 ms"
        assert time.monotonic() - begin < 20
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_what_a_program_leaves_in_the_background_neither_counts_nor_ends(tmp_path: Path) -> None:
    """It keeps the standard error, on which nobody may wait then."""
    begin = time.monotonic()
    assert told(("/bin/sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid")) == ""
    pid = int((tmp_path / "pid").read_text())
    assert time.monotonic() - begin < 20
    os.kill(pid, signal.SIGKILL)  # which is there to be killed


def test_a_program_that_talks_and_reads_nothing_is_told_all_the_same(tmp_path: Path) -> None:
    assert told(("/bin/sh", "-c", "exec 0<&-; head -c 10000000 /dev/zero >&2; exit 0")) == ""
    assert told(("/bin/sh", "-c", "seq 1 100000 >&2; printf 'evil\\033[2J' >&2; exit 3")) == r"/bin/sh: evil\u001b[2J"
    assert told(("/bin/sh", "-c", "exit 3")) == "/bin/sh: it ended with status 3"
    assert told(("/bin/sh", "-c", "kill -9 $$")) == "/bin/sh: it ended with status -9"


def test_what_cannot_be_run_is_a_sentence() -> None:
    assert "No such file" in told(("/nowhere/program",))
    assert told(("http://127.0.0.1:1/secret",)) == "127.0.0.1:1: [Errno 111] Connection refused"


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


GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.contextmanager
def answering(*parts: bytes, pause: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """A port that answers whatever it is asked with these bytes; what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, contextlib.suppress(OSError):
                        asked.append(b"")
                        while not asked[-1].endswith(b"}"):  # the whole of it, or its sender is told of a reset
                            asked[-1] += client.recv(65536)
                        for part in parts:
                            client.sendall(part)
                            time.sleep(pause)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/in?token=secret", asked
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("answer", "trouble"), [
    (GOOD, ""), (b"HTTP/1.1 204 No Content\r\n\r\n", ""), (b"HTTP/1.0 202 Accepted\r\n\r\nhalf a bo", ""),
    (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", "it answered 500 Internal Server Error"),
    (b"HTTP/1.1 404 \r\n\r\n", "it answered 404"),
    (b"HTTP/1.1 301 Moved\r\nLocation: /there\r\n\r\n", "it answered 301 Moved, which leads to /there: name that URL"),
    (b"HTTP/1.1 303 See Other\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "it answered 303 See Other, which leads to "),
    (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "302"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "its answer makes no sense: BadStatusLine"), (b"\x00\xff\x1b[2J\n", "makes no sense"),
    (b"HTTP/1.1 2x0 OK\r\n\r\n", "makes no sense"), (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, "makes no sense"),
    (b"HTTP/1.1 200 " + b"x" * 70_000, "makes no sense"), (b"", "losed connection without response")],
    ids=lambda v: v[:24].decode(errors="replace") if isinstance(v, bytes) else "")
def test_odd_answers_are_a_sentence_and_no_success(answer: bytes, trouble: str) -> None:
    with answering(answer) as (url, asked):
        said = told((url,))
        assert (trouble in said) if trouble else said == ""
        assert asked[0].startswith(b"POST /in?token=secret") and b"secret" not in said.encode()
        assert not said or (said.startswith("127.0.0.1:") and said.isprintable())
        assert len(asked) == 1, "no redirect was followed"


def test_an_answer_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes before a socket would time out."""
    monkeypatch.setattr(herald, "TELL_SECONDS", 1.5)
    with answering(*[bytes([c]) for c in b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50], pause=0.1) as (url, _):
        begin = time.monotonic()
        assert told((url,)).endswith("it had not ended after 1.5 s") and time.monotonic() - begin < 15


def test_a_hook_that_hangs_neither_holds_up_the_other_nor_the_loop(tmp_path: Path) -> None:
    good = ended("b", JobState.FAILED)
    out = tmp_path / "out"
    h, _, _ = a_herald([ended("a"), ended("a2"), good], on_done=["/bin/sleep", "600"],
                       on_failed=["/bin/sh", "-c", f"cat > {out}"])

    async def both() -> None:
        telling = asyncio.create_task(h.tell_all())
        while untold(good):  # noqa: ASYNC110  # nothing but its record tells
            await asyncio.sleep(0.01)
        assert not telling.done() and json.loads(out.read_text())["job"] == "b"
        telling.cancel()  # as when the daemon stops
        begin = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
        assert time.monotonic() - begin < 5

    asyncio.run(asyncio.wait_for(both(), 60))


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


def test_a_daemon_killed_between_the_end_and_the_telling_tells_at_its_next_start(tmp_path: Path) -> None:
    """At least once: the receiver is down when the job ends, then the daemon is, and only then all is well."""
    out, up = tmp_path / "told", tmp_path / "up"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntest -e {up} || {{ echo $$ > {tmp_path}/tried; exec sleep 600; }}\n"
                    f"cat >> {out}; echo >> {out}\n")
    hook.chmod(0o755)
    with box(tmp_path, f'cpu_dies = 1\non_done = ["{hook}"]\n') as b:
        b.start()
        write_job(b.jobs_dir, "good", **toy_keys(tmp_path, max_steps=5))
        b.wait_state("good", "done")
        b.wait(lambda _: (tmp_path / "tried").exists(), "the hook was not run")
        begin = time.monotonic()
        assert b.job("good") and time.monotonic() - begin < 5, "the hook hangs, the daemon does not"
        b.kill()
        os.kill(int((tmp_path / "tried").read_text()), signal.SIGKILL)  # under systemd it goes with the unit
        assert not out.exists()
        up.touch()
        b.start()
        b.wait(lambda _: out.exists() and out.read_text().endswith("}\n"), "not told after the restart")
        assert b.stop() == 0
        b.start()
        b.wait(lambda s: len(s.jobs) == 1, "not back")
        assert b.stop() == 0
        assert [json.loads(line)["job"] for line in out.read_text().splitlines()] == ["good"], "and not again"
