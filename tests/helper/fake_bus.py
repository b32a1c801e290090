"""A bus of devices as the helper sees it: configuration spaces with their read-only bits, BARs that can be sized,
bridges that pass windows on; and what goes wrong with them. It also knows who would answer at an address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MEMORY = 0x2
MASTER = 0x4
K80 = 0x102D_10DE


@dataclass
class FakeBar:
    """A BAR of ``size`` bytes at register ``number``."""

    number: int
    size: int
    wide: bool = False
    prefetchable: bool = False
    io: bool = False

    @property
    def kind(self) -> int:
        return 0x1 if self.io else 0x4 * self.wide | 0x8 * self.prefetchable

    def mask(self) -> int:
        """The address bits that can be written, over both registers."""
        return -self.size & ((1 << (64 if self.wide else 32)) - 1) & ~(0x3 if self.io else 0xF)


class Killed(BaseException):
    """The helper's process ends here."""


class FakeDevice:
    """One configuration space. """

    def __init__(self, bus: FakeBus, address: str, ids: int, bars: list[FakeBar], parent: str | None) -> None:
        self.bus, self.address, self.ids, self.bars, self.parent = bus, address, ids, bars, parent
        self.memory = [bytearray(b"\0") for _ in bars]
        self.fallen = self.gone = self.locked = False
        self.stuck: dict[int, int] = {}
        """Bits of a byte, by its place, that keep what they are."""
        self.reset()

    def reset(self) -> None:
        """As after power came: no address, nothing on."""
        self.regs = bytearray(64)
        self.writable = bytearray(64)
        self._put(0, 4, self.ids)
        self._put(0x08, 4, 0x0302_00A1)
        self._put(0x06, 2, 0x0010)
        self.writable[0x04:0x06] = (0x0547).to_bytes(2, "little")
        self.writable[0x0C] = self.writable[0x3C] = 0xFF
        for bar in self.bars:
            self._put(0x10 + 4 * bar.number, 4, bar.kind)
            size = 8 if bar.wide else 4
            at = 0x10 + 4 * bar.number
            self.writable[at : at + size] = bar.mask().to_bytes(size, "little")

    def _put(self, at: int, size: int, value: int) -> None:
        self.regs[at : at + size] = value.to_bytes(size, "little")

    def get(self, at: int, size: int) -> int:
        return int.from_bytes(self.regs[at : at + size], "little")

    # --- what the helper may do ---

    def read(self, at: int, size: int) -> int:
        self._accessed(at, size)
        return (1 << 8 * size) - 1 if self.fallen else self.get(at, size)

    def write(self, at: int, size: int, value: int) -> None:
        self.bus.step()
        self._accessed(at, size)
        assert not (self.on and 0x10 <= at < 0x28), "an address changes while somebody may be reached at it"
        self.bus.writes += 1
        was_on = self.on
        if not self.fallen:
            self._write(at, value.to_bytes(size, "little"))
        if self.on and not was_on:
            self.bus.turned_on(self)
        self.bus.step()

    def _write(self, at: int, data: bytes) -> None:
        for n, byte in enumerate(data, at):
            may = self.writable[n] & ~self.stuck.get(n, 0)
            self.regs[n] = self.regs[n] & ~may | byte & may
            if n in (0x06, 0x07):  # status: a one clears
                self.regs[n] &= ~byte

    def _accessed(self, at: int, size: int) -> None:
        assert at % size == 0 and at + size <= 64, "an access of its own width, in the first 64 bytes"
        self.bus.accesses += 1
        self.bus.on_access(self)
        if self.gone:
            raise OSError(19, "No such device")
        if self.locked:
            raise OSError(1, "Operation not permitted")

    # --- what others see ---

    @property
    def on(self) -> bool:
        return bool(self.get(0x04, 2) & MEMORY) and not (self.fallen or self.gone)

    def place(self, *addresses: int, on: bool = True) -> None:
        """The firmware's or the kernel's work: an address for each BAR, memory on."""
        for bar, address in zip(self.bars, addresses, strict=True):
            self._put(0x10 + 4 * bar.number, 8 if bar.wide else 4, address | bar.kind)
        self._put(0x04, 2, MASTER | MEMORY * on)

    def fall(self) -> None:
        self.fallen = True

    def come_back(self) -> None:
        """The link is up again: after a reset, as always."""
        self.fallen = self.gone = False
        self.reset()

    def boot_state(self) -> tuple[int, bytes]:
        """Memory-space-enable and BARs."""
        return self.get(0x04, 2) & MEMORY, bytes(self.regs[0x10:0x28])

    def claims(self, address: int) -> bool:
        """Whether it takes a memory access at ``address`` that reaches it."""
        if not self.on:
            return False
        for bar in self.bars:
            base = self.get(0x10 + 4 * bar.number, 8 if bar.wide else 4) & ~0xF
            if not bar.io and base <= address < base + bar.size:
                return True
        return False


