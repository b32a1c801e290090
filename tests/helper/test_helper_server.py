"""The server over a backend that does as it is told: swaps that hang, holders that leave, groups that do not wait."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from rrd.helper import server as module
from rrd.helper.base import Refusal
from rrd.helper.device import Fallen
from rrd.helper.group import Group
from rrd.helper.server import Server

DEADLINE = 20.0


class Backend:
    """Opens and closes at once, but where ``hang`` is clear: there it waits, as in the kernel."""

    def __init__(self, *dies: str) -> None:
        self.dies = dies
        self.is_open: str | None = None
        self.hang = threading.Event()
        self.hang.set()
        self.within = threading.Event()
        self.stuck = False

    def start(self) -> None:
        pass

    def open(self, die: str, wanted: Callable[[], bool] = lambda: True) -> None:
        self.within.set()
        assert self.hang.wait(DEADLINE)
        assert self.is_open is None
        self.is_open = die

    def close(self, die: str) -> None:
        assert self.is_open == die
        if self.stuck:
            raise Refusal("it does not let go")
        self.is_open = None


class Signals:
    """In the place of SIGTERM."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def send(self) -> None:
        self._theirs.send(b"x")

    def seen(self) -> bool:
        try:
            return bool(self._ours.recv(1))
        except BlockingIOError:
            return False


class Peer:
    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE)
        self.sock.connect(str(path))

    def send(self, verb: str, die: str) -> None:
        self.sock.sendall(json.dumps({"id": 1, "verb": verb, "die": die}).encode() + b"\n")

    def answer(self) -> dict[str, object]:
        reply = json.loads(self.sock.recv(4096))
        assert reply.pop("id") == 1
        return reply

    def ask(self, verb: str, die: str) -> dict[str, object]:
        self.send(verb, die)
        return self.answer()


@contextmanager
def serving(path: Path, *groups: Group, grace: float = DEADLINE) -> Iterator[tuple[Signals, list[bool]]]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    signals, ended = Signals(), []
    server = Server(listener, groups, users={os.geteuid()}, grace=grace)
    thread = threading.Thread(target=lambda: ended.append(server.run(signals)))  # type: ignore[arg-type]
    thread.start()
    try:
        yield signals, ended
    finally:
        signals.send()
        signals.send()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        listener.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK", 0.02)


def test_a_swap_that_hangs_is_answered_in_its_place_and_undone_when_it_ends(tmp_path: Path) -> None:
    hung, free = Backend("0", "1"), Backend("2")
    hung.hang.clear()
    with serving(tmp_path / "s", Group("a", hung, patience=0.05), Group("b", free, patience=0.05)):
        peer, other = Peer(tmp_path / "s"), Peer(tmp_path / "s")
        assert peer.ask("acquire", "0") == {"ok": False, "reason": "the swap hangs: the bus does not answer"}
        busy = other.ask("acquire", "1")
        assert (busy["ok"], busy["later"]) == (False, True)
        assert "group a is busy" in str(busy["reason"])
        assert other.ask("acquire", "2") == {"ok": True}, "another window is no matter"
        hung.hang.set()
        while not (granted := other.ask("acquire", "1"))["ok"]:
            assert granted["later"]
        assert hung.is_open == "1", "what came too late was undone"
        assert peer.ask("acquire", "0")["reason"] == "die 1 has the bus"


def test_a_holder_that_left_while_its_die_was_opened_holds_nothing(tmp_path: Path) -> None:
    backend = Backend("0", "1")
    backend.hang.clear()
    with serving(tmp_path / "s", Group("a", backend, patience=DEADLINE)):
        peer, other = Peer(tmp_path / "s"), Peer(tmp_path / "s")
        peer.send("acquire", "0")
        assert backend.within.wait(DEADLINE)
        peer.sock.close()
        other.send("acquire", "1")
        backend.hang.set()
        assert other.answer() == {"ok": True}
        assert backend.is_open == "1"


def test_a_die_that_does_not_let_go_is_said_and_the_end_is_no_good_one(tmp_path: Path) -> None:
    backend = Backend("0", "1")
    with serving(tmp_path / "s", Group("a", backend, patience=1.0), grace=0.05) as (signals, ended):
        peer = Peer(tmp_path / "s")
        assert peer.ask("acquire", "0") == {"ok": True}
        backend.stuck = True
        assert peer.ask("release", "0") == {"ok": False, "reason": "it does not let go"}
        backend.stuck, backend.is_open = False, None
        assert peer.ask("acquire", "1") == {"ok": True}
        backend.stuck = True
        signals.send()
    assert ended == [False]


def test_what_befell_the_die_of_one_that_left_is_not_said_of_the_next() -> None:
    class Fell(Backend):
        def close(self, die: str) -> None:
            self.is_open = None
            raise Fallen(f"die {die} has fallen off the bus")

    backend, gone, next_one = Fell("0", "1"), mock.Mock(gone=lambda: True), mock.Mock(gone=lambda: False)
    group = Group("a", backend, patience=1.0)
    group.acquire("0", gone)
    group.acquire("1", next_one)
    assert backend.is_open == "1"


def test_stopping_it_answers_still(tmp_path: Path) -> None:
    backend = Backend("0", "1")
    with serving(tmp_path / "s", Group("a", backend, patience=1.0)) as (signals, ended):
        holder = Peer(tmp_path / "s")
        assert holder.ask("acquire", "0") == {"ok": True}
        signals.send()
        late = Peer(tmp_path / "s")
        while (reply := late.ask("acquire", "1"))["reason"] != "rrd-gate is stopping":
            assert reply["reason"] == "die 0 has the bus"
        assert reply["later"] is True
        assert holder.ask("acquire", "0") == {"ok": True}, "it has it"
        assert holder.ask("release", "0") == {"ok": True}
    assert ended == [True]


def test_many_at_once_never_hold_two(tmp_path: Path) -> None:
    """Twelve peers, four dies; the backend asserts that one is open at a time."""
    backend = Backend("0", "1", "2", "3")
    granted = []

    def life(n: int) -> None:
        peer = Peer(tmp_path / "s")
        for turn in range(8):
            die = str((n + turn) % 4)
            while not peer.ask("acquire", die)["ok"]:
                pass
            granted.append(die)
            if turn % 3 == n % 3:
                peer.sock.close()
                peer = Peer(tmp_path / "s")
            else:
                assert peer.ask("release", die) == {"ok": True}
        peer.sock.close()

    with serving(tmp_path / "s", Group("a", backend, patience=DEADLINE)):
        threads = [threading.Thread(target=life, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * DEADLINE)
        assert not any(thread.is_alive() for thread in threads)
    assert backend.is_open is None
    assert len(granted) == 12 * 8
