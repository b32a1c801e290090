"""rrd.worker.channel: orders in, reports out, and the end of the daemon noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rrd.errors import ProtocolError
from rrd.messages import REPORTS, Decoder, Evict, Evicted, Message, Progress, Stop, Yield, encode
from rrd.worker import channel
from rrd.worker.channel import Channel, Closed


class Daemon:
    """The other end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self._decoder = sock, Decoder(REPORTS)
        self.socket.settimeout(30)

    def say(self, *orders: Message) -> None:
        self.socket.sendall(b"".join(map(encode, orders)))

    def hear(self) -> list[Message]:
        """What was reported until the worker's end was closed."""
        heard: list[Message] = []
        while data := self.socket.recv(1 << 16):
            heard += self._decoder.feed(data)
        return heard


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Daemon]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(theirs), Daemon(ours)


def test_orders_are_received_in_order_however_they_come(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    orders = [Evict(job="a"), Yield(), Evict(job="b"), Stop()]
    stream = b"".join(map(encode, orders))
    daemon.socket.sendall(stream[:50])
    assert worker.receive() == orders[0]
    daemon.socket.sendall(stream[50:])
    assert [worker.receive() for _ in orders[1:]] == orders[1:]


def test_looking_for_an_order_never_waits_and_loses_none(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    assert not worker.pending()
    daemon.socket.sendall(encode(Yield())[:5])
    assert not worker.pending()  # half an order is none yet
    daemon.socket.sendall(encode(Yield())[5:])
    assert worker.pending() and worker.pending()
    assert worker.receive() == Yield()
    assert not worker.pending()


def test_the_end_of_the_daemon_is_seen_wherever_one_looks(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    daemon.say(Stop())
    daemon.socket.close()
    with pytest.raises(Closed):
        worker.pending()
    for look in (worker.pending, lambda: worker.send(Evicted(job="a")), lambda: worker.progress("a", "x", 0.5)):
        with pytest.raises(Closed):
            look()
    assert worker.receive() == Stop()  # what was said before is still heard
    with pytest.raises(Closed):
        worker.receive()


def test_a_reset_is_an_end(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    worker.send(Evicted(job="a"))
    daemon.socket.close()  # with a report unread
    with pytest.raises(Closed):
        worker.receive()


def test_nonsense_is_no_order(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    daemon.socket.sendall(encode(Evicted(job="a")))
    with pytest.raises(ProtocolError):
        worker.receive()


def test_reports_of_several_threads_do_not_mix(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    threads = [threading.Thread(target=lambda i=i: [worker.send(Evicted(job=f"{i}" * 300_000)) for _ in range(5)])
               for i in range(4)]
    for thread in threads:
        thread.start()
    hearing: list[Message] = []
    listener = threading.Thread(target=lambda: hearing.extend(daemon.hear()))
    listener.start()
    for thread in threads:
        thread.join(30)
    worker._socket.shutdown(socket.SHUT_WR)
    listener.join(30)
    assert sorted(m.job[0] for m in hearing if isinstance(m, Evicted)) == sorted("0123" * 5)


def test_progress_is_said_twice_a_second_and_within_bounds(
        ends: tuple[Channel, Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, daemon = ends
    clock = iter([10.0, 10.25, 10.49, 10.5, 10.75, 11.0, 11.5])
    monkeypatch.setattr(channel.time, "monotonic", lambda: next(clock))
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, -1.0, 7.0):
        worker.progress("a", "loading", share)
    worker._socket.close()
    heard = daemon.hear()
    assert [m.share for m in heard if isinstance(m, Progress)] == [0.1, 0.4, 0.0, 1.0]


def test_a_sign_of_life_is_repeated_until_it_is_too_old(
        ends: tuple[Channel, Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, daemon = ends
    worker.repeat(60.0)  # nothing was said yet
    clock = iter([10.0, 10.1, 11.0, 70.0, 70.2, 130.3])
    monkeypatch.setattr(channel.time, "monotonic", lambda: next(clock))
    for share in (0.1, 0.2):
        worker.progress("a", "exporting", share)
    for _ in range(2):
        worker.repeat(60.0)
    worker.progress("a", "exporting", 0.3)
    worker.repeat(60.0)
    worker._socket.close()
    assert [m.share for m in daemon.hear() if isinstance(m, Progress)] == [0.1, 0.2, 0.2, 0.3]


def test_what_waits_is_as_urgent_as_the_most_urgent_of_it(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    assert worker.urgency() == -1
    for order, urgency in ((Evict(job="a"), 0), (Yield(urgency=1), 1), (Yield(), 1), (Yield(urgency=2), 2)):
        daemon.say(order)
        assert worker.urgency() == urgency
    assert worker.receive() == Evict(job="a")  # looking takes nothing away


def test_the_end_is_urgent(ends: tuple[Channel, Daemon]) -> None:
    worker, daemon = ends
    daemon.say(Stop())
    assert worker.urgency() == 1
