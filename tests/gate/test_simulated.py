"""The simulated gate, beyond the contract."""

from __future__ import annotations

import asyncio

import pytest

from rrd.gate import GateRefused, SimulatedGate
from rrd.gate.simulated import Act


def test_asserts_the_rules() -> None:
    async def scene() -> None:
        gate = SimulatedGate()
        with pytest.raises(AssertionError, match="die 0 touched"):
            gate.touch("0")
        await gate.acquire("0")
        gate.touch("0")
        with pytest.raises(AssertionError, match="die 1 asked for"):
            await gate.acquire("1")
        await gate.release("0")
        with pytest.raises(AssertionError, match="die 0 touched"):
            gate.touch("0")
        assert gate.log == [("acquire", "0"), ("release", "0")]

    asyncio.run(scene())


def test_die_that_vanishes_is_refused_until_it_is_back() -> None:
    async def scene() -> None:
        gate = SimulatedGate({"1": [Act(), Act("vanish")]}, latency=0)
        await gate.acquire("1")
        await gate.release("1")
        for _ in range(3):
            with pytest.raises(GateRefused, match="vanished"):
                await gate.acquire("1")
        gate.come_back("1")
        await gate.acquire("1")
        gate.vanish("1")
        with pytest.raises(AssertionError):
            gate.touch("1")

    asyncio.run(scene())
