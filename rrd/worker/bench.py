"""``python -m rrd.worker.bench``: how near each op comes to what the die can do. ``rrd bench ops`` asks for it.

First the die's two ceilings are measured: bytes/s of a large copy or sum, whichever is quicker (read and written bytes
both count), and FLOP/s of a product of square fp32 matrices. Then every op that a training step is made of runs, in the
form this die chooses for it, at the shapes of a small real model; its bytes and FLOPs are counted from the shapes, as
few as any form of it needs. The best of several runs counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rrd.models.int8 import quantize
from rrd.models.layers import Linear, Lora
from rrd.ops import choice, native
from rrd.ops.attention import attention
from rrd.ops.cuda import int8
from rrd.ops.grad import backward
from rrd.ops.linear import Group
from rrd.ops.norm import rms_norm
from rrd.ops.rope import angles
from rrd.ops.rwkv7 import wkv7
from rrd.ops.swiglu import swiglu
from rrd.optim import AdamW
from rrd.train.loss import loss_and_grad
from rrd.train.state import Staging, cpu_model

HEAD = 64
"""Channels of a head."""


@dataclass(frozen=True)
class Sizes:
    """T tokens of C channels, F in the feed-forward, V words, rank r; n trained parameters, bytes of the copy."""

    tokens: int = 512
    channels: int = 768
    inner: int = 2048
    words: int = 32768
    rank: int = 32
    trained: int = 1 << 23
    copied: int = 1 << 28


SMALL = Sizes(tokens=32, channels=128, inner=256, words=512, rank=4, trained=1 << 14, copied=1 << 18)
"""For tests of the bench itself."""


class Case(NamedTuple):
    """One op: how often it runs in a step does not matter here. ``move`` bytes, ``work`` FLOPs a call."""

    op: str
    shape: str
    by: str
    call: Callable[[], object]
    move: float
    work: float


class Clock:
    """Seconds of a call on one die, the best of as many as ``seconds`` hold, three at least."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.name = "CPU time" if alone else "wall time"
        # one thread's own time does not count what other tenants of the box took
        self._now = time.process_time if alone else time.perf_counter

    def best(self, call: Callable[[], object]) -> float:
        self._once(call)
        times = [self._once(call) for _ in range(3)]
        while sum(times) < self._seconds and len(times) < 1000:
            times.append(self._once(call))
        return min(times)

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        start = self._now()
        call()
        self._wait()
        return self._now() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(device: torch.device, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """``{"die", "clock", "copy", "gemm", "ops": [{"op", "shape", "by", "seconds", "bytes", "flops"}]}``; per second."""
    clock = Clock(device, seconds)
    copy, gemm, ops = _copy_rate(device, sizes, clock), _gemm_rate(device, sizes, clock), []
    for case in cases(device, sizes):
        took = clock.best(case.call)
        ops.append({"op": case.op, "shape": case.shape, "by": case.by, "seconds": took,
                    "bytes": case.move / took, "flops": case.work / took})
    return {"die": _name(device), "torch": torch.__version__, "threads": torch.get_num_threads(), "clock": clock.name,
            "copy": copy, "gemm": gemm, "ops": ops}


def _copy_rate(device: torch.device, s: Sizes, clock: Clock) -> float:
    """Bytes/s. A CPU reads what a copy is about to overwrite; adding in place has no such hidden traffic."""
    a, b = torch.ones(s.copied // 4, device=device), torch.zeros(s.copied // 4, device=device)
    return max(2 * s.copied / clock.best(lambda: b.copy_(a)), 3 * s.copied / clock.best(lambda: b.add_(a)))


def _gemm_rate(device: torch.device, s: Sizes, clock: Clock) -> float:
    n = min(2048, 2 * s.channels)
    x, y, z = (torch.randn(n, n, device=device) for _ in range(3))
    return 2 * n**3 / clock.best(lambda: torch.mm(x, y, out=z))


def cases(device: torch.device, s: Sizes) -> Iterator[Case]:
    """Every op in turn; what one needs is gone when the next one comes."""
    with device:
        torch.manual_seed(0)
        for make in (_linear, _int8, _lora, _attention, _wkv7, _norm, _swiglu, _loss, _adamw, _save):
            yield from make(device, s)


def _linear(device: torch.device, s: Sizes) -> Iterator[Case]:
    yield from _product("linear", "torch", _frozen(Linear(s.channels, s.inner)), s)


def _int8(device: torch.device, s: Sizes) -> Iterator[Case]:
    m = _frozen(Linear(s.channels, s.inner))
    q, scale = quantize(m.weight.detach())
    m.weight, m.scale = nn.Parameter(q, requires_grad=False), nn.Parameter(scale, requires_grad=False)
    by = choice.choose("int8", device)
    yield from _product("int8 linear", by, m, s)
    if by == "kernel":
        with choice.overruled("int8", "torch"):  # as long as its cases are run
            yield from _product("int8 linear", "torch", m, s)
    if (die := choice.launcher("int8", device)) is not None and die.dp4a:
        x, y = torch.randn(s.tokens, s.channels), torch.empty(s.tokens, s.inner)
        yield Case("int8 linear, dp4a", f"{s.tokens} x {s.channels} x {s.inner}", by,
                   lambda: int8.y_dp4a(die, x, q, scale, y), 4.0 * (x.numel() + y.numel()) + q.numel(),
                   2.0 * s.tokens * q.numel())


def _product(op: str, by: str, m: Linear, s: Sizes) -> Iterator[Case]:
    """y and dx of a frozen linear."""
    group, x = Group(m), torch.randn(1, s.tokens, s.channels, requires_grad=True)
    y = group(x)
    dy = torch.randn_like(y)
    shape = f"{s.tokens} x {s.channels} x {s.inner}"
    work, weights = 2.0 * s.tokens * s.channels * s.inner, m.weight.numel() * m.weight.element_size()
    move = 4.0 * s.tokens * (s.channels + s.inner) + weights
    with torch.no_grad():
        yield Case(op, shape, by, lambda: group(x), move, work)
    yield Case(f"{op} dx", shape, by, _again(y, x, dy), move, work)


def _lora(device: torch.device, s: Sizes) -> Iterator[Case]:
    m = _frozen(Linear(s.channels, s.inner))
    m.lora = Lora(torch.randn(s.rank, s.channels), torch.randn(s.inner, s.rank), scale=1.0, dropout=0.0)
    optimizer = AdamW([("a", m.lora.a), ("b", m.lora.b)])
    group, x = Group(m), torch.randn(1, s.tokens, s.channels, requires_grad=True)
    dy = torch.randn(1, s.tokens, s.inner)

    def both() -> None:
        optimizer.zero_grad()
        backward(group(x), dy)
        x.grad = None

    low = s.rank * (s.channels + s.inner)
    work = 2.0 * s.tokens * (2 * s.channels * s.inner + 3 * low)
    yield Case("LoRA linear, both ways", f"{s.tokens} x {s.channels} x {s.inner}, r {s.rank}", "torch", both,
               4.0 * (2 * m.weight.numel() + 3 * s.tokens * (s.channels + s.inner)), work)


def _attention(device: torch.device, s: Sizes) -> Iterator[Case]:
    heads = s.channels // HEAD
    qkv = torch.randn(1, s.tokens, 3 * heads, HEAD, requires_grad=True)
    at = angles(torch.arange(s.tokens), torch.ones(HEAD // 2), torch.float32)
    y = attention(qkv, at, n_head=heads)
    dy, shape = torch.randn_like(y), f"{s.tokens} x {heads} x {HEAD}"
    work, move = 2.0 * s.tokens**2 * s.channels, 4.0 * s.tokens * 4 * s.channels  # half of the square is masked
    with torch.no_grad():
        yield Case("attention", shape, "torch", lambda: attention(qkv, at, n_head=heads), move, work)
    yield Case("attention backward", shape, "torch", _again(y, qkv, dy), 2 * move, 2.5 * work)


def _wkv7(device: torch.device, s: Sizes) -> Iterator[Case]:
    heads = s.channels // HEAD
    r, k, v, z = (torch.randn(1, s.tokens, heads, HEAD) for _ in range(4))
    kk = torch.nn.functional.normalize(torch.randn(1, s.tokens, heads, HEAD), dim=-1)
    xs = [t.requires_grad_() for t in (r, -0.6 * torch.sigmoid(z), k, v, -kk, kk * torch.sigmoid(z))]
    y, _ = wkv7(*xs)
    dy, shape = torch.randn_like(y), f"{s.tokens} x {heads} x {HEAD}"
    work, move = 9.0 * s.tokens * s.channels * HEAD, 4.0 * s.tokens * 7 * s.channels
    by = "compiled" if device.type == "cpu" and native.kernels() else choice.choose("wkv7", device)
    with torch.no_grad():
        yield Case("wkv7", shape, by, lambda: wkv7(*xs), move, work)
    yield Case("wkv7 backward", shape, by, lambda: torch.autograd.grad(y, xs, dy, retain_graph=True), 2 * move,
               3 * work)


def _norm(device: torch.device, s: Sizes) -> Iterator[Case]:
    x, w = torch.randn(1, s.tokens, s.channels), torch.ones(s.channels)
    yield Case("rms norm", f"{s.tokens} x {s.channels}", "torch", lambda: rms_norm(x, w, 1e-5), 8.0 * x.numel(),
               4.0 * x.numel())


def _swiglu(device: torch.device, s: Sizes) -> Iterator[Case]:
    x = torch.randn(1, s.tokens, 2 * s.inner)
    yield Case("swiglu", f"{s.tokens} x {s.inner}", "torch", lambda: swiglu(x), 6.0 * x.numel(), 3.0 * x.numel())


def _loss(device: torch.device, s: Sizes) -> Iterator[Case]:
    hidden, head = torch.randn(s.tokens, s.channels), 0.02 * torch.randn(s.words, s.channels)
    targets = torch.randint(s.words, (s.tokens,))
    yield Case("cross-entropy, both ways", f"{s.tokens} x {s.channels} x {s.words}", choice.choose("xent", device),
               lambda: loss_and_grad(hidden, head, targets, scale=1.0), 8.0 * (head.numel() + hidden.numel()),
               4.0 * s.tokens * s.channels * s.words)


def _adamw(device: torch.device, s: Sizes) -> Iterator[Case]:
    optimizer = _optimizer(s)
    optimizer.gather()
    by, loss = choice.choose("adamw", device), torch.zeros(())
    if by == "kernel":  # which clips by a norm that only the die knows: one pass more
        yield Case("AdamW and its norm", f"{s.trained} parameters", by, lambda: optimizer.update(1e-6, 1.0, [loss]),
                   32.0 * s.trained, 17.0 * s.trained)
    yield Case("AdamW", f"{s.trained} parameters", "torch", lambda: optimizer.step(1e-6), 28.0 * s.trained,
               15.0 * s.trained)


def _save(device: torch.device, s: Sizes) -> Iterator[Case]:
    """Copying the state aside for a checkpoint: on a CUDA die this crosses the bus."""
    optimizer = _optimizer(s)
    staging = Staging(optimizer)
    yield Case("checkpoint copy", f"{s.trained} parameters", "torch", lambda: staging.fill(optimizer),
               24.0 * s.trained, 0.0)


def _optimizer(s: Sizes) -> AdamW:
    return AdamW([("w", nn.Parameter(torch.randn(s.trained // 256, 256)))])


def _frozen(m: Linear) -> Linear:
    nn.init.normal_(m.weight, std=0.02)
    m.weight.requires_grad_(False)
    return m


def _again(y: Tensor, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """The backward pass alone, as often as one likes."""
    return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return cpu_model()
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="rrd bench ops", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per op")
    parser.add_argument("--small", action="store_true", help="tiny shapes: is it working at all?")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    print(json.dumps(measure(torch.device(args.device), SMALL if args.small else Sizes(), args.seconds)))


if __name__ == "__main__":
    main()
