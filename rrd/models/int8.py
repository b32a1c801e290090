"""INT8 bases: W = diag(s) q with int8 q [out, in] and one fp32 scale a row, s = max |row| / 127.

Weights are quantized as they stream from their files, row by row, so the float model is never in memory. Every linear's
weight is, and every expert's of a mixture, [experts, out, in], but not the head's; norms, mixes, routers and embeddings
stay as they are. What the files store [in, out], as GPT-2's do, is turned, one matrix at a time: a row is one output's.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rrd.models.files import Stream
from rrd.models.layers import Linear
from rrd.models.registry import Family, Shape

Piece = tuple[str, int, Tensor]
"""(name, index of its first element, the elements: 1-D)."""

TURNED = 1 << 18
"""Elements of a turned matrix that are quantized at a time."""
_SHOWN = 4


def quantized_names(family: Family, config: Any) -> dict[str, bool]:
    """The weights of a model that are quantized, and whether each is stored [..., in, out]."""
    with torch.device("meta"):
        model = family.skeleton(config, compute=torch.float32)
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    uses[id(model.head_weight)] += 1
    return {f"{path}.{leaf}": turned for path, m in model.named_modules() for leaf, turned in _weights_of(m)
            if uses[id(getattr(m, leaf))] == 1}


def _weights_of(module: nn.Module) -> Iterable[tuple[str, bool]]:
    if isinstance(module, Linear):
        return [("weight", module.transposed)]
    weights: Mapping[str, bool] = getattr(module, "int8_weights", {})  # rrd.models.bridge_experts
    return weights.items()


def scale_of(name: str) -> str:
    """Where the scales of the weight ``name`` stand, in the base and in the module."""
    return name.removesuffix("weight") + "scale" if name.endswith(".weight") else name + "_scale"


def stood(shape: Shape, turned: bool) -> Shape:
    """The shape in which a weight of ``shape`` stands once it is quantized: [..., out, in]."""
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def note(tensors: Mapping[str, Tensor]) -> str:
    """What an owner should know of a base: which weights of its blocks are not in 8 bits. Empty where all are."""
    held = {n for n, t in tensors.items() if t.dtype == torch.int8}
    scales = {scale_of(n) for n in held}
    weights = {n: t.numel() for n, t in tensors.items() if re.search(r"\.\d+\.", n) and n not in scales
               and sum(size > 1 for size in t.shape) > 1}
    left = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", n) for n in weights if n not in held))
    if not left:
        return ""
    share = 100 * sum(weights[n] for n in held if n in weights) // sum(weights.values())
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    return f"{share} % of the block weights are held in 8 bits; {', '.join(left[:_SHOWN])}{more} are not"


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [n, in] fp32 -> q [n, in] int8, s [n] fp32. A row of zeros has the scale 1."""
    s = w.abs().amax(1).div_(127.0)
    s = torch.where(s == 0.0, torch.ones_like(s), s)
    return (w / s[:, None]).round_().clamp_(-127.0, 127.0).to(torch.int8), s


class Int8Stream:
    """A ``Stream`` with the weights ``names`` quantized, and their scales after all else, in the same order.

    ``names`` says of each whether it is to be turned. ``stream`` gives fp32; what is not quantized is handed on as
    ``dtype``.
    """

    def __init__(self, stream: Stream, dtype: torch.dtype, names: Mapping[str, bool]) -> None:
        assert stream.dtype == torch.float32
        self._stream, self._dtype, self._names = stream, dtype, names

    @property
    def digest(self) -> str:
        """The float model's."""
        return self._stream.digest

    def __iter__(self) -> Iterator[Piece]:
        wanted, scales = self._stream.files.wanted, {}
        # What is kept has its memory beforehand: small parts among large temporaries leave malloc with large holes.
        room = torch.empty(max((prod(wanted[n][-2:]) for n, turned in self._names.items() if turned), default=0))
        for name, pieces in itertools.groupby(self._stream, key=lambda piece: piece[0]):
            if name not in self._names:
                for _, first, piece in pieces:
                    yield name, first, piece.to(self._dtype)
                continue
            shape, parts, row = wanted[name], (piece for _, _, piece in pieces), 0
            matrix = room[: prod(shape[-2:])].view(shape[-2:]) if self._names[name] else None
            n_in = stood(shape, matrix is not None)[-1]
            scales[scale_of(name)] = scale = torch.empty(prod(shape) // n_in)
            for w in _rows(parts, n_in) if matrix is None else _turned(parts, matrix):
                q, scale[row : row + len(w)] = quantize(w)
                yield name, row * n_in, q.view(-1)
                row += len(w)
        for name, scale in scales.items():
            yield name, 0, scale


def _rows(pieces: Iterable[Tensor], n_in: int) -> Iterator[Tensor]:
    """Whole rows [n, in] of a matrix that comes in pieces cut anywhere."""
    rest = torch.empty(0)
    for piece in pieces:
        have = torch.cat((rest, piece)) if len(rest) else piece
        n = len(have) // n_in
        rest = have[n * n_in :].clone()
        if n:
            yield have[: n * n_in].view(n, n_in)


def _turned(pieces: Iterable[Tensor], matrix: Tensor) -> Iterator[Tensor]:
    """Rows [n, in] of matrices that come as [in, out], one behind the other, in pieces cut anywhere.

    Each is put together in ``matrix``.
    """
    have, step = 0, max(1, TURNED // len(matrix))
    for piece in pieces:
        while len(piece):
            n = min(len(piece), matrix.numel() - have)
            matrix.view(-1)[have : have + n] = piece[:n]
            have, piece = have + n, piece[n:]
            if have == matrix.numel():
                have = 0
                yield from (rows.contiguous() for rows in torch.split(matrix.t(), step))
