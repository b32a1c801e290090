"""The gate of two programs, beyond the contract."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from gate_benches import CommandBench, until

from rrd.gate import CommandGate, GateRefused


def test_status_and_last_line_are_the_reason(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = CommandBench(tmp_path)
        bench.script("0", "broken")
        with pytest.raises(GateRefused, match=r"refused die 0: config space reads all ones \(exit status 3\)"):
            await bench.gate.acquire("0")
        with pytest.raises(GateRefused, match="killed by SIGKILL"):
            await CommandGate(["sh", "-c", "kill -9 $$"], ["true"]).acquire("0")
        with pytest.raises(GateRefused, match="cannot be run: No such file") as refusal:
            await CommandGate(["/no/such/program"], ["true"]).acquire("0")
        assert "gate.acquire" in refusal.value.hint
        with pytest.raises(GateRefused, match="could not release die 0: exit status 1"):
            await CommandGate(["true"], ["false"]).release("0")

    asyncio.run(scene())


def test_kills_all_that_a_hung_program_started(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = CommandBench(tmp_path)
        bench.script("0", "hang")
        with pytest.raises(GateRefused):
            await bench.gate.acquire("0")
        child = int((tmp_path / "child").read_text())
        await until(lambda: not _runs(child))

    asyncio.run(scene())


def test_cancelled_when_half_granted_it_gives_back(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = CommandBench(tmp_path)
        bench.script("0", "hang")
        task = asyncio.ensure_future(bench.gate.acquire("0"))
        await until(lambda: bench.open() == "0")
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert bench.open() is None

    asyncio.run(scene())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_runs_no_shell_and_names_the_die_anywhere(tmp_path: Path) -> None:
    async def scene() -> None:
        script = "import sys; sys.exit(sys.argv[1] != 'bus=$(0);')"
        gate = CommandGate([sys.executable, "-S", "-c", script, "bus=$({die});"], ["true"])
        await gate.acquire("0")

    asyncio.run(scene())


def test_leaves_no_file_open(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = CommandBench(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        await bench.gate.acquire("0")
        for mood in ("refuse", "hang"):
            bench.script("0", mood)
            with pytest.raises(GateRefused):
                await bench.gate.acquire("0")
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(scene())
