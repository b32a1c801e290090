"""Running a part of a model again in the backward pass in place of keeping its activations (Chen et al., 2016).

``layers.checkpointed`` for parts with several inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rrd.models.layers import _rng_state, _set_rng_state
from rrd.ops.grad import _Seed

Part = Callable[..., tuple[Tensor, ...]]


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, wanted: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.part, ctx.wants = part, [x.requires_grad for x in inputs]
        ctx.rng = _rng_state(inputs[0].device)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            return part(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, ctx.wants, strict=True)]
        device = inputs[0].device
        after = _rng_state(device)
        _set_rng_state(device, ctx.rng)
        with torch.enable_grad():
            outputs = ctx.part(*inputs)
        _set_rng_state(device, after)
        backward_from([(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad])
        return None, None, *(x.grad for x in inputs)


def recomputed(part: Part, wanted: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """``part(*inputs)``, a tuple of tensors; only ``inputs`` are kept, and the backward pass runs it again.

    ``wanted`` is a parameter that is trained, if any: it makes the result part of the graph where no input is.
    """
    result: tuple[Tensor, ...] = _Again.apply(part, wanted, *inputs)  # type: ignore[no-untyped-call]
    return result


def backward_from(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One backward pass from several outputs on: (output, the gradient in it). Without any, nothing happens.

    As ``rrd.ops.grad.backward``, in place of ``torch.autograd.backward``, for the same reason.
    """
    with torch.enable_grad():  # called from within another backward pass, it is off
        seeds: list[Tensor] = [_Seed.apply(y, grad).view(1) for y, grad in pairs]  # type: ignore[no-untyped-call]
        if seeds:
            torch.cat([s.float() for s in seeds]).sum().backward()  # type: ignore[no-untyped-call]
