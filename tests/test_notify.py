"""What reaches systemd, byte for byte."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrd.notify import Notify, handed


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The other end of the notify protocol."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@rrd-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name.replace("@", "\0", 1))
        end.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield end


def assignments(systemd: socket.socket) -> list[str]:
    return systemd.recv(65536).decode("ascii").split("\n")


def said_nothing(systemd: socket.socket) -> bool:
    systemd.setblocking(False)
    try:
        return not systemd.recv(65536)
    except BlockingIOError:
        return True


def test_ready_status_stopping(systemd: socket.socket) -> None:
    notify = Notify()
    notify.ready("looking for jobs")
    assert assignments(systemd) == ["READY=1", "STATUS=looking for jobs"]
    notify.status("3 jobs: 2 running, 1 waiting")
    assert assignments(systemd) == ["STATUS=3 jobs: 2 running, 1 waiting"]
    notify.stopping("saving every job")
    assert assignments(systemd) == ["STOPPING=1", "STATUS=saving every job"]
    notify.extend(90.5)
    assert assignments(systemd) == ["EXTEND_TIMEOUT_USEC=90500000"]


def test_reloading_carries_the_monotonic_time(systemd: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    Notify().reloading()
    flag, at = assignments(systemd)
    assert flag == "RELOADING=1"
    assert before <= int(at.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


@pytest.mark.parametrize("text", ["code-ä → 日本\nSTOPPING=1", "a\r\nMAINPID=1\x00\x1b[2J", "‮evil", "x" * 5000])
def test_a_status_is_one_line_of_printable_ascii_and_always_arrives(systemd: socket.socket, text: str) -> None:
    Notify().status(text)
    (only,) = assignments(systemd)
    assert only.startswith("STATUS=")
    assert only.isprintable()
    assert len(only) < 300


def test_the_same_status_is_sent_once(systemd: socket.socket) -> None:
    notify = Notify()
    notify.status("idle")
    assignments(systemd)
    notify.status("idle")
    assert said_nothing(systemd)


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [
        ("30000000", None, 15.0),
        ("30000000", "self", 15.0),
        ("30000000", "1", None),
        (None, None, None),
        ("x", None, None),
    ],
)
def test_watchdog_at_half_its_interval_if_it_is_ours(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, interval: float | None
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", str(os.getpid()) if pid == "self" else pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    notify = Notify()
    assert notify.watchdog_interval == interval
    notify.watchdog()
    if interval is None:
        assert said_nothing(systemd)
    else:
        assert assignments(systemd) == ["WATCHDOG=1"]


def test_a_systemd_that_does_not_listen_cannot_hold_us_up(systemd: socket.socket) -> None:
    notify = Notify()
    start = time.monotonic()
    n = 0
    while time.monotonic() - start < 0.15 and n < 10_000:  # until its queue is full
        notify.status(f"status {n}")
        n += 1
    start = time.monotonic()
    notify.status("one more")
    assert time.monotonic() - start < 1


def test_without_a_socket_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    notify = Notify()
    notify.ready("x")
    notify.reloading()
    notify.watchdog()
    notify.extend(1)
    notify.stopping()


def test_the_socket_that_systemd_hands_over_is_known_by_its_name(tmp_path: Path) -> None:
    """In a process of its own, as file descriptors 3 and 4 are."""
    code = ("import os, sys; from rrd.notify import handed\n"
            "os.environ['LISTEN_PID'] = str(os.getpid() + int(sys.argv[1]))\n"
            "s = handed('metrics'); print(s and (s.fileno(), os.get_inheritable(s.fileno()), s.getsockname()))")
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))

        def ask(names: str, other: int = 0) -> str:
            shuffle = f"exec {sys.executable} - {other} 3<&{one.fileno()} 4<&{two.fileno()}"
            return subprocess.run(["bash", "-c", shuffle], input=code, text=True, capture_output=True, check=True,
                                  pass_fds=(one.fileno(), two.fileno()), cwd=Path(__file__).parent.parent,
                                  env={**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": names}).stdout.strip()

        assert ask("other:metrics") == str((4, False, two.getsockname()))
        assert ask("other:another") == "None"
        assert ask("other:metrics", other=1) == "None", "meant for another process"
    assert handed("metrics") is None, "nothing was handed to the tests"
