"""The gate behind a socket, beyond the contract."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gate_benches import SocketBench, until

from rrd.gate import GateRefused, SocketGate


def test_refuses_when_the_helper_leaves_and_connects_again(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = SocketBench(tmp_path)
        with pytest.raises(GateRefused, match=r"no helper at .*No such file"):
            await bench.gate.acquire("0")
        async with bench.serving():
            bench.script("0", "leave")
            with pytest.raises(GateRefused, match="no helper"):
                await bench.gate.acquire("0")
            await bench.gate.acquire("0")
            bench.changed.clear()
            bench.hang_up()
            await bench.changed.wait()
            await bench.gate.release("0")  # the connection's end has released it
            assert not bench.connections
            await bench.gate.acquire("1")
            assert bench.open() == "1"
            assert len(bench.connections) == 1
            await bench.gate.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "said", ["nonsense\n", "[1]\n", '{"id": 999, "ok": true}\n', "x" * 100_000 + "\n", '{"ok": true}\n', "\xff\n"]
)
def test_takes_no_nonsense_for_a_grant(tmp_path: Path, said: str) -> None:
    async def scene() -> None:
        bench = SocketBench(tmp_path)
        async with bench.serving():
            bench.script("0", f"say {said}")
            with pytest.raises(GateRefused, match="does not speak the protocol"):
                await bench.gate.acquire("0")
            await bench.gate.acquire("0")
            await bench.gate.close()

    asyncio.run(scene())


# --- a helper gone mad ---

Mad = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def among_the_mad(tmp_path: Path, mad: Mad, scene: Callable[[SocketGate], Awaitable[None]]) -> None:
    """Play ``scene`` with a gate whose helper answers each connection with ``mad``; nothing may outlive it."""

    async def play() -> None:
        server = await asyncio.start_unix_server(mad, str(tmp_path / "gate.sock"))
        gate = SocketGate(str(tmp_path / "gate.sock"), timeout=0.25)
        async with server:
            await asyncio.wait_for(scene(gate), 20)
            await gate.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(play())


def test_an_answer_too_many_is_no_grant_of_the_next_die(tmp_path: Path) -> None:
    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"id": 1, "ok": true}\n' * 2 if not writers else b'{"id": 3, "ok": true}\n')
        writers.append(writer)
        await reader.read()
        writer.close()

    writers: list[asyncio.StreamWriter] = []

    async def scene(gate: SocketGate) -> None:
        await gate.acquire("0")
        with pytest.raises(GateRefused, match="not an answer to the request"):
            await gate.acquire("1")
        await gate.acquire("2")

    among_the_mad(tmp_path, twice, scene)


def test_a_drip_is_no_answer_in_time(tmp_path: Path) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        waiting = asyncio.ensure_future(reader.read())
        while not waiting.done():
            writer.write(b" ")
            await asyncio.wait({waiting}, timeout=0.01)
        writer.close()

    async def scene(gate: SocketGate) -> None:
        for ask in (gate.acquire, gate.acquire, gate.release):
            start = time.monotonic()
            if ask == gate.release:
                await ask("0")  # nothing is held: the connection has ended
            else:
                with pytest.raises(GateRefused, match="no answer within 250 ms"):
                    await ask("0")
            assert time.monotonic() - start < 5

    among_the_mad(tmp_path, drip, scene)


@pytest.mark.parametrize("said", [b"", b'{"id": 1, "ok"', b'{"id": 1, "ok": true}'])
def test_one_that_hangs_up_within_its_answer_has_granted_nothing(tmp_path: Path, said: bytes) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        writer.close()

    async def scene(gate: SocketGate) -> None:
        with pytest.raises(GateRefused, match="it ended the connection"):
            await gate.acquire("0")
        await gate.release("0")

    among_the_mad(tmp_path, hang_up, scene)


@pytest.mark.parametrize(("said", "why"), [
    (b'{"id": 1, "ok": "yes"}', "no reason given"), (b'{"id": 1, "ok": 1}', "no reason given"),
    (b'{"id": 1}', "no reason given"), (b'{"id": 1, "ok": false, "reason": ["a"]}', r"\['a'\]"),
    (b'{"id": 1, "ok": false, "reason": "a\\u001b[2J\\nb"}', r"a\\u001b\[2J b"),
    (b'{"id": 1, "ok": false, "reason": "' + b"x" * 3000 + b'"}', "x{200}…"),
])
def test_what_is_not_yes_is_no_and_its_reason_is_made_safe(tmp_path: Path, said: bytes, why: str) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said + b"\n")
        await reader.read()
        writer.close()

    async def scene(gate: SocketGate) -> None:
        with pytest.raises(GateRefused, match=f"the gate refused die 0: {why}$"):
            await gate.acquire("0")

    among_the_mad(tmp_path, say, scene)


def test_deep_nesting_is_no_answer(tmp_path: Path) -> None:
    async def deep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"[" * 4000 + b"\n")
        await reader.read()
        writer.close()

    async def scene(gate: SocketGate) -> None:
        with pytest.raises(GateRefused, match="does not speak the protocol"):
            await gate.acquire("0")

    among_the_mad(tmp_path, deep, scene)


def test_one_that_accepts_nobody_is_refused_in_time(tmp_path: Path) -> None:
    async def scene() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "gate.sock"))
            listener.listen(0)
            gates = [SocketGate(str(tmp_path / "gate.sock"), timeout=0.25) for _ in range(4)]
            start = time.monotonic()
            for gate in gates:
                with pytest.raises(GateRefused, match=r"no answer within|no helper at"):
                    await gate.acquire("0")
            assert time.monotonic() - start < 10
            for gate in gates:
                await gate.close()

    asyncio.run(scene())
