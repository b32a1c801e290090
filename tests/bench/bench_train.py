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
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

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


def main() -> None:
    args = _arguments()
    global clock
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    print(f"torch {torch.__version__}, {args.threads} thread(s); GEMM rate "
          + ", ".join(f"{d} {gemm_rate(getattr(torch, d)):.0f}" for d in ("float32", "bfloat16")) + " GFLOP/s")
    for model, seq, dtype, method, masked in figures(args):
        with tempfile.TemporaryDirectory() as where:
            make_model(model, where, dtype)
            ratios[masked > 0].append(compare(args, model, where, seq, dtype, method, masked))
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
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=0, help="steps a round; 0: about 2 seconds' worth")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's own, for busy boxes")
    p.add_argument("--alone", action="store_true", help="without the peer")
    p.add_argument("--profile", action="store_true", help="print where our time goes, and stop")
    return p.parse_args()


def figures(args: argparse.Namespace) -> list[tuple[str, int, str, str, float]]:
    """What to measure: the options given, and the whole list along those that are not."""
    grid = itertools.product(
        [args.model] if args.model else list(SIZES), [args.seq] if args.seq else [256, 512],
        [args.dtype] if args.dtype else ["float32", "bfloat16"], [args.method] if args.method else ["lora", "full"],
        [0.0, 0.5] if args.masked is None else [args.masked],
    )
    full_given = args.method == "full"
    return [f for f in grid if f[3] == "lora" or full_given or (f[0] == "12m" and f[2] == "float32" and f[4] == 0)]


def gemm_rate(dtype: torch.dtype, n: int = 1024) -> float:
    """GFLOP/s of a product of square matrices, the best of ten."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return 2 * n**3 / min(seconds(lambda: torch.mm(a, b)) for _ in range(10)) / 1e9


clock = time.perf_counter


def seconds(call: Callable[[], object]) -> float:
    start = clock()
    call()
    return clock() - start


def make_model(size: str, where: str, dtype: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=False, max_position_embeddings=2048)
    with contextlib.redirect_stderr(io.StringIO()):
        LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(where)


def samples(size: str, seq: int, masked: float, n: int = 16) -> tuple[Tensor, Tensor]:
    """idx and labels (not shifted, as Trainer takes them): [n, seq] each."""
    idx = torch.randint(SIZES[size]["vocab_size"], (n, seq), generator=torch.Generator().manual_seed(1))
    labels = idx.clone()
    labels[:, : int(seq * masked)] = NO_LABEL
    return idx, labels


def flops_per_token(size: str, seq: int, method: str) -> float:
    """Of forward and backward: 2 a weight and product; attention counted causal, its backward as 2.5 forwards."""
    s = SIZES[size]
    C, F, L, V = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"], s["vocab_size"]
    linear, head = L * (4 * C * C + 3 * C * F), V * C
    lora = L * RANK * (4 * 2 * C + 3 * (C + F))
    products = 6 * (linear + head) if method == "full" else 4 * (linear + head) + 6 * lora
    return products + 7 * L * C * seq


def ours(where: str, dtype: str, method: str, idx: Tensor, labels: Tensor) -> Callable[[], object]:
    """One step of our job a call."""
    full = method == "full"
    stored, compute = choose(dtype, "cpu", trainable=full)
    base = load_base(where, dtype=stored, compute=compute, trainable=full, store_dir=where + "/store")
    model = build(base)
    trained = list(model.named_parameters()) if full else attach(model, targets=TARGETS, rank=RANK, seed=0)
    optimizer = AdamW(trained)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
    turns = itertools.cycle([Batch(idx[i : i + 1], shifted[i : i + 1]) for i in range(len(idx))])
    return lambda: train_step(model, optimizer, [next(turns)], lr=1e-4, clip_norm=1.0, seeds=[0])


class Peer:
    """Hugging Face's Trainer in a thread of its own, let through one step at a time."""

    def __init__(self, where: str, dtype: str, method: str, idx: Tensor, labels: Tensor, steps: int) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._job = (where, dtype, method, idx, labels, steps)
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self) -> None:
        self._go.release()
        self._done.acquire()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            torch.set_num_threads(torch.get_num_threads())
            trainer(*self._job, gate=self).train()
        except BaseException as e:
            self._error = e
        self._done.release()


def trainer(where: str, dtype: str, method: str, idx: Tensor, labels: Tensor, steps: int, gate: Peer) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Gate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate._go.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate._done.release()
            gate._go.acquire()

    model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype))
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)))
    data = [{"input_ids": i, "labels": y} for i, y in zip(idx, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=where + "/peer", per_device_train_batch_size=1, max_steps=steps, learning_rate=1e-4,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, logging_strategy="no",
    )
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Gate()])


def compare(args: argparse.Namespace, size: str, where: str, seq: int, dtype: str, method: str, masked: float) -> float:
    idx, labels = samples(size, seq, masked)
    mine = ours(where, dtype, method, idx, labels)
    mine(), mine()
    if args.profile:
        profile(mine)
        return 1.0
    steps = args.steps or max(1, round(2.0 / seconds(mine)))
    peer = None if args.alone else Peer(where, dtype, method, idx, labels, steps * args.rounds + 3)
    if peer:
        peer(), peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.rounds):
        for side, call in enumerate([mine, peer]):
            if call:
                times[side].append(seconds(lambda call=call: [call() for _ in range(steps)]) / steps)
    return report(size, seq, dtype, method, masked, times)


def report(
    size: str, seq: int, dtype: str, method: str, masked: float, times: tuple[list[float], list[float]]
) -> float:
    work = flops_per_token(size, seq, method) * seq
    line = f"{size:>5} seq {seq} {dtype:8} {method} masked {masked:.1f}:"
    for who, side in zip(("rrd", "peer"), times, strict=True):
        if side:
            t = statistics.median(side)
            share = work / t / 1e9 / gemm_rate(torch.float32 if who == "rrd" else getattr(torch, dtype))
            line += f"  {who} {seq / t:7.0f} tok/s ({share:4.0%} of GEMM)"
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
