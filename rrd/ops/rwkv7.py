"""The parts of an RWKV-7 block between its products: token shift, and the time mix's core. Peng et al., 2025.

Shapes: B samples, T tokens, C channels, H heads of N channels. Vectors of channels may come as [1, 1, C], as files
have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import group_norm, normalize

from rrd.ops.wkv7 import wkv7_chunked

NORM_EPS = 64e-5
"""Of the group norm over each head's output."""


class Core(NamedTuple):
    """The time mix's parameters that are no products: all [C] but r_k [H, N]; v0 None where v_first begins."""

    w0: Tensor
    a0: Tensor
    v0: Tensor | None
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    ln_weight: Tensor
    ln_bias: Tensor


def shift_mix(x: Tensor, before: Tensor | None, mus: Sequence[Tensor]) -> list[Tensor]:
    """x + (x_{t-1} - x) * mu for each mu [C]; x [B, T, C], ``before`` [B, C] what stands before it (None: zeros)."""
    first = x.new_zeros(x.shape[0], 1, x.shape[2]) if before is None else before[:, None]
    difference = torch.cat([first, x[:, :-1]], 1) - x
    return [torch.addcmul(x, difference, mu.reshape(-1).to(x.dtype)) for mu in mus]


def time_mix(
    r: Tensor, z: Tensor, k: Tensor, v: Tensor, alpha: Tensor, nu: Tensor | None, g: Tensor, v_first: Tensor | None,
    core: Core, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the projections to what goes into the output product: ([B, T, C], v [B, T, C], state [B, H, N, N]).

    All inputs [B, T, C]: z, alpha and nu are the low-rank products before their offsets w0, a0, v0 and sigmoids; g the
    gate. In the first block nu, v0 and ``v_first`` are None. ``state`` is fp32, None for zeros.
    """
    dtype, (B, T, C) = r.dtype, r.shape
    H, N = core.r_k.shape
    r, z, k, v, alpha, g = (_wide(t) for t in (r, z, k, v, alpha, g))
    w0, a0, k_k, k_a = (_wide(p).reshape(-1) for p in (core.w0, core.a0, core.k_k, core.k_a))
    if nu is not None:
        assert v_first is not None and core.v0 is not None
        v = v + (_wide(v_first) - v) * torch.sigmoid(_wide(core.v0).reshape(-1) + _wide(nu))
    log_d = torch.sigmoid(w0 + z) * -math.exp(-0.5)
    alpha = torch.sigmoid(a0 + alpha)
    kappa = normalize((k * k_k).view(B, T, H, N), dim=-1, eps=1e-12)
    k = k * (1 + (alpha - 1) * k_a)
    rh, wh, kh, vh, ah = (t.view(B, T, H, N) for t in (r, log_d, k, v, alpha))
    y, state = wkv7_chunked(rh, wh, kh, vh, -kappa, kappa * ah, state)
    y = group_norm(y.reshape(B * T, C), H, _wide(core.ln_weight), _wide(core.ln_bias), NORM_EPS)
    bonus = (rh * kh * _wide(core.r_k)).sum(-1, keepdim=True) * vh
    return ((y.view(B, T, C) + bonus.reshape(B, T, C)) * g).to(dtype), v.to(dtype), state


def _wide(t: Tensor) -> Tensor:
    """fp32, whatever the products are computed in (and fp64 where they are, for tests)."""
    return t if t.dtype == torch.float64 else t.float()
