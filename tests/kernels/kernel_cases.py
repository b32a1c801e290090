"""What every kernel must do, as cases that any launcher can be held to: the host build here, a GPU there.

A case is a function of a launcher and a device. ``CASES[op][name]``; each raises AssertionError where the kernel is
wrong. Outputs are poisoned first; expected values come from ``rrd.ops.reference`` in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rrd.ops import reference
from rrd.ops.cuda import adamw, int8, wkv7, xent
from rrd.ops.cuda.launch import Launcher
from rrd.ops.grad import place_of
from rrd.optim.adamw import _plain
from rrd.train import loss as torch_loss

Case = Callable[[Launcher, torch.device], None]
CASES: dict[str, dict[str, Case]] = {op: {} for op in ("wkv7", "int8", "adamw", "xent")}


def case(op: str, name: str, *args: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function, called with ``args`` behind launcher and device."""
    def register(f: Callable[..., None]) -> Callable[..., None]:
        assert name not in CASES[op], name
        CASES[op][name] = lambda go, device: f(go, device, *args)
        return f
    return register


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor that torch makes without a value begins as NaNs, so that what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    set_it = torch._C._set_deterministic_algorithms  # the public one imports the compiler, which takes seconds
    set_it(True)
    try:
        yield
    finally:
        set_it(before)


def poisoned(*shape: int, at: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), device=at)


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within ``tolerance`` of the largest element; NaN and infinity where they are expected, and nowhere else."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    assert got.shape == expected.shape
    if expected.numel():
        odd = ~expected.isfinite()
        assert torch.equal(got[odd].nan_to_num(7.0), expected[odd].nan_to_num(7.0)), "NaN or infinity"
        error = (got - expected)[~odd].abs().max() / expected[~odd].abs().max().clamp(min=1e-30) if (~odd).any() else 0
        assert error <= tolerance, float(error)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- wkv7 ------------------------------------------------------------------------------------------------------------


def recurrence(seed: int, B: int, T: int, H: int, decay: str, keys: str) -> list[Tensor]:
    """r, log_d, k, v, a, b, state as an RWKV-7 layer makes them, in fp64."""
    r, k, v, z = (random(seed + i, B, T, H, 64) for i in range(4))
    z = {"usual": z - 2, "fastest": z * 0 + 40, "slowest": z * 0 - 60, "either": z * 40}[decay]
    if keys == "alike":
        k = random(seed + 9, B, 1, H, 64) + 1e-3 * k
    kappa = torch.nn.functional.normalize(k, dim=-1)
    alpha = torch.ones_like(k) if keys == "alike" else torch.sigmoid(random(seed + 5, B, T, H, 64))
    return [r, -math.exp(-0.5) * torch.sigmoid(z), k, v, -kappa, kappa * alpha, random(seed + 6, B, H, 64, 64) * 0.3]


def _wkv7_run(op: Callable[..., tuple[Tensor, Tensor]], xs: Sequence[Tensor | None]) -> list[Tensor | None]:
    y, last = op(*xs)
    dy, dlast = (random(70 + i, *t.shape).to(t) for i, t in enumerate((y, last)))
    torch.autograd.backward([y, last], [dy, dlast])
    return [y.detach(), last.detach(), *(None if x is None else x.grad for x in xs)]


@case("wkv7", "one token", 1, 1, 1)
@case("wkv7", "two tokens", 1, 2, 2)
@case("wkv7", "half a chunk", 1, 8, 1)
@case("wkv7", "half a chunk and one", 1, 9, 1)
@case("wkv7", "a chunk", 1, 16, 1)
@case("wkv7", "a chunk and one, three heads, two samples", 2, 17, 3)
@case("wkv7", "an odd length", 1, 41, 1)
@case("wkv7", "nothing", 0, 5, 2)
@case("wkv7", "decays at their bound", 1, 33, 1, "fastest")
@case("wkv7", "no decay", 1, 24, 1, "slowest")
@case("wkv7", "either", 1, 32, 1, "either", "alike")
def _(go: Launcher, at: torch.device, B: int, T: int, H: int, decay: str = "usual", keys: str = "usual") -> None:
    xs = recurrence(B + T + H, B, T, H, decay, keys)
    expected = _wkv7_run(reference.wkv7, [x.clone().requires_grad_() for x in xs])
    mine = [x.float().to(at).requires_grad_() for x in xs]
    with poisoned_memory():
        got = _wkv7_run(lambda *a: wkv7.wkv7(go, *a), mine)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert g is not None and e is not None
        near(g, e, 2e-6 if i < 2 else 5e-5 if decay in ("fastest", "either") else 5e-6)


