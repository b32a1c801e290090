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

from rrd.ops import choice, grad
from rrd.ops.cuda import int8
from rrd.ops.cuda.launch import Launcher
from rrd.ops.dropout import dropout as drop
from rrd.ops.grad import add_product, add_sum, adjoin
from rrd.ops.pulse import beat
from rrd.ops.stored import blocks


class Adapter(Protocol):
    """What a product needs of a LoRA: a [r, in], b [out, r]."""

    a: Any
    b: Any
    scale: float
    dropout: float


class LinearLike(Protocol):
    """What a product needs of a linear module: weight [out, in], bias [out], int8 weight's scale [out], adapter."""

    weight: Any
    bias: Any
    scale: Any
    lora: Any
    training: bool


class Adapted(NamedTuple):
    """An adapter, its first column in the packed output and in h = A x, and how many columns it has there."""

    lora: Adapter
    column: int
    width: int
    first: int
    rank: int


class Group:
    """Linears that see one input. Calling it multiplies: x [..., in] -> [..., sum of outs], packed."""

    def __init__(self, *linears: LinearLike) -> None:
        self.linears = linears
        self._plan: Plan | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``residual`` [..., sum of outs] is added. With dropout, one mask of x serves the whole group."""
        plan = self._plan
        if plan is None or plan.generation != grad.generation() or plan.dtype != x.dtype:
            plan = self._plan = Plan(self.linears, x.dtype)
        dropout = plan.dropout if self.linears[0].training else 0.0
        y: Tensor = _Linear.apply(x, residual, plan, dropout, plan.anchor)  # type: ignore[no-untyped-call]
        return y


class Plan:
    """A group as it stands in memory now; good until a parameter is moved (``rrd.ops.grad.generation``)."""

    def __init__(self, linears: Sequence[LinearLike], dtype: torch.dtype) -> None:
        self.generation, self.dtype = grad.generation(), dtype
        self.linears = linears
        self.widths = [m.weight.shape[0] for m in linears]
        self.columns = [sum(self.widths[:i]) for i in range(len(linears))]
        self.width = sum(self.widths)
        self._weights = _joined([m.weight for m in linears])
        placed = zip(linears, self.columns, self.widths, strict=True)
        self.biased = [(m, column, width) for m, column, width in placed if m.bias is not None]
        self.scale = _scales(linears)
        """[width] fp32 for int8 weights: multiplied into the product, and into what comes back. None for others."""
        self.trains_weights = all(m.weight.requires_grad for m in linears)
        self.adapted = self._adapted()
        self._a = _joined([ad.lora.a for ad in self.adapted]) if self.adapted else []
        self.rank = sum(ad.rank for ad in self.adapted)
        drops = {ad.lora.dropout for ad in self.adapted} or {0.0}
        assert len(drops) == 1, "one dropout a group: its linears see one input"
        self.dropout = drops.pop()
        trained = [p for m in linears for p in (m.weight, m.bias) if p is not None and p.requires_grad]
        self.anchor = (trained + [ad.lora.a for ad in self.adapted] + [None])[0]
        """Any parameter that is trained: it makes the product part of the graph when x alone would not."""
        self.keeps_input = self.trains_weights or bool(self.adapted)

    def _adapted(self) -> list[Adapted]:
        adapted, first = [], 0
        for m, column, width in zip(self.linears, self.columns, self.widths, strict=True):
            if m.lora is not None:
                adapted.append(Adapted(m.lora, column, width, first, m.lora.a.shape[0]))
                first += m.lora.a.shape[0]
        return adapted

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """(first column of the packed output, weight [columns, in]): as few matrices as can be, each until the next."""
        column = 0
        for stored in self._weights:
            for first, w in blocks(stored, self.dtype):
                yield column + first, w
            column += len(stored)

    def stored(self) -> Iterator[tuple[int, Tensor]]:
        """The same, as they are stored and whole."""
        column = 0
        for w in self._weights:
            yield column, w
            column += len(w)

    @property
    def is_one(self) -> bool:
        """Whether ``weights`` is a single matrix."""
        return len(self._weights) == 1 and self._weights[0].dtype == self.dtype

    def a(self) -> Tensor:
        """All A's, one below the other: [sum of ranks, in]."""
        a = self._a[0] if len(self._a) == 1 else torch.cat(self._a)
        return a.to(self.dtype)


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The matrices as one, if they are neighbours in memory, or as they are."""
    joined = adjoin(tensors)
    return [t.detach() for t in tensors] if joined is None else [joined]


def _scales(linears: Sequence[LinearLike]) -> Tensor | None:
    scales = [m.scale.detach() for m in linears if m.scale is not None]
    assert len(scales) in (0, len(linears)), "a group is int8 or it is not"
    return torch.cat(scales) if scales else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, plan: Plan, dropout: float, anchor: Tensor | None
    ) -> Tensor:
        beat()
        flat = x.detach().reshape(-1, x.shape[-1])  # torch 2.0 loses a leaf that only hooks hold
        y = _products(flat, None if residual is None else residual.reshape(-1, plan.width), plan)
        seen, mask, h = flat, None, None
        if plan.adapted:
            if dropout:
                seen, mask = drop(x, dropout)
            h = torch.mm(seen, plan.a().t())  # [M, sum of ranks]
            for lora, column, width, first, rank in plan.adapted:
                part, hi = _columns(y, column, width), _columns(h, first, rank)
                part.addmm_(hi, lora.b.detach().to(y.dtype).t(), alpha=lora.scale)
        ctx.plan, ctx.dropout, ctx.shape = plan, dropout, x.shape
        ctx.save_for_backward(seen if plan.keeps_input else None, mask, h)
        return y.view(*x.shape[:-1], plan.width)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        beat()
        seen, mask, h = ctx.saved_tensors
        plan: Plan = ctx.plan
        g = dy.reshape(-1, plan.width)
        dx = _input_grad(g, plan) if ctx.needs_input_grad[0] else None
        if plan.trains_weights:
            add_product([m.weight for m in plan.linears], g, seen)
        for m, column, width in plan.biased:
            if m.bias.requires_grad:
                add_sum(m.bias, _columns(g, column, width))
        if plan.adapted:
            dh = _adapter_grads(g, seen, h, plan)
            if dx is not None:
                _add_through_adapters(dx, dh, mask, ctx.dropout, plan)
        return None if dx is None else dx.view(ctx.shape), dy if ctx.needs_input_grad[1] else None, None, None, None


def _columns(x: Tensor, first: int, width: int) -> Tensor:
    return x if width == x.shape[1] else x.narrow(1, first, width)


def _products(x: Tensor, residual: Tensor | None, plan: Plan) -> Tensor:
    """[M, sum of outs]: residual + W x + bias."""
    if plan.scale is not None:
        y = _int8_products(x, plan, plan.scale)
        y = y if residual is None else y.add_(residual)
    elif plan.is_one:
        ((_, w),) = plan.weights()
        y = torch.mm(x, w.t()) if residual is None else torch.addmm(residual, x, w.t())
    else:
        y = x.new_empty(x.shape[0], plan.width) if residual is None else residual.clone()
        for column, w in plan.weights():
            part = y.narrow(1, column, w.shape[0])
            torch.addmm(part, x, w.t(), beta=0.0 if residual is None else 1.0, out=part)
    for m, column, width in plan.biased:
        _columns(y, column, width).add_(m.bias.detach())
    return y


def _int8_products(x: Tensor, plan: Plan, scale: Tensor) -> Tensor:
    """(q x) s: an int8 is exact in every dtype that is multiplied, so only the product is rounded."""
    y = x.new_empty(x.shape[0], plan.width)
    if (go := _int8_kernels(x)) is not None:
        product = int8.y_dp4a if choice.wished("int8", x.device) == "dp4a" else int8.y
        for column, q in plan.stored():
            product(go, x, q, scale[column : column + len(q)], _columns(y, column, len(q)))
        return y
    for column, q in plan.weights():
        part = _columns(y, column, q.shape[0])
        torch.mm(x, q.t(), out=part)
    return y.mul_(scale)


def _input_grad(dy: Tensor, plan: Plan) -> Tensor:
    """dy W, over all of the group."""
    if plan.scale is not None and (go := _int8_kernels(dy)) is not None:
        product = int8.dx_dp4a if choice.wished("int8", dy.device) == "dp4a" else int8.dx
        dx = dy.new_empty(dy.shape[0], plan.linears[0].weight.shape[1])
        for column, q in plan.stored():
            product(go, _columns(dy, column, len(q)), q, plan.scale[column : column + len(q)], dx, add=column > 0)
        return dx
    if plan.scale is not None:
        dy = torch.mul(dy, plan.scale, out=torch.empty_like(dy))
    total: Tensor | None = None
    for column, w in plan.weights():
        part = _columns(dy, column, w.shape[0])
        total = torch.mm(part, w) if total is None else total.addmm_(part, w)
    assert total is not None
    return total


def _int8_kernels(x: Tensor) -> Launcher | None:
    """What multiplies x with int8 weights as they are stored, on dies where ``rrd.ops.choice`` has it."""
    return choice.launcher("int8", x.device) if x.dtype == torch.float32 else None


def _adapter_grads(dy: Tensor, x: Tensor, h: Tensor, plan: Plan) -> Tensor:
    """Adds to the gradients of all A and B; returns the gradient of h = A x, [M, sum of ranks]."""
    dh = torch.empty_like(h)
    for lora, column, width, first, rank in plan.adapted:
        g, dhi = _columns(dy, column, width), _columns(dh, first, rank)
        torch.addmm(dhi, g, lora.b.detach().to(g.dtype), beta=0.0, alpha=lora.scale, out=dhi)
        add_product([lora.b], g, _columns(h, first, rank), scale=lora.scale)
    add_product([ad.lora.a for ad in plan.adapted], dh, x)
    return dh


def _add_through_adapters(dx: Tensor, dh: Tensor, mask: Tensor | None, dropout: float, plan: Plan) -> None:
    if mask is None:
        dx.addmm_(dh, plan.a())
    else:
        dx.addcmul_(torch.mm(dh, plan.a()), mask.to(dx.dtype), value=1.0 / (1.0 - dropout))
