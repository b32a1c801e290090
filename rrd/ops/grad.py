"""Gradients written where the optimizer reads them: no zeroing, no extra pass to accumulate.

The optimizer gives a parameter a ``flat_grad``, its part of the flat gradient. The first product of a window
overwrites it, further ones add to it; ``param.grad is None`` says that a window has just begun.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def flat_grad(param: nn.Parameter) -> Tensor:
    """Where ``param``'s gradient goes, fp32; without an optimizer, a tensor of its own."""
    view: Tensor | None = getattr(param, "flat_grad", None)
    if view is None:
        view = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
        param.flat_grad = view  # type: ignore[attr-defined]
    return view


def adjoin(tensors: Sequence[Tensor]) -> Tensor | None:
    """Matrices of one width that stand back to back in memory, as one view [sum of rows, width]; else None."""
    first, end = tensors[0], tensors[0].data_ptr()
    for t in tensors:
        if t.data_ptr() != end or t.dtype != first.dtype or t.shape[1:] != first.shape[1:] or not t.is_contiguous():
            return None
        end += t.numel() * t.element_size()
    if len(tensors) == 1:
        return first.detach()
    rows = sum(t.shape[0] for t in tensors)
    if first.storage_offset() + rows * first.shape[1] > first.untyped_storage().nbytes() // first.element_size():
        return None  # neighbours by chance: tensors of different storages
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))
