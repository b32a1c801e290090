"""Weights as they are stored, handed out as they are multiplied.

A frozen weight may be stored in a smaller dtype than the die computes in. It is then converted a block of rows at a
time, in one buffer that all products of the process use in turn; the converted whole never exists.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 20
"""Elements converted at a time: few enough to be still in a cache when they are multiplied."""

_kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows as ``dtype``) of weight [out, in]: all at once where it is stored so. Each lasts to the next."""
    if weight.dtype == dtype:
        yield 0, weight
        return
    rows = max(1, BLOCK // weight.shape[1])
    buffer = _buffer(weight.device, dtype, rows * weight.shape[1])
    for first in range(0, len(weight), rows):
        block = weight[first : first + rows]
        yield first, buffer[: block.numel()].view(block.shape).copy_(block)


def _buffer(device: torch.device, dtype: torch.dtype, size: int) -> Tensor:
    key = device, dtype
    if key not in _kept or _kept[key].numel() < size:
        _kept[key] = torch.empty(size, device=device, dtype=dtype)
    return _kept[key]
