"""One contract for every gate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gate_benches import Bench, bench_of, until

from rrd.config import GateConfig
from rrd.errors import TryLater
from rrd.gate import CommandGate, GateRefused, NoGate, SimulatedGate, SocketGate, make_gate


@pytest.fixture(params=["simulated", "command", "socket", "rrd-gate"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Bench], Awaitable[None]]], None]:
    """Runs a scene on a fresh bench, one loop each; nothing may be left running when it ends."""

    def run(scene: Callable[[Bench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with bench_of(request.param, tmp_path) as bench:
                await asyncio.wait_for(scene(bench), 20)
            await until(lambda: len(asyncio.all_tasks()) == 1)
            await until(lambda: bench.open() is None)

        asyncio.run(main())

    return run


Play = Callable[[Callable[[Bench], Awaitable[None]]], None]


def test_a_die_is_open_between_acquire_and_release(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        for die in ("0", "1", "0"):
            await bench.gate.acquire(die)
            assert bench.open() == die
            await bench.gate.release(die)
            assert bench.open() is None

    play(scene)


def test_a_refusal_says_why_and_leaves_the_gate_usable(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.script("3", "refuse")
        with pytest.raises(GateRefused) as refusal:
            await bench.gate.acquire("3")
        assert "die 5 has the " in refusal.value.reason
        assert "\x1b" not in str(refusal.value)
        assert isinstance(refusal.value, TryLater)
        assert bench.open() is None
        await bench.gate.acquire("4")
        assert bench.open() == "4"

    play(scene)


def test_a_gate_that_hangs_is_refused_at_the_deadline_and_holds_nothing(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.script("1", "hang")
        start = time.monotonic()
        with pytest.raises(GateRefused, match="no answer within"):
            await bench.gate.acquire("1")
        assert time.monotonic() - start < 5
        await until(lambda: bench.open() is None)
        await bench.gate.acquire("1")
        assert bench.open() == "1"

    play(scene)


@pytest.mark.parametrize("mood", ["hang", "grant"])
def test_cancelled_at_any_moment_it_holds_nothing(play: Play, mood: str) -> None:
    async def scene(bench: Bench) -> None:
        for turns in (0, 1, 2, 3, 4, 6, 9, 14, 30):
            bench.script("2", mood)
            task = asyncio.ensure_future(bench.gate.acquire("2"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                await until(lambda: bench.open() is None)
            else:  # it was quicker: then it is a grant like any other
                assert bench.open() == "2"
                await bench.gate.release("2")
        await bench.gate.acquire("0")
        assert bench.open() == "0"

    play(scene)


def test_a_release_is_carried_through_when_cancelled(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.gate.acquire("0")
        task = asyncio.ensure_future(bench.gate.release("0"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert bench.open() is None

    play(scene)


def test_releasing_what_is_not_held_is_harmless(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.gate.release("0")
        await bench.gate.acquire("1")
        await bench.gate.release("0")
        assert bench.open() == "1"

    play(scene)


def test_close_gives_everything_back(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        await bench.gate.acquire("1")
        await bench.gate.close()
        await until(lambda: bench.open() is None)

    play(scene)


def test_no_gate_grants_everything() -> None:
    async def scene() -> None:
        gate = NoGate()
        for die in "0011":
            await gate.acquire(die)
        await gate.release("7")
        await gate.close()

    asyncio.run(scene())


def test_make_gate_builds_what_the_configuration_says() -> None:
    assert isinstance(make_gate(GateConfig()), NoGate)
    assert isinstance(make_gate(GateConfig(kind="socket", socket="/run/rrd-gate.sock")), SocketGate)
    assert isinstance(make_gate(GateConfig(kind="command", acquire=("a",), release=("b",))), CommandGate)
    assert isinstance(make_gate(GateConfig(kind="simulated")), SimulatedGate)
