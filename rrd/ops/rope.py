"""Rotary positions (Su et al., 2021) in the half-split layout of the Hugging Face models."""

from __future__ import annotations

from typing import NamedTuple

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


def rotate(x: Tensor, at: Angles, out: Tensor, *, back: bool = False) -> Tensor:
    """Turn each pair (i, i + D/2) of x [B, T, H, D] by its angle, or back by it, into ``out`` of the same shape.

    Turning back is the transpose, and so the gradient. ``out`` must not overlap ``x``.
    """
    sign = -1.0 if back else 1.0
    x1, x2 = x.chunk(2, -1)
    y1, y2 = out.chunk(2, -1)
    torch.mul(x1, at.cos, out=y1).addcmul_(x2, at.sin, value=-sign)
    torch.mul(x2, at.cos, out=y2).addcmul_(x1, at.sin, value=sign)
    return out
