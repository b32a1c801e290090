"""What an int8 base costs in time: one LoRA step over a float base and over the same quantized, turn about.

    python tests/bench/bench_int8.py [--model 140m] [--seq 512] [--dtype float32] [--rounds 9]
    python tests/bench/bench_int8.py --error .demo/models/SmolLM2-135M-Instruct [--samples 8]

Printed: median seconds a step of each, their ratio, and the bytes that the bases hold. With ``--error``: what weights
of less precision do to the loss and the LoRA gradient of a real model, for int8 with a scale a row (what rrd does),
int8 with finer scales, and bf16, on the first 512 tokens of README.md, and of a file of docs/ for each further sample.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import bench_train as bench
import torch
from rig import Results
from torch import Tensor

from rrd.lora import attach
from rrd.models import Base, build, load_base
from rrd.models.dtypes import choose
from rrd.models.int8 import quantize, quantized_names
from rrd.optim import AdamW
from rrd.train.step import Batch, train_step


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=bench.SIZES, default="140m")
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--quick", action="store_true", help="a small model, two rounds")
    p.add_argument("--error", type=Path, metavar="MODEL")
    p.add_argument("--samples", type=int, default=1)
    args = p.parse_args()
    if args.error:
        errors(args.error, args.samples)
        return
    if args.quick:
        args.model, args.seq, args.rounds = "12m", 64, 2
    bench.settle(1)
    results = Results("int8")
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
    what = f"LoRA step, {args.model}, T={args.seq}"
    results.add(f"{what}: {args.dtype} base", exact, "s")
    results.add(f"{what}: int8 base", int8, "s")
    results.add(f"{what}: int8 to {args.dtype}", int8 / exact, "times", most=1.15)
    results.finish()


def side(where, figure, *, quantize):  # type: ignore[no-untyped-def]
    stored, compute = choose(figure.dtype, "cpu")
    base = load_base(where, dtype=stored, compute=compute, quantize=quantize)
    print(f"{'int8' if quantize else figure.dtype}: the base holds {base.nbytes / 2**20:.0f} MiB")
    model = build(base)
    optimizer = AdamW(attach(model, targets=bench.TARGETS, rank=bench.RANK))
    idx, labels = bench.samples(figure)
    batch = [Batch(idx[:1, :-1], labels[:1, 1:])]
    return lambda: train_step(model, optimizer, batch, lr=1e-4, clip_norm=1.0, seeds=[0])


# ---- what is lost ------------------------------------------------------------------------------------------------


def by_row(w: Tensor) -> Tensor:
    q, s = quantize(w)
    return q * s[:, None]


def by_row_searched(w: Tensor) -> Tensor:
    """The scale a row of the least square error: the largest weights may be cut."""
    best, least = w, torch.full((len(w), 1), torch.inf)
    for share in torch.linspace(0.7, 1.0, 31):
        s = w.abs().amax(1, keepdim=True) * share / 127.0
        rounded = (w / s).round().clamp(-127, 127) * s
        gone = (rounded - w).square().sum(1, keepdim=True)
        best, least = torch.where(gone < least, rounded, best), torch.minimum(gone, least)
    return best


def by_group(width: int) -> Callable[[Tensor], Tensor]:
    """A scale, stored as fp16, for every ``width`` weights of a row: 1 + 2 / ``width`` bytes a weight."""

    def rounded(w: Tensor) -> Tensor:
        x = w.view(len(w), -1, width)
        s = (x.abs().amax(2, keepdim=True) / 127.0).half().float().clamp_min(1e-8)
        return ((x / s).round().clamp(-127, 127) * s).view_as(w)

    return rounded


FORMATS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "int8, a scale a row": (1.0, by_row), "int8, a scale a row, searched": (1.0, by_row_searched),
    "int8, a scale for 64": (1 + 2 / 64, by_group(64)), "int8, a scale for 32": (1 + 2 / 32, by_group(32)),
    "bf16": (2.0, lambda w: (w * 1.3).bfloat16().float() / 1.3),  # these weights are bf16: scaled, they are rounded
    "fp32 with noise of 0.1 %": (4.0, lambda w: w + 1e-3 * w.std() * torch.randn_like(w))}


def errors(model: Path, samples: int) -> None:
    from tokenizers import Tokenizer

    top = Path(__file__).parents[2]
    texts = [f.read_text(encoding="utf-8") for f in [top / "README.md", *sorted(top.glob("docs/*.md"))][:samples]]
    tok = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = torch.tensor([tok.encode(t).ids[:513] for t in texts])
    loss, whole = gradient(load_base(model), ids)
    grad = torch.cat(whole)
    for name, (size, rounded) in FORMATS.items():
        base, gone, all_of_it = load_base(model), 0.0, 0.0
        for n in sorted(quantized_names(base.family, base.config)):
            w = base.tensors[n]
            base.tensors[n] = rounded(w)
            gone += float((base.tensors[n] - w).square().sum())
            all_of_it += float(w.square().sum())
        other_loss, parts = gradient(base, ids)
        other = torch.cat(parts)
        norms = torch.tensor([abs(float(a.norm() / b.norm()) - 1) for a, b in zip(parts, whole, strict=True)])
        print(f"{name}: {size:.2f} bytes a weight, weights {(gone / all_of_it) ** 0.5:.2%} off; loss "
              f"{abs(other_loss / loss - 1):.2%}, gradient's norm {abs(float(other.norm() / grad.norm()) - 1):.2%}, "
              f"each tensor's norm {float(norms.median()):.1%} (median; {float((norms < 0.01).float().mean()):.0%} of "
              f"them within 1 %), gradient {float((other - grad).norm() / grad.norm()):.1%} off, cosine "
              f"{float(other @ grad / other.norm() / grad.norm()):.4f}", flush=True)


def gradient(base: Base, ids: Tensor) -> tuple[float, list[Tensor]]:
    """Loss and all LoRA gradients, a tensor each, B's included: they begin at a random place."""
    model, g = build(base), torch.Generator().manual_seed(3)
    named = attach(model, targets=base.family.lora_targets, rank=4)
    for name, p in named:
        if "lora_B" in name:
            p.data.normal_(generator=g, std=0.01)
    optimizer = AdamW(named)
    batches = [Batch(i[None, :-1], i[None, 1:]) for i in ids]
    result = train_step(model, optimizer, batches, lr=0.0, clip_norm=0.0, seeds=[0] * len(batches))
    return result.loss, [optimizer.view("grad", slot).flatten().double() for slot in optimizer.layout]


if __name__ == "__main__":
    main()