@case("wkv7", "no token")
def _(go: Launcher, at: torch.device) -> None:
    xs = [x.float().to(at).requires_grad_() for x in recurrence(1, 2, 0, 1, "usual", "usual")]
    with poisoned_memory():
        _, last = wkv7.wkv7(go, *xs)
        last.backward(xs[-1].detach() * 2)
    assert torch.equal(last, xs[-1]) and torch.equal(xs[-1].grad, xs[-1].detach() * 2)


@case("wkv7", "without a state or gradients of one")
def _(go: Launcher, at: torch.device) -> None:
    *xs, _ = recurrence(3, 1, 19, 2, "usual", "usual")

    def run(op: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor]) -> list[Tensor | None]:
        y, last = op(*given, None)
        y.backward(random(8, *y.shape).to(y))
        return [y, last, *(x.grad for x in given)]
    expected = run(reference.wkv7, [x.clone().requires_grad_() for x in xs])
    with poisoned_memory():
        got = run(lambda *a: wkv7.wkv7(go, *a), [x.float().to(at).requires_grad_() for x in xs])
    for g, e in zip(got, expected, strict=True):
        near(g, e, 5e-6)


@case("wkv7", "only forward, in two pieces")
def _(go: Launcher, at: torch.device) -> None:
    *xs, state = (x.float().to(at) for x in recurrence(4, 1, 21, 1, "usual", "usual"))
    with poisoned_memory():
        y, last = wkv7.wkv7(go, *xs, state)
        y1, middle = wkv7.wkv7(go, *(x[:, :5] for x in xs), state)
        y2, end = wkv7.wkv7(go, *(x[:, 5:] for x in xs), middle)
    assert torch.equal(torch.cat([y1, y2], 1), y) and torch.equal(end, last)


@case("wkv7", "the same bits each time")
def _(go: Launcher, at: torch.device) -> None:
    xs = [x.float().to(at) for x in recurrence(5, 1, 18, 1, "usual", "usual")]
    with poisoned_memory():
        runs = [_wkv7_run(lambda *a: wkv7.wkv7(go, *a), [x.clone().requires_grad_() for x in xs]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True) if a is not None and b is not None)


# ---- int8 ------------------------------------------------------------------------------------------------------------


def _weights(out: int, width: int) -> tuple[Tensor, Tensor]:
    q = torch.randint(-127, 128, (out, width), generator=torch.Generator().manual_seed(out), dtype=torch.int8)
    if out and width:
        q[0, 0], q[-1, -1] = -127, 127
    return q, random(out + 1, out).abs().float() + 0.01


def _paths(go: Launcher) -> list[tuple[Callable[..., Tensor], Callable[..., Tensor], float]]:
    plain: list[tuple[Callable[..., Tensor], Callable[..., Tensor], float]] = [(int8.y, int8.dx, 2e-6)]
    return [*plain, (int8.y_dp4a, int8.dx_dp4a, 2e-6)] if getattr(go, "dp4a", True) else plain


