"""The ops of ``rrd.ops.rwkv7`` in plain torch, for every device and dtype; gradients are autograd's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import group_norm, layer_norm, normalize

from rrd.ops.wkv7 import wkv7_as_chosen

NORM_EPS = 64e-5
"""Of the group norm over each head's output."""


class Core(NamedTuple):
    """The time mix's parameters that are no products: all of C numbers, r_k as [H, N]; v0 None where v_first begins."""

    w0: Tensor
    a0: Tensor
    v0: Tensor | None
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    ln_weight: Tensor
    ln_bias: Tensor


def norm_shift(x: Tensor, weight: Tensor, bias: Tensor, mus: Sequence[Tensor], before: Tensor | None, eps: float
               ) -> tuple[tuple[Tensor, ...], Tensor]:
    n = layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), eps)
    first = n.new_zeros(n.shape[0], 1, n.shape[2]) if before is None else before[:, None]
    difference = torch.cat([first, n[:, :-1]], 1) - n
    return tuple(torch.addcmul(n, difference, mu.reshape(-1).to(n.dtype)) for mu in mus), n[:, -1]


def time_mix(
    r: Tensor, z: Tensor, k: Tensor, v: Tensor, alpha: Tensor, nu: Tensor | None, g: Tensor, v_first: Tensor | None,
    core: Core, state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype, (B, T, C) = r.dtype, r.shape
    H, N = core.r_k.shape
    r, z, k, v, alpha, g = (wide(t) for t in (r, z, k, v, alpha, g))
    w0, a0, k_k, k_a = (wide(p).reshape(-1) for p in (core.w0, core.a0, core.k_k, core.k_a))
    if nu is not None:
        assert v_first is not None and core.v0 is not None
        v = v + (wide(v_first) - v) * torch.sigmoid(wide(core.v0).reshape(-1) + wide(nu))
    log_d = torch.sigmoid(w0 + z) * -math.exp(-0.5)
    alpha = torch.sigmoid(a0 + alpha)
    kappa = normalize((k * k_k).view(B, T, H, N), dim=-1, eps=1e-12)
    k = k * (1 + (alpha - 1) * k_a)
    rh, wh, kh, vh, ah = (t.view(B, T, H, N) for t in (r, log_d, k, v, alpha))
    y, state = wkv7_as_chosen(rh, wh, kh, vh, -kappa, kappa * ah, state)
    y = group_norm(y.reshape(B * T, C), H, wide(core.ln_weight), wide(core.ln_bias), NORM_EPS)
    bonus = (rh * kh * wide(core.r_k)).sum(-1, keepdim=True) * vh
    return ((y.view(B, T, C) + bonus.reshape(B, T, C)) * g).to(dtype), state


def wide(t: Tensor) -> Tensor:
    """fp32, whatever the products are computed in (and fp64 where they are, for tests)."""
    return t if t.dtype == torch.float64 else t.float()
