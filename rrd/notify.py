"""What the daemon tells systemd: ready, stopping, reloading, how it is doing, and that it is alive (sd_notify(3)); and
the sockets that systemd hands to it (sd_listen_fds(3)).

Without NOTIFY_SOCKET, and without LISTEN_FDS, all of it does nothing.
"""

from __future__ import annotations

import os
import socket
import time

from sdnotify import SystemdNotifier

from rrd.text import ascii_line

SEND_SECONDS = 0.2
"""Longest that the loop may wait for systemd to take a message."""


class Notify:
    """The notify protocol over ``sdnotify``, with the environment that systemd gave this process.

    sdnotify sends Latin-1 and whatever it is given: a status with another character is dropped without a word, and a
    newline in it starts an assignment of its own. So every text becomes one line of printable ASCII first.
    """

    def __init__(self) -> None:
        self._systemd = SystemdNotifier()
        if self._systemd.socket is not None:
            self._systemd.socket.settimeout(SEND_SECONDS)
        self._status = ""
        self.watchdog_interval = _watchdog_interval()
        """Seconds between two calls of ``watchdog``, half of what systemd allows; None: it does not watch us."""

    def ready(self, status: str = "") -> None:
        """Started, or reloaded."""
        self._send("READY=1", *self._new_status(status))

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; sent only when it changed."""
        self._send(*self._new_status(text))

    def stopping(self, status: str = "") -> None:
        """Stopping has begun."""
        self._send("STOPPING=1", *self._new_status(status))

    def reloading(self) -> None:
        """Reading the configuration again; ``ready`` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def watchdog(self) -> None:
        """Alive. To be called only from the loop, and only when it has made progress."""
        if self.watchdog_interval is not None:
            self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """Starting or stopping goes on: do not give up on us for so long from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def _new_status(self, text: str) -> list[str]:
        line = ascii_line(text)
        if not line or line == self._status:
            return []
        self._status = line
        return [f"STATUS={line}"]

    def _send(self, *assignments: str) -> None:
        if assignments and self._systemd.socket is not None:
            self._systemd.notify("\n".join(assignments))


def _watchdog_interval() -> float | None:
    """Half of WATCHDOG_USEC in seconds, if it is meant for this process (sd_watchdog_enabled(3))."""
    try:
        limit = int(os.environ.get("WATCHDOG_USEC", "0"))
        pid = int(os.environ.get("WATCHDOG_PID", "0")) or os.getpid()
    except ValueError:
        return None
    return limit / 2e6 if limit > 0 and pid == os.getpid() else None


FIRST_FD = 3


def handed(name: str) -> socket.socket | None:
    """The listening socket that a socket unit of this ``FileDescriptorName=`` hands to this process; None without."""
    try:
        mine = int(os.environ["LISTEN_PID"]) == os.getpid()
        fds = range(FIRST_FD, FIRST_FD + int(os.environ["LISTEN_FDS"]))
    except (KeyError, ValueError):
        return None
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    found = [fd for fd, its in zip(fds, names, strict=False) if its == name] if mine else []
    for fd in found:
        os.set_inheritable(fd, False)  # a worker must not keep it open
    return socket.socket(fileno=found[0]) if found else None
