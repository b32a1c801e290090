"""The parts of an RWKV-7 block between its products. Peng et al., 2025.

Each is one op: compiled (``kernels/rwkv7_cpu.cpp``) on CPU dies that have the kernels, else torch's in
``rrd.ops.rwkv7_torch``. Both give the same numbers to fp32 rounding. Vectors of channels come as [1, 1, C], as the
files have them, and may be trained: their gradients go straight to their places (``rrd.ops.grad``). ``plain`` asks for
torch's form all the same.

Shapes: B samples, T tokens, C channels, H heads of N = 64 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rrd.ops import choice, rwkv7_torch
from rrd.ops.grad import opened
from rrd.ops.native import Kernels, kernels
from rrd.ops.rwkv7_torch import Core
from rrd.ops.wkv7 import wkv7_as_chosen

__all__ = ["Core", "compiled_for", "norm_shift", "relu2", "time_mix", "wkv7"]

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
MIXES = 6
"""Most mixes that ``norm_shift`` makes."""


def compiled_for(x: Tensor) -> Kernels | None:
    """The kernels that take x; None: torch's ops do."""
    plain = x.device.type != "cpu" or x.dtype not in _SUFFIX or choice.wished("wkv7", x.device) == "reference"
    return None if plain else kernels()


def _flat(p: Tensor) -> Tensor:
    """A parameter as the kernels read it: fp32, in one row."""
    return p.detach().reshape(-1).float().contiguous()


def _first_trained(params: Sequence[Tensor | None]) -> Tensor | None:
    """Any trained parameter: it makes an op part of the graph when no input would."""
    return next((p for p in params if p is not None and p.requires_grad), None)


