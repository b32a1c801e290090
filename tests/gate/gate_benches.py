"""Gates and the worlds behind them: dies of which one can be open, and their moods."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from rrd_gate import RrdGate

from rrd.gate import CommandGate, Gate, SimulatedGate, SocketGate
from rrd.gate.simulated import Act

TIMEOUT = 0.25


class Bench(Protocol):
    """A gate and the world behind it."""

    gate: Gate

    def script(self, die: str, mood: str) -> None:
        """The next acquire of ``die`` meets ``mood``: refuse, hang, grant."""

    def open(self) -> str | None:
        """The die that may be touched, as the world sees it."""


class SimulatedBench:
    def __init__(self) -> None:
        self.gate = self._gate = SimulatedGate(timeout=TIMEOUT)

    def script(self, die: str, mood: str) -> None:
        self._gate._script[die].append(Act(mood, reason="die 5 has the bus"))  # type: ignore[arg-type]

    def open(self) -> str | None:
        return self._gate.held


PROGRAM = """#!/bin/sh
# bus VERB DIE DIR: opens and closes a die by a file; obeys the mood in DIR/mood.DIE once
verb=$1 die=$2 dir=$3
mood=$(cat "$dir/mood.$die" 2>/dev/null)
if [ $verb = acquire ]; then
  rm -f "$dir/mood.$die"
  case $mood in
  refuse) printf 'looking\\ndie 5 has the \\033bus\\n\\n' >&2; exit 75 ;;
  broken) echo "config space reads all ones" >&2; exit 3 ;;
  esac
  echo $die > "$dir/open"   # half granted from here on
  case $mood in hang) sleep 60 & echo $! > "$dir/child"; wait ;; esac
else
  if [ "$(cat "$dir/open" 2>/dev/null)" = $die ]; then rm -f "$dir/open"; fi
fi
"""


class CommandBench:
    def __init__(self, path: Path) -> None:
        self._path = path
        program = path / "bus"
        program.write_text(PROGRAM)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        acquire, release = ([str(program), verb, "{die}", str(path)] for verb in ("acquire", "release"))
        self.gate = CommandGate(acquire, release, timeout=2.0)  # a shell may be slow to start on a busy machine

    def script(self, die: str, mood: str) -> None:
        (self._path / f"mood.{die}").write_text(mood)

    def open(self) -> str | None:
        try:
            return (self._path / "open").read_text().strip()
        except FileNotFoundError:
            return None


class SocketBench:
    """A helper as small as one can be: one holder, and its connection's end takes the die back."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "gate.sock")
        self.gate = SocketGate(self.path, timeout=TIMEOUT)
        self.moods: dict[str, list[str]] = {}
        self.held: tuple[str, object] | None = None
        self.connections: set[asyncio.StreamWriter] = set()
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield
        finally:
            server.close()
            self.hang_up()
            await until(lambda: not self.connections)

    def hang_up(self) -> None:
        for writer in self.connections:
            writer.transport.abort()

    def script(self, die: str, mood: str) -> None:
        self.moods.setdefault(die, []).append(mood)

    def open(self) -> str | None:
        return self.held[0] if self.held else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                reply = self._answer(writer, request["verb"], request["die"])
                if isinstance(reply, bytes):
                    writer.write(reply)
                elif reply is not None:
                    writer.write(json.dumps({"id": request["id"], **reply}).encode() + b"\n")
        except OSError:
            pass
        finally:
            self.connections.discard(writer)
            if self.held and self.held[1] is writer:
                self.held = None
            writer.close()
            self.changed.set()

    def _answer(self, writer: asyncio.StreamWriter, verb: str, die: str) -> dict[str, object] | bytes | None:
        if verb == "release":
            if self.held and self.held[0] == die:
                self.held = None
            return {"ok": True}
        moods = self.moods.get(die) or ["grant"]
        mood = moods.pop(0)
        if mood == "refuse":
            return {"ok": False, "reason": "die 5 has the bus"}
        if mood.startswith("say "):
            return mood[4:].encode()
        if mood == "leave":
            writer.transport.abort()
            return None
        self.held = (die, writer)  # half granted from here on
        return None if mood == "hang" else {"ok": True}


class HelperBench:
    """The real rrd-gate, which runs the programs of CommandBench."""

    def __init__(self, path: Path) -> None:
        self._programs = CommandBench(path)
        acquire, release = ([str(path / "bus"), verb, "{die}", str(path)] for verb in ("acquire", "release"))
        dies = [str(n) for n in range(6)]
        self.helper = RrdGate(path, f"""allow_users = []
            allow_groups = []
            [[group]]
            backend = "command"
            dies = {json.dumps(dies)}
            acquire = {json.dumps(acquire)}
            release = {json.dumps(release)}
            timeout = 2.0
        """).start()
        self.gate = SocketGate(str(self.helper.socket), timeout=10)

    def script(self, die: str, mood: str) -> None:
        self._programs.script(die, mood)

    def open(self) -> str | None:
        return self._programs.open()


@asynccontextmanager
async def bench_of(kind: str, path: Path) -> AsyncIterator[Bench]:
    if kind == "socket":
        bench = SocketBench(path)
        async with bench.serving():
            yield bench
            await bench.gate.close()
        return
    if kind == "rrd-gate":
        helper_bench = HelperBench(path)
        try:
            yield helper_bench
            await helper_bench.gate.close()
            await until(lambda: helper_bench.open() is None)
        finally:
            helper_bench.helper.close()
        return
    bench_now: Bench = {"simulated": SimulatedBench, "command": lambda: CommandBench(path)}[kind]()
    yield bench_now
    await bench_now.gate.close()


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until ``holds``; the helper learns of a lost connection a moment later."""
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0)
