"""The worker's end of its socket: blocking reads, a look without waiting, and sends from any thread."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque

from rrd.messages import ORDERS, Decoder, Message, Progress, Stop, Yield, encode

PROGRESS_SECONDS = 0.5
"""Signs of life are at least so far apart: half of the shortest silence that may count as a hang."""


class Closed(Exception):
    """The daemon is gone: there is nobody to work for."""


class Channel:
    """Orders in, reports out. Raises Closed as soon as the other end is."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._decoder = sock, Decoder(ORDERS)
        self._waiting: deque[Message] = deque()
        self._sending = threading.Lock()
        self._last_progress = 0.0
        self._alive: tuple[float, str, str, float] | None = None
        """The newest sign of life, sent or not, and when it was given."""

    def receive(self) -> Message:
        """The next order, waiting for it."""
        while not self._waiting:
            self._read()
        return self._waiting.popleft()

    def pending(self) -> bool:
        """Whether an order is waiting to be received; never waits. Between steps this is also how EOF is seen."""
        while select.select([self._socket], [], [], 0)[0]:
            self._read()
        return bool(self._waiting)

    def urgency(self) -> int:
        """The most urgent of what waits: -1 nothing, else as ``Yield`` has it; an order of any other kind is 0, and
        Stop 1."""
        if not self.pending():
            return -1
        return max(o.urgency if isinstance(o, Yield) else int(isinstance(o, Stop)) for o in self._waiting)

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError as e:
            raise Closed from e
        if not data:
            raise Closed
        self._waiting.extend(self._decoder.feed(data))

    def send(self, report: Message) -> None:
        with self._sending:
            try:
                self._socket.sendall(encode(report))
            except OSError as e:
                raise Closed from e

    def progress(self, job: str, what: str, share: float) -> None:
        """A sign of life during long work, of which few are sent; also notices that the daemon is gone."""
        now = time.monotonic()
        self._alive = now, job, what, share
        if now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.send(Progress(job=job, what=what, share=min(max(share, 0.0), 1.0)))

    def repeat(self, most: float) -> None:
        """Send the newest sign of life again, unless it is older than ``most`` seconds."""
        if self._alive and time.monotonic() - self._alive[0] < most:
            _, job, what, share = self._alive
            self.send(Progress(job=job, what=what, share=min(max(share, 0.0), 1.0)))
