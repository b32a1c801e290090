"""What a bridge passes on: its windows, read and never written."""

from __future__ import annotations

from rrd.helper.device import Device

PROG_IF = 0x09
"""1 byte, the low byte of the class: 1 is a bridge that passes on whatever nobody else claims."""
WINDOW, PREFETCHABLE, UPPER_BASE, UPPER_LIMIT = 0x20, 0x24, 0x28, 0x2C
"""Base (low half) and limit (high half) in units of 1 MiB; the upper 32 bits of the prefetchable ones."""
MIB_BITS = 0xFFF0


def windows(bridge: Device) -> list[range]:
    """The addresses below ``bridge`` (PCI-to-PCI Bridge 1.2, 3.2.5.8 and 9). Raises Fallen."""
    plain, prefetchable = bridge.read(WINDOW, 4), bridge.read(PREFETCHABLE, 4)
    upper = (0, 0)
    if prefetchable & 0xF == 1:  # 64 bits wide
        upper = bridge.read(UPPER_BASE, 4), bridge.read(UPPER_LIMIT, 4)
    bridge.ids()
    return [w for w in (_window(plain, (0, 0)), _window(prefetchable, upper)) if w]


def _window(register: int, upper: tuple[int, int]) -> range:
    """Empty where the base is above the limit: closed."""
    base = upper[0] << 32 | (register & MIB_BITS) << 16
    limit = upper[1] << 32 | (register >> 16 & MIB_BITS) << 16 | 0xFFFFF
    return range(base, limit + 1)


def passes_on(bridge: Device, address: int, size: int) -> bool:
    """Whether all of ``size`` bytes at ``address`` lie in one window of ``bridge``."""
    if bridge.read(PROG_IF, 1) == 1:
        return True
    return any(w.start <= address and address + size <= w.stop for w in windows(bridge))
