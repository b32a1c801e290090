"""rrd.client: what each answer, silence and refusal becomes."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrd import errors
from rrd.client import alive, call

sys.path.append(str(Path(__file__).parent / "cli"))
from fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.close()


def test_the_request_travels_and_the_result_comes_back(daemon: FakeDaemon) -> None:
    daemon.answers["pause"] = {"ok": True, "result": {"text": "ü" * 100_000}}
    assert call(daemon.run_dir, "pause", job="code-a") == {"text": "ü" * 100_000}
    assert daemon.asked == [{"verb": "pause", "job": "code-a"}]


@pytest.mark.parametrize(("code", "kind"), [
    (3, errors.NotRunning), (4, errors.NoSuchJob), (65, errors.Damaged), (75, errors.TryLater), (77, errors.Denied),
    (78, errors.BadConfig), (1, errors.RrdError), (99, errors.RrdError)])
def test_a_refusal_is_raised_as_the_class_of_its_exit_code(
        daemon: FakeDaemon, code: int, kind: type[errors.RrdError]) -> None:
    daemon.refuse("cancel", "no", code, "do this")
    with pytest.raises(errors.RrdError) as e:
        call(daemon.run_dir, "cancel", job="x")
    assert type(e.value) is kind
    assert (e.value.message, e.value.hint) == ("no", "do this")


def test_nobody_there(tmp_path: Path) -> None:
    for run_dir in (tmp_path / "none", tmp_path, tmp_path / ("long" * 60)):
        with pytest.raises(errors.NotRunning):
            call(run_dir, "status")
        assert not alive(run_dir)


def test_a_socket_left_by_a_killed_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "control.sock"))
    with pytest.raises(errors.NotRunning):
        call(tmp_path, "status")
    assert not alive(tmp_path)


def test_silence_has_a_deadline(daemon: FakeDaemon) -> None:
    daemon.answers["status"] = None
    start = time.monotonic()
    with pytest.raises(errors.TryLater, match=r"within 0\.2 s"):
        call(daemon.run_dir, "status", deadline=0.2)
    assert time.monotonic() - start < 2
    assert alive(daemon.run_dir)


def test_a_daemon_that_ends_before_it_answers_is_not_running(daemon: FakeDaemon) -> None:
    daemon.answers["status"] = b""
    with pytest.raises(errors.NotRunning):
        call(daemon.run_dir, "status")


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 400 Bad Request\n", b"[]\n", b"{}\n", b'{"ok": false}\n', b"\xff\n", b"7\n", b"[" * 100_000 + b"\n",
    b'{"ok": false, "error": {"message": "x"}}\n', b'{"ok": false, "error": 3}\n'])
def test_what_is_no_rrd_is_said_to_be_none(daemon: FakeDaemon, answer: bytes) -> None:
    daemon.answers["status"] = answer
    with pytest.raises(errors.ProtocolError, match="no rrd"):
        call(daemon.run_dir, "status")
