"""RWKV-7 of the 0.1B model's shape (12 layers, 768 channels, 65,536 words): rrd against plain torch.

    python tests/bench/bench_rwkv.py                          steps: LoRA and full, 256 and 512 tokens
    python tests/bench/bench_rwkv.py --method lora --seq 512 --layers 4
    python tests/bench/bench_rwkv.py --threads 2              by the clock on the wall: the box must be quiet
    python tests/bench/bench_rwkv.py --ops                    only the recurrence: compiled, chunked, token by token
    python tests/bench/bench_rwkv.py --fla DIR                also flash-linear-attention's naive path, unpacked in DIR
    python tests/bench/bench_rwkv.py --profile                where our time goes, without the peers

On one thread, what counts is the process's own time, so that other tenants of the box matter less. All take turns, a
step each, on the same weights and tokens. Printed: tokens/s of the best step of each, our ratio to the others, and the
share of this CPU's measured GEMM rate that our step's own products amount to. The random start is RWKV-LM's
initialisation.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rwkv_peer import Peer, Recurrence, careful_recurrence, fla_naive, recurrence
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recorder

from rrd.lora import attach
from rrd.models import build, load_base
from rrd.models.new import new_model
from rrd.models.rwkv7_init import new_config
from rrd.ops import native
from rrd.ops.rwkv7 import wkv7
from rrd.ops.wkv7 import wkv7_chunked
from rrd.optim import AdamW
from rrd.train.step import Batch, train_step

clock = time.process_time

RANK, TARGETS = 32, ("receptance", "key", "value", "output")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    global clock
    clock = time.process_time if args.threads == 1 else time.perf_counter
    torch.set_flush_denormal(True)
    kernels = native.kernels()
    print(f"torch {torch.__version__}, threads: {args.threads}, kernels: "
          f"{kernels.name if kernels else native.why_not()}")
    recurrences = {"token by token": recurrence} | ({"flash-linear-attention": fla_naive(args.fla)} if args.fla else {})
    for T in (64,) if args.quick else (256, 512):
        ops(T, recurrences)
    if args.ops:
        return
    with tempfile.TemporaryDirectory() as where:
        path = Path(where) / "model"
        new_model(new_config(args.layers, args.width, args.vocab), path)
        for method in [args.method] if args.method else ["lora", "full"]:
            for seq in [args.seq] if args.seq else [256, 512]:
                steps(path, method, seq, args, {} if args.profile else recurrences)


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--method", choices=["lora", "full"])
    p.add_argument("--seq", type=int)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--vocab", type=int, default=65536)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--profile", action="store_true", help="where our time goes, without the peers")
    p.add_argument("--ops", action="store_true", help="the recurrence alone")
    p.add_argument("--fla", type=Path, help="where the wheel of fla-core is unpacked; needs einops")
    p.add_argument("--quick", action="store_true", help="two small layers, a few seconds")
    args = p.parse_args()
    if args.quick:
        args.layers, args.width, args.vocab, args.rounds = 2, 128, 500, 1
    return args


def gemm_rate(n: int = 1024) -> float:
    """FLOP/s of a product of square matrices, the best of forty."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    return 2 * n**3 / best(lambda: torch.mm(a, b), 40)


def best(call: Callable[[], object], times: int) -> float:
    return min(seconds(call) for _ in range(times))


def seconds(call: Callable[[], object]) -> float:
    start = clock()
    call()
    return clock() - start


def steps(path: Path, method: str, seq: int, args: argparse.Namespace, peers: dict[str, Recurrence]) -> None:
    idx = torch.randint(args.vocab, (1, seq + 1), generator=torch.Generator().manual_seed(0))
    sides = {"rrd": ours(path, method, idx)} | {name: theirs(path, method, idx, peers[name]) for name in peers}
    losses, times, rate = {}, dict.fromkeys(sides, math.inf), 0.0
    for turn in range(args.rounds + 1):
        rate = max(rate, gemm_rate())
        for name, step in sides.items():
            took = seconds(lambda step=step, name=name: losses.__setitem__(name, step()))
            if turn:
                times[name] = min(times[name], took)
        assert turn or max(losses.values()) - min(losses.values()) < 1e-3, losses
    share = products(args.layers, args.width, args.vocab, method) * seq / times["rrd"] / rate
    line = (f"{method} T={seq}: rrd {seq / times['rrd']:.0f} tokens/s, {share:.0%} of the GEMM rate, "
            f"{rate / 1e9:.0f} GFLOP/s")
    for name in peers:
        line += f"; {name} {seq / times[name]:.1f} tokens/s, ratio {times[name] / times['rrd']:.1f}"
    print(line, flush=True)
    if args.profile:
        profile(sides["rrd"])


