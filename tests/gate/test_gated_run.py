"""A real daemon, whose dies a real rrd-gate grants: the same bytes as without, whatever happens to the helper."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import Box, box, toy_keys, write_job
from gate_benches import PROGRAM
from rrd_gate import ADDRESSES, RrdGate, fake_sysfs, open_dies, pci_config, registers

JOBS = ("a", "b", "c")
LANE = '[[lane]]\ndies = ["cpu", "cpu", "cpu"]\n'


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The jobs on the same lane without a gate."""
    root = tmp_path_factory.mktemp("ungated")
    with box(root, LANE) as b:
        drop_jobs(b, root)
        b.start()
        b.wait_done(*JOBS)
        return root, {name: b.adapter(name) for name in JOBS}


def drop_jobs(b: Box, inputs: Path) -> None:
    for seed, name in enumerate(JOBS):
        write_job(b.jobs_dir, name, **toy_keys(inputs, seed=seed, max_steps=12))


def gated(gate: RrdGate) -> str:
    return f'{LANE}[lane.gate]\nkind = "socket"\nsocket = "{gate.socket}"\n'


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[RrdGate, Path]]:
    sysfs = fake_sysfs(tmp_path / "sys")
    gate = RrdGate(tmp_path, pci_config(), sysfs=sysfs)
    yield gate, sysfs
    gate.close()


def test_granted_by_bar_swaps_the_bytes_are_the_same(
        tmp_path: Path, gate: tuple[RrdGate, Path], reference: tuple[Path, dict[str, str]]) -> None:
    """The helper is killed on the way, and a die falls off the bus: its jobs go on elsewhere."""
    helper, sysfs = gate
    inputs, digests = reference
    boot = registers(sysfs)
    with box(tmp_path, gated(helper)) as b:
        drop_jobs(b, inputs)
        helper.start()
        b.start()
        b.wait_job("a", lambda j: j.step >= 6)
        assert len(open_dies(sysfs)) <= 1
        helper.signal(signal.SIGKILL)
        assert helper.wait() == -signal.SIGKILL
        assert helper.run("--restore").returncode == 0
        assert registers(sysfs) == boot
        config = sysfs / "bus/pci/devices" / ADDRESSES["1"] / "config"
        there = config.read_bytes()
        config.write_bytes(b"\xff" * 64)
        helper.start()
        seen = b.wait(lambda s: any(d.state == "fenced" for d in s.dies), "die 1 is never missed")
        assert "die 1 (0000:05:00.0) has fallen off the bus" in next(d.why for d in seen.dies if d.name == "1")
        b.wait_done(*JOBS)
        assert {name: b.adapter(name) for name in JOBS} == digests
        config.write_bytes(there)
        assert b.stop() == 0
    assert open_dies(sysfs) == []
    assert helper.end() == 0
    assert registers(sysfs) == boot


def test_granted_by_programs_the_bytes_are_the_same(tmp_path: Path, reference: tuple[Path, dict[str, str]]) -> None:
    inputs, digests = reference
    bus = tmp_path / "bus"
    bus.write_text(PROGRAM)
    bus.chmod(0o755)
    acquire, release = (f'["{bus}", "{verb}", "{{die}}", "{tmp_path}"]' for verb in ("acquire", "release"))
    helper = RrdGate(tmp_path, f'allow_users = []\nallow_groups = []\n[[group]]\nbackend = "command"\n'
                               f'dies = ["0", "1", "2"]\nacquire = {acquire}\nrelease = {release}\ntimeout = 30\n')
    helper.start()
    try:
        with box(tmp_path, gated(helper) + "timeout = 200.0\n") as b:
            drop_jobs(b, inputs)
            b.start()
            b.wait_done(*JOBS)
            assert {name: b.adapter(name) for name in JOBS} == digests
            b.stop()
        assert not os.path.exists(tmp_path / "open")
        assert helper.end() == 0
    finally:
        helper.close()
