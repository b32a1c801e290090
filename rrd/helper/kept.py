"""The state file: how the devices were before the helper touched them, so that whoever comes after a crash can put
them back. It lies in /run, which a reboot clears with the state that it describes."""

from __future__ import annotations

import contextlib
import json
import os
import threading

from rrd.helper.base import BadSetup
from rrd.helper.device import Saved

FORMAT = 1


class Kept:
    """The state file at ``path``. Every change is on it before the call returns."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.devices: dict[str, Saved] = {}
        """By address, bridges before what is below them."""
        self.undo: dict[str, list[str]] = {}
        """By group: the program that closes the die which a program has opened, or may have."""

    @classmethod
    def load(cls, path: str) -> Kept:
        """What was kept at ``path``; nothing where there is no such file, or where it is of another boot."""
        kept = cls(path)
        try:
            with open(path, "rb") as file:
                data = json.load(file)
            if data["format"] != FORMAT:
                raise ValueError("of another version")
            if data["boot"] == boot_id():
                kept.devices = {d["address"]: Saved(d["address"], d["ids"], d["command"], tuple(d["bars"]))
                                for d in data["devices"]}
                kept.undo = {str(group): [str(part) for part in argv] for group, argv in data["undo"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise BadSetup(f"the state file {path} cannot be read: {e}",
                           hint="reboot, or remove it if no die is in use") from None
        return kept

    def add(self, saved: Saved) -> Saved:
        """Keep ``saved`` unless its device is kept already; what is in force."""
        with self._lock:
            if saved.address not in self.devices:
                self.devices[saved.address] = saved
                self._write()
            return self.devices[saved.address]

    def to_undo(self, group: str, argv: list[str] | None) -> None:
        """Keep the program that undoes what ``group`` is about to do; None: nothing is to be undone."""
        with self._lock:
            if argv is None:
                self.undo.pop(group, None)
            else:
                self.undo[group] = argv
            self._write()

    def forget(self, devices: list[Saved] | None = None, undo: dict[str, list[str]] | None = None) -> None:
        """Keep only ``devices`` that could not be put back and the programs ``undo`` that failed; without any, no file
        either."""
        with self._lock:
            self.devices, self.undo = {s.address: s for s in devices or []}, undo or {}
            if self.devices or self.undo:
                self._write()
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)

    def _write(self) -> None:
        data = {"format": FORMAT, "boot": boot_id(), "undo": self.undo,
                "devices": [{"address": s.address, "ids": s.ids, "command": s.command, "bars": s.bars}
                            for s in self.devices.values()]}
        fd = os.open(f"{self._path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(data).encode())
        finally:
            os.close(fd)
        os.rename(f"{self._path}.new", self._path)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
