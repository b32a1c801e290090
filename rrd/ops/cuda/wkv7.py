"""RWKV-7's recurrence by ``kernels/wkv7.cu``, as one op with all seven gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rrd.ops.cuda.launch import Launcher

CHUNK = 16
"""Tokens between the states that a forward pass keeps."""
HEAD = 64
"""Channels of a head; there are no kernels for others."""


def wkv7(go: Launcher, r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
         state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y [B, T, H, 64] and the state after the last token [B, H, 64, 64], as ``rrd.ops.reference.wkv7``; fp32.

    ``log_d`` must be at least -1; RWKV-7's is at least -e^-1/2.
    """
    y, last = _WKV7.apply(go, r, log_d, k, v, a, b, state)  # type: ignore[no-untyped-call]
    return y, last


class _WKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, go: Launcher, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        *xs, state = (None if t is None else t.contiguous() for t in given)
        r = xs[0]
        assert r is not None and r.shape[-1] == HEAD and r.dtype == torch.float32
        B, T, H, _ = r.shape
        y, last = torch.empty_like(r), r.new_empty(B, H, HEAD, HEAD)
        wanted = any(ctx.needs_input_grad)
        u = torch.empty_like(r) if wanted else None
        kept = r.new_empty(B, H, -(-T // CHUNK), HEAD, HEAD) if wanted else None
        go("rrd_wkv7_forward", (H, B), *xs, state, y, u, kept, last, T, H)
        ctx.go = go
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs, u, kept)
        return y, last

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        *xs, u, kept = ctx.saved_tensors
        B, T, H, _ = xs[0].shape
        dy = torch.zeros_like(xs[0]) if dy is None else dy.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        grads, dfirst = [torch.empty_like(x) for x in xs], xs[0].new_empty(B, H, HEAD, HEAD)
        ctx.go("rrd_wkv7_backward", (H, B), *xs, u, kept, dy, dlast, *grads, dfirst, T, H)
        return None, *grads, dfirst if ctx.needs_input_grad[-1] else None
