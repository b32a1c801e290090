"""The daemon itself: how long its import takes, how large it is, how fast it answers with 1,000 jobs and six busy dies.

    python tests/bench/bench_daemon.py
    python tests/bench/bench_daemon.py --quick    with 50 jobs
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from rig import Results, Rrd, make_data, make_model, median, memory, quantile, running

DIES = 6


def main() -> None:
    args = arguments()
    results = Results("daemon")
    imports(results, 3 if args.quick else 10)
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        model, data = make_model(where, "toy" if args.quick else "12m"), make_data(where / "data.jsonl")
        rrd = Rrd(where / "rrd", cpu_dies=DIES, jobs_per_die=1)
        for i in range(args.jobs):
            # the first six have the dies; of the others every second is paused, the rest wait in line
            rrd.submit(f"job-{i:04}", model=str(model), data=str(data), seq_len=256, visit_seconds=1.0,
                       max_steps=10**8, seed=i, paused=i >= DIES and i % 2 == 1)
        with rrd:
            rrd.wait(lambda s: len(s.jobs) == args.jobs and len(running(s)) == DIES
                     and all(j.steps_run for j in running(s)), "all jobs known and six running")
            answers(results, rrd, args)
            size(results, rrd, args)
    results.finish()


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="50 jobs, a few seconds")
    p.add_argument("--jobs", type=int, default=1000)
    p.add_argument("--asks", type=int, default=200)
    args = p.parse_args()
    if args.quick:
        args.jobs, args.asks = 50, 20
    return args


def imports(results: Results, n: int) -> None:
    """In a fresh process each; the interpreter's own start is apart."""
    code = "import time; t = time.perf_counter(); import rrd.daemon; print(time.perf_counter() - t)"
    taken = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(n)]
    results.add("import of rrd.daemon, median", median(taken), "s", most=0.5)
    results.add("import of rrd.daemon, shortest", min(taken), "s")


def answers(results: Results, rrd: Rrd, args: argparse.Namespace) -> None:
    def status() -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(str(rrd.run_dir / "control.sock"))
            s.sendall(b'{"verb": "status"}\n')
            with s.makefile("rb") as lines:
                assert lines.readline().startswith(b'{"ok": true')

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{rrd.port}/metrics") as page:
            assert b"rrd_build_info" in page.read()

    jobs = f"{args.jobs:,} jobs"
    times = timed(status, args.asks)
    results.add(f"status, {jobs}: answer, median", 1e3 * median(times), "ms", most=100, digits=1)
    results.add(f"status, {jobs}: answer, 95 of 100 below", 1e3 * quantile(times, 0.95), "ms", digits=1)
    results.add(f"status, {jobs}: answer, longest", 1e3 * max(times), "ms", digits=1)
    times = timed(scrape, args.asks // 4)
    results.add(f"/metrics, {jobs}: scrape, median", 1e3 * median(times), "ms", digits=1)
    results.add(f"/metrics, {jobs}: scrape, longest", 1e3 * max(times), "ms", digits=1)
    command = [sys.executable, "-m", "rrd", "status", "--json", "--state", str(rrd.where)]
    times = timed(lambda: json.loads(subprocess.check_output(command)), max(3, args.asks // 40))
    results.add(f"`rrd status --json`, {jobs}: the whole command, median", 1e3 * median(times), "ms", digits=0)


def timed(call: Callable[[], object], n: int) -> list[float]:
    """Seconds of each of ``n`` calls, a moment apart."""
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
        time.sleep(0.02)
    return taken


def size(results: Results, rrd: Rrd, args: argparse.Namespace) -> None:
    results.add(f"RSS of the daemon, {args.jobs:,} jobs", memory([rrd.process.pid], "Rss"), "MB", most=80, digits=1)
    results.add(f"PSS of the daemon, {args.jobs:,} jobs", memory([rrd.process.pid]), "MB", digits=1)


if __name__ == "__main__":
    main()