@case("int8", "one", 1, 1, 1)
@case("int8", "odd", 3, 5, 7)
@case("int8", "in no multiple of 4, more than a tile", 131, 67, 66)
@case("int8", "a tile", 128, 64, 64)
@case("int8", "a dp4a tile", 64, 32, 64)
@case("int8", "a tile and one", 65, 68, 129)
@case("int8", "long rows", 2, 1000, 3)
@case("int8", "no rows", 0, 8, 8)
def _(go: Launcher, at: torch.device, M: int, width: int, out: int) -> None:
    q, s = _weights(out, width)
    x, dy = random(1, M, width).float(), random(2, M, out).float()
    for y_of, dx_of, tolerance in _paths(go):
        for add in (False, True):
            # Outputs are columns of something wider, and end where memory ends
            wide = random(3, M, out + 3).float().to(at)
            before = wide.clone()
            y = wide[:, 3:]
            if not add:
                y.fill_(float("nan"))
            y_of(go, x.to(at), q.to(at), s.to(at), y, add=add)
            near(y, reference.int8_y(x.double(), q, s) + (before[:, 3:].double().cpu() if add else 0), tolerance)
            assert torch.equal(wide[:, :3], before[:, :3])
            dx = random(4, M, width).float().to(at)
            first = dx.double().cpu() if add else 0
            if not add:
                dx.fill_(float("nan"))
            dx_of(go, dy.to(at), q.to(at), s.to(at), dx, add=add)
            near(dx, reference.int8_dx(dy.double(), q, s) + first, tolerance)


@case("int8", "strided inputs")
def _(go: Launcher, at: torch.device) -> None:
    q, s = (t.to(at) for t in _weights(9, 20))
    x, dy = random(5, 6, 23).float().to(at)[:, 2:22], random(6, 6, 12).float().to(at)[:, 3:]
    for y_of, dx_of, tolerance in _paths(go):
        near(y_of(go, x, q, s, poisoned(6, 9, at=at)), reference.int8_y(x.double(), q, s), tolerance)
        near(dx_of(go, dy, q, s, poisoned(6, 20, at=at)), reference.int8_dx(dy.double(), q, s), tolerance)


@case("int8", "extremes")
def _(go: Launcher, at: torch.device) -> None:
    q, s = (t.to(at) for t in _weights(5, 12))
    x = random(7, 7, 12).float()
    x[0], x[1], x[2, 3], x[3, 4], x[5], x[6] = 0.0, 1e-40, 1e30, float("nan"), 1e34, 1e-36
    x, s = x.to(at), s * 1e-3
    for y_of, _, _ in _paths(go):
        y = y_of(go, x, q, s, poisoned(7, 5, at=at))
        exact = reference.int8_y(x.double(), q, s)
        for row in (2, 4, 5):
            near(y[row], exact[row], 2e-6)
        assert y[0].abs().max() == 0 and y[1].abs().max() < 1e-37 and y[3].isnan().all()
        assert (y[6].double() - exact[6]).abs().max() < 1e-35


@case("int8", "limbs are exact to 2^-23 of the row")
def _(go: Launcher, at: torch.device) -> None:
    if not getattr(go, "dp4a", True):
        return
    x = random(8, 5, 11).float().to(at)
    x[1] = torch.linspace(-1, 1, 11)
    with poisoned_memory():
        limbs, unit = int8._limbs(go, x, None)
    bytes_ = limbs.cpu().view(torch.int8).view(3, 5, -1).double()
    assert bytes_.shape[2] == 12 and not bytes_[:, :, 11:].any()
    whole = unit.double().cpu()[:, None] * (65536 * bytes_[0] + 256 * bytes_[1] + bytes_[2])[:, :11]
    assert ((whole - x.double().cpu()).abs().amax(1) <= 2.0**-23 * x.double().cpu().abs().amax(1)).all()


# ---- adamw -----------------------------------------------------------------------------------------------------------

BETAS, EPS, LR = (0.9, 0.999), 1e-8, 1e-3


def _flat(n: int, at: torch.device) -> list[Tensor]:
    p, g, m, v = (random(20 + i, n).float() for i in range(4))
    return [p.to(at), g.to(at), (m * 0.1).to(at), (v * 0.1).abs().to(at)]


