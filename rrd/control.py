"""The control socket: one line of JSON asks, one answers. Who may connect is the socket file's group and mode."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import socket
import struct
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
        """Listen. The daemon holds the state directory's lock, so a socket that is there already is a dead one's."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        old = os.umask(0o117)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_LINE)
        finally:
            os.umask(old)
        with contextlib.suppress(KeyError, PermissionError):  # no such group, or an ordinary user: the owner only
            os.chown(self.path, -1, grp.getgrnam(self.group).gr_gid)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
            while line := await asyncio.wait_for(_line(reader), IDLE_SECONDS):
                writer.write(self._answer(line, _peer(writer)) + b"\n")
                await asyncio.wait_for(writer.drain(), IDLE_SECONDS)
        writer.close()

    def _answer(self, line: bytes, uid: int) -> bytes:
        try:
            request = json.loads(line)
            verb = self.verbs[request.pop("verb")]
            result = verb(**request)
            self.audit(verb.__name__, uid)
        except RrdError as e:
            return _error(e.message, e.hint, e.exit_code)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            return _error(f"this is no request of ours: {one_line(f'{type(e).__name__}: {e}', 200)}", "", 2)
        return result if isinstance(result, bytes) else json.dumps({"ok": True, "result": result}).encode()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as e:
        return e.partial
    except asyncio.LimitOverrunError:
        return b"{}"  # answered as the nonsense it is; the connection then ends


def _peer(writer: asyncio.StreamWriter) -> int:
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def _error(message: str, hint: str, code: int) -> bytes:
    return json.dumps({"ok": False, "error": {"message": message, "hint": hint, "exit_code": code}}).encode()
