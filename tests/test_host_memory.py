"""The host's memory: as Linux says it, within a control group's limit, and what CPU dies may have of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from world import World, play

from rrd import host_memory
from rrd.config import Config
from rrd.die import Die, facts_of
from rrd.host_memory import HostMemory

GIB = 1 << 30


def test_it_is_what_linux_says() -> None:
    found = host_memory.look()
    assert found and 0 < found.available <= found.total


def test_the_kernel_counts_whom_it_kills_for_want_of_memory() -> None:
    counted = Path("/proc/vmstat").read_text().split()
    assert "oom_kill" in counted and host_memory.oom_kills() >= int(counted[counted.index("oom_kill") + 1])


def test_a_limit_of_the_control_group_counts_whoever_has_set_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path("/proc/self/cgroup").read_text().partition("0::")[2].strip().strip("/")
    monkeypatch.setattr(host_memory, "_LIMIT", str(tmp_path))
    (tmp_path / own).mkdir(parents=True, exist_ok=True)
    assert host_memory._limit() is None
    (tmp_path / own / "memory.max").write_text("max\n")
    assert host_memory._limit() is None
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    assert host_memory._limit() == 1 << 20 and host_memory.look() == (1 << 20, 1 << 20)


def a_job(needs: int, base: int = 0, key: str = "") -> Any:
    return SimpleNamespace(needs_bytes=needs, base_bytes=base, base_key=key)


def dies(*jobs: list[Any], held: int = 0, **config: Any) -> tuple[list[Die], Config]:
    c = Config.model_validate({"lane": ({"dies": ["cpu"] * len(jobs)},), **config})
    made = [Die(spec) for spec in c.dies]
    for die, theirs in zip(made, jobs, strict=True):
        die.jobs = {str(i): job for i, job in enumerate(theirs)}
        die.held_bytes, die.worker = held, SimpleNamespace(alive=True)  # type: ignore[assignment]
    return made, c


def test_cpu_dies_share_the_host_and_what_was_promised_is_not_promised_twice() -> None:
    jobs = [a_job(5 * GIB, 2 * GIB, "b")], [a_job(3 * GIB, 2 * GIB, "b"), a_job(GIB)], []
    found = facts_of(*dies(*jobs), HostMemory(20 * GIB, 20 * GIB))
    assert {(d.pool, d.bytes_total, d.base_keys) for d in found} == {("the host", 18 * GIB, frozenset("b"))}
    assert {d.bytes_free for d in found} == {11 * GIB}  # 18 but for 3 + 1 + 1 of their own and the base once
    busy = facts_of(*dies(*jobs), HostMemory(20 * GIB, 10 * GIB))  # somebody else has taken half of it
    assert {d.bytes_free for d in busy} == {1 * GIB}
    taken = facts_of(*dies(*jobs, held=4 * GIB), HostMemory(20 * GIB, 10 * GIB))  # these jobs have
    assert {d.bytes_free for d in taken} == {9 * GIB}
    none = facts_of(*dies(*jobs), HostMemory(20 * GIB, 2 * GIB))
    assert {d.bytes_free for d in none} == {0}


def test_with_a_memory_of_their_own_by_configuration_they_share_nothing() -> None:
    found = facts_of(*dies([a_job(5 * GIB)], [], die_memory="6GiB"), HostMemory(20 * GIB, GIB))
    assert [(d.pool, d.bytes_free, d.bytes_total) for d in found] == [("", GIB, 6 * GIB), ("", 6 * GIB, 6 * GIB)]
    unknown = facts_of(*dies([]), None)
    assert [(d.pool, d.bytes_free) for d in unknown] == [("", None)]


def test_a_job_that_the_host_has_no_memory_for_waits_says_the_numbers_and_starts_when_it_has(tmp_path: Path) -> None:
    async def tell() -> None:
        async with World(tmp_path, 2) as w:
            memory = HostMemory(16 * GIB, 2 * GIB)
            w.scheduler.memory = lambda: memory
            w.workers.needs_bytes = 3 * GIB
            w.drop("a")
            await w.until(lambda: w.why("a") == "it needs 3.0 GiB, and the host has 2.0 GiB free now; next in line")
            memory = HostMemory(16 * GIB, 4 * GIB)
            await w.until_done("a")

    play(tell())
