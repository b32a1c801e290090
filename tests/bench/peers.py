"""The peers: one job trained by rrd's own Trainer in a plain process, without a daemon. They differ in scheduling only.

    python tests/bench/peers.py MODEL DATA SEQ THREADS SEED LOG CACHE

Appends a line ``unix-time tokens`` a step to LOG and trains until it is killed. Like any training script it holds its
own weights, and leaves OpenMP as it comes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rig
import torch

from rrd.job import parse_job, to_toml
from rrd.models import dtypes, load_base
from rrd.train import data as datasets

if TYPE_CHECKING:
    from rrd.train.trainer import Trainer

ENDLESS = 10**8


def job(model: Path, data: Path, seq: int, seed: int = 0) -> dict[str, object]:
    """The job file that all sides train."""
    return {"model": str(model), "data": str(data), "seq_len": seq, "seed": seed, "schedule": "constant",
            "max_steps": ENDLESS, "dtype": "float32", "lora_rank": 32}


def trainer(model: Path, data: Path, seq: int, *, threads: int, seed: int, cache: Path) -> Trainer:
    from rrd.train.trainer import Trainer

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    spec = parse_job("job.toml", to_toml(job(model, data, seq, seed)).encode())
    prepared = datasets.prepare(spec.data, spec.model, seq_len=seq, too_long=spec.too_long,
                                max_bad_lines=spec.max_bad_lines, cache_dir=cache)
    dtype, compute = dtypes.choose(spec.dtype, "cpu")
    base = load_base(spec.model, dtype=dtype, compute=compute)
    return Trainer(spec, base, datasets.Dataset.open(prepared.path), None, threads=threads)


def step_seconds(model: Path, data: Path, seq: int, cache: Path, n: int = 9) -> float:
    """The median of a few steps on one thread, in this process."""
    t = trainer(model, data, seq, threads=1, seed=0, cache=cache)
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        t.run_step(ENDLESS, "stop")
        taken.append(time.perf_counter() - start)
    return rig.median(taken[2:])


def main() -> None:
    model, data, seq, threads, seed, log, cache = sys.argv[1:]
    t = trainer(Path(model), Path(data), int(seq), threads=int(threads), seed=int(seed), cache=Path(cache))
    with open(log, "a", buffering=1) as lines:
        while True:
            tokens = t.run_step(ENDLESS, "stop").tokens
            lines.write(f"{time.time():.3f} {tokens}\n")


if __name__ == "__main__":
    main()
