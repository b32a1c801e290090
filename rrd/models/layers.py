"""The modules every family is made of. Their parameters are named as in the model's files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rrd.ops.embedding import embed
from rrd.ops.grad import backward
from rrd.ops.norm import rms_norm


class Lora(nn.Module):
    """The adapter of one linear module: adds ``scale * B A dropout(x)``. A [r, in], B [out, r], fp32."""

    def __init__(self, a: Tensor, b: Tensor, *, scale: float, dropout: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.scale, self.dropout = scale, dropout


class Linear(nn.Module):
    """y = W x + bias, with W [out, in], and an adapter where one is attached. Multiplied by ``rrd.ops.linear``.

    In an int8 base, W is ``weight``, int8, with every row times its ``scale`` [out].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    scale: nn.Parameter | None
    transposed = False
    """Whether ``weight`` is stored [in, out]; only some models of ``rrd.models.bridge`` do."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.scale = None
        self.lora: Lora | None = None


class Embedding(nn.Module):
    """Rows of weight [V, C], as ``compute``."""

    def __init__(self, n_words: int, n_channels: int, *, compute: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_words, n_channels))
        self.compute = compute

    def forward(self, idx: Tensor) -> Tensor:
        return embed(idx, self.weight, self.compute)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Again(torch.autograd.Function):
    """Runs a block without keeping anything but its input, and runs it again when the gradient comes."""

    @staticmethod
    def forward(ctx, block: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.block, ctx.wants_x = block, x.requires_grad
        ctx.rng = _rng_state(x.device)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.wants_x)
        after = _rng_state(x.device)
        _set_rng_state(x.device, ctx.rng)
        with torch.enable_grad():
            y = ctx.block(x)
        _set_rng_state(x.device, after)
        backward(y, grad)
        return None, x.grad, None


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor) -> Tensor:
    """``block(x)``, recomputed in the backward pass with the same random numbers (Chen et al., 2016).

    ``wanted`` is any parameter that is trained: it makes the result part of the graph when ``x`` alone would not.
    """
    result: Tensor = _Again.apply(block, x, wanted)  # type: ignore[no-untyped-call]
    return result


def _rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