@case("adamw", "one element", 1, [1])
@case("adamw", "a block less one", 1023, [1023])
@case("adamw", "a block", 1024, [300, 1024])
@case("adamw", "a block and one", 1025, [1, 2, 1025])
@case("adamw", "groups that end within blocks", 3001, [700, 1600, 1700, 3001])
def _(go: Launcher, at: torch.device, n: int, ends: list[int]) -> None:
    p, g, m, v = _flat(n, at)
    groups = [adamw.Group(end, 1.0 + i, 0.1 * (len(ends) - 1 - i)) for i, end in enumerate(ends)]
    with poisoned_memory():
        update = adamw.Update(go, p, g, m, v, groups=groups, betas=BETAS, eps=EPS, steps=4)
    before = g.clone()
    mine = [t.clone() for t in (p, m, v)]
    exact = [t.double().cpu() for t in (p, m, v)]
    for i in range(2):
        norm = torch.linalg.vector_norm(g).view(1)
        update.step(LR, norm, clip=0.5)
        for start, (end, lr_scale, decay) in zip([0, *ends], groups, strict=False):
            at_ = slice(start, end)
            P, M, V = (t[at_] for t in mine)
            scaled = g[at_].clone()
            _plain(P, scaled, M, V, 5 + i, lr=LR * lr_scale, betas=BETAS, eps=EPS, decay=decay,
                   scale=min(1.0, 0.5 / (float(norm) + 1e-6)))
            for t, new in zip(exact, reference.adamw(
                    exact[0][at_], g[at_].double().cpu(), exact[1][at_], exact[2][at_], 5 + i, lr=LR * lr_scale,
                    betas=BETAS, eps=EPS, decay=decay, norm=float(norm), clip=0.5), strict=True):
                t[at_] = new
    assert int(update.steps) == 6 and float(update.facts.applied) == 1.0 and float(update.facts.step) == 6.0
    assert torch.equal(g, before)
    for got, ours, ref in zip((p, m, v), mine, exact, strict=True):
        near(got, ref, 1e-6)
        near(got, ours, 3e-7)


@case("adamw", "no clipping, and a norm below it")
def _(go: Launcher, at: torch.device) -> None:
    for norm, clip in ((None, 0.0), (torch.tensor([0.3], device=at), 0.5), (torch.tensor([9.0], device=at), 0.0)):
        p, g, m, v = _flat(10, at)
        expected = reference.adamw(*(t.double().cpu() for t in (p, g, m, v)), 1, lr=LR, betas=BETAS, eps=EPS, decay=0.1)
        update = adamw.Update(go, p, g, m, v, groups=[adamw.Group(10, 1.0, 0.1)], betas=BETAS, eps=EPS)
        update.step(LR, norm, clip)
        assert float(update.facts.factor) == 1.0
        for got, ref in zip((p, m, v), expected, strict=True):
            near(got, ref, 1e-6)


@case("adamw", "a gradient that is not finite changes nothing")
def _(go: Launcher, at: torch.device) -> None:
    for bad in (float("nan"), float("inf")):
        p, g, m, v = _flat(1030, at)
        update = adamw.Update(go, p, g, m, v, groups=[adamw.Group(1030, 1.0, 0.1)], betas=BETAS, eps=EPS, steps=3)
        before = [t.clone() for t in (p, m, v)]
        update.step(LR, torch.tensor([bad], device=at), clip=1.0)
        assert all(torch.equal(a, b) for a, b in zip((p, m, v), before, strict=True))
        assert int(update.steps) == 3 and float(update.facts.applied) == 0.0
        update.step(LR, torch.linalg.vector_norm(g).view(1), clip=1.0)
        assert int(update.steps) == 4 and float(update.facts.applied) == 1.0 and not torch.equal(p, before[0])


# ---- xent ------------------------------------------------------------------------------------------------------------


