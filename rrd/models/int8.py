"""INT8 bases: W = diag(s) q with int8 q [out, in] and one fp32 scale a row, s = max |row| / 127.

Weights are quantized as they stream from their files, row by row, so the float model is never in memory. Every linear's
weight is, except the head's and those stored [in, out]; norms, mixes and embeddings stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rrd.models.files import Stream
from rrd.models.layers import Linear
from rrd.models.registry import Family

Piece = tuple[str, int, Tensor]
"""(name, index of its first element, the elements: 1-D)."""


def quantized_names(family: Family, config: Any) -> frozenset[str]:
    """The weights of a model that are quantized."""
    with torch.device("meta"):
        model = family.skeleton(config, compute=torch.float32)
    head = model.head_weight
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, Linear) and not m.transposed]
    return frozenset(f"{n}.weight" for n, m in linears if m.weight is not head)


def scale_of(name: str) -> str:
    """Where the scales of the weight ``name`` stand, in the base and in the module."""
    return name.removesuffix("weight") + "scale"


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [n, in] fp32 -> q [n, in] int8, s [n] fp32. A row of zeros has the scale 1."""
    s = w.abs().amax(1).div_(127.0)
    s = torch.where(s == 0.0, torch.ones_like(s), s)
    return (w / s[:, None]).round_().clamp_(-127.0, 127.0).to(torch.int8), s


class Int8Stream:
    """A ``Stream`` with the weights ``names`` quantized, and their scales after all else, in the same order.

    ``stream`` gives fp32; what is not quantized is handed on as ``dtype``.
    """

    def __init__(self, stream: Stream, dtype: torch.dtype, names: Collection[str]) -> None:
        assert stream.dtype == torch.float32
        self._stream, self._dtype, self._names = stream, dtype, names

    @property
    def digest(self) -> str:
        """The float model's."""
        return self._stream.digest

    def __iter__(self) -> Iterator[Piece]:
        scales: dict[str, list[Tensor]] = {}
        for name, pieces in itertools.groupby(self._stream, key=lambda piece: piece[0]):
            if name not in self._names:
                for _, first, piece in pieces:
                    yield name, first, piece.to(self._dtype)
                continue
            n_in = self._stream.files.wanted[name][1]
            for row, w in _rows((piece for _, _, piece in pieces), n_in):
                q, s = quantize(w)
                scales.setdefault(scale_of(name), []).append(s)
                yield name, row * n_in, q.view(-1)
        for name, parts in scales.items():
            yield name, 0, torch.cat(parts)


def _rows(pieces: Iterable[Tensor], n_in: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, whole rows [n, in]) of a matrix that comes in pieces cut anywhere."""
    row, rest = 0, torch.empty(0)
    for piece in pieces:
        have = torch.cat((rest, piece)) if len(rest) else piece
        n = len(have) // n_in
        rest = have[n * n_in :].clone()
        if n:
            yield row, have[: n * n_in].view(n, n_in)
        row += n
