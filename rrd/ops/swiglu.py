"""silu(gate) * up of one packed tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        gate, up = packed.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (packed,) = ctx.saved_tensors
        gate, up = packed.chunk(2, -1)
        grad = torch.empty_like(packed)
        d_gate, d_up = grad.chunk(2, -1)
        torch.mul(dy, silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return grad


def swiglu(packed: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020): packed [..., 2I] is gate, then up -> [..., I]."""
    y: Tensor = _SwiGLU.apply(packed)  # type: ignore[no-untyped-call]
    return y
