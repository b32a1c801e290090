"""The NVIDIA chips of this machine, as the kernel lists them, and which torch can compute on them.

Read from ``/sys/bus/pci``: no driver, no torch and no root are needed, so that it can be asked before any of them is
there. ``rrd-setup`` runs this file on the system's Python, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

NVIDIA = "0x10de"
OLDEST = 37
"""Of the chips that any torch has kernels for: a K80. The K40 and the K20 (sm_35) need older ones than rrd takes."""
DISPLAY = ("0x0300", "0x0302")
"""PCI classes of chips that draw, and of those that only compute."""

ARCHITECTURES: tuple[tuple[int, int, str, int], ...] = (
    (0x0FC0, 0x12FF, "Kepler", 30), (0x1340, 0x17FF, "Maxwell", 52), (0x15F0, 0x1D7F, "Pascal", 61),
    (0x1D80, 0x1DFF, "Volta", 70), (0x1E00, 0x21FF, "Turing", 75), (0x2080, 0x20FF, "Ampere", 80),
    (0x2200, 0x22FF, "Ampere", 86), (0x2300, 0x23FF, "Hopper", 90), (0x2400, 0x25FF, "Ampere", 86),
    (0x2600, 0x28FF, "Ada", 89), (0x2900, 0x31FF, "Blackwell", 100),
)
"""Device ids from, to, architecture, compute capability as sm_NN. Of ranges that overlap, the later one counts."""

KNOWN: dict[int, tuple[str, int]] = {
    0x102D: ("Tesla K80", 37), 0x1023: ("Tesla K40m", 35), 0x1024: ("Tesla K40c", 35), 0x1028: ("Tesla K20m", 35),
    0x13BD: ("Tesla M10", 50), 0x13F2: ("Tesla M60", 52), 0x17FD: ("Tesla M40", 52), 0x15F7: ("Tesla P100", 60),
    0x15F8: ("Tesla P100", 60), 0x15F9: ("Tesla P100", 60), 0x1B38: ("Tesla P40", 61), 0x1BB3: ("Tesla P4", 61),
    0x1DB1: ("Tesla V100", 70), 0x1DB4: ("Tesla V100", 70), 0x1DB5: ("Tesla V100", 70), 0x1DB6: ("Tesla V100", 70),
    0x1EB8: ("Tesla T4", 75), 0x20B0: ("A100", 80), 0x20B5: ("A100", 80), 0x2204: ("RTX 3090", 86),
    0x2235: ("A40", 86), 0x2330: ("H100", 90), 0x2331: ("H100", 90), 0x2335: ("H200", 90), 0x2684: ("RTX 4090", 89),
    0x26B5: ("L40", 89), 0x2B85: ("RTX 5090", 120),
}
"""Chips that boxes like ours are made of: device id, name, compute capability."""


class Board(NamedTuple):
    """One chip. ``sm`` is its compute capability, 37 for 3.7; ``driver`` the kernel's, empty for none."""

    address: str
    device_id: int
    name: str
    sm: int
    driver: str = ""


class Flavour(NamedTuple):
    """A torch: what to ask pip for, from which index ("" is PyPI), on which Pythons."""

    name: str
    packages: tuple[str, ...]
    index_url: str
    least_python: tuple[int, int]
    most_python: tuple[int, int]
    why: str


FLAVOURS = {f.name: f for f in (
    Flavour("cpu", ("torch>=2.4",), "https://download.pytorch.org/whl/cpu", (3, 10), (3, 13), "dies are CPU cores"),
    Flavour("k80", ("torch==2.0.1", "numpy<2"), "", (3, 10), (3, 11),
            "CUDA 11.7; the last torch with kernels for Kepler (sm_37)"),
    Flavour("p40", ("torch>=2.4,<2.15",), "https://download.pytorch.org/whl/cu126", (3, 10), (3, 13),
            "CUDA 12.6; the last with kernels for Maxwell, Pascal and Volta (sm_50 to sm_70)"),
    Flavour("cuda", ("torch>=2.4",), "", (3, 10), (3, 13), "current CUDA, for Turing (sm_75) and later"),
)}


def boards(sys: Path = Path("/sys")) -> list[Board]:
    """The NVIDIA chips, by address. Raises nothing: without a PCI bus there are none."""
    found = []
    try:
        devices = sorted((sys / "bus/pci/devices").iterdir())
    except OSError:
        return []
    for device in devices:
        if _read(device / "vendor") == NVIDIA and _read(device / "class")[:6] in DISPLAY:
            number = int(_read(device / "device"), 16)
            driver = device / "driver"
            found.append(Board(device.name, number, *identify(number),
                               os.path.basename(os.path.realpath(driver)) if driver.exists() else ""))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip().lower()
    except OSError:
        return ""


def identify(device_id: int) -> tuple[str, int]:
    """Name and compute capability of a chip; of an unknown one, those of its architecture. 0: unknown altogether."""
    if device_id in KNOWN:
        return KNOWN[device_id]
    name, sm = f"NVIDIA chip {device_id:04x}", 0
    for first, last, architecture, capability in ARCHITECTURES:
        if first <= device_id <= last:
            name, sm = f"NVIDIA {architecture} chip {device_id:04x}", capability
    return name, sm


def serves(arch_list: Iterable[str], sm: int) -> bool:
    """Whether a torch with kernels for ``arch_list`` (``sm_37``, ``compute_90``) can compute on a chip: machine code
    runs on the same major version from its minor one on, PTX on everything later."""
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        number = int(digits.rstrip("af") or 0)
        if (kind == "sm" and number // 10 == sm // 10 and number <= sm) or (kind == "compute" and number <= sm):
            return True
    return False


def flavour_for(found: Iterable[Board]) -> str:
    """The flavour of torch for these chips: the one that serves the oldest that rrd can use at all."""
    known = sorted(b.sm for b in found if b.sm >= OLDEST)
    if not known:
        return "cpu"
    return "k80" if known[0] < 50 else "p40" if known[0] < 75 else "cuda"


def pip_arguments(flavour: str) -> list[str]:
    """What to give ``pip install`` for a flavour."""
    f = FLAVOURS[flavour]
    return [*f.packages, *(["--extra-index-url", f.index_url] if f.index_url else [])]
