"""``one_step.py MODEL KEYS``: a step of a job, as a worker runs it; prints the bytes that it took at the peak, and
those that were estimated. ``bench_memory.py`` and ``tests/train/test_memory.py`` run it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import rrd.worker.loop  # noqa: F401 (all that a worker has before it loads anything)
from rrd.job import JobSpec
from rrd.models import dtypes, load_base
from rrd.models.files import inspect
from rrd.train.memory import estimate
from rrd.train.state import Staging
from rrd.train.step import Batch
from rrd.train.trainer import Trainer


class Tokens:
    """Data without end, a label at every position."""

    digest = "none"

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def __len__(self) -> int:
        return 1 << 30

    def batch_at(self, position: int, size: int, seed: int) -> Batch:
        idx = torch.randint(300, (size, self.seq_len))
        return Batch(idx, idx)


def one_step(model: str, keys: dict[str, Any]) -> tuple[int, int]:
    spec = JobSpec.model_validate({"model": model, "data": "/none", "max_steps": 2, "dtype": "float32", **keys})
    stored, compute = dtypes.choose(spec.dtype, "cpu", trainable=spec.method == "full")
    said = estimate(spec, inspect(Path(model)), stored, cuda=False).total
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew: proc(5)
    with tempfile.TemporaryDirectory() as store:
        base = load_base(model, dtype=stored, compute=compute, store_dir=store, trainable=spec.method == "full",
                         quantize=spec.quantize)
        trainer = Trainer(spec, base, Tokens(spec.seq_len), None, threads=1)  # type: ignore[arg-type]
        trainer.model.make_ready(Path.home() / ".cache" / "rrd", None, lambda: None)
        staging = Staging(trainer.optimizer)
        trainer.optimizer.state.mul_(1.0)  # written to, as after the first step
        staging.fill(trainer.optimizer)
        trainer.run_step(2, "stop")
        return held("VmHWM") - before, said


def held(what: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    print(*one_step(sys.argv[1], json.loads(sys.argv[2])))
