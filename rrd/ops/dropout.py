"""Dropout, for a whole batch or for part of one with the random numbers that the whole would have had.

A batch that is run in parts to save memory must not be another step. So each part seeds the generator as the whole
does and draws the whole's mask, layer by layer in the same order, and takes its own rows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """``first`` up to ``last`` of ``of``."""

    first: int
    last: int
    of: int


class Part(NamedTuple):
    """Which samples of the batch, and which of its labelled positions, are being run."""

    samples: Rows
    labelled: Rows


_part: Part | None = None


@contextlib.contextmanager
def part_of_batch(part: Part) -> Iterator[None]:
    """Within it, ``dropout`` is that of the whole batch, of which only ``part`` is there. Forward and backward pass."""
    global _part
    _part = part
    try:
        yield
    finally:
        _part = None


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """(x with a share ``p`` of its numbers zeroed and the others scaled up, the mask of those kept), as [M, C].

    x: [B, T, C], or [n, C] of labelled positions alone; M is B*T or n.
    """
    flat = x.reshape(-1, x.shape[-1])
    if _part is None:
        return torch.native_dropout(flat, p, True)
    first, last, of = _rows(x, _part)
    whole = torch.native_dropout(flat.new_zeros(1, 1).expand(of, flat.shape[1]), p, True)[1]
    mask = whole[first:last].clone()
    return flat.mul(mask).mul_(1.0 / (1.0 - p)), mask


def _rows(x: Tensor, part: Part) -> Rows:
    if x.dim() == 2:
        assert len(x) == part.labelled.last - part.labelled.first
        return part.labelled
    B, T, _ = x.shape
    assert part.samples.last - part.samples.first == B
    return Rows(part.samples.first * T, part.samples.last * T, part.samples.of * T)
