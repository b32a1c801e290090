"""What the ops must compute, written as the papers write it: slow, plain, and in whatever dtype it is given.

Tests run these in fp64 and hold every other implementation to them. Gradients are autograd's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wkv7(
    r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RWKV-7's recurrence (Peng et al., 2025, "RWKV-7 Goose"): y [B, T, H, V] and the state after it [B, H, V, K].

        u = S a;  S <- S diag(exp log_d) + u b^T + v k^T;  y = S r

    r, log_d, k, a, b: [B, T, H, K]; v [B, T, H, V]; ``state`` [B, H, V, K], zeros where it is None.
    """
    B, T, H, K = r.shape
    S = r.new_zeros(B, H, v.shape[3], K) if state is None else state
    ys = []
    for t in range(T):
        u = S @ a[:, t, :, :, None]  # [B, H, V, 1]
        S = S * log_d[:, t, :, None, :].exp() + u * b[:, t, :, None, :] + v[:, t, :, :, None] * k[:, t, :, None, :]
        ys.append((S @ r[:, t, :, :, None]).squeeze(-1))
    return (torch.stack(ys, 1) if ys else v.new_empty(v.shape)), S
