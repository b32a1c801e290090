"""Boxes to try the swap on."""

from __future__ import annotations

from pathlib import Path

from fake_bus import FakeBar, FakeBus

from rrd.helper.kept import Kept
from rrd.helper.window import Window

MIB, GIB = 1 << 20, 1 << 30
BAR0, BAR1, BAR3 = 0xF800_0000, 0x38_0000_0000, 0x3C_0000_0000
WINDOW = {0: BAR0, 1: BAR1, 3: BAR3}


def k80_bars() -> list[FakeBar]:
    """A K80 die's: 16 MiB of registers, 16 GiB and 32 MiB of memory that are 64 bits wide, and an I/O BAR."""
    return [FakeBar(0, 16 * MIB), FakeBar(1, 16 * GIB, wide=True, prefetchable=True),
            FakeBar(3, 32 * MIB, wide=True, prefetchable=True), FakeBar(5, 128, io=True)]


def flat_box(dies: int = 6) -> tuple[FakeBus, dict[str, str]]:
    """All dies on one bus. The firmware had room for the first alone; the others have no address."""
    bus = FakeBus()
    names = {str(n): f"0000:{n + 4:02x}:00.0" for n in range(dies)}
    for n, address in enumerate(names.values()):
        die = bus.die(address, k80_bars())
        die.place(*((BAR0, BAR1, BAR3, 0xE000) if n == 0 else (0, 0, 0, 0xE080)), on=n == 0)
    return bus, names


def tree_box(boards: int = 3) -> tuple[FakeBus, dict[str, str]]:
    """K80 boards: a root port, a switch's upstream port, and a downstream port for each of two dies. The windows of all
    ports hold the shared one, as somebody who wires such a box sees to."""
    bus, names = FakeBus(), {}
    windows = (BAR0, BAR0 + 16 * MIB - 1), (BAR1, BAR3 + 32 * MIB - 1)
    for board in range(boards):
        root, up = f"0000:00:{board + 1:02x}.0", f"0000:{board + 1}0:00.0"
        bus.bridge(root, *windows)
        bus.bridge(up, *windows, parent=root)
        for n in range(2):
            down, address = f"0000:{board + 1}1:{n:02x}.0", f"0000:{board + 1}{n + 2}:00.0"
            bus.bridge(down, *windows, parent=up)
            die = bus.die(address, k80_bars(), parent=down)
            first = board == n == 0
            die.place(*((BAR0, BAR1, BAR3, 0xE000) if first else (0, 0, 0, 0xE080)), on=first)
            names[str(2 * board + n)] = address
    for bridge in [d for a, d in bus.devices.items() if a not in names.values()]:
        on = bridge.address in bus.bridges(names["0"])
        bridge._put(0x04, 2, 0x4 | 0x2 * on)
    return bus, names


def window_over(bus: FakeBus, names: dict[str, str], path: Path, **how: object) -> Window:
    """The backend over a box, with its state file below ``path``."""
    kept = Kept.load(str(path / "state.json"))
    tree = any(d.parent for d in bus.devices.values())
    return Window(names, WINDOW, bus, kept, **{"switch_bridges": tree, **how})  # type: ignore[arg-type]
