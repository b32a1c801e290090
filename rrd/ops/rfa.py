"""Random feature attention with gates (Peng et al., 2021): causal attention with a state of constant size.

    phi(x) = sqrt(1/D) [sin(w_1 x), …, sin(w_D x), cos(w_1 x), …, cos(w_D x)],  w_i = sigma * features_i,  |x| = 1
    S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T;  z_t, n_t likewise with 1 in place of v_t, and of both
    y_t = phi(q_t)^T S_t / max(phi(q_t) z_t, FLOOR n_t)

phi(q) phi(k) has the mean exp(-|sigma (q - k)|^2 / 2); a denominator that chance makes small is held at FLOOR times
what it would be if all keys were the query. z is the last column of the state here, and n needs none: it is 1 - prod g.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, pad

FLOOR = 0.01
CHUNK = 64


def random_features(x: Tensor, features: Tensor, sigma: Tensor) -> Tensor:
    """phi(x) of x [B, T, H, N], made unit vectors: [B, T, H, 2D]. features [H, D, N], sigma [H, N]."""
    w = features.detach() * sigma[:, None]
    a = torch.einsum("bthn,hdn->bthd", normalize(x, dim=-1), w)
    phi: Tensor = torch.cat([a.sin(), a.cos()], -1) * features.shape[1] ** -0.5
    return phi


def rfa(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None, total: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
    """(y [B, T, H, N], the state after [B, H, 2D, N + 1], the total weight in it [B, H]).

    q, k: phi of queries and keys [B, T, H, 2D]; v [B, T, H, N]; gate [B, T, H], before its sigmoid. State and total are
    None where nothing came before. All fp32 (or fp64).
    """
    B, T, H, F = q.shape
    values = pad(v, (0, 1), value=1.0)  # the last column collects z
    if state is None or total is None:
        state, total = v.new_zeros(B, H, F, v.shape[3] + 1), v.new_zeros(B, H)
    parts = []
    for i in range(0, T, CHUNK):
        rows = slice(i, i + CHUNK)
        qs, ks, vs, gs = (t[:, rows].transpose(1, 2) for t in (q, k, values, gate))
        y, state, total = _chunk(qs, ks, vs, gs, state, total)
        parts.append(y)
    return torch.cat(parts, 2).transpose(1, 2), state, total


def _chunk(q: Tensor, k: Tensor, values: Tensor, gate: Tensor, state: Tensor, total: Tensor
           ) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk of tokens: tensors [B, H, C, …]. Decays only ever shrink, so nothing overflows."""
    G = logsigmoid(gate).cumsum(-1)  # [B, H, C]: log of what is left of the state after each token
    weight = torch.sigmoid(-gate)  # 1 - g
    C = G.shape[-1]
    later = torch.ones(C, C, dtype=torch.bool, device=G.device).triu(1)
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(later, float("-inf")).exp()
    scores = (q @ k.transpose(-1, -2)) * decay * weight[..., None, :]
    y = scores @ values + (q @ state) * G.exp()[..., None]
    seen = 1 - (1 - total[..., None]) * G.exp()
    end = G[..., -1:]
    keys = k * (weight * (end - G).exp())[..., None]
    state = state * end.exp()[..., None] + keys.transpose(-1, -2) @ values
    return y[..., :-1] / torch.maximum(y[..., -1:], FLOOR * seen[..., None]), state, seen[..., -1]
