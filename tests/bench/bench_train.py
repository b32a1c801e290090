"""One job's tokens/s against Hugging Face Trainer + PEFT: same random model and samples, batch 1, one thread, one run.

    python tests/bench/bench_train.py                         every figure of the benchmark page
    python tests/bench/bench_train.py --model 12m --seq 256 --dtype float32 --method lora --masked 0.5
    python tests/bench/bench_train.py --model 12m --profile   where our time goes

The two take turns, a round of steps each, so that a noisy neighbour meets both. Printed: median tokens/s, their ratio
and, beside each, the share of this CPU's measured GEMM rate that the step's own arithmetic amounts to.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from rrd.lora import attach
from rrd.models import build, load_base
from rrd.models.dtypes import choose
from rrd.models.llama import Llama
from rrd.optim import AdamW
from rrd.train.step import NO_LABEL, Batch, train_step

SIZES = {
    "12m": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6, "num_attention_heads": 5,
                "num_key_value_heads": 5, "vocab_size": 8192},
    "140m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
                 "num_key_value_heads": 12, "vocab_size": 32000},
}
TARGETS = Llama.lora_targets
RANK = 32
HERE = str(Path(__file__).parent)


def main() -> None:
    args = _arguments()
    settle(args.threads)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    rates = [f"{d} {gemm_rate(getattr(torch, d), args.clock):.0f}" for d in ("float32", "bfloat16")]
    print(f"torch {torch.__version__}, {args.threads} thread(s); GEMM rate {', '.join(rates)} GFLOP/s")
    for figure in figures(args):
        with tempfile.TemporaryDirectory() as where:
            make_model(figure, where)
            ratios[figure.masked > 0].append(compare(args, where, figure))
    for masked, values in ratios.items():
        if values:
            mean = math.exp(statistics.fmean(map(math.log, values)))
            print(f"{'half masked' if masked else 'all labels'}: geometric mean {mean:.2f}, lowest {min(values):.2f}")


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=SIZES)
    p.add_argument("--seq", type=int)
    p.add_argument("--dtype", choices=["float32", "bfloat16"])
    p.add_argument("--method", choices=["lora", "full"])
    p.add_argument("--masked", type=float, help="share of each sample that has no label")
    p.add_argument("--compute", choices=["float32", "bfloat16"], help="what rrd computes in; default: what it chooses")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=0, help="steps a round; 0: about 2 seconds' worth")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's own, for busy boxes")
    p.add_argument("--alone", action="store_true", help="without the peer")
    p.add_argument("--profile", action="store_true", help="print where our time goes, and stop")
    return p.parse_args()


class Figure(NamedTuple):
    """What is measured: ``masked`` is the share of each sample without a label."""

    model: str
    seq: int
    dtype: str
    method: str
    masked: float


def figures(args: argparse.Namespace) -> list[Figure]:
    """What to measure: the options given, and the whole list along those that are not."""
    grid = itertools.starmap(Figure, itertools.product(
        [args.model] if args.model else list(SIZES), [args.seq] if args.seq else [256, 512],
        [args.dtype] if args.dtype else ["float32", "bfloat16"], [args.method] if args.method else ["lora", "full"],
        [0.0, 0.5] if args.masked is None else [args.masked],
    ))
    full_given = args.method == "full"
    return [f for f in grid if f.method == "lora" or full_given
            or (f.model, f.dtype, f.masked) == ("12m", "float32", 0.0)]


def gemm_rate(dtype: torch.dtype, clock: str, n: int = 1024) -> float:
    """GFLOP/s of a product of square matrices, the best of forty."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return 2 * n**3 / min(seconds(lambda: torch.mm(a, b), CLOCKS[clock]) for _ in range(40)) / 1e9


