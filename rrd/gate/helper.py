r"""The gate that is a privileged helper behind a unix socket: the client's side.

The protocol is one JSON object a line, at most 4 KiB, one request at a time::

    -> {"id": 7, "verb": "acquire", "die": "3"}
    <- {"id": 7, "ok": true}
    <- {"id": 7, "ok": false, "reason": "die 5 has the bus", "later": true}
    <- {"id": 7, "ok": false, "reason": "die 3 has fallen off the bus", "lost": true}

Verbs are ``acquire`` and ``release``. What a connection holds, the helper takes back **when that connection ends**: so
one connection is kept, and dropping it is how a grant in doubt is undone, and how everything is when the daemon dies.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from rrd.gate.base import GateRefused, to_its_end, within
from rrd.text import duration

LINE = 4096
"""Longest line of the protocol, in bytes."""

_Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SocketGate:
    """Asks the helper at ``path``; each answer has ``timeout`` seconds. Connects when asked, and again after a loss."""

    def __init__(self, path: str, *, timeout: float = 10.0) -> None:
        self._path = path
        self._timeout = timeout
        self._wire: _Wire | None = None
        self._last_id = 0

    async def acquire(self, die: str) -> None:
        """See Gate."""
        await self._ask("acquire", die)

    async def release(self, die: str) -> None:
        """See Gate."""
        if self._connection() is not None:  # else the helper has taken back everything already
            await to_its_end(self._ask("release", die))

    async def close(self) -> None:
        """See Gate."""
        wire = self._wire
        self._drop()
        if wire is not None:
            with suppress(OSError):
                await wire[1].wait_closed()

    async def _ask(self, verb: str, die: str) -> None:
        try:
            reply = await within(self._timeout, self._exchange({"verb": verb, "die": die}))
        except TimeoutError:
            self._drop()
            raise GateRefused(verb, die, f"no answer within {duration(self._timeout)}") from None
        except OSError as e:
            self._drop()
            raise GateRefused(verb, die, f"no helper at {self._path}: {e.strerror or e}") from e
        except ValueError as e:
            self._drop()
            raise GateRefused(verb, die, f"the helper at {self._path} does not speak the protocol: {e}") from e
        except asyncio.CancelledError:
            self._drop()
            raise
        if reply.get("ok") is not True:
            raise GateRefused(verb, die, str(reply.get("reason") or "no reason given"), lost=reply.get("lost") is True)

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request and its reply; raises OSError for a lost helper, ValueError for a reply that is none."""
        reader, writer = await self._connected()
        self._last_id += 1
        writer.write(json.dumps({"id": self._last_id, **request}).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("it ended the connection")
        try:
            reply = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(reply, dict) or reply.get("id") != self._last_id:
            raise ValueError("not an answer to the request")
        return reply

    async def _connected(self) -> _Wire:
        wire = self._connection()
        if wire is None:
            wire = self._wire = await asyncio.open_unix_connection(self._path, limit=LINE)
        return wire

    def _connection(self) -> _Wire | None:
        """The connection, unless the helper has ended it."""
        if self._wire is not None and self._wire[0].at_eof():
            self._drop()
        return self._wire

    def _drop(self) -> None:
        """End the connection, and with it every grant."""
        if self._wire is not None:
            self._wire[1].transport.abort()
            self._wire = None
