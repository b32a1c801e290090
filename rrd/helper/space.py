"""A device's configuration space: its first 64 bytes, through sysfs.

Registers as the PCI Local Bus Specification 3.0 (chapter 6) and the PCI-to-PCI Bridge Architecture Specification 1.2
(chapter 3) number them. Each access is one access of its own width: the kernel hands an aligned pread or pwrite of 1,
2 or 4 bytes on as such, and the upper half of the command's dword holds status bits that a write would clear.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

IDS = 0x00
"""Device and vendor, 4 bytes: all ones where nobody answers."""
COMMAND = 0x04
"""2 bytes."""
MEMORY = 0x0002
"""In the command: memory-space-enable. A device answers on its BARs, a bridge passes its windows on."""
HEADER_TYPE = 0x0E
"""1 byte: 0 a device, 1 a bridge; the top bit means that the device has several functions."""
BAR = 0x10
"""The first of 6 base address registers, 4 bytes each."""

IS_MEMORY, NOWHERE = 0x200, 0x3000_0000
"""In the kernel's flags of a resource: it is one of memory space; it has no address, or is off (linux/ioport.h)."""

GONE = 0xFFFFFFFF
"""What a read gives where nobody answers."""


class Space(Protocol):
    """The configuration space of one device. Both raise OSError when the kernel no longer knows the device."""

    def read(self, at: int, size: int) -> int:
        """``size`` bytes (1, 2, 4) at ``at``, little end first."""

    def write(self, at: int, size: int, value: int) -> None:
        """Write ``value``, ``size`` bytes, to ``at``."""


class SysfsSpace:
    """``<sysfs>/bus/pci/devices/<address>/config``. Opened when asked, and again after the device has been away."""

    def __init__(self, directory: str, *, writable: bool = True) -> None:
        self._path, self._flags = f"{directory}/config", os.O_RDWR if writable else os.O_RDONLY
        self._fd = -1

    def read(self, at: int, size: int) -> int:
        """See Space."""
        data = self._call(lambda fd: os.pread(fd, size, at))
        if len(data) != size:
            raise OSError(f"{self._path} is too short")
        return int.from_bytes(data, "little")

    def write(self, at: int, size: int, value: int) -> None:
        """See Space."""
        self._call(lambda fd: os.pwrite(fd, value.to_bytes(size, "little"), at))

    def _call(self, call: Callable[[int], bytes | int]) -> bytes:
        if self._fd < 0:
            self._fd = os.open(self._path, self._flags | os.O_CLOEXEC)
        try:
            done = call(self._fd)
        except OSError:
            self.close()
            raise
        return done if isinstance(done, bytes) else b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Bus(Protocol):
    """The devices of a machine."""

    def space(self, address: str) -> Space:
        """The configuration space of the device at ``address``, such as "0000:05:00.0"."""

    def bridges(self, address: str) -> list[str]:
        """The addresses of the bridges above it, outermost first. Raises OSError for a device that is not there."""

    def addresses(self) -> list[str]:
        """Of all devices."""

    def memory(self) -> list[tuple[int, int]]:
        """First and last address of each stretch of RAM, as far as we are told."""

    def resources(self, address: str) -> list[tuple[int, int, int]]:
        """First and last address and flags of each of the 6 BARs, as the kernel sized them. Raises OSError."""


class Sysfs:
    """The machine's own bus, or a tree that looks like it. Reading takes no privilege."""

    def __init__(self, root: str = "/sys", *, writable: bool = True) -> None:
        self._devices, self._writable = f"{root}/bus/pci/devices", writable
        self._map = f"{root}/firmware/memmap"

    def space(self, address: str) -> SysfsSpace:
        """See Bus."""
        return SysfsSpace(f"{self._devices}/{address}", writable=self._writable)

    def bridges(self, address: str) -> list[str]:
        """See Bus. The real path of a device names all that is above it."""
        above = os.path.realpath(f"{self._devices}/{address}", strict=True).split("/")[:-1]
        return [part for part in above if is_address(part)]

    def addresses(self) -> list[str]:
        """See Bus."""
        return sorted(filter(is_address, os.listdir(self._devices)))

    def memory(self) -> list[tuple[int, int]]:
        """See Bus. What the firmware told the kernel: unlike /proc/iomem, it is shown without any capability."""
        found = []
        with suppress(OSError):  # not every kernel keeps it
            for entry in os.listdir(self._map):
                first, last, kind = (_text(f"{self._map}/{entry}/{what}") for what in ("start", "end", "type"))
                if kind == "System RAM":
                    found.append((int(first, 16), int(last, 16)))
        return sorted(found)

    def resources(self, address: str) -> list[tuple[int, int, int]]:
        """See Bus."""
        with open(f"{self._devices}/{address}/resource", encoding="ascii") as file:
            rows = [[int(n, 16) for n in line.split()] for line in file]
        return [(first, last, flags) for first, last, flags in rows[:6]]


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


def is_address(text: str) -> bool:
    """Whether ``text`` is a full PCI address: ``0000:05:00.0``."""
    return _ADDRESS.fullmatch(text) is not None
