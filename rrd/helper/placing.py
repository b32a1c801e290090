"""Whether a window fits the dies that are to share it, and the bridges above them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from rrd.helper.base import BadSetup
from rrd.helper.bridge import passes_on
from rrd.helper.device import Bar, Device
from rrd.helper.space import IS_MEMORY, NOWHERE, Bus


def check_window(device: Device, bars: Mapping[int, Bar], window: Mapping[int, int]) -> None:
    """Raises BadSetup unless ``window`` places each of ``bars`` and nothing else, aligned, and apart."""
    who = f"{device.name} ({device.address})"
    for number in window:
        if number not in bars:
            raise BadSetup(f"{who} has no memory BAR {number}", hint=f"it has {_listed(bars)}; `lspci -v` shows them")
    for number, bar in bars.items():
        if number not in window:
            raise BadSetup(f"the window has no bar{number}, but {who} would answer there, too",
                           hint=f"it has {_listed(bars)}")
        address = window[number]
        if address % bar.size:
            raise BadSetup(f"bar{number} of the window, 0x{address:x}, is not a multiple of the {bar.size:#x} bytes "
                           f"that {who} has there")
        if not bar.wide and address + bar.size > 1 << 32:
            raise BadSetup(f"bar{number} of the window, 0x{address:x}, is above 4 GiB, and {who} has 32 bits there")
    spans = sorted((window[number], number) for number in bars)
    for (address, number), (after, other) in itertools.pairwise(spans):
        if address + bars[number].size > after:
            raise BadSetup(f"bar{number} and bar{other} of the window overlap: "
                           f"{span(address, bars[number].size)} and {span(after, bars[other].size)}")


def check_free(spans: Mapping[int, range], dies: Collection[str], bus: Bus) -> list[str]:
    """A sentence for each thing that answers at addresses of the window already, besides ``dies``."""
    return [f"bar{number} of the window, {span(at.start, len(at))}, overlaps {what}"
            for number, at in spans.items() for what in _there_already(at, dies, bus)]


def _there_already(window: range, dies: Collection[str], bus: Bus) -> Iterator[str]:
    """Memory, as far as the kernel tells us, and other devices."""
    for start, end in bus.memory():
        if start < window.stop and window.start <= end:
            yield f"the machine's memory, {span(start, end - start + 1)}"
    for address in bus.addresses():
        if address in dies:
            continue
        with suppress(OSError):  # it has gone meanwhile
            for first, last, flags in bus.resources(address):
                here = flags & IS_MEMORY and not flags & NOWHERE
                if here and first < window.stop and window.start <= last:
                    yield f"what {address} has, {span(first, last - first + 1)}"


def span(address: int, size: int) -> str:
    """``0xf0000000-0xf00fffff``."""
    return f"0x{address:x}-0x{address + size - 1:x}"


def _listed(bars: Mapping[int, Bar]) -> str:
    return ", ".join(f"bar{n} of {bar.size:#x} bytes" for n, bar in bars.items()) or "none"


def check_bridge(bridge: Device, device: Device, bars: Mapping[int, Bar], window: Mapping[int, int]) -> None:
    """Raises BadSetup unless ``bridge`` passes the window on to ``device`` below it."""
    for number, bar in bars.items():
        if not passes_on(bridge, window[number], bar.size):
            raise BadSetup(f"{bridge.name}, above {device.name}, does not pass on bar{number} of the window, "
                           f"{span(window[number], bar.size)}",
                           hint="choose one inside the windows of every bridge above; `lspci -vv` shows them")


def own_bridges(chains: Sequence[Sequence[str]], *, may_switch: bool) -> list[str]:
    """The bridges in ``chains``, one chain a die, that are not above every die. Raises BadSetup unless they
    ``may_switch``: all of them pass the same window on."""
    own = [b for b in dict.fromkeys(b for chain in chains for b in chain) if not all(b in c for c in chains)]
    if own and not may_switch:
        raise BadSetup(f"not all dies are behind the same bridges ({', '.join(own)} above some only), so that several "
                       "bridges pass the window on",
                       hint="with switch_bridges = true only those of the open die do so")
    return own
