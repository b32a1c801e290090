"""Gradients written where the optimizer reads them: no zeroing, no extra pass to accumulate.

A trained parameter has a place for its gradient, given by the optimizer as a part of one flat buffer. The first product
of an accumulation window overwrites it and further ones add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Place:
    """Where one parameter's gradient goes: ``view``, fp32; ``begun`` once this window has written to it."""

    view: Tensor
    begun: bool = False


def place_of(param: Tensor) -> Place:
    """``param``'s place; without an optimizer, one of its own."""
    place: Place | None = getattr(param, "grad_place", None)
    if place is None:
        place = give_place(param, torch.zeros(param.shape, dtype=torch.float32, device=param.device))
    return place


def give_place(param: Tensor, view: Tensor) -> Place:
    """Have ``param``'s gradient written to ``view``, of its shape."""
    place = Place(view)
    param.grad_place = place  # type: ignore[attr-defined]
    moved()
    return place


_generation = 0


def generation() -> int:
    """A number that changes whenever parameters may have moved in memory: what was worked out from places is stale."""
    return _generation


def moved() -> None:
    """Say that a parameter has a new place, or a module a new parameter."""
    global _generation
    _generation += 1


def add_product(params: Sequence[Tensor], a: Tensor, b: Tensor, *, scale: float = 1.0) -> None:
    """Add ``scale * a^T b`` to the gradients of ``params``, whose rows in turn are the columns of ``a``.

    a: [M, sum of rows], b: [M, width]; params: [rows, width] each.
    """
    places = [place_of(p) for p in params]
    joined = adjoin([p.view for p in places]) if all(p.begun == places[0].begun for p in places) else None
    if joined is not None:
        _accumulate(joined, a, b, places[0].begun, scale)
    else:
        for place, part in zip(places, torch.split(a, [p.view.shape[0] for p in places], 1), strict=True):
            _accumulate(place.view, part, b, place.begun, scale)
    for place in places:
        place.begun = True


def _accumulate(grad: Tensor, a: Tensor, b: Tensor, begun: bool, scale: float) -> None:
    if a.dtype != grad.dtype:  # products of bf16 are summed up in fp32
        product = torch.mm(a.t(), b)
        if begun:
            grad.add_(product, alpha=scale)
        else:
            torch.mul(product, scale, out=grad)
    elif begun:
        grad.addmm_(a.t(), b, alpha=scale)
    else:
        torch.addmm(grad, a.t(), b, beta=0.0, alpha=scale, out=grad)


def add_sum(param: Tensor, terms: Tensor) -> None:
    """Add the sum of ``terms`` [M, n] over M to the gradient of ``param`` [n]."""
    opened(param).add_(terms.sum(0, dtype=torch.float32))


def opened(param: Tensor) -> Tensor:
    """``param``'s gradient to add to by hand: zeros, if this window has not written to it yet."""
    place = place_of(param)
    if not place.begun:
        place.view.zero_()
        place.begun = True
    return place.view


def adjoin(tensors: Sequence[Tensor]) -> Tensor | None:
    """Matrices of one width that stand back to back in one storage, as one view [sum of rows, width]; else None."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    end, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for t in tensors:
        here = t.storage_offset() == end and t.untyped_storage().data_ptr() == storage
        if not here or t.dtype != first.dtype or t.shape[1:] != first.shape[1:] or not t.is_contiguous():
            return None
        end += t.numel()
    return first.as_strided((sum(t.shape[0] for t in tensors), first.shape[1]), first.stride())


class _Seed(torch.autograd.Function):
    """A scalar whose gradient in ``y`` is ``grad``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def backward(y: Tensor, grad: Tensor) -> None:
    """The backward pass from ``y`` on, with the gradient ``grad`` in it.

    The same as ``torch.autograd.backward(y, grad)``, which however imports sympy to compare two shapes: 40 MB and a
    second in each worker.
    """
    with torch.enable_grad():  # called from within another backward pass, it is off
        _Seed.apply(y, grad).backward()  # type: ignore[no-untyped-call]