def _give(params: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    for p, g in zip(params, grads, strict=True):
        if p is not None and p.requires_grad:
            assert g is not None
            opened(p).view(-1).add_(g.reshape(-1))


# ---- the recurrence alone ----------------------------------------------------------------------------------------


def wkv7(r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
         ) -> tuple[Tensor, Tensor]:
    """y [B, T, H, N] and the state after the last token [B, H, N, N], as ``rrd.ops.reference.wkv7``; fp32."""
    lib = compiled_for(r) if r.dtype == torch.float32 and r.shape[-1] == v.shape[-1] == 64 else None
    if lib is None:
        return wkv7_as_chosen(r, log_d, k, v, a, b, state)
    y, last = _WKV7.apply(lib, r, log_d, k, v, a, b, state)  # type: ignore[no-untyped-call]
    return y, last


def _kept(lib: Kernels, wanted: bool, B: int, H: int, T: int) -> Tensor | None:
    """Room for the states that a forward pass keeps for its backward pass."""
    return torch.empty(B, H, -(-T // lib.chunk), 64, 64) if wanted else None


class _WKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Kernels, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        *xs, state = (None if t is None else t.contiguous() for t in given)
        r = xs[0]
        assert r is not None
        B, T, H, _ = r.shape
        y, last = torch.empty_like(r), r.new_empty(B, H, 64, 64)
        kept = _kept(lib, any(ctx.needs_input_grad), B, H, T)
        lib("rrd_wkv7_forward", xs, state, y, kept, last, T, H, units=B * H)
        ctx.lib = lib
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs, kept)
        return y, last

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        *xs, kept = ctx.saved_tensors
        B, T, H, _ = xs[0].shape
        dy = torch.zeros_like(xs[0]) if dy is None else dy.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        grads, dfirst = [torch.empty_like(x) for x in xs], kept.new_empty(B, H, 64, 64)
        ctx.lib("rrd_wkv7_backward", xs, kept, dy, dlast, grads, dfirst, T, H, units=B * H)
        return None, *grads, dfirst if ctx.needs_input_grad[-1] else None


# ---- the time mix's core -----------------------------------------------------------------------------------------


def time_mix(
    r: Tensor, z: Tensor, k: Tensor, v: Tensor, alpha: Tensor, nu: Tensor | None, g: Tensor, v_first: Tensor | None,
    core: Core, state: Tensor | None, *, plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """From the projections to what goes into the output product: ([B, T, C], the state after, [B, H, N, N] fp32).

    All inputs [B, T, C]: z, alpha and nu are the low-rank products before their offsets w0, a0, v0 and sigmoids; g the
    gate. In the first time mix nu, v0 and ``v_first`` are None. ``state`` is None for zeros.
    """
    lib = compiled_for(r) if core.r_k.shape[1] == 64 and not plain else None
    if lib is None:
        return rwkv7_torch.time_mix(r, z, k, v, alpha, nu, g, v_first, core, state)
    y, last = _TimeMix.apply(  # type: ignore[no-untyped-call]
        lib, core, _first_trained(core), state, r, z, k, v, alpha, nu, g, v_first)
    return y, last


class _TimeMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Kernels, core: Core, anchor: Tensor | None, state: Tensor | None,
                *given: Tensor | None) -> tuple[Tensor, Tensor]:
        xs = [None if t is None else t.contiguous() for t in given]
        r = xs[0]
        assert r is not None
        (B, T, _), H = r.shape, core.r_k.shape[0]
        params = [None if p is None else _flat(p) for p in core]
        y, last = torch.empty_like(r), torch.empty(B, H, 64, 64)
        kept = _kept(lib, any(ctx.needs_input_grad), B, H, T)
        lib(f"rrd_time_mix_forward_{_SUFFIX[r.dtype]}", xs, params, None if state is None else state.contiguous(), y,
            kept, last, T, H, units=B * H)
        ctx.lib, ctx.core = lib, core
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs, kept)
        return y, last

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        *xs, kept = ctx.saved_tensors
        core, r = ctx.core, xs[0]
        (B, T, _), H = r.shape, core.r_k.shape[0]
        dy = torch.zeros_like(r) if dy is None else dy.contiguous()
        grads = [None if x is None else torch.empty_like(x) for x in xs]
        dparams, dfirst = torch.empty(B, H, len(core), 64), torch.empty(B, H, 64, 64)
        params = [None if p is None else _flat(p) for p in core]
        ctx.lib(f"rrd_time_mix_backward_{_SUFFIX[r.dtype]}", xs, params, kept, dy,
                None if dlast is None else dlast.contiguous(), grads, dparams, dfirst, T, H, units=B * H)
        if _first_trained(core) is not None:
            _give(core, list(dparams.sum(0).unbind(1)))
        return None, None, None, dfirst if ctx.needs_input_grad[3] else None, *grads


# ---- norm, token shift and its mixes -----------------------------------------------------------------------------


def norm_shift(x: Tensor, weight: Tensor, bias: Tensor, mus: Sequence[Tensor], before: Tensor | None, eps: float,
               *, plain: bool = False) -> tuple[tuple[Tensor, ...], Tensor]:
    """With n = layer norm of x [B, T, C]: n + (n_{t-1} - n) * mu for each mu, and the last n [B, C].

    ``before`` [B, C] is the n before the first; None for zeros.
    """
    lib = None if plain else compiled_for(x)
    if lib is None:
        return rwkv7_torch.norm_shift(x, weight, bias, mus, before, eps)
    params = (weight, bias, *mus)
    *mixes, last = _NormShift.apply(lib, params, eps, _first_trained(params), x, before)  # type: ignore[no-untyped-call]
    return tuple(mixes), last


class _NormShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Kernels, params: Sequence[Tensor], eps: float, anchor: Tensor | None, x: Tensor,
                before: Tensor | None) -> tuple[Tensor, ...]:
        B, T, C = x.shape
        x, before = x.contiguous(), None if before is None else before.contiguous()
        weight, bias, *mus = (_flat(p) for p in params)
        outs, last = [torch.empty_like(x) for _ in mus], x.new_empty(B, C)
        stats = torch.empty(B, T, 2)
        lib(f"rrd_norm_shift_forward_{_SUFFIX[x.dtype]}", x, weight, bias, mus, len(mus), before, outs, last, stats, T,
            C, eps, units=B * -(-T // lib.piece))
        ctx.lib, ctx.params = lib, params
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, before, stats)
        return *outs, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, before, stats = ctx.saved_tensors
        B, T, C = x.shape
        weight, bias, *mus = (_flat(p) for p in ctx.params)
        *douts, dlast = (None if g is None else g.contiguous() for g in grads)
        douts = [torch.zeros_like(x) if g is None else g for g in douts]
        dx, dbefore = torch.empty_like(x), x.new_empty(B, C)
        pieces = -(-T // ctx.lib.piece)
        dparams = torch.empty(B * pieces, len(ctx.params), C)
        ctx.lib(f"rrd_norm_shift_backward_{_SUFFIX[x.dtype]}", x, stats, weight, bias, mus, len(mus), before, douts,
                dlast, dx, dbefore, dparams, T, C, units=B * pieces)
        if _first_trained(ctx.params) is not None:
            _give(ctx.params, list(dparams.sum(0)))
        return None, None, None, None, dx, None if before is None else dbefore


# ---- relu(h)^2 ---------------------------------------------------------------------------------------------------


def relu2(h: Tensor, *, plain: bool = False) -> Tensor:
    """relu(h)^2. ``h`` is used up: nobody else may need it."""
    lib = None if plain else compiled_for(h)
    if lib is None or h.numel() % lib.lanes or not h.is_contiguous():
        return torch.relu(h).square()
    y: Tensor = _Relu2.apply(lib, h)  # type: ignore[no-untyped-call]
    return y


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Kernels, h: Tensor) -> Tensor:
        y = torch.empty_like(h)
        lib(f"rrd_relu2_forward_{_SUFFIX[h.dtype]}", h, y, units=h.numel() // lib.lanes)  # h is relu(h) now
        ctx.lib = lib
        ctx.save_for_backward(h)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (h,) = ctx.saved_tensors
        dh = torch.empty_like(h)
        ctx.lib(f"rrd_relu2_backward_{_SUFFIX[h.dtype]}", h, dy.contiguous(), dh, units=h.numel() // ctx.lib.lanes)
        return None, dh
