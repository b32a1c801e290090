"""The control socket: one line of JSON asks, one answers. Who may connect is the socket file's group and mode."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import socket
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rrd.errors import RrdError
from rrd.text import one_line

MAX_LINE = 64 * 1024
IDLE_SECONDS = 30.0
"""A client that says nothing for so long is let go."""

Verbs = dict[str, Callable[..., Any]]


class Control:
    """Serves ``verbs`` (name to function of keyword arguments) on a unix socket. ``audit`` hears who asked for what."""

    def __init__(self, path: Path, group: str, verbs: Verbs, audit: Callable[[str, int], None]) -> None:
        self.path, self.group, self.verbs, self.audit = path, group, verbs, audit
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen. The daemon holds the state directory's lock, so a socket that is there already is a dead one's.

        Raises RrdError when the socket cannot be made.
        """
        try:
            self._server = await asyncio.start_unix_server(self._serve, sock=self._bind(), limit=MAX_LINE)
        except OSError as e:
            raise RrdError(f"the control socket {self.path} cannot be made: {(e.strerror or str(e)).lower()}",
                           hint="choose another run_dir") from e

    def _bind(self) -> socket.socket:
        """The socket with its owner and mode; nobody can connect before it listens."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        sock, mode = socket.socket(socket.AF_UNIX), 0o600
        try:
            sock.bind(str(self.path))
            with contextlib.suppress(KeyError, PermissionError):  # no such group, or an ordinary user: the owner only
                gid = grp.getgrnam(self.group).gr_gid
                if self.path.stat().st_gid != gid:  # a service runs in that group already, and may not even ask for it
                    os.chown(self.path, -1, gid)
                mode = 0o660
            self.path.chmod(mode)
        except OSError:
            sock.close()
            raise
        return sock

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = _peer(writer)
        try:
            while line := await asyncio.wait_for(_line(reader), IDLE_SECONDS):
                writer.write(self._answer(line, uid))
                await asyncio.wait_for(writer.drain(), IDLE_SECONDS)
        except asyncio.LimitOverrunError:
            writer.write(_error(f"a request has at most {MAX_LINE} bytes", "", 2))
        except asyncio.TimeoutError:
            writer.transport.abort()  # what it did not take is not kept for it
        except (OSError, asyncio.CancelledError):
            pass  # the client is gone, or we are
        finally:
            writer.close()

    def _understand(self, line: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The verb that ``line`` asks for, and its arguments. Raises _Nonsense."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise _Nonsense("it is not JSON") from None
        name = request.pop("verb", None) if isinstance(request, dict) else None
        if not isinstance(name, str):
            raise _Nonsense("it names no verb")
        if name not in self.verbs:
            raise _Nonsense(f"there is no verb {one_line(name, 40)}, only {', '.join(sorted(self.verbs))}")
        return self.verbs[name], request

    def _answer(self, line: bytes, uid: int) -> bytes:
        try:
            verb, args = self._understand(line)
            try:
                result = verb(**args)
            except (TypeError, KeyError) as e:
                given = ", ".join(map(repr, args)) or "nothing"
                raise _Nonsense(f"{verb.__name__} cannot be asked with {one_line(given, 100)}") from e
            self.audit(verb.__name__, uid)
        except RrdError as e:
            return _error(e.message, e.hint, e.exit_code)
        except Exception as e:
            traceback.print_exc()
            return _error(one_line(f"{type(e).__name__}: {e}", 200), "this is a bug of rrd; its log has the stack", 1)
        return (result if isinstance(result, bytes) else json.dumps({"ok": True, "result": result}).encode()) + b"\n"


class _Nonsense(RrdError):
    """A line that is no request."""

    exit_code = 2

    def __init__(self, why: str) -> None:
        hint = 'a request is a line such as {"verb": "pause", "job": "code"}'
        super().__init__(f"this is no request of ours: {why}", hint=hint)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; what there is of it at the end of the stream. Raises LimitOverrunError."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as e:
        return e.partial


def _peer(writer: asyncio.StreamWriter) -> int:
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def _error(message: str, hint: str, code: int) -> bytes:
    return json.dumps({"ok": False, "error": {"message": message, "hint": hint, "exit_code": code}}).encode() + b"\n"
