"""A port as the daemon serves it, with snapshots that a test makes up, and a busy box to look at."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cli"))

from fake_daemon import HOSTILE, busy, job, snapshot

from rrd.metrics import Meters
from rrd.snapshot import JobView, Snapshot, VisitView
from rrd.states import JobState
from rrd.web import Web

__all__ = ["HOSTILE", "Stage", "a_busy_box", "job", "snapshot", "stage"]


class Stage:
    """The metrics port over ``self.snapshot``, which a test replaces as it likes; its loop runs in a thread."""

    def __init__(self, snapshot: Snapshot, port: int = 0) -> None:
        self.snapshot, self.meters = snapshot, Meters()
        self.taken = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.web = asyncio.run_coroutine_threadsafe(self._make(), self.loop).result()
        self.web.start(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.web.port}/"

    async def _make(self) -> Web:
        return Web(self._take, self.meters)

    def _take(self) -> Snapshot:
        self.taken += 1
        return self.snapshot

    def get(self, path: str = "", **headers: str) -> str:
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        self.web.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextlib.contextmanager
def stage(snapshot: Snapshot, port: int = 0) -> Iterator[Stage]:
    s = Stage(snapshot, port)
    try:
        yield s
    finally:
        s.close()


def a_busy_box() -> Snapshot:
    """Two lanes in the middle of the week, with visits behind them, jobs in every state and a few things wrong."""
    s = busy()
    s.jobs[0].losses = [2.2 + 1.8 * math.exp(-i / 18) + 0.05 * math.sin(3 * i) for i in range(64)]
    s.jobs[0].eval_loss, s.jobs[1].eta_seconds = 2.41, 30 * 3600.0
    s.jobs += [JobView(id=f"corpus-{i}", state=JobState.RUNNING, die=str(i), step=40 + 90 * i, target_steps=900,
                       loss=3 - i / 4, losses=[4 - i / 4 - 0.02 * k + 0.15 * math.sin(k * (i + 2)) for k in range(50)],
                       steps_per_minute=12.5 + i, eta_seconds=600.0 * (9 - i), last_checkpoint_at=s.time - 60 * i - 5,
                       last_checkpoint_step=40 + 80 * i) for i in range(6)]
    s.disk_free_bytes, s.disk_size_bytes = 212 << 30, 930 << 30
    for lane in s.lanes:
        visits(s, lane.name)
    return s


def visits(s: Snapshot, lane: str, seconds: float = 110.0, each: float = 3.1) -> None:
    """The dies of a lane took turns until now; the die after the last one computes."""
    dies = [d for d in s.dies if d.lane == lane]
    at, n = s.time - seconds, 0
    while at + each < s.time:
        d = dies[n % 3]
        jobs = [f"corpus-{d.name}", *(["code-a"] if d.name == "3" else [])]
        d.jobs = sorted({*d.jobs, *jobs})
        d.visits.append(VisitView(job=jobs[n // 3 % len(jobs)], start=at, end=at + each - 0.05,
                                  steps=0 if n < 3 else 9, round=n // 3))
        at, n = at + each, n + 1
    d = dies[n % 3]
    for other in dies:
        other.computing, other.state = None, "idle" if other.state == "computing" else other.state
    d.computing, d.since, d.state = f"corpus-{d.name}", at, "computing"


def shown(port: int = 9477) -> None:
    """Serve the busy box until interrupted: ``python tests/stage.py``, to look at the page by hand."""
    with stage(a_busy_box(), port) as s:
        print(s.url)
        while True:
            time.sleep(1)
            fresh = a_busy_box()
            fresh.jobs[0].step += int(fresh.time) % 1000
            s.snapshot = fresh


if __name__ == "__main__":
    shown()
