"""The gate behind a socket, beyond the contract."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gate_benches import SocketBench

from rrd.gate import GateRefused


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
