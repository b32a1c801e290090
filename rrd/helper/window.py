"""The backend that swaps bars: dies whose BARs take turns at one window of addresses.

Invariant: at most one die of the group has memory-space-enable set, at every moment between two accesses, once the
helper has started. So ``open`` turns off every other die first, and reads back that it is off: a driver that is loaded,
or wakes its device, sets the bit without asking. Only then are the window's addresses written to the die, with its own
memory off, and only when they read back right is it turned on. ``close`` is the reverse, to the BARs of the boot.

Bridges keep their windows. Where dies sit behind bridges of their own, whose windows then overlap, only the bridges of
the open die pass memory accesses on (``switch_bridges``): else a switch might send an access to either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rrd.helper.base import WARNING, BadSetup, Refusal, say
from rrd.helper.device import Bar, Device, Fallen, Saved, memory_bars
from rrd.helper.kept import Kept
from rrd.helper.placing import check_bridge, check_free, check_window, own_bridges
from rrd.helper.space import Bus


@dataclass
class _Known:
    """What is known of a die that has answered."""

    saved: Saved
    placed: Sequence[tuple[int, int]]
    """BAR registers and their values that place it at the window."""
    above: Sequence[str]
    """The addresses of its bridges, outermost first."""


class Window:
    """``dies``: PCI address by name; ``window``: address by BAR number. Each swap has ``timeout`` seconds."""

    def __init__(self, dies: Mapping[str, str], window: Mapping[int, int], bus: Bus, kept: Kept, *,
                 switch_bridges: bool = False, timeout: float = 1.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.dies: Sequence[str] = list(dies)
        self._window, self._bus, self._kept = window, bus, kept
        self._switch_bridges, self._timeout, self._clock = switch_bridges, timeout, clock
        self._devices = {name: self._device(f"die {name}", address) for name, address in dies.items()}
        self._known: dict[str, _Known] = {}
        self._bridges: dict[str, Device] = {}
        """All that are above a known die."""
        self._own: list[str] = []
        """Those of them that are not above every die: off unless the open die is behind them."""

    def start(self) -> None:
        """See Backend. A die that is not there, or is not as it should be, may come later."""
        self._look_before_touching()
        bad: list[BadSetup] = []
        for name in self.dies:
            try:
                self._know(name)
            except Refusal as e:
                say(WARNING, f"{e.reason}; the other dies go on without it")
            except BadSetup as e:
                bad.append(e)
        if len(bad) == len(self.dies):
            raise bad[0]
        for fault in bad:
            say(WARNING, f"{fault}; the other dies go on without it")

    def open(self, die: str, wanted: Callable[[], bool] = lambda: True) -> None:
        """See Backend."""
        with self._in_time(die):
            self._open(die)

    def close(self, die: str) -> None:
        """See Backend."""
        with self._in_time(die):
            self._close(die)

    @contextmanager
    def _in_time(self, die: str) -> Iterator[None]:
        self._limit(self._clock() + self._timeout)
        try:
            yield
        except (Refusal, BadSetup) as e:
            self._limit(math.inf)  # however long it takes: what is half open must not stay so
            self._shut(die)
            raise _refused(e) from None
        finally:
            self._limit(math.inf)

    def _close(self, die: str) -> None:
        device, known = self._devices[die], self._known[die]
        try:
            device.set_memory(False)
            device.put_back(known.saved)
        finally:
            for bridge in self._own_above(die):
                bridge.set_memory(False)

    def _open(self, die: str) -> None:
        for name in self.dies:
            with suppress(Fallen):  # who does not answer claims no address either
                self._turn_off(name)
        device, known = self._devices[die], self._met(die)
        for address in self._own:
            if address not in known.above:
                with suppress(Fallen):
                    self._bridges[address].set_memory(False)
        device.set_memory(False)
        for number, value in known.placed:
            device.put_bar(number, value)
        for address in known.above:
            self._pass_on(self._bridges[address])
        device.set_memory(True)

    def _turn_off(self, name: str) -> None:
        if name in self._known:
            self._devices[name].set_memory(False)
            return
        try:
            self._know(name)
        except BadSetup:  # said at the start
            if self._devices[name].address in self._kept.devices:  # else it is none of ours, and never touched
                self._devices[name].set_memory(False)

    def _pass_on(self, bridge: Device) -> None:
        if self._switch_bridges:
            bridge.set_memory(True)
        elif not bridge.memory:
            raise Refusal(f"{bridge.name} passes no memory access on: its memory-space-enable bit is off")

    def _shut(self, die: str) -> None:
        """Close ``die`` as far as it lets itself be closed."""
        with suppress(Refusal, BadSetup):
            self._devices[die].set_memory(False)
            if die in self._known:
                self._devices[die].put_back(self._known[die].saved)
        for bridge in self._own_above(die):
            with suppress(Refusal, BadSetup):
                bridge.set_memory(False)

    # --- getting to know the dies ---

    def _look_before_touching(self) -> None:
        """A wrong address may be that of a disk. Raises BadSetup unless the dies are of one kind."""
        kinds: dict[int, Device] = {}
        chains: list[list[str]] = []
        hint = "`lspci -nn` shows where the dies are"
        for device in self._devices.values():
            with suppress(Fallen):
                kinds.setdefault(device.ids(), device)
                chains.append(self._above(device))
                if device.is_bridge():
                    raise BadSetup(f"{device.name} ({device.address}) is a bridge", hint=hint)
        if len(kinds) > 1:
            found = ", ".join(f"{d.name} ({d.address}) is {_ids(ids)}" for ids, d in kinds.items())
            raise BadSetup(f"the dies of a group must be of one kind: {found}", hint=hint)
        own_bridges(chains, may_switch=self._switch_bridges)

    def _meet(self, name: str) -> None:
        """Get to know a die that was not there at the start."""
        if name not in self._known:
            try:
                self._know(name)
            except BadSetup as e:
                raise Refusal(str(e)) from None

    def _met(self, name: str) -> _Known:
        self._meet(name)
        device = self._devices[name]
        ids = device.ids()
        known = self._known[name]
        if ids != known.saved.ids:
            raise Refusal(f"{device.name} ({device.address}) is another device now: "
                          f"{_ids(ids)}, it was {_ids(known.saved.ids)}; restart rrd-gate if that is right")
        return known

    def _know(self, name: str) -> None:
        """Keep how the die is, turn it off, and find what places it. Raises Refusal, BadSetup."""
        device = self._devices[name]
        now = device.saved()
        self._check_kind(device, now)
        above = self._above(device)
        bridges = {a: self._bridges.get(a) or self._device(f"bridge {a}", a) for a in above}
        if self._switch_bridges:
            for bridge in bridges.values():
                self._kept.add(bridge.saved())
        saved = self._kept.add(now)
        device.set_memory(False)
        placed = self._places(device, memory_bars(device, now), bridges.values())
        chains = [known.above for known in self._known.values()]
        own = own_bridges([*chains, above], may_switch=self._switch_bridges)
        self._known[name] = _Known(saved, placed, above)
        self._bridges |= bridges
        self._own = own

    def _check_kind(self, device: Device, saved: Saved) -> None:
        """The same again, for a die that comes late."""
        other = next((known.saved.ids for known in self._known.values()), saved.ids)
        if not saved.bars or saved.ids != other:
            raise BadSetup(f"{device.name} ({device.address}) is {_ids(saved.ids)}, the other dies are {_ids(other)}")

    def _places(self, device: Device, bars: Mapping[int, Bar], above: Iterable[Device]) -> list[tuple[int, int]]:
        check_window(device, bars, self._window)
        for bridge in above:
            check_bridge(bridge, device, bars, self._window)
        spans = {n: range(self._window[n], self._window[n] + bar.size) for n, bar in bars.items()}
        for taken in check_free(spans, [d.address for d in self._devices.values()], self._bus):
            raise BadSetup(taken, hint="`rrd-gate --check` lists all that is wrong")
        return [value for number, bar in bars.items() for value in bar.values(self._window[number])]

    def _above(self, device: Device) -> list[str]:
        try:
            return self._bus.bridges(device.address)
        except OSError as e:
            raise Fallen(f"{device.name} ({device.address}) is not on the bus: {e.strerror}") from None

    def _own_above(self, die: str) -> list[Device]:
        """The bridges that are switched with ``die``, innermost first."""
        above = self._known[die].above if die in self._known else ()
        return [self._bridges[a] for a in reversed(above) if a in self._own]

    def _device(self, name: str, address: str) -> Device:
        return Device(name, address, self._bus.space(address), self._clock)

    def _limit(self, deadline: float) -> None:
        for device in (*self._devices.values(), *self._bridges.values()):
            device.deadline = deadline


def _ids(ids: int) -> str:
    return f"{ids & 0xFFFF:04x}:{ids >> 16:04x}"


def _refused(e: Refusal | BadSetup) -> Refusal:
    """To whoever asked for a swap, a right that was taken away meanwhile (kernel lockdown) is a refusal, too."""
    return e if isinstance(e, Refusal) else Refusal(str(e))
