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
    B, _, H, K = r.shape
    S = r.new_zeros(B, H, v.shape[3], K) if state is None else state
    ys = []
    for rt, wt, kt, vt, at, bt in zip(*(x.unbind(1) for x in (r, log_d, k, v, a, b)), strict=True):
        u = S @ at[..., None]  # [B, H, V, 1]
        S = S * wt[..., None, :].exp() + u * bt[..., None, :] + vt[..., None] * kt[..., None, :]
        ys.append((S @ rt[..., None]).squeeze(-1))
    return (torch.stack(ys, 1) if ys else v.new_empty(v.shape)), S


def moba(q: Tensor, k: Tensor, v: Tensor, chunk: int, topk: int) -> Tensor:
    """Attention to a query's own chunk up to itself and to the ``topk - 1`` best earlier ones, by q . mean key.

    q, k, v: [B, T, H, N]; heads are apart. Lu et al., 2025, "MoBA", with one softmax over everything a query sees.
    """
    B, T, H, N = q.shape
    scores = torch.einsum("bthn,bshn->bhts", q, k) * N**-0.5
    t = torch.arange(T, device=q.device)
    visible = torch.zeros(B, H, T, T, dtype=torch.bool, device=q.device)
    for i in range(T):
        c = i // chunk
        visible[:, :, i, c * chunk : i + 1] = True
        if c == 0:
            continue
        means = k[:, : c * chunk].view(B, c, chunk, H, N).mean(2)
        gate = torch.einsum("bhn,bchn->bhc", q[:, i], means)
        chosen = gate.topk(min(topk - 1, c), -1).indices
        visible[:, :, i] |= (t // chunk == chosen[..., None]).any(2)
    return torch.einsum("bhts,bshn->bthn", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


def rfa(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, floor: float) -> Tensor:
    """Gated random feature attention, token by token. q, k: features [B, T, H, F]; v [B, T, H, N]; gate [B, T, H]."""
    B, T, H, F = q.shape
    S, z, n = v.new_zeros(B, H, F, v.shape[3]), v.new_zeros(B, H, F), v.new_zeros(B, H)
    ys = []
    for i in range(T):
        g = torch.sigmoid(gate[:, i])
        S = g[..., None, None] * S + (1 - g)[..., None, None] * k[:, i, :, :, None] * v[:, i, :, None, :]
        z, n = g[..., None] * z + (1 - g)[..., None] * k[:, i], g * n + 1 - g
        below = torch.maximum((q[:, i] * z).sum(-1), floor * n)
        ys.append((q[:, i, :, None] @ S).squeeze(2) / below[..., None])
    return torch.stack(ys, 1)


def int8_y(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """x W^T with W = diag(s) q: x [M, in], q [out, in] int8, s [out] -> [M, out]."""
    return x @ (s.to(x.dtype)[:, None] * q.to(x.dtype)).t()


def int8_dx(dy: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """dy W, the gradient of x: dy [M, out] -> [M, in]."""
    return dy @ (s.to(dy.dtype)[:, None] * q.to(dy.dtype))


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, *, lr: float, betas: tuple[float, float], eps: float,
          decay: float, norm: float = 0.0, clip: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """p, m and v after update ``t`` = 1, 2, … (Loshchilov and Hutter, 2019, Algorithm 2), g clipped to ``clip``."""
    g = g * min(1.0, clip / (norm + 1e-6)) if clip else g
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return p - lr * decay * p - lr * m_hat / (v_hat.sqrt() + eps), m, v


def xent(logits: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] of logits [n, V], and ``scale`` times their gradient; none where a target is negative."""
    labelled = targets >= 0
    at = targets.clamp(min=0)[:, None]
    losses = logits.logsumexp(1) - logits.gather(1, at).squeeze(1)
    grad = (logits.softmax(1) - torch.zeros_like(logits).scatter_(1, at, 1.0)) * scale
    return torch.where(labelled, losses, 0.0), torch.where(labelled[:, None], grad, 0.0)
