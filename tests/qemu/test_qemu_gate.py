"""rrd-gate on real configuration space: QEMU's devices, whose memory is files that can be looked into afterwards."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from qemu_machine import Machine, needs_qemu, options, why_no_systemd

HERE = Path(__file__).parent
MODULES = ["rrd.gate", "rrd.helper.main", "rrd.helper.check", "rrd.helper.__main__", "asyncio", "ctypes", "mmap",
           "random", "subprocess", "hashlib", "tomllib", "tempfile", "difflib", "runpy", "encodings.ascii"]

PATIENCE = 840.0
"""Seconds: about 40 on a quiet machine, of which most is a Python that is emulated."""
pytestmark = pytest.mark.timeout(900)

DIES = {"flat": 3, "boards": 2, "bus": 2}


def devices(path: Path) -> list[str]:
    """Three dies on the root bus, two behind root ports of their own, two behind one bridge. Each has a BAR of 32 bits
    and one of 64, and 1 MiB of memory that is a file."""
    pairs: list[tuple[str, str]] = []
    number = 0

    def die(bus: str, slot: int) -> None:
        nonlocal number
        file = path / f"memory.{number}"
        pairs.append(("object", f"memory-backend-file,id=m{number},share=on,mem-path={file},size=1M"))
        pairs.append(("device", f"ivshmem-plain,memdev=m{number},bus={bus},addr={slot:#x}"))
        number += 1

    for n in range(DIES["flat"]):
        die("pcie.0", 0x10 + n)
    for n in range(DIES["boards"]):
        pairs.append(("device", f"pcie-root-port,id=port{n},bus=pcie.0,chassis={n + 1},addr={0x14 + n:#x}"))
        die(f"port{n}", 0)
    pairs.append(("device", "pcie-pci-bridge,id=bridge,bus=pcie.0,addr=0x18"))
    for n in range(DIES["bus"]):
        die("bridge", n + 1)
    return options(*pairs)


def play(path: Path, seconds: float, *, systemd: bool, **words: int) -> list[dict[str, Any]]:
    """What the guest reports; each memory, looked into from outside, must hold what the guest says it wrote last."""
    machine = Machine(path, HERE / "guest_gate.py", MODULES, systemd=systemd)
    reports = machine.run(devices(path), seconds=seconds, words=[f"{k}={v}" for k, v in words.items()])
    assert reports[-1] == {"end": "well"}, "\n".join(reports[-1].get("why", []))
    memory = reports[-2]["memory"]
    assert len(set(memory)) == sum(DIES.values())
    for n, digest in enumerate(memory):
        assert hashlib.sha256((path / f"memory.{n}").read_bytes()).hexdigest() == digest, f"die {n}"
    return reports


@needs_qemu
@pytest.mark.skipif(bool(why_no_systemd()), reason=why_no_systemd())
def test_each_memory_survives_a_thousand_swaps(tmp_path: Path) -> None:
    """Under a real systemd, by the units as they are installed. Configuration space can be written by root without a
    capability, in a service that sees all else read-only; the boot state is back after a kill, and after the end."""
    reports = play(tmp_path, PATIENCE, systemd=True, flat=1000, boards=30, bus=30)
    assert {r["capabilities"] for r in reports if "capabilities" in r} == {"0" * 16}
    assert [r["swaps"] for r in reports if "swaps" in r] == [1000, 30, 30]
    check = next(r["check"] for r in reports if "check" in r)
    assert "  bridge 0000:00:14.0 is switched" in check
    assert check[-1] == "ok"
    for said in ({"unconfigured": "", "socket": False}, {"start": "", "mode": "0o660", "group": 900},
                 {"put_back": True}, {"stop": "", "boot": True, "result": "success", "socket": False}):
        assert said in reports


@needs_qemu
@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_thousands_of_swaps_and_dozens_of_kills(tmp_path: Path) -> None:
    for report in play(tmp_path, 3600, systemd=False, flat=3000, boards=3000, bus=3000, kills=40):
        print({k: v for k, v in report.items() if k not in ("check", "memory")})