class FakeBridge(FakeDevice):
    """A bridge; its windows are [first, last] addresses."""

    def __init__(self, bus: FakeBus, address: str, parent: str | None, window: tuple[int, int],
                 prefetchable: tuple[int, int]) -> None:
        self.window, self.prefetchable = window, prefetchable
        super().__init__(bus, address, 0x8747_10B5, [], parent)

    def reset(self) -> None:
        super().reset()
        self._put(0x08, 4, 0x0604_00CA)
        self.regs[0x0E] = 0x01
        (base, limit), (pbase, plimit) = self.window, self.prefetchable
        self._put(0x20, 4, base >> 16 & 0xFFF0 | (limit >> 16 & 0xFFF0) << 16)
        self._put(0x24, 4, pbase >> 16 & 0xFFF0 | (plimit >> 16 & 0xFFF0) << 16 | 0x0001_0001)
        self._put(0x28, 4, pbase >> 32)
        self._put(0x2C, 4, plimit >> 32)
        self.writable[0x18:0x30] = b"\xff" * 0x18
        self._put(0x04, 2, MASTER | MEMORY)

    def claims(self, address: int) -> bool:
        return self.on and any(first <= address <= last for first, last in (self.window, self.prefetchable))

    def boot_state(self) -> tuple[int, bytes]:
        return self.get(0x04, 2) & MEMORY, bytes(self.regs[0x10:0x40])


def _nothing(device: FakeDevice) -> None:
    pass


@dataclass
class FakeBus:
    """See Bus. ``turned_on`` is called when the helper has turned a device on, ``on_access`` at every access."""

    devices: dict[str, FakeDevice] = field(default_factory=dict)
    ram: list[tuple[int, int]] = field(default_factory=list)
    seen: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """The resources that the kernel knows, by address."""
    turned_on: Callable[[FakeDevice], None] = _nothing
    on_access: Callable[[FakeDevice], None] = _nothing
    die_at: int = -1
    """The helper's process is killed at this step: 2 n is just before its write n, 2 n + 1 just after."""
    steps: int = 0
    writes: int = 0
    accesses: int = 0

    def die(self, address: str, bars: list[FakeBar], parent: str | None = None, ids: int = K80) -> FakeDevice:
        self.devices[address] = device = FakeDevice(self, address, ids, bars, parent)
        return device

    def bridge(self, address: str, window: tuple[int, int] = (0xFFFFFFFF, 0), prefetchable: tuple[int, int] = (1, 0),
               parent: str | None = None) -> FakeBridge:
        self.devices[address] = bridge = FakeBridge(self, address, parent, window, prefetchable)
        return bridge

    def space(self, address: str) -> FakeDevice:
        """See Bus."""
        return self.devices[address]

    def bridges(self, address: str) -> list[str]:
        """See Bus."""
        if self.devices[address].gone:
            raise OSError(2, "No such file or directory")
        chain: list[str] = []
        above = self.devices[address].parent
        while above:
            chain.insert(0, above)
            above = self.devices[above].parent
        return chain

    def addresses(self) -> list[str]:
        """See Bus."""
        return list(self.devices)

    def memory(self) -> list[tuple[int, int]]:
        """See Bus."""
        return self.ram

    def resources(self, address: str) -> list[tuple[int, int, int]]:
        """See Bus. As it was at boot: the kernel takes no notice of the helper."""
        return self.seen.get(address, [])

    def step(self) -> None:
        if self.steps == self.die_at:
            raise Killed
        self.steps += 1

    def answers(self, address: int) -> list[str]:
        """Who takes a memory access of the processor at ``address``: more than one is a fight."""
        return [a for a, d in self.devices.items() if not isinstance(d, FakeBridge) and d.claims(address)
                and all(self.devices[b].claims(address) for b in self.bridges(a))]

    def boot_states(self) -> dict[str, tuple[int, bytes]]:
        return {a: d.boot_state() for a, d in self.devices.items()}
