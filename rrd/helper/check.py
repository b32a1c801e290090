"""``rrd-gate --check``: what the configuration means on this machine. Only reads, so that dies may be at work."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rrd.helper.base import BadSetup, Refusal
from rrd.helper.bridge import windows
from rrd.helper.config import GroupConfig, HelperConfig
from rrd.helper.device import KINDS, WIDE, Bar, Device, Saved
from rrd.helper.placing import check_bridge, check_free, check_window, own_bridges, span
from rrd.helper.space import IS_MEMORY, Sysfs


def check(config: HelperConfig, bus: Sysfs) -> int:
    """Print it; 78 if something is wrong, else 0."""
    wrong: list[str] = []
    users = dict.fromkeys(["root", *config.allow_users])
    print("may ask: " + ", ".join([*(f"user {u}" for u in users), *(f"group {g}" for g in config.allow_groups)]))
    for found, names, what in ((config.uids, config.allow_users, "user"), (config.gids, config.allow_groups, "group")):
        if len(found) < len(set(names)):
            wrong.append(f"not every {what} of {', '.join(names)} exists on this machine")
    for group in config.groups:
        wrong += _check_pci(group, bus) if group.backend == "pci" else _check_programs(group)
    for fault in wrong:
        print(f"WRONG: {fault}")
    if not wrong:
        print("ok")
    return 78 if wrong else 0


def _check_programs(group: GroupConfig) -> list[str]:
    print(f"\n{group.name}: dies {' '.join(group.dies)}, by {group.acquire[0]} and {group.release[0]}")
    return [f"{argv[0]} is no program that can be run" for argv in (group.acquire, group.release)
            if not os.access(argv[0], os.X_OK)]


def _check_pci(group: GroupConfig, bus: Sysfs) -> list[str]:
    window = ", ".join(f"bar{n} at 0x{a:x}" for n, a in group.window.items())
    print(f"\n{group.name}: dies {' '.join(group.dies)}, one at a time at {window}")
    wrong: list[str] = []
    chains: list[list[str]] = []
    spans: dict[int, range] = {}
    for name, address in group.dies.items():
        try:
            chains.append(bus.bridges(address))
            bars = _check_die(Device(f"die {name}", address, bus.space(address)), chains[-1], group, bus)
            spans |= {n: range(group.window[n], group.window[n] + bar.size) for n, bar in bars.items()}
        except (BadSetup, Refusal) as e:
            wrong.append(str(e))
        except OSError as e:
            wrong.append(f"die {name} ({address}) is not on the bus: {e.strerror or e}")
    wrong += check_free(spans, group.dies.values(), bus)
    try:
        for bridge in own_bridges(chains, may_switch=group.switch_bridges):
            print(f"  bridge {bridge} is switched")
    except BadSetup as e:
        wrong.append(str(e))
    return wrong


def _check_die(device: Device, above: list[str], group: GroupConfig, bus: Sysfs) -> Mapping[int, Bar]:
    """Print it; its BARs."""
    saved = device.saved()
    bars = _bars(saved, bus.resources(device.address))
    at = [f"bar{n} {_address(saved, bar):#x}+{bar.size:#x}" for n, bar in bars.items()]
    ids = f"{saved.ids & 0xFFFF:04x}:{saved.ids >> 16:04x}"
    print(f"  {device.name}  {device.address}  {ids}  memory {'on' if saved.memory else 'off'}  {', '.join(at)}")
    bridges = [Device(f"bridge {a}", a, bus.space(a)) for a in above]
    for bridge in bridges:
        passed = ", ".join(span(w.start, len(w)) for w in windows(bridge)) or "no window"
        print(f"    behind {bridge.address}: {passed}")
    if not saved.bars:
        raise BadSetup(f"{device.name} ({device.address}) is a bridge")
    check_window(device, bars, group.window)
    for bridge in bridges:
        check_bridge(bridge, device, bars, group.window)
    return bars


def _bars(saved: Saved, resources: list[tuple[int, int, int]]) -> Mapping[int, Bar]:
    """The memory BARs as the kernel has sized them."""
    return {n: Bar(n, end - start + 1, saved.bars[n] & 0x6 == WIDE, saved.bars[n] & KINDS)
            for n, (start, end, flags) in enumerate(resources) if flags & IS_MEMORY}


def _address(saved: Saved, bar: Bar) -> int:
    high = saved.bars[bar.number + 1] << 32 if bar.wide else 0
    return high | saved.bars[bar.number] & ~KINDS
