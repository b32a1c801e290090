"""One device on the bus, die or bridge: whether it answers, and its memory-space-enable bit, each write read back."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from rrd.helper.base import BadSetup, Refusal
from rrd.helper.space import BAR, COMMAND, GONE, HEADER_TYPE, IDS, MEMORY, Space

BARS = 6
KINDS = 0xF
"""The bits of a memory BAR's low half that are no address and cannot be written."""
IO, WIDE = 0x1, 0x4
"""In a BAR: it is one of the I/O space; it is 64 bits wide, its upper half in the next register."""
ONES = 0xFFFFFFFF


class Fallen(Refusal):
    """The device does not answer."""

    lost = True


@dataclass(frozen=True)
class Saved:
    """A device as the firmware and the kernel left it: what it is, its command, its BARs (none for a bridge)."""

    address: str
    ids: int
    command: int
    bars: tuple[int, ...]

    @property
    def memory(self) -> bool:
        """Whether it answered on its BARs."""
        return bool(self.command & MEMORY)


class Device:
    """A device by its address. ``name`` is for sentences: "die 3", "bridge 0000:03:00.0".

    Every access fails with Refusal once ``deadline`` (of the monotonic clock) is over.
    """

    def __init__(self, name: str, address: str, space: Space,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.address = name, address
        self._space, self._clock = space, clock
        self.deadline = math.inf

    def saved(self) -> Saved:
        """What it is now. Raises Fallen."""
        ids = self.ids()
        bars = () if self.is_bridge() else tuple(self.read(BAR + 4 * n, 4) for n in range(BARS))
        return Saved(self.address, ids, self.command(), bars)

    def ids(self) -> int:
        """Vendor and device. Raises Fallen."""
        ids = self.read(IDS, 4)
        if ids == GONE:
            raise Fallen(f"{self.name} ({self.address}) has fallen off the bus: its configuration space reads all ones")
        return ids

    def is_bridge(self) -> bool:
        return self.read(HEADER_TYPE, 1) & 0x7F == 1

    def command(self) -> int:
        """Raises Fallen."""
        command = self.read(COMMAND, 2)
        if command == 0xFFFF:
            self.ids()
        return command

    @property
    def memory(self) -> bool:
        """Whether it answers on its BARs; a bridge: whether it passes its windows on. Raises Fallen."""
        return bool(self.command() & MEMORY)

    def set_memory(self, on: bool) -> None:
        """Raises Refusal when the bit cannot be set or cleared. The other bits stay as they are now: a driver's."""
        command = self.command()
        if bool(command & MEMORY) == on:
            return
        self.write(COMMAND, 2, command ^ MEMORY)
        if self.memory != on:
            what = "come onto the bus" if on else "let go of the bus"
            raise Refusal(f"{self.name} ({self.address}) does not {what}: its memory-space-enable bit is stuck")

    def put_bar(self, number: int, value: int) -> None:
        """Write the BAR register ``number``; raises Refusal when it does not keep ``value``."""
        self.write(BAR + 4 * number, 4, value)
        kept = self.read(BAR + 4 * number, 4)
        if kept != value:
            if kept == GONE:
                self.ids()
            raise Refusal(f"{self.name} ({self.address}) does not take its address: BAR {number} was given "
                          f"0x{value:08x} and reads 0x{kept:08x}")

    def put_back(self, saved: Saved) -> None:
        """Its BARs as they were; only while its memory is off. Raises Refusal."""
        for number, value in enumerate(saved.bars):
            if self.read(BAR + 4 * number, 4) != value:
                self.put_bar(number, value)

    def read(self, at: int, size: int) -> int:
        self._in_time()
        try:
            return self._space.read(at, size)
        except OSError as e:
            raise self._fault(e) from None

    def write(self, at: int, size: int, value: int) -> None:
        self._in_time()
        try:
            self._space.write(at, size, value)
        except OSError as e:
            raise self._fault(e) from None

    def _fault(self, e: OSError) -> Exception:
        who = f"{self.name} ({self.address})"
        if e.errno in (errno.EPERM, errno.EACCES):
            return BadSetup(f"the configuration space of {who} may not be touched: {e.strerror}",
                            hint="that takes root, and a kernel that is not in lockdown (Secure Boot)")
        return Fallen(f"{who} is not on the bus: {e.strerror or e}")

    def _in_time(self) -> None:
        if self._clock() > self.deadline:
            raise Refusal(f"{self.name} ({self.address}) answers too slowly")


@dataclass(frozen=True)
class Bar:
    """A memory BAR: its register's number, how many bytes it answers on, whether it is 64 bits wide, its kind bits."""

    number: int
    size: int
    wide: bool
    kind: int

    def values(self, address: int) -> list[tuple[int, int]]:
        """The registers, with the values that place it at ``address``."""
        low = (self.number, (address & ONES) | self.kind)
        return [low, (self.number + 1, address >> 32)] if self.wide else [low]


def memory_bars(device: Device, saved: Saved) -> dict[int, Bar]:
    """The memory BARs that ``device`` has, by number, found by writing all ones; only while its memory is off.

    The address bits that a device does not decode are wired to zero (PCI 3.0, 6.2.5.1): what stays of all ones is the
    negative of the size.
    """
    found: dict[int, Bar] = {}
    skip = False
    for number, value in enumerate(saved.bars):
        wide = not value & IO and value & 0x6 == WIDE and number + 1 < BARS
        if not skip and not value & IO and (bar := _sized(device, saved, number, wide)):
            found[number] = bar
        skip = wide and not skip
    return found


def _sized(device: Device, saved: Saved, number: int, wide: bool) -> Bar | None:
    registers = (number, number + 1) if wide else (number,)
    for n in registers:
        device.write(BAR + 4 * n, 4, ONES)
    stayed = [device.read(BAR + 4 * n, 4) for n in registers]
    for n in registers:
        device.put_bar(n, saved.bars[n])
    mask = (stayed[0] & ~KINDS) | ((stayed[1] if wide else ONES) << 32)
    size = -mask & (1 << 64) - 1
    return Bar(number, size, wide, stayed[0] & KINDS) if stayed[0] & ~KINDS or (wide and stayed[1]) else None
