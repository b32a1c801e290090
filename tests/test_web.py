"""rrd.web: the metrics port as Prometheus and the curious meet it. (What the page shows: test_page.py.)"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import socket
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stage import Stage, job, snapshot, stage

from rrd import web
from rrd.errors import RrdError


@pytest.fixture(scope="module")
def one_stage() -> Iterator[Stage]:
    with stage(snapshot()) as s:
        yield s


@pytest.fixture
def served(one_stage: Stage) -> Stage:
    one_stage.snapshot, one_stage.taken = snapshot(job("a"), job("b")), 0
    return one_stage


def connect(s: Stage) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", s.web.port, timeout=30)


def series(s: Stage) -> dict[tuple[str, str], float]:
    """The scraped values of the jobs' steps, by name and job."""
    return {(sample.name, sample.labels["rrd_job"]): sample.value
            for family in text_string_to_metric_families(s.get("metrics"))
            for sample in family.samples if "rrd_job" in sample.labels}


def test_a_scrape_reads_one_snapshot(served: Stage) -> None:
    assert {j for _, j in series(served)} == {"a", "b"}
    assert served.taken == 1
    assert series(served)["rrd_job_step", "a"] == 150


def test_the_next_scrape_knows_no_job_that_is_gone(served: Stage) -> None:
    series(served)
    served.snapshot = snapshot(job("b", step=151))
    assert {j for _, j in series(served)} == {"b"}
    assert series(served)["rrd_job_step", "b"] == 151


def test_the_format_is_named_and_no_series_says_when_it_was_created(served: Stage) -> None:
    connection = connect(served)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200 and answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    assert "_created" not in text and "# TYPE rrd_job_steps_run_total counter" in text
    connection.close()


def test_a_durations_histogram_is_there_once_something_took_time(served: Stage) -> None:
    assert "rrd_step_duration_seconds_count" not in served.get("metrics")
    served.meters.step("0", 0.2)
    assert 'rrd_step_duration_seconds_count{die="0"} 1' in served.get("metrics")
    served.meters.steps.clear()


def test_a_head_request_has_no_body(served: Stage) -> None:
    connection = connect(served)
    connection.request("HEAD", "/metrics")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    connection.close()


def test_many_scrapers_at_once(served: Stage) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda _: served.get("metrics"), range(64)))
    assert set(texts) == {texts[0]}


def test_a_mute_or_slow_client_holds_up_nobody(served: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", served.web.port)) as mute, \
            socket.create_connection(("127.0.0.1", served.web.port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        for _ in range(3):
            assert series(served)
        mute.shutdown(socket.SHUT_RDWR)
        slow.sendall(b"st: localhost\r\n\r\n")
        assert slow.recv(15) == b"HTTP/1.0 200 OK"
    assert series(served)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("garbage", [
    b"\0\xff" * 100 + b"\r\n\r\n", b"GET\r\n\r\n", b"{}\n\n", b"GET /" + b"x" * 100_000,
], ids=["bytes", "half", "json", "long"])
def test_garbage_is_refused_and_nothing_worse(served: Stage, garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", served.web.port), timeout=30) as s, contextlib.suppress(OSError):
        s.sendall(garbage)
        s.shutdown(socket.SHUT_WR)
        while data := s.recv(1 << 16):
            answer += data
    assert b"200 OK" not in answer
    assert series(served)
    assert capfd.readouterr().err == ""


def test_a_loop_that_does_not_answer_is_said_and_waited_for_no_longer(
        served: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SNAPSHOT_SECONDS", 0.1)
    go_on = threading.Event()
    served.loop.call_soon_threadsafe(go_on.wait, 30)
    with pytest.raises(urllib.error.HTTPError) as e:
        served.get("metrics")
    assert e.value.code == 503 and b"no answer from the loop" in e.value.read()
    go_on.set()
    monkeypatch.undo()
    assert series(served)


def test_an_address_in_use_is_said_in_one_sentence(served: Stage) -> None:
    another = asyncio.run_coroutine_threadsafe(served._make(), served.loop).result(30)
    with pytest.raises(RrdError, match=f"metrics cannot be served on 127.0.0.1:{served.web.port}: Address") as e:
        another.start(("127.0.0.1", served.web.port))
    assert 'metrics = "host:port"' in e.value.hint


def test_a_socket_that_listens_already_is_served(served: Stage) -> None:
    another = asyncio.run_coroutine_threadsafe(served._make(), served.loop).result(30)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    another.start(listening)
    try:
        reader = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        reader.request("GET", "/metrics")
        answer = reader.getresponse()
        assert (another.port, answer.status) == (port, 200)
        assert b'rrd_job_step{rrd_job="a"}' in answer.read()
    finally:
        another.stop()


def test_stopping_is_quick_and_frees_the_port() -> None:
    with stage(snapshot()) as s:
        port = s.web.port
        assert s.get("metrics")
        start = time.monotonic()
    assert time.monotonic() - start < 10
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with stage(snapshot(), port=port) as s:
        assert s.get("metrics")
