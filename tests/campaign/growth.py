"""Whether the daemon and its workers grow: memory and open files, sampled over their lives."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path

from rrd.snapshot import Snapshot

WARM_UP = {"daemon": 120.0, "worker": 40.0}
"""Seconds of a process's life that say nothing of its later memory."""
MOST = {"daemon": 20.0, "worker": 40.0}
"""MiB an hour that may be noise: well above what was seen (docs/reliability.md)."""


class Growth:
    """Samples of the daemon's processes."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[tuple[float, float, int, int]]] = defaultdict(list)
        """Of each process: (monotonic time, MiB, open files, jobs that it holds)."""

    def sample(self, s: Snapshot) -> None:
        who = [("daemon", s.pid, 0), *(("worker", d.worker_pid, len(d.jobs)) for d in s.dies if d.worker_pid)]
        for kind, pid, jobs in who:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                # What is shared with the nursery counts in full, or a share would grow whenever another worker dies.
                kib = int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])
                files = len(os.listdir(f"/proc/{pid}/fd"))
                self.samples[kind, pid].append((time.monotonic(), kib / 1024, files, jobs))

    def judge(self) -> tuple[list[str], str]:
        """What grows, and a sentence with the figures."""
        told, wrong = [], []
        for kind, most in MOST.items():
            lives = [[x for x in xs if x[0] >= xs[0][0] + WARM_UP[kind] and x[3] == jobs]  # with more it may hold more
                     for (k, _), xs in self.samples.items() if k == kind for jobs in {x[3] for x in xs}]
            memory, seen = slope([[(t, mib) for t, mib, _, _ in xs] for xs in lives])
            files, _ = slope([[(t, float(n)) for t, _, n, _ in xs] for xs in lives])
            peak = max((mib for xs in lives for _, mib, _, _ in xs), default=0.0)
            open_files = max((n for xs in lives for _, _, n, _ in xs), default=0)
            told.append(f"{kind}: at most {peak:.0f} MiB and {open_files} open files, {memory:+.1f} MiB and "
                        f"{files:+.1f} files an hour over {seen / 60:.0f} process-minutes")
            if seen > 600 and (memory > most or files > 10):
                wrong.append(f"the {kind} grows: {told[-1]}")
        return wrong, "; ".join(told)


def slope(lives: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """Least squares with a level of its own for each life: (units an hour, seconds seen)."""
    above = below = seen = 0.0
    for xs in lives:
        if len(xs) < 3:
            continue
        t0, v0 = sum(t for t, _ in xs) / len(xs), sum(v for _, v in xs) / len(xs)
        above += sum((t - t0) * (v - v0) for t, v in xs)
        below += sum((t - t0) ** 2 for t, _ in xs)
        seen += xs[-1][0] - xs[0][0]
    return (3600 * above / below if below else 0.0), seen
