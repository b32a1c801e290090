"""A small run of each op against the reference: a kernel that was compiled wrongly, or for another die, is not used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rrd.ops import reference
from rrd.ops.cuda import adamw, int8, wkv7, xent
from rrd.ops.cuda.launch import Launcher
from rrd.ops.cuda.nvrtc import NoKernels

TOLERANCE = 1e-4


def check(op: str, go: Launcher, device: torch.device) -> None:
    """Run ``op``'s kernels once. Raises NoKernels where they do not compute what the reference does."""
    with torch.enable_grad():
        pairs = _RUNS[op](go, device)
    for got, expected in pairs:
        error = (got.double().cpu() - expected.double().cpu()).abs().max() / expected.abs().max().clamp(min=1e-30).cpu()
        if not error <= TOLERANCE:
            raise NoKernels(f"the {op} kernels do not compute what they should on this die (off by {float(error):.1g})")


Pairs = list[tuple[Tensor, Tensor]]


def _wave(*shape: int, by: float) -> Tensor:
    """Numbers between -1 and 1 that need no generator, fp64."""
    n = torch.Size(shape).numel()
    return torch.arange(1, n + 1, dtype=torch.float64).mul_(by).sin_().view(shape)


def _wkv7(go: Launcher, at: torch.device) -> Pairs:
    r, w, k, v, a, b = (0.2 * x for x in _wave(6, 1, 19, 2, 64, by=0.37))
    exact = [x.requires_grad_() for x in (r, -w.abs(), k, v, a, b)]
    mine = [x.detach().float().to(at).requires_grad_() for x in exact]
    y, last = reference.wkv7(*exact)
    y_, last_ = wkv7.wkv7(go, *mine)
    grads = torch.autograd.grad([y_.sum() + last_.sum()], mine)
    expected = torch.autograd.grad([y.sum() + last.sum()], exact)
    return [(y_.detach(), y.detach()), (last_.detach(), last.detach()), *zip(grads, expected, strict=True)]


def _int8(go: Launcher, at: torch.device) -> Pairs:
    q, s = (_wave(67, 36, by=0.7) * 127).round().to(torch.int8), _wave(67, by=0.2).abs().float() + 0.1
    x, dy = _wave(130, 36, by=0.3).float(), _wave(130, 67, by=0.9).float()
    there = [t.to(at) for t in (q, s, x, dy)]
    q_, s_, x_, dy_ = there
    y, dx = reference.int8_y(x.double(), q, s), reference.int8_dx(dy.double(), q, s)
    pairs = [(int8.y(go, x_, q_, s_, x_.new_empty(130, 67)), y), (int8.dx(go, dy_, q_, s_, x_.new_empty(130, 36)), dx)]
    if getattr(go, "dp4a", False):
        pairs += [(int8.y_dp4a(go, x_, q_, s_, x_.new_empty(130, 67)), y),
                  (int8.dx_dp4a(go, dy_, q_, s_, x_.new_empty(130, 36)), dx)]
    return pairs


def _adamw(go: Launcher, at: torch.device) -> Pairs:
    p, g, m, v = (x.float().to(at) for x in _wave(4, 1500, by=0.11))
    v.abs_()
    P, G, M, V = (t.double().cpu() for t in (p, g, m, v))
    expected = reference.adamw(P, G, M, V, 1, lr=0.01, betas=(0.9, 0.999), eps=1e-8, decay=0.1, norm=2.0, clip=1.0)
    update = adamw.Update(go, p, g, m, v, groups=[adamw.Group(700, 1.0, 0.1), adamw.Group(1500, 1.0, 0.1)],
                          betas=(0.9, 0.999), eps=1e-8)
    update.step(0.01, torch.full((1,), 2.0, device=at), clip=1.0)
    return list(zip((p, m, v), expected, strict=True))


def _xent(go: Launcher, at: torch.device) -> Pairs:
    hidden, head = _wave(9, 8, by=0.5).float(), _wave(40, 8, by=0.3).float()
    targets = torch.arange(9) * 4
    losses, d = reference.xent(hidden.double() @ head.double().t(), targets, 0.5)
    pairs = []
    for tile in (1 << 16, 9 * 16):
        total, grad = xent.loss_and_grad(go, hidden.to(at), head.to(at), targets.to(at), scale=0.5, tile=tile)
        pairs += [(total, losses.sum()), (grad, d @ head.double())]
    return pairs


_RUNS: dict[str, Callable[[Launcher, torch.device], Pairs]] = {
    "wkv7": _wkv7, "int8": _int8, "adamw": _adamw, "xent": _xent}