def settle(threads: int) -> None:
    """Both sides run under the same settings."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(call: Callable[[], object], now: Callable[[], float]) -> float:
    start = now()
    call()
    return now() - start


def make_model(figure: Figure, where: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[figure.model], tie_word_embeddings=False, max_position_embeddings=2048)
    with contextlib.redirect_stderr(io.StringIO()):
        LlamaForCausalLM(config).to(getattr(torch, figure.dtype)).save_pretrained(where)


def samples(figure: Figure, n: int = 16) -> tuple[Tensor, Tensor]:
    """idx and labels (not shifted, as Trainer takes them): [n, seq] each."""
    words, generator = SIZES[figure.model]["vocab_size"], torch.Generator().manual_seed(1)
    idx = torch.randint(words, (n, figure.seq), generator=generator)
    labels = idx.clone()
    labels[:, : int(figure.seq * figure.masked)] = NO_LABEL
    return idx, labels


def flops_per_token(figure: Figure) -> float:
    """Of forward and backward: 2 a weight and product; attention counted causal, its backward as 2.5 forwards."""
    s = SIZES[figure.model]
    C, F, L, V = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"], s["vocab_size"]
    linear, head = L * (4 * C * C + 3 * C * F), V * C
    lora = L * RANK * (4 * 2 * C + 3 * (C + F))
    products = 6 * (linear + head) if figure.method == "full" else 4 * (linear + head) + 6 * lora
    return products + 7 * L * C * figure.seq


def ours(where: str, figure: Figure, computed: str | None = None) -> Callable[[], object]:
    """One step of our job a call."""
    full = figure.method == "full"
    stored, compute = choose(figure.dtype, "cpu", trainable=full)
    if computed:
        compute = getattr(torch, computed)
        stored = compute if full else stored
    base = load_base(where, dtype=stored, compute=compute, trainable=full, store_dir=where + "/store")
    model = build(base)
    trained = list(model.named_parameters()) if full else attach(model, targets=TARGETS, rank=RANK, seed=0)
    optimizer = AdamW(trained)
    idx, labels = samples(figure)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
    turns = itertools.cycle([Batch(idx[i : i + 1], shifted[i : i + 1]) for i in range(len(idx))])
    return lambda: train_step(model, optimizer, [next(turns)], lr=1e-4, clip_norm=1.0, seeds=[0])


class Side:
    """One of the two, in a process of its own: it reads how many steps to take, and answers with the seconds."""

    def __init__(self, who: str, args: argparse.Namespace, where: str, figure: Figure) -> None:
        code = f"import sys; sys.path.insert(0, {HERE!r}); import bench_train; bench_train.serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        self._say({"who": who, "where": where, "figure": figure, "threads": args.threads, "clock": args.clock,
                   "compute": args.compute})
        self.steps(2)

    def steps(self, n: int) -> float:
        """Seconds a step."""
        self._say(n)
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a side of the comparison died; run it with --alone, or look at serve()")
        return float(line) / n

    def _say(self, what: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


def serve() -> None:
    """The child's side of ``Side``."""
    order = json.loads(sys.stdin.readline())
    settle(order["threads"])
    now = CLOCKS[order["clock"]]
    out, sys.stdout = sys.stdout, sys.stderr
    figure = Figure(*order["figure"])
    if order["who"] == "rrd":
        step = ours(order["where"], figure, order["compute"])
        for line in sys.stdin:
            start = now()
            for _ in range(int(line)):
                step()
            print(now() - start, file=out, flush=True)
        return

    def answers() -> Iterator[None]:
        """Yields after every step that may be taken."""
        for line in sys.stdin:
            start = now()
            for _ in range(int(line)):
                yield
            print(now() - start, file=out, flush=True)

    peer(order["where"], figure, answers())


def peer(where: str, figure: Figure, turns: Iterator[None]) -> None:
    """Hugging Face's Trainer, let through one step a turn."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Gate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            next(turns)

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            if next(turns, "end") == "end":
                control.should_training_stop = True

    model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, figure.dtype))
    if figure.method == "lora":
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)))
    idx, labels = samples(figure)
    arguments = TrainingArguments(
        output_dir=where + "/peer", per_device_train_batch_size=1, max_steps=10**6, learning_rate=1e-4,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, logging_strategy="no",
    )
    data = [{"input_ids": i, "labels": y} for i, y in zip(idx, labels, strict=True)]
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Gate()]).train()


def compare(args: argparse.Namespace, where: str, figure: Figure) -> float:
    if args.profile:
        profile(ours(where, figure, args.compute))
        return 1.0
    sides = [Side(who, args, where, figure) for who in (["rrd"] if args.alone else ["rrd", "peer"])]
    steps = args.steps or max(1, round(2.0 / sides[0].steps(1)))
    times: list[list[float]] = [[], []]
    for _ in range(args.rounds):
        for i, side in enumerate(sides):
            times[i].append(side.steps(steps))
    for side in sides:
        side.close()
    return report(figure, times, args.clock)


def report(figure: Figure, times: list[list[float]], clock: str) -> float:
    work = flops_per_token(figure) * figure.seq
    line = f"{figure.model:>5} seq {figure.seq} {figure.dtype:8} {figure.method} masked {figure.masked:.1f}:"
    rate = gemm_rate(getattr(torch, figure.dtype), clock)
    for who, side in zip(("rrd", "peer"), times, strict=True):
        if side:
            t = statistics.median(side)
            line += f"  {who} {figure.seq / t:7.0f} tok/s ({work / t / 1e9 / rate:4.0%} of GEMM)"
    ratio = statistics.median(times[1]) / statistics.median(times[0]) if times[1] else 1.0
    print(line + f"  ratio {ratio:.2f}", flush=True)
    return ratio


def profile(call: Callable[[], object], steps: int = 5) -> None:
    """A table of torch's operators by their own time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorder

    with recorder(activities=[ProfilerActivity.CPU], record_shapes=False) as p:
        for _ in range(steps):
            call()
    print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


if __name__ == "__main__":
    sys.exit(main())
