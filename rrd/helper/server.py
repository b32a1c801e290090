r"""The socket's side of the helper.

One JSON object a line, at most 4 KiB, one request at a time::

    -> {"id": 7, "verb": "acquire", "die": "3"}
    <- {"id": 7, "ok": true}
    <- {"id": 7, "ok": false, "reason": "die 5 has the bus", "later": true}
    <- {"id": 7, "ok": false, "reason": "die 3 has fallen off the bus", "lost": true}

What a connection holds is taken back when it ends. Each connection has a thread, which does the swap itself: handing
it to another would cost more than the swap. A swap that hangs in the kernel hangs its thread alone: the main thread,
which looks twice a second, then answers in its place.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rrd.helper.base import ERROR, WARNING, Refusal, say
from rrd.helper.group import Group

LINE = 4096
"""Longest line of the protocol, in bytes."""
CONNECTIONS = 16
"""Open at a time; the daemon needs one a lane. More are turned away."""
TICK = 0.5
"""Seconds between two looks for answers that are overdue, while anybody is connected."""
STOPPING_TICK = 0.05
"""Seconds between two looks whether the dies are back."""


class Server:
    """Serves ``groups`` on ``listener`` to root and to peers whose user or group id is in ``users`` or ``gids``."""

    def __init__(self, listener: socket.socket, groups: Sequence[Group], *, users: Collection[int] = (),
                 gids: Collection[int] = (), grace: float = 20.0) -> None:
        self._listener, self._groups, self._grace = listener, groups, grace
        self._users, self._gids = {0, *users}, set(gids)
        self._by_die = {die: group for group in groups for die in group.dies}
        self._connections: set[_Connection] = set()

    def run(self, signals: Signals) -> bool:
        """Serve until a signal; then wait for dies to come back, at most the grace, or until the next signal.
        False if a die could not be closed."""
        self._listener.setblocking(False)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(signals, select.POLLIN)
        end: float | None = None
        while True:
            if signals.seen():
                if end is not None:
                    break
                end = time.monotonic() + self._grace
                for group in self._groups:
                    group.stop()
            if end is not None and (time.monotonic() >= end or not any(group.held for group in self._groups)):
                break
            tick = STOPPING_TICK if end is not None else TICK if self._connections else None
            if any(fd == self._listener.fileno() for fd, _ in poll.poll(tick and 1000 * tick)):
                self._accept()
            for connection in list(self._connections):
                connection.answer_if_overdue()
        closed = [group.end() for group in self._groups]
        return all(closed)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        if len(self._connections) >= CONNECTIONS:
            say(WARNING, f"more than {CONNECTIONS} connections: the newest is turned away")
            sock.close()
            return
        connection = _Connection(sock, self._by_die, self._not_welcome(sock))
        self._connections.add(connection)
        try:
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()
        except RuntimeError as e:
            say(ERROR, f"no thread for a connection: {e}")
            self._connections.discard(connection)
            sock.close()

    def _attend(self, connection: _Connection) -> None:
        try:
            connection.serve()
        finally:
            connection.end()
            for group in self._groups:
                group.leave(connection)
            self._connections.discard(connection)

    def _not_welcome(self, sock: socket.socket) -> str:
        """Why the peer may not ask; empty if it may."""
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in self._users or gid in self._gids:
            return ""
        say(WARNING, f"process {pid} of user {uid}, group {gid} may not use the gate")
        return f"user {uid} may not use the gate"


class _Connection:
    """One peer, and its one request at a time."""

    def __init__(self, sock: socket.socket, groups: Mapping[str, Group], not_welcome: str) -> None:
        self._sock, self._groups, self._not_welcome = sock, groups, not_welcome
        self._lock = threading.Lock()
        self._asked: tuple[object, float] | None = None
        """The id of the request that has no answer yet, and when it is overdue."""
        if not_welcome:
            sock.settimeout(1.0)

    def serve(self) -> None:
        """Answer requests until the peer goes, or says something that is none."""
        pending = b""
        with suppress(OSError, ValueError):
            while data := self._sock.recv(LINE):
                pending += data
                while b"\n" in pending:
                    line, _, pending = pending.partition(b"\n")
                    self._handle(line)
                    if self._not_welcome:
                        return
                if len(pending) >= LINE:
                    raise ValueError("too long")

    def gone(self) -> bool:
        """See Owner. Known before its thread has read to the end."""
        poll = select.poll()
        try:
            poll.register(self._sock, 0)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def end(self) -> None:
        """Hang up."""
        with self._lock:
            self._asked = None
            self._sock.close()

    def _handle(self, line: bytes) -> None:
        """Raises ValueError for what is no request, OSError when the peer takes no answer."""
        request = _request(line)
        ident, die = request["id"], request["die"]
        group = self._groups.get(die)
        self._asked = ident, time.monotonic() + (2 * group.patience if group else TICK)
        try:
            self._do(request["verb"], die, group)
            reply: dict[str, object] = {"ok": True}
        except Refusal as e:
            said = {"later": e.later, "lost": e.lost}
            reply = {"ok": False, "reason": e.reason} | {word: True for word, so in said.items() if so}
        if not self._answer(ident, reply) and group:
            group.leave(self)  # it was told that it has not got it

    def _do(self, verb: str, die: str, group: Group | None) -> None:
        if self._not_welcome:
            raise Refusal(self._not_welcome)
        if group is None:
            raise Refusal(f"no group has a die {die[:40]!r}")
        if verb == "acquire":
            group.acquire(die, self)
        elif verb == "release":
            group.release(die, self)
        else:
            raise Refusal(f"no such verb: {verb[:40]!r}")

    def answer_if_overdue(self) -> None:
        """For the main thread: answer in the place of a swap that hangs."""
        asked = self._asked
        if asked is not None and time.monotonic() > asked[1]:
            say(ERROR, "a swap hangs: the bus does not answer")
            with suppress(OSError):
                self._answer(asked[0], {"ok": False, "reason": "the swap hangs: the bus does not answer"})

    def _answer(self, ident: object, reply: Mapping[str, object]) -> bool:
        """Whether this was the answer; False if the request had one."""
        with self._lock:
            if self._asked is None or self._asked[0] is not ident:
                return False
            self._asked = None
            data = json.dumps({"id": ident, **reply}).encode() + b"\n"
            if self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) != len(data):
                raise OSError("the peer does not read")
            return True


def refuse_all(listener: socket.socket, reason: str) -> None:
    """Answer each connection that waits, once: the last words of a helper that cannot serve."""
    listener.setblocking(False)
    with suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with sock, suppress(OSError, ValueError):
                sock.settimeout(TICK)
                request = _request(sock.recv(LINE))
                sock.sendall(json.dumps({"id": request["id"], "ok": False, "reason": reason[:1000]}).encode() + b"\n")


def _request(line: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not (isinstance(request, dict) and isinstance(request.get("verb"), str) and isinstance(request.get("die"), str)
            and isinstance(request.get("id"), (int, str)) and len(line) <= LINE):
        raise ValueError("no request")
    return request


class Signals:
    """SIGTERM and SIGINT, as something to poll, from the moment it is entered."""

    def __enter__(self) -> Signals:
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs
        self._ours.setblocking(False)
        theirs.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        self._ours.close()
        self._theirs.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def seen(self) -> bool:
        """Whether one has come since the last look."""
        try:
            return bool(self._ours.recv(64))
        except BlockingIOError:
            return False
