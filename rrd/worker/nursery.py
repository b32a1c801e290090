"""The nursery: one process that has imported torch and does nothing but fork workers.

Importing torch costs a second and 200 MB; a fork of a process that has done so costs 10 ms and shares the memory.
It must never compute anything (a fork after a multi-threaded operation hangs) and never touch a die.

The daemon sends, over a SOCK_SEQPACKET socket, one JSON packet a worker together with the worker's own socket and a
file for its stack if it crashes; the nursery answers ``{"pid", "id"}`` and later ``{"pid", "status"}``. When the
daemon's end closes, workers see their own sockets close, and end; the nursery ends when they have. One that does not
end (stopped, or in a native call that takes its time) would keep the locks of its jobs from the next daemon: it is
killed after ``ORPHAN_SECONDS``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator

PACKET = 1 << 16
ORPHAN_SECONDS = 10.0
"""How long workers have to end by themselves when the daemon is gone: enough to finish a write."""

_alive: set[int] = set()
"""The workers that have not ended yet."""


class DaemonGone(Exception):
    """The daemon's end of the control socket is closed."""


def main() -> None:
    """``python -m rrd.worker.nursery FD``."""
    control = socket.socket(fileno=int(sys.argv[1]))
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch misses it; we do not
    import rrd.worker.loop  # brings torch, once, for all workers to come

    assert rrd.worker.loop is not None
    gc.collect()
    gc.freeze()  # or each worker's collector would visit, and so copy, 50 MB of torch's objects
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the daemon's to handle
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with contextlib.suppress(ConnectionError, DaemonGone):
        _serve(control, wake_r, wake_w)
    _outlive(wake_r)


def _serve(control: socket.socket, wake_r: int, wake_w: int) -> None:
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(wake_r, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is control:
                    _answer(control, (wake_r, wake_w))
                else:
                    os.read(wake_r, 4096)
                    _reap(control)


def _answer(control: socket.socket, private: tuple[int, int]) -> None:
    try:
        packet, fds, _, _ = socket.recv_fds(control, PACKET, 2)
    except ConnectionResetError:  # the daemon was killed with an answer of ours unread
        packet, fds = b"", []
    if not packet:
        raise DaemonGone
    request = json.loads(packet)
    pid = os.fork()
    if pid == 0:
        _become_worker(control, private, fds, request)
    _alive.add(pid)
    for fd in fds:
        os.close(fd)
    control.send(json.dumps({"pid": pid, "id": request["id"]}).encode())


def _become_worker(control: socket.socket, private: tuple[int, int], fds: list[int],
                   request: dict[str, object]) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for other in private:
            os.close(other)
        from rrd.worker import entry

        status = entry.main(socket.socket(fileno=fds[0]), request, *fds[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # never unwind into the nursery's loop


def _outlive(wake_r: int) -> None:
    """Wait for the workers, and kill those that stay too long. One that hangs in the kernel is not waited for."""
    end = time.monotonic() + ORPHAN_SECONDS
    while True:
        list(_ended())
        seconds = end - time.monotonic()
        if not _alive or seconds <= 0:
            break
        select.select([wake_r], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(wake_r, 4096)
    for pid in _alive:
        os.kill(pid, signal.SIGKILL)  # our child, and not reaped: the number is nobody else's yet


def _reap(control: socket.socket) -> None:
    for pid, status in _ended():
        control.send(json.dumps({"pid": pid, "status": status}).encode())


def _ended() -> Iterator[tuple[int, int]]:
    """(pid, exit status) of each worker that has ended since."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _alive.discard(ended[0])
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    main()