def _xent(go: Launcher, at: torch.device, logits: Tensor, targets: Tensor, width: int, scale: float = 0.5
          ) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, their sum and the gradient, by tiles of ``width`` words; tiles are columns of something wider."""
    n, V = logits.shape
    with poisoned_memory():
        of = xent.Rows(targets.to(at), *torch.empty(3, n, device=at).unbind())
        losses, total = torch.empty(n, device=at), torch.zeros(1, device=at)
    tiles = [(first, logits[:, first : first + width].float().to(at)) for first in range(0, V, width)]
    for first, tile in tiles:
        xent.fold(go, of, tile, first)
    xent.loss(go, of, total, losses)
    grads = []
    for first, tile in tiles:
        wide = torch.full((n, tile.shape[1] + 1), 7.0, device=at)
        wide[:, 1:] = tile
        xent.gradient(go, of, wide[:, 1:], first, scale)
        assert (wide[:, 0] == 7.0).all()
        grads.append(wide[:, 1:])
    return losses, total, torch.cat(grads, 1)


@case("xent", "one row of one word", 1, 1, 1)
@case("xent", "odd", 3, 77, 77)
@case("xent", "tiles", 3, 77, 10)
@case("xent", "more than a block of words", 2, 1027, 1027)
@case("xent", "exactly blocks", 2, 1024, 512)
@case("xent", "no rows", 0, 5, 5)
def _(go: Launcher, at: torch.device, n: int, V: int, width: int) -> None:
    logits = random(n + V, n, V) * 4
    targets = torch.arange(n) * 7 % V
    if n > 1:
        targets[1], targets[-1] = -100, V - 1
    losses, grad = reference.xent(logits, targets, 0.5)
    mine, total, d = _xent(go, at, logits, targets, width)
    near(mine, losses, 1e-6)
    near(total, losses.sum().view(1), 1e-6)
    near(d, grad, 2e-6)


@case("xent", "extremes")
def _(go: Launcher, at: torch.device) -> None:
    logits = random(5, 6, 12)
    logits[0] *= 1e4
    logits[1, :6] = float("-inf")
    logits[2, 3] = float("nan")
    logits[3] = 3e38
    logits[4] = -3e38
    targets = torch.tensor([3, 8, 1, 2, 11, 0])
    losses, grad = reference.xent(logits, targets, 0.5)
    for width in (12, 4):
        mine, _, d = _xent(go, at, logits, targets, width)
        near(mine[:2], losses[:2], 1e-6)
        near(d[:2], grad[:2], 2e-6)
        near(mine[3:5], torch.full((2,), math.log(12.0)), 1e-6)  # the reference's fp64 is too coarse for 3e38 + 2.5
        near(d[3:], grad[3:], 2e-6)
        assert mine[2].isnan() and d[2].isnan().all()


@case("xent", "more rows than threads, and a total that was begun")
def _(go: Launcher, at: torch.device) -> None:
    n, V = 259, 5
    logits = random(7, n, V).float().to(at)
    targets = (torch.arange(n) % V).to(at)
    targets[5] = -1
    top = logits.amax(1)
    hit = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    of = xent.Rows(targets, top, (logits - top[:, None]).exp().sum(1), hit)
    losses, total = poisoned(n, at=at), torch.full((1,), 100.0, device=at)
    xent.loss(go, of, total, losses)
    expected = reference.xent(logits.double().cpu(), targets.cpu())[0]
    near(losses, expected, 1e-6)
    near(total, 100 + expected.sum().view(1), 1e-6)


@case("xent", "the whole op, in rows", 1 << 23, True)
@case("xent", "the whole op, in parts of the vocabulary", 640, True)
@case("xent", "the whole op, a frozen head", 640, False)
def _(go: Launcher, at: torch.device, tile: int, trained: bool) -> None:
    n, C, V = 70, 6, 13
    hidden, targets = random(1, n, C).float().to(at), (torch.arange(n) % V).to(at)
    results = []
    for op in (torch_loss.loss_and_grad, lambda *a, **k: xent.loss_and_grad(go, *a, tile=tile, **k)):
        head = (random(2, V, C).float() * 0.3).to(at).requires_grad_(trained)
        bias = random(3, V).float().to(at).requires_grad_(trained)
        total, grad = op(hidden, head, targets, scale=0.01, bias=bias)
        results.append([total, grad, *([place_of(head).view, place_of(bias).view] if trained else [])])
    for ours, theirs in zip(*results, strict=True):
        near(theirs, ours, 1e-5)
