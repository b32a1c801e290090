"""The client of the daemon's control socket: one request, one answer, a deadline; blocking.

A request is a line of JSON, ``{"verb": "pause", "job": "code"}``; the answer is ``{"ok": true, "result": …}`` or
``{"ok": false, "error": {"message", "hint", "exit_code"}}``, also one line.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from rrd.errors import (
    BadConfig,
    Damaged,
    Denied,
    NoSuchJob,
    NotRunning,
    ProtocolError,
    RrdError,
    TryLater,
)

SOCKET = "control.sock"
MAX_ANSWER = 64 << 20
"""Bytes; a status of 10,000 jobs takes about 10 MB."""

DEADLINE = 5.0
"""Seconds for the whole exchange. The daemon answers within one (I4); the rest is for a box that swaps."""

_BY_CODE: dict[int, type[RrdError]] = {
    c.exit_code: c for c in (NotRunning, NoSuchJob, Damaged, TryLater, Denied, BadConfig)
}


def call(run_dir: Path, verb: str, *, deadline: float = DEADLINE, **args: object) -> Any:
    """Ask the daemon whose runtime directory is ``run_dir``; returns its result.

    Raises:
        NotRunning: nothing answers there.
        Denied: the socket is not for this user.
        TryLater: no answer within ``deadline`` seconds.
        RrdError: the daemon's own refusal, of the class that its exit code belongs to.
    """
    request = json.dumps({"verb": verb, **args}).encode() + b"\n"
    try:
        answer = json.loads(_exchange(run_dir, request, time.monotonic() + deadline))
        if answer["ok"]:
            return answer["result"]
        error = answer["error"]
        refusal = _BY_CODE.get(error["exit_code"], RrdError)(error["message"], hint=error.get("hint", ""))
    except TimeoutError:
        raise TryLater(f"the daemon at {run_dir} did not answer within {deadline:g} s",
                       hint="its log says why: journalctl -u rrd") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"what answers at {run_dir / SOCKET} is no rrd that this one understands",
                            hint="are daemon and command of the same version?") from e
    raise refusal


def _exchange(run_dir: Path, request: bytes, until: float) -> bytes:
    """Send ``request``; the answer's line. Raises TimeoutError after the monotonic time ``until``."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(_left(until))
            s.connect(str(run_dir / SOCKET))
            s.sendall(request)
            return _read_line(s, until)
    except TimeoutError:
        raise
    except PermissionError:
        raise Denied(f"no permission to talk to the daemon at {run_dir}",
                     hint="become a member of the group rrd, or use sudo") from None
    except BlockingIOError:  # too many callers wait already: connect() does not
        raise TimeoutError from None
    except (OSError, EOFError):
        raise NotRunning(f"rrd is not running: nothing answers at {run_dir / SOCKET}",
                         hint="start it: `systemctl start rrd` or `rrd daemon`, or `rrd run` with jobs") from None


def _read_line(s: socket.socket, until: float) -> bytes:
    buffer = bytearray()
    while not buffer.endswith(b"\n"):
        s.settimeout(_left(until))
        data = s.recv(1 << 20)
        if not data:
            raise EOFError
        buffer += data
        if len(buffer) > MAX_ANSWER:
            raise ValueError("the answer is too long")
    return bytes(buffer)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def alive(run_dir: Path) -> bool:
    """Whether a daemon listens on the control socket in ``run_dir``, and for us."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(1.0)
        try:
            s.connect(str(run_dir / SOCKET))
        except OSError:
            return False
        return True
