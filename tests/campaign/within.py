"""What befalls workers from within, one fault at a time, at random moments of their jobs (faulty_worker.py)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import faulty_worker

KINDS: dict[str, tuple[list[Any], tuple[str, ...], float]] = {
    "crashes": (["signal", "SIGSEGV"], ("step", "save", "write"), 1),
    "aborts": (["signal", "SIGABRT"], ("step", "save", "write"), 1),
    "exits": (["exit", 3], ("step", "save", "write"), 0.5),
    "hangs in native code": (["hang"], ("step", "save"), 0.7),
    "hangs deaf to all but SIGKILL": (["wedge"], ("step", "save"), 0.7),
    "sockets closed": (["eof"], ("step", "save"), 1),
    "garbage on a socket": (["garbage"], ("step", "save"), 1),
    "CUDA errors 700": (["poison", 700, 30], ("step",), 1),
    "dies lost": (["poison", "lost", 10], ("step",), 0.5),
    "out of memory": (["oom", 40], ("step",), 1)}
"""What, at which moments, and how often."""
NOTHING = {"job": "", "at": ""}


class Within:
    """The script that workers look into, to be started with ``environment``; only the last fault may still happen."""

    def __init__(self, script: Path, chance: random.Random) -> None:
        self.script, self.chance = script, chance
        self.environment = faulty_worker.write(script, NOTHING)
        self.names = [""]
        self.short: set[str] = set()
        """Jobs that have run out of memory: once more, and they would be run with what changes the last bits."""

    def befall(self, job: str) -> None:
        """Something, at its next step or save."""
        name = self.chance.choices(list(KINDS), [often for _, _, often in KINDS.values()])[0]
        do, moments, _ = KINDS[name]
        if name == "out of memory":
            if job in self.short:
                return
            self.short.add(job)
        fault = {"job": job, "at": self.chance.choice(moments), "do": do, "times": 2 if name == "out of memory" else 1}
        faulty_worker.write(self.script, *[NOTHING] * len(self.names), fault)
        self.names.append(name)

    def withdraw(self) -> list[str]:
        """Have what was to befall somebody happen no more. Returns its name if it has."""
        last = len(self.names) - 1
        if not self.names[last]:
            return []
        faulty_worker.write(self.script, NOTHING)
        happened = Path(f"{self.script}.{last}.0").exists()
        name, self.names[last] = self.names[last], ""
        return [name] if happened else []
