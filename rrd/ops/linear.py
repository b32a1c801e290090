"""Products with one or more weights at once, their adapters included, and only the gradients somebody wants.

    y_i = W_i x + bias_i + s_i B_i A_i dropout(x)      i: the linears of one group, such as q, k and v

The group's outputs stand side by side in one packed tensor. Weights, and A's, that are neighbours in memory are
multiplied as one matrix; the adapter adds into the product; a residual is where the product starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rrd.ops.grad import add_product, add_sum, adjoin


class Adapter(Protocol):
    """What a product needs of a LoRA: a [r, in], b [out, r]."""

    a: Any
    b: Any
    scale: float
    dropout: float


class Part(NamedTuple):
    """One linear of a group: weight [out, in], bias [out], adapter."""

    weight: Tensor
    bias: Tensor | None
    lora: Adapter | None


class Group:
    """What the forward pass knows of its linears and the backward pass needs again."""

    def __init__(self, parts: Sequence[Part], training: bool) -> None:
        self.parts = parts
        self.sizes = [p.weight.shape[0] for p in parts]
        self.columns = _slices(self.sizes)
        self.adapted = [(c, p.lora) for c, p in zip(self.columns, parts, strict=True) if p.lora is not None]
        self.ranks = [lora.a.shape[0] for _, lora in self.adapted]
        drops = {lora.dropout for _, lora in self.adapted} or {0.0}
        assert len(drops) == 1, "one dropout a group: its linears see one input"
        self.dropout = drops.pop() if training else 0.0

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """The weights as ``dtype``, in as few matrices as can be, each with its columns of the packed output."""
        weights = [p.weight for p in self.parts]
        joined = adjoin(weights)
        if joined is not None:
            yield slice(0, joined.shape[0]), joined.to(dtype)
            return
        for columns, w in zip(self.columns, weights, strict=True):
            yield columns, w.detach().to(dtype)

    def a(self, dtype: torch.dtype) -> Tensor:
        """All A's, one below the other: [sum of ranks, in]."""
        tensors = [lora.a for _, lora in self.adapted]
        joined = adjoin(tensors)
        return (torch.cat(tensors).detach() if joined is None else joined).to(dtype)


def _slices(sizes: Sequence[int]) -> list[slice]:
    slices, start = [], 0
    for size in sizes:
        slices.append(slice(start, start + size))
        start += size
    return slices


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, group: Group, *trained: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = _products(flat, None if residual is None else residual.reshape(-1, residual.shape[-1]), group)
        seen = mask = h = None
        if group.adapted:
            seen, mask = flat, None
            if group.dropout:
                seen, mask = torch.native_dropout(flat, group.dropout, True)
            h = torch.mm(seen, group.a(x.dtype).t())  # [M, sum of ranks]
            for (columns, lora), hi in zip(group.adapted, torch.split(h, group.ranks, 1), strict=True):
                y[:, columns].addmm_(hi, lora.b.to(x.dtype).t(), alpha=lora.scale)
        ctx.group, ctx.shape = group, x.shape
        keep = group.adapted or any(p.weight.requires_grad for p in group.parts)
        ctx.save_for_backward(flat if keep else None, seen if mask is not None else None, mask, h)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        flat, seen, mask, h = ctx.saved_tensors
        group: Group = ctx.group
        g = dy.reshape(-1, dy.shape[-1])
        dx = _input_grad(g, group) if ctx.needs_input_grad[0] else None
        _weight_grads(g, flat, group)
        if group.adapted:
            dh = _adapter_grads(g, flat if seen is None else seen, h, group)
            if dx is not None:
                _add_through_adapters(dx, dh, mask, group)
        rest = (None,) * (len(ctx.needs_input_grad) - 3)
        return None if dx is None else dx.view(ctx.shape), dy if ctx.needs_input_grad[1] else None, None, *rest


def _products(x: Tensor, residual: Tensor | None, group: Group) -> Tensor:
    """[M, sum of outs]: residual + W x + bias."""
    y = x.new_empty(x.shape[0], sum(group.sizes)) if residual is None else residual.clone()
    for columns, w in group.weights(x.dtype):
        if residual is None:
            torch.mm(x, w.t(), out=y[:, columns])
        else:
            y[:, columns].addmm_(x, w.t())
    for columns, part in zip(group.columns, group.parts, strict=True):
        if part.bias is not None:
            y[:, columns].add_(part.bias.detach())
    return y


def _input_grad(dy: Tensor, group: Group) -> Tensor:
    """dy W, over all of the group."""
    dx: Tensor | None = None
    for columns, w in group.weights(dy.dtype):
        dx = torch.mm(dy[:, columns], w) if dx is None else dx.addmm_(dy[:, columns], w)
    assert dx is not None
    return dx


def _weight_grads(dy: Tensor, x: Tensor, group: Group) -> None:
    if all(p.weight.requires_grad for p in group.parts):
        add_product([p.weight for p in group.parts], dy, x)
    for columns, part in zip(group.columns, group.parts, strict=True):
        if part.bias is not None and part.bias.requires_grad:
            add_sum(part.bias, dy[:, columns])


def _adapter_grads(dy: Tensor, x: Tensor, h: Tensor, group: Group) -> Tensor:
    """Adds to the gradients of all A and B; returns the gradient of h = A x, [M, sum of ranks]."""
    dh = torch.empty_like(h)
    split = torch.split(h, group.ranks, 1), torch.split(dh, group.ranks, 1)
    for (columns, lora), hi, dhi in zip(group.adapted, *split, strict=True):
        g = dy[:, columns]
        torch.addmm(dhi, g, lora.b.to(g.dtype), beta=0.0, alpha=lora.scale, out=dhi)
        add_product([lora.b], g, hi, scale=lora.scale)
    add_product([lora.a for _, lora in group.adapted], dh, x)
    return dh


def _add_through_adapters(dx: Tensor, dh: Tensor, mask: Tensor | None, group: Group) -> None:
    a = group.a(dx.dtype)
    if mask is None:
        dx.addmm_(dh, a)
    else:
        dx.addcmul_(torch.mm(dh, a), mask.to(dx.dtype), value=1.0 / (1.0 - group.dropout))


def linear(x: Tensor, parts: Sequence[Any], *, residual: Tensor | None = None) -> Tensor:
    """The packed outputs [..., sum of outs] of modules with ``weight``, ``bias`` and ``lora`` on x [..., in].

    ``residual`` [..., sum of outs] is added. With dropout, one mask of x serves the whole group.
    """
    group = Group([Part(p.weight, p.bias, p.lora) for p in parts], training=parts[0].training)
    trained = [t for p in group.parts for t in (p.weight, p.bias) if t is not None and t.requires_grad]
    trained += [t for _, lora in group.adapted for t in (lora.a, lora.b)]
    y: Tensor = _Linear.apply(x, residual, group, *trained)  # type: ignore[no-untyped-call]
    return y
