"""What a bar swap takes, apart from the bus: rrd-gate over a tree of files that looks like /sys.

    python tests/bench/bench_gate.py
    python tests/bench/bench_gate.py --quick    50 swaps each

A file on tmpfs takes an access about as fast as a device's register space does over sysfs (a microsecond or two each,
most of it the system call). The boxes: six dies on one bus, and six on three K80 boards, whose bridges are switched.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rig import Results, median, memory, quantile

sys.path.insert(0, str(Path(__file__).parent.parent / "gate"))

from rrd_gate import ADDRESSES, WINDOW, Peer, RrdGate, fake_sysfs, pci_config

from rrd.gate import SocketGate
from rrd.helper.kept import Kept
from rrd.helper.space import Sysfs
from rrd.helper.window import Window

MOST = {"acquire": 0.3, "release": 0.1}
"""Milliseconds."""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="50 swaps each")
    swaps = 50 if p.parse_args().quick else 5000
    results = Results("gate")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        backends(results, Path(name), swaps)
        with helper(Path(name) / "helper") as gate:
            by_hand(results, gate, swaps)
            asyncio.run(by_the_gate(results, gate, swaps))
            assert gate.process is not None
            results.add("resident memory of rrd-gate", memory([gate.process.pid], "Rss"), "MB")
    results.finish()


def timed(swaps: int, acquire: Callable[[str], object], release: Callable[[str], object]) -> dict[str, list[float]]:
    """Milliseconds of each, the dies in turn."""
    taken: dict[str, list[float]] = {"acquire": [], "release": []}
    for n in range(swaps):
        die = str(n % len(ADDRESSES))
        for verb, call in (("acquire", acquire), ("release", release)):
            start = time.perf_counter()
            call(die)
            taken[verb].append(1000 * (time.perf_counter() - start))
    return taken


def report(results: Results, what: str, taken: dict[str, list[float]], *, budget: bool) -> None:
    for verb, times in taken.items():
        results.add(f"{what}: {verb}, median", median(times), "ms", most=MOST[verb] if budget else None)
        results.add(f"{what}: {verb}, 99 of 100", quantile(times, 0.99), "ms")


def backends(results: Results, path: Path, swaps: int) -> None:
    for what, boards in (("swap, one bus", False), ("swap, three boards", True)):
        where = path / what.replace(" ", "-")
        sysfs = fake_sysfs(where / "sys", boards=boards)
        window = Window(ADDRESSES, WINDOW, Sysfs(str(sysfs)), Kept(str(where / "state.json")), switch_bridges=boards)
        window.start()
        report(results, what, timed(swaps, window.open, window.close), budget=True)


@contextmanager
def helper(path: Path) -> Iterator[RrdGate]:
    path.mkdir()
    gate = RrdGate(path, pci_config(), sysfs=fake_sysfs(path / "sys"))
    gate.start()
    try:
        yield gate
    finally:
        gate.close()


def by_hand(results: Results, gate: RrdGate, swaps: int) -> None:
    """A client that does nothing else."""
    peer = Peer(gate.socket)
    report(results, "over the socket", timed(swaps, lambda d: peer.ask("acquire", d), lambda d: peer.ask("release", d)),
           budget=True)
    peer.close()


async def by_the_gate(results: Results, gate: RrdGate, swaps: int) -> None:
    """The daemon's own client, on an event loop: its part is Python's."""
    client = SocketGate(str(gate.socket))
    taken: dict[str, list[float]] = {"acquire": [], "release": []}
    for n in range(swaps):
        for verb, call in (("acquire", client.acquire), ("release", client.release)):
            start = time.perf_counter()
            await call(str(n % len(ADDRESSES)))
            taken[verb].append(1000 * (time.perf_counter() - start))
    await client.close()
    report(results, "as the daemon asks", taken, budget=False)


if __name__ == "__main__":
    main()
