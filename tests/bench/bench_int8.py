"""What an int8 base costs in time: one LoRA step over a float base and over the same quantized, turn about.

    python tests/bench/bench_int8.py [--model 140m] [--seq 512] [--dtype float32] [--rounds 9]

Printed: median seconds a step of each, their ratio, and the bytes that the bases hold.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time

import bench_train as bench

from rrd.lora import attach
from rrd.models import build, load_base
from rrd.models.dtypes import choose
from rrd.optim import AdamW
from rrd.train.step import Batch, train_step


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=bench.SIZES, default="140m")
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--rounds", type=int, default=9)
    args = p.parse_args()
    bench.settle(1)
    figure = bench.Figure(args.model, args.seq, args.dtype, "lora", 0.0)
    with tempfile.TemporaryDirectory() as where:
        bench.make_model(figure, where)
        sides = {name: side(where, figure, quantize=name == "int8") for name in (args.dtype, "int8")}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _, (name, step) in itertools.product(range(args.rounds), sides.items()):
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    exact, int8 = (statistics.median(t[1:] or t) for t in taken.values())
    print(f"{args.model}, {args.seq} tokens: {args.dtype} {exact:.3f} s a step, int8 {int8:.3f} s, "
          f"ratio {int8 / exact:.3f}")


def side(where, figure, *, quantize):  # type: ignore[no-untyped-def]
    stored, compute = choose(figure.dtype, "cpu")
    base = load_base(where, dtype=stored, compute=compute, quantize=quantize)
    print(f"{'int8' if quantize else figure.dtype}: the base holds {base.nbytes / 2**20:.0f} MiB")
    model = build(base)
    optimizer = AdamW(attach(model, targets=bench.TARGETS, rank=bench.RANK))
    idx, labels = bench.samples(figure)
    batch = [Batch(idx[:1, :-1], labels[:1, 1:])]
    return lambda: train_step(model, optimizer, batch, lr=1e-4, clip_norm=1.0, seeds=[0])


if __name__ == "__main__":
    main()
