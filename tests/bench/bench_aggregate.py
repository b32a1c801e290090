"""Six jobs together: tokens/s and memory under rrd, against what people do without it, in the same run.

    python tests/bench/bench_aggregate.py            a 12M-parameter llama
    python tests/bench/bench_aggregate.py --model 140m --window 90 --slice 15
    python tests/bench/bench_aggregate.py --quick    the same on toys, in seconds

The peers train the same jobs with rrd's own training code, so that only the scheduling differs:

    gang   six processes with a thread per core each, of which SIGSTOP and SIGCONT let one run at a time, a slice each:
           what Slurm's gang scheduling and a shell script do
    side   six processes with one thread each, all at once

All are up all the time; windows of each take turns while the others are stopped, so that a noisy neighbour meets all.
Memory is measured while only one of them is up, because a page that others map too counts less.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peers import job
from rig import START_SECONDS, Results, Rrd, cpu_seconds, make_data, make_model, median, memory, send

JOBS = 6


def main() -> None:
    args = arguments()
    results = Results("aggregate")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        where = Path(name)
        data, model = make_data(where / "data.jsonl"), make_model(where, args.model)
        side = stack.enter_context(Peers(where / "side", model, data, args.seq, threads=1))
        side.wait()
        theirs = steady_memory(side.pids)
        side.stop()
        gang = stack.enter_context(Peers(where / "gang", model, data, args.seq, threads=os.cpu_count() or 1))
        gang.wait(slice=max(1.0, args.slice))
        gang.stop()
        rrd = stack.enter_context(Ours(where / "rrd", model, data, args.seq))
        rates = measure(args, rrd, gang, side)
        side.end(), gang.end()
        rrd.go()
        time.sleep(1.0)
        ours = steady_memory(rrd.pids)
    report(results, args, rates, ours, theirs)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="toys, a few seconds")
    p.add_argument("--model", default="12m", choices=["toy", "12m", "140m"])
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--window", type=float, default=30.0, help="seconds of each side a round")
    p.add_argument("--slice", type=float, default=5.0, help="seconds until the gang's next process has its turn")
    args = p.parse_args()
    if args.quick:
        args.model, args.seq, args.rounds, args.window, args.slice = "toy", 64, 2, 1.5, 0.25
    return args


class Peers:
    """Six plain processes. They stop when the block ends."""

    def __init__(self, where: Path, model: Path, data: Path, seq: int, *, threads: int) -> None:
        where.mkdir()
        self.logs = [where / f"{i}.log" for i in range(JOBS)]
        self._commands = [[sys.executable, str(Path(__file__).with_name("peers.py")), str(model), str(data), str(seq),
                           str(threads), str(i), str(log), str(where / "cache")] for i, log in enumerate(self.logs)]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._turn = 0

    def __enter__(self) -> Peers:
        self._processes = [subprocess.Popen(c, env=self._environment) for c in self._commands]
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def wait(self, steps: int = 5, *, slice: float | None = None) -> None:
        """Until each has made ``steps`` steps; with ``slice`` they take turns, or their many threads would never."""
        deadline = time.monotonic() + START_SECONDS
        if slice:
            self.stop()
        while not all(log.exists() and log.read_text().count("\n") >= steps for log in self.logs):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._processes):
                sys.exit("the peers do not train")
            if slice:
                self.rotate(time.time() + JOBS * slice, slice)
            else:
                time.sleep(0.1)

    def go(self) -> None:
        send(self.pids, signal.SIGCONT)

    def stop(self) -> None:
        send(self.pids, signal.SIGSTOP)

    def rotate(self, until: float, slice: float) -> None:
        """One at a time, ``slice`` seconds each, up to the Unix time ``until``."""
        while (now := time.time()) < until:
            pid = self.pids[self._turn % JOBS]
            self._turn += 1
            os.kill(pid, signal.SIGCONT)
            time.sleep(min(slice, until - now))
            os.kill(pid, signal.SIGSTOP)

    def tokens(self, start: float, end: float) -> int:
        """Those of the steps that ended between two Unix times."""
        steps = (line.split() for log in self.logs for line in log.read_text().split("\n")[:-1])
        return sum(int(tokens) for at, tokens in steps if start <= float(at) < end)

    def end(self) -> None:
        for p in self._processes:
            p.kill()
            p.wait()
        self._processes = []


class Ours:
    """The daemon with the same six jobs, its default lanes and visits."""

    def __init__(self, where: Path, model: Path, data: Path, seq: int) -> None:
        self.rrd = Rrd(where, hang_seconds=3600)  # while the others have their windows it is stopped
        for i in range(JOBS):
            self.rrd.submit(f"job-{i}", **job(model, data, seq, seed=i))
        self.pids: list[int] = []

    def __enter__(self) -> Ours:
        self.rrd.__enter__()
        self.rrd.wait_running(JOBS)
        self.stop()
        return self

    def __exit__(self, *error: object) -> None:
        self.rrd.__exit__(*error)

    def go(self) -> None:
        send(self.pids, signal.SIGCONT)

    def stop(self) -> None:
        self.pids = self.rrd.tree()
        send(self.pids, signal.SIGSTOP)

    def tokens(self, start: float, end: float) -> int:
        steps = (h for i in range(JOBS) for h in self.rrd.history(f"job-{i}"))
        return sum(h["tokens"] for h in steps if start <= h["time"] < end)


@dataclass
class Rates:
    """What one side made, a figure a round."""

    a_second: list[float] = field(default_factory=list)
    a_cpu_second: list[float] = field(default_factory=list)


def measure(args: argparse.Namespace, rrd: Ours, gang: Peers, side: Peers) -> dict[str, Rates]:
    """Tokens of each side in windows that take turns."""
    runs: dict[str, tuple[Ours | Peers, Callable[[float], None]]] = {
        "rrd": (rrd, free(rrd)), "side": (side, free(side)),
        "gang": (gang, lambda until: gang.rotate(until, args.slice))}
    rates = {name: Rates() for name in runs}
    for _ in range(args.rounds):
        for name, (it, run) in runs.items():
            start, cpu = time.time(), cpu_seconds(it.pids)
            run(start + args.window)
            end, tokens = time.time(), it.tokens(start, time.time())
            rates[name].a_second.append(tokens / (end - start))
            rates[name].a_cpu_second.append(tokens / (cpu_seconds(it.pids) - cpu))
        print("    tokens/s: " + ", ".join(f"{name} {r.a_second[-1]:,.0f}" for name, r in rates.items()), flush=True)
    return rates


def free(it: Ours | Peers) -> Callable[[float], None]:
    """Let it run as it likes until a Unix time."""
    def run(until: float) -> None:
        it.go()
        time.sleep(max(0.0, until - time.time()))
        it.stop()

    return run


def steady_memory(pids: list[int], samples: int = 5) -> float:
    """MB of PSS together, the median of a few looks while they train."""
    looks = []
    for _ in range(samples):
        looks.append(memory(pids))
        time.sleep(0.3)
    return median(looks)


def report(results: Results, args: argparse.Namespace, rates: dict[str, Rates], ours: float, theirs: float) -> None:
    for name, rate in rates.items():
        results.add(f"{args.model} seq {args.seq}: six jobs, {name}", median(rate.a_second), "tokens/s", digits=0)
    for name, least in (("gang", 1.25), ("side", 1.0)):
        results.add(f"rrd / {name}, median of the rounds' ratios", ratio(rates, name, "a_second"),
                    least=0 if args.quick else least)
        results.add(f"rrd / {name}, by CPU time used (for a box that is not idle)", ratio(rates, name, "a_cpu_second"))
    results.add("PSS of rrd: daemon, nursery and six workers", ours, "MB", digits=0)
    results.add("PSS of six processes (side)", theirs, "MB", digits=0)
    results.add("PSS of rrd / PSS of six processes", ours / theirs, most=0.5)
    results.finish()


def ratio(rates: dict[str, Rates], other: str, what: str) -> float:
    pairs = zip(getattr(rates["rrd"], what), getattr(rates[other], what), strict=True)
    return median([a / b for a, b in pairs])


if __name__ == "__main__":
    main()
