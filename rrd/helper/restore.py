"""Putting everything back as it was: at the end, after a crash, and before a start that follows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rrd.helper.base import NOTICE, WARNING, Refusal, say
from rrd.helper.device import IO, KINDS, Device, Fallen, Saved
from rrd.helper.kept import Kept
from rrd.helper.programs import run
from rrd.helper.space import Bus

UNDO_SECONDS = 10.0


def restore(kept: Kept, bus: Bus) -> bool:
    """Put back all that is kept, as far as it answers, and forget it. False if something would not; it stays kept."""
    undone: dict[str, list[str]] = {}
    for group, argv in kept.undo.items():
        try:
            run(argv, UNDO_SECONDS)
        except Refusal as e:
            say(WARNING, f"group {group}: {' '.join(argv)}: {e.reason}")
            undone[group] = argv
    stuck = put_back(list(kept.devices.values()), bus)
    kept.forget(stuck, undone)
    return not stuck and not undone


def put_back(saved: Sequence[Saved], bus: Bus) -> list[Saved]:
    """The devices that would not go back. One that no longer answers has nothing to be put back.

    Everything is off before any address changes, and every address is right before anything is on: bridges first. No
    die is turned on at an address that another has: a driver may have meddled, or the other may not let go.
    """
    here = {s: d for s in saved if (d := _still_there(s, bus))}
    stuck: list[Saved] = []
    _try_each(_off, here, stuck)
    taken = {bar for s in stuck for bar in _claims(here[s].saved())}
    for step in (Device.put_back, _bridge_on):
        _try_each(step, here, stuck)
    for s, device in here.items():
        if s.memory and s.bars and _claims(s) & taken:
            say(WARNING, f"{device.name} ({s.address}) stays off: another has its address")
            stuck += [s] if stuck else []  # it will have it, once the other lets go
        else:
            taken |= _claims(s) if s.memory else set()
            _try_each(_die_on, {s: device}, stuck)
    return stuck


def _try_each(step: Callable[[Device, Saved], None], here: Mapping[Saved, Device], stuck: list[Saved]) -> None:
    for s, device in here.items():
        try:
            if s not in stuck:
                step(device, s)
        except Fallen as e:
            say(NOTICE, e.reason)
        except Refusal as e:
            say(WARNING, e.reason)
            stuck.append(s)


def _claims(saved: Saved) -> set[int]:
    """The addresses of its memory BARs, as the registers have them."""
    return {bar for bar in saved.bars if bar & ~KINDS and not bar & IO}


def _still_there(saved: Saved, bus: Bus) -> Device | None:
    device = Device("device", saved.address, bus.space(saved.address))
    try:
        ids = device.ids()
    except Fallen as e:
        say(NOTICE, f"{e.reason}; nothing to put back")
        return None
    if ids != saved.ids:
        say(NOTICE, f"device {saved.address} is another one now; nothing to put back")
        return None
    return device


def _off(device: Device, saved: Saved) -> None:
    if saved.bars:
        device.set_memory(False)


def _bridge_on(device: Device, saved: Saved) -> None:
    if not saved.bars:
        device.set_memory(saved.memory)


def _die_on(device: Device, saved: Saved) -> None:
    if saved.bars:
        device.set_memory(saved.memory)
