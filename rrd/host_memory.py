"""The memory of this machine, which its CPU dies and everything else on it share; see proc(5), meminfo."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_LIMIT = "/sys/fs/cgroup"


class HostMemory(NamedTuple):
    """Bytes: that there are, and that may be taken without anything being swapped."""

    total: int
    available: int


def look() -> HostMemory | None:
    """As it is now, within the limit of our control group (``MemoryMax=`` of a unit); None where Linux does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in f}
        memory = HostMemory(found["MemTotal"], found["MemAvailable"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    limit = _limit()
    return memory if limit is None else HostMemory(min(memory.total, limit), min(memory.available, limit))


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it booted, the machine's or a control group's; 0
    where it does not say (before Linux 4.13)."""
    try:
        with open("/proc/vmstat", encoding="ascii") as f:
            return next((int(line.split()[1]) for line in f if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0


def _limit() -> int | None:
    """The least ``memory.max`` of our control group and those above it (cgroup v2)."""
    least = None
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").partition("0::")[2].strip().strip("/")
        at = Path(_LIMIT, group)
        for each in (at, *at.parents):
            if each.is_relative_to(_LIMIT) and (said := each / "memory.max").exists():
                text = said.read_text(encoding="ascii").strip()
                least = least if text == "max" else min(int(text), least or int(text))
    except (OSError, ValueError):
        pass
    return least
