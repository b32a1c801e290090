"""How a model's tensors stand in one buffer of bytes, on a die or in the store, and what fills it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from rrd.errors import BadJob
from rrd.models.dtypes import itemsize
from rrd.models.files import ModelFiles, Progress, Stream
from rrd.models.int8 import Int8Stream, quantized_names, scale_of, stood
from rrd.models.registry import Shape

ALIGN = 64
"""Bytes; where a tensor starts is a multiple of it."""


class Slot:
    """Where one tensor stands: offset and size in bytes."""

    def __init__(self, shape: Shape, dtype: torch.dtype, offset: int) -> None:
        self.shape, self.dtype, self.offset = shape, dtype, offset
        self.nbytes = prod(shape) * itemsize(dtype)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Layout:
    """The tensors of ``files`` stored as ``dtype``, in the family's order; with ``int8``, its linears as such.

    What multiplies together stands together: the scales come after all else. Raises BadJob where none can be quantized.
    """

    def __init__(self, files: ModelFiles, dtype: torch.dtype, *, int8: bool = False) -> None:
        self.files, self.dtype = files, dtype
        self.int8 = _quantized(files) if int8 else {}
        self.slots: dict[str, Slot] = {}
        self.size = 0
        for name, shape in files.wanted.items():
            if name in self.int8:
                self._append(name, stood(shape, self.int8[name]), torch.int8)
            else:
                self._append(name, shape, dtype)
        for name in self.int8:
            self._append(scale_of(name), self.slots[name].shape[:-1], torch.float32)

    def _append(self, name: str, shape: Shape, dtype: torch.dtype) -> None:
        self.slots[name] = slot = Slot(shape, dtype, self.size)
        self.size += -(-slot.nbytes // ALIGN) * ALIGN

    def stream(self, progress: Progress | None) -> Stream | Int8Stream:
        """One pass over the model's files, in the order of the slots."""
        if not self.int8:
            return Stream(self.files, self.dtype, progress)
        return Int8Stream(Stream(self.files, torch.float32, progress), self.dtype, self.int8)

    def views(self, buffer: Tensor) -> Mapping[str, Tensor]:
        """The tensors in ``buffer``, 1-D uint8, by reference."""
        return {n: buffer[s.offset : s.end].view(s.dtype).view(s.shape) for n, s in self.slots.items()}


def _quantized(files: ModelFiles) -> dict[str, bool]:
    """``quantized_names``, in the order of the files' tensors."""
    known = quantized_names(files.family, files.config)
    names = {n: known[n] for n in files.wanted if n in known}
    if not names:
        raise BadJob("none of this model's weights can be held in 8 bits", key="quantize", file=str(files.path),
                     hint="leave quantize out")
    return names
