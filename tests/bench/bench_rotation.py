"""What the rotation costs: seconds inside steps over seconds of busy lanes, the round trip of a visit, a checkpoint.

    python tests/bench/bench_rotation.py            six jobs, a checkpoint a minute
    python tests/bench/bench_rotation.py --quick    the same on toys, in seconds

Efficiency is given twice: as the daemon counts it (rrd_lane_busy_seconds / rrd_lane_seconds), and as the clock on the
wall does (seconds of all steps in the history, over the window times the number of lanes).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rig import Results, Rrd, make_data, make_model, median, quantile, steps_between

from rrd.handle import Nursery, Worker
from rrd.job import parse_job, to_toml
from rrd.messages import Committed, Load, Loaded, Message, Ready, Run, Step, VisitDone

JOBS = 6
STEP_SECONDS = 0.150
ENDLESS = 10**8


def main() -> None:
    args = arguments()
    results = Results("rotation")
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        data = make_data(where / "data.jsonl")
        size = "toy" if args.quick else "12m"
        model = make_model(where, size)
        job = {"model": str(model), "data": str(data), "schedule": "constant", "max_steps": ENDLESS,
               "dtype": "float32"}
        if not args.only or args.only == "trip":
            asyncio.run(round_trips(results, where, make_model(where / "t", "toy"), data, 200 if args.quick else 5000))
            visit_overhead(results, where, make_model(where / "v", "toy"), data, 3 if args.quick else args.window / 3)
        if not args.only or args.only == "efficiency":
            seq = 64 if args.quick else seq_for(STEP_SECONDS, where, model, data)
            efficiency(results, where / "a", "1 s visits", dict(job, seq_len=min(seq, 256), visit_seconds=1.0), args,
                       least=0.99)
            efficiency(results, where / "b", "1 step a visit", dict(job, seq_len=seq, steps_per_visit=1), args,
                       least=0.97)
        if not args.only or args.only == "checkpoint":
            big = model if args.quick else make_model(where, args.model)
            asyncio.run(checkpoints(results, where, args.model if not args.quick else size, big, data,
                                    3 if args.quick else args.checkpoints))
    results.finish()


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="toys, a few seconds")
    p.add_argument("--only", choices=["trip", "efficiency", "checkpoint"])
    p.add_argument("--window", type=float, default=130.0, help="seconds to measure each rotation")
    p.add_argument("--model", default="140m", help="whose checkpoint to measure")
    p.add_argument("--checkpoints", type=int, default=9)
    args = p.parse_args()
    if args.quick:
        args.window = min(args.window, 5.0)
    return args


# ---- six jobs in a daemon -------------------------------------------------------------------------------------------


def efficiency(results: Results, where: Path, name: str, job: dict[str, Any], args: argparse.Namespace, *,
               least: float) -> None:
    """Six jobs, a checkpoint every minute each, measured over a window that holds at least two of each."""
    with Rrd(where, cpu_dies=JOBS) as rrd:
        for i in range(JOBS):
            rrd.submit(f"job-{i}", **job, seed=i, checkpoint_every="60s")
        rrd.wait_running(JOBS)
        first, start = rrd.status(), time.time()
        time.sleep(args.window)
        last, end = rrd.status(), time.time()
        steps = [s for i in range(JOBS) for s in steps_between(rrd.history(f"job-{i}"), start, end)]
    busy = sum(b.busy_seconds - a.busy_seconds for a, b in zip(first.lanes, last.lanes, strict=True))
    seconds = sum(b.seconds - a.seconds for a, b in zip(first.lanes, last.lanes, strict=True))
    commits = sum(b.checkpoint_commits - a.checkpoint_commits for a, b in zip(first.jobs, last.jobs, strict=True))
    inside = sum(s["seconds"] for s in steps)
    if args.quick:
        least = 0.0
    results.add(f"{name}: efficiency, by the daemon's meters", busy / seconds, least=least, digits=4)
    results.add(f"{name}: efficiency, by the clock", inside / (end - start) / len(last.lanes), least=least, digits=4)
    results.add(f"{name}: median step", 1e3 * median([s["seconds"] for s in steps]), "ms", digits=1)
    results.add(f"{name}: checkpoints committed in the window", commits, digits=0)


def visit_overhead(results: Results, where: Path, model: Path, data: Path, window: float) -> None:
    """One job of next to no work on one lane, a step a visit: what a visit takes beyond its step."""
    with Rrd(where / "overhead", cpu_dies=1) as rrd:
        rrd.submit("job", model=str(model), data=str(data), seq_len=8, steps_per_visit=1, max_steps=ENDLESS)
        rrd.wait_running(1, steps=100)
        first = rrd.status()
        time.sleep(window)
        last = rrd.status()
    (a,), (b,) = first.lanes, last.lanes
    visits = last.jobs[0].steps_run - first.jobs[0].steps_run
    spent = (b.seconds - a.seconds) - (b.busy_seconds - a.busy_seconds)
    results.add("a visit beyond its step: gate, messages, history", 1e3 * spent / visits, "ms", most=1.0)


def seq_for(seconds: float, where: Path, model: Path, data: Path) -> int:
    """The length of samples with which a step takes about ``seconds`` here."""
    from peers import step_seconds

    taken = step_seconds(model, data, 256, where / "calibration")
    return max(64, min(512, round(256 * seconds / taken / 8) * 8))


# ---- one worker, asked directly -------------------------------------------------------------------------------------


async def with_worker(where: Path, spec: dict[str, Any], use: Callable[[Worker, list[Message]], Awaitable[None]]
                      ) -> None:
    """A worker that has loaded one job, spoken to as a lane does; ``use`` also gets the list of all its reports."""
    nursery, heard = Nursery(), list[Message]()
    (where / "state" / "jobs").mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {"die": "0", "device": "cpu", "threads": 1, "state_dir": str(where / "state"),
                                   "cache_dir": str(where / "cache")}
    worker = Worker(nursery, settings, heard.append)
    await worker.start()
    await worker.ask(None, Ready, patience=lambda: 120)
    answer = await worker.ask(Load(job="job", spec=parse_job("job.toml", to_toml(spec).encode())), Loaded,
                              patience=lambda: 600)
    assert isinstance(answer, Loaded), answer
    try:
        await use(worker, heard)
    finally:
        await worker.stop(patience=120)
        await nursery.stop()


async def round_trips(results: Results, where: Path, model: Path, data: Path, n: int) -> None:
    """``Run`` of no steps until ``VisitDone``: two messages, two processes woken, nothing else."""
    taken: list[float] = []

    async def use(worker: Worker, heard: list[Message]) -> None:
        for _ in range(n):
            start = time.perf_counter()
            await worker.ask(Run(job="job", steps=0, total=1), VisitDone, patience=lambda: 60)
            taken.append(time.perf_counter() - start)

    await with_worker(where / "trip", {"model": str(model), "data": str(data), "seq_len": 8}, use)
    results.add("message round trip, median", 1e3 * median(taken), "ms", most=1.0)
    results.add("message round trip, 99 of 100 below", 1e3 * quantile(taken, 0.99), "ms")


async def checkpoints(results: Results, where: Path, name: str, model: Path, data: Path, n: int) -> None:
    """A step and a checkpoint a visit: the copy within the visit against the step, and the commit after it.

    Every other visit saves, so that steps beside no commit are to be had.
    """
    stalls: list[float] = []
    commits: list[Committed] = []
    steps: list[Step] = []

    async def use(worker: Worker, heard: list[Message]) -> None:
        for i in range(2 * n + 1):
            order = Run(job="job", steps=1, total=ENDLESS, checkpoint=i % 2 == 1)
            done = await worker.ask(order, VisitDone, patience=lambda: 600)
            assert isinstance(done, VisitDone), done
            if done.copied:
                stalls.append(done.copy_seconds)
                commits.append(await worker.ask(None, Committed, patience=lambda: 600))  # type: ignore[arg-type]
        steps.extend(r for r in heard[1:] if isinstance(r, Step))

    spec = {"model": str(model), "data": str(data), "seq_len": 256, "lora_rank": 32, "dtype": "float32"}
    await with_worker(where / "checkpoint", spec, use)
    step = median([s.seconds for s in steps[1:]])
    results.add(f"{name} LoRA r=32: bytes of a checkpoint", commits[-1].bytes / 1e6, "MB", digits=1)
    results.add(f"{name} LoRA r=32: median step, seq 256", 1e3 * step, "ms", digits=1)
    results.add(f"{name} LoRA r=32: stall inside the visit", 1e3 * median(stalls), "ms", digits=2)
    results.add(f"{name} LoRA r=32: longest stall inside the visit", 1e3 * max(stalls), "ms", digits=2)
    results.add(f"{name} LoRA r=32: stall as a share of a step", median(stalls) / step, most=0.05, digits=4)
    commit = median([c.seconds for c in commits])
    results.add(f"{name} LoRA r=32: commit, after the visit", 1e3 * commit, "ms", digits=1)


if __name__ == "__main__":
    main()
