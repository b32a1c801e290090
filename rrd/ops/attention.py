"""Causal attention of grouped queries, by the fastest kernel this torch has for the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_GROUPED = "enable_gqa" in (scaled_dot_product_attention.__doc__ or "")
"""Whether the kernels take fewer key heads than query heads (torch 2.5 on)."""


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D), causal) v. q [B, T, H, D], k and v [B, T, G, D], H a multiple of G -> [B, T, H * D].

    ``window``: a position sees itself and the ``window - 1`` before it; None means all before it.
    """
    B, T, H, D = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = None if window is None or window >= T else _band(T, window, q.device)
    grouped = {} if k.shape[1] == H or not _GROUPED else {"enable_gqa": True}
    if k.shape[1] != H and not _GROUPED:
        k, v = _repeat(k, H), _repeat(v, H)
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **grouped)
    return y.transpose(1, 2).reshape(B, T, H * D)


def _band(T: int, window: int, device: torch.device) -> Tensor:
    """[T, T] bool: which key (column) a query (row) sees."""
    whole = torch.ones(T, T, dtype=torch.bool, device=device)
    return whole.tril().triu(1 - window)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """[B, G, T, D] -> [B, heads, T, D], each head as often as queries share it."""
    B, G, T, D = x.shape
    return x[:, :, None].expand(B, G, heads // G, T, D).reshape(B, heads, T, D)