PARTS = {"products": {"aten::mm", "aten::addmm", "aten::addmm_"}, "AdamW": {"aten::_fused_adamw_"},
         "time mix": {"_TimeMix", "_TimeMixBackward"}, "the gradient's norm": {"aten::linalg_vector_norm"},
         "norms, shifts, relu2": {"_NormShift", "_NormShiftBackward", "_Relu2", "_Relu2Backward"},
         "cross-entropy": {"aten::_softmax", "aten::amax"}, "zeros": {"aten::fill_"}}


def profile(step: Callable[[], object], count: int = 4) -> None:
    """Milliseconds a step, by parts, on the wall; the profiler itself costs some."""
    with recorder(activities=[ProfilerActivity.CPU]) as found:
        whole = best(step, count)
    own = {e.key: e.self_cpu_time_total / count / 1e3 for e in found.key_averages()}
    for part, keys in PARTS.items():
        print(f"    {part}: {sum(own.get(key, 0.0) for key in keys):.0f} ms")
    print(f"    all: {sum(own.values()):.0f} ms; the quickest step {whole * 1e3:.0f} ms")


def products(L: int, C: int, V: int, method: str) -> float:
    """FLOPs a token of the products of a step: forward and the input's gradient, and those of what is trained."""
    config = new_config(L, C, V)
    low = sum(2 * C * (b.d_w + b.d_a + b.d_v + b.d_g) for b in config.blocks)
    frozen = 12 * C * C * L + low + V * C
    adapters = 0 if method == "full" else RANK * 18 * C * L
    return 2.0 * (frozen * (3 if method == "full" else 2) + 3 * adapters)


def ours(path: Path, method: str, idx: Tensor) -> Callable[[], float]:
    model = build(load_base(path, trainable=method == "full"))
    named = list(model.named_parameters()) if method == "full" else attach(model, targets=TARGETS, rank=RANK, seed=0)
    optimizer = AdamW(named)
    batch = Batch(idx[:, :-1], idx[:, 1:])
    return lambda: train_step(model, optimizer, [batch], lr=1e-5, clip_norm=1.0, seeds=[0]).loss


def theirs(path: Path, method: str, idx: Tensor, recur: Recurrence) -> Callable[[], float]:
    tensors = {n: p.detach() for n, p in build(load_base(path)).named_parameters()}
    peer = Peer(tensors, 0 if method == "full" else RANK, recur)
    trained = [p for p in peer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(peer(idx[:, :-1]).view(-1, len(peer.get("head.weight"))), idx[0, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def ops(T: int, peers: dict[str, Recurrence], H: int = 12) -> None:
    g = torch.Generator().manual_seed(0)
    r, k, v, z, kk = (torch.randn(1, T, H, 64, generator=g) for _ in range(5))
    kappa = torch.nn.functional.normalize(kk, dim=-1)
    xs = [r, -math.exp(-0.5) * torch.sigmoid(z), k, v, -kappa, kappa * 0.5]

    def op(recur: Recurrence) -> Callable[..., tuple[Tensor, None]]:
        def call(r: Tensor, log_d: Tensor, *rest: Tensor) -> tuple[Tensor, None]:
            r, w, k, v, a, b = (t.view(1, T, H * 64) for t in (r, torch.log(-log_d), *rest))
            return recur(r, w, k, v, a, b).view(1, T, H, 64), None

        return call

    sides: dict[str, Callable[..., tuple[Tensor, object]]] = {"compiled": wkv7, "chunked": wkv7_chunked}
    sides |= {name: op(recur) for name, recur in (peers | {"with care": careful_recurrence}).items()}
    expected = wkv7_chunked(*xs)[0]
    for name, side in sides.items():
        assert torch.allclose(side(*xs)[0], expected, atol=1e-3), name
        inputs = [x.clone().requires_grad_() for x in xs]
        forward = best(lambda side=side, inputs=inputs: side(*inputs), 5)
        both = best(lambda side=side, inputs=inputs: side(*inputs)[0].sum().backward(), 5)
        print(f"recurrence, {H} heads, {T} tokens, {name}: forward {forward * 1e3:.1f} ms, "
              f"backward {(both - forward) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
