"""Rotary positions (Su et al., 2021) in the half-split layout of the Hugging Face models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """cos and sin of position times frequency: both [T, 1, D/2], to stand against [B, T, H, D/2]."""

    cos: Tensor
    sin: Tensor


def angles(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> Angles:
    """positions [T], inverse_frequencies [D/2] fp32."""
    a = torch.outer(positions.float(), inverse_frequencies)[:, None]
    return Angles(a.cos().to(dtype), a.sin().to(dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y1, y2 = y.chunk(2, -1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    return y


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = Angles(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(dy, ctx.angles.cos, ctx.angles.sin, -1.0), None, None


def rope(x: Tensor, at: Angles) -> Tensor:
    """x [B, T, H, D], each pair (i, i + D/2) turned by its angle; the gradient is turned back."""
    y: Tensor = _Rope.apply(x, at.cos, at.sin)  # type: ignore[no-untyped-call]
    return y
