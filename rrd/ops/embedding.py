"""Rows of a table, and their gradient added straight into the table's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rrd.ops.grad import opened


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, idx: Tensor, weight: Tensor, compute: torch.dtype) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(idx)
        return torch.nn.functional.embedding(idx, weight).to(compute)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        (idx,) = ctx.saved_tensors
        rows, grad = idx.reshape(-1), dy.reshape(-1, dy.shape[-1]).float()
        if dy.is_cuda:  # index_add_ adds in no fixed order there
            n = ctx.weight.shape[0]
            opened(ctx.weight).add_(torch.ops.aten.embedding_dense_backward(grad, rows, n, -1, False))
        else:
            opened(ctx.weight).index_add_(0, rows, grad)
        return None, None, None


def embed(idx: Tensor, weight: Tensor, compute: torch.dtype) -> Tensor:
    """weight[idx], as ``compute``: idx [...] int64, weight [V, C] -> [..., C]. No gradient for a frozen table."""
    y: Tensor = _Embed.apply(idx, weight, compute)  # type: ignore[no-untyped-call]
    return y
