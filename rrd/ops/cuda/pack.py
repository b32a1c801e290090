"""Scattered tensors into one staging buffer by ``kernels/pack.cu``: one launch, then one copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rrd.ops.cuda.launch import Launcher

BLOCKS = 256
"""Blocks that share one piece, at most."""
BYTES = 1 << 14
"""Bytes of a piece that are worth a block."""


class Packer:
    """Copies ``tensors`` (contiguous, all of one die) to their ``offsets`` (bytes) in ``out``, a buffer of ``size``.

    The table is made once: the tensors must stay where they are in memory. ``base``: count their places from this
    buffer's start, which holds them all, and not from address 0.
    """

    def __init__(self, go: Launcher, tensors: Sequence[Tensor], offsets: Sequence[int], size: int,
                 base: Tensor | None = None) -> None:
        assert tensors and all(t.is_contiguous() for t in tensors)
        start = 0 if base is None else base.data_ptr()
        nbytes = [t.numel() * t.element_size() for t in tensors]
        pieces = [(t.data_ptr() - start, at, n) for t, at, n in zip(tensors, offsets, nbytes, strict=True)]
        device = tensors[0].device
        self._go, self._base, self._tensors = go, base, list(tensors)
        self._pieces = torch.tensor(pieces, dtype=torch.int64, device=device)
        self._blocks = min(BLOCKS, max(1, max(nbytes) // BYTES))
        self.out = torch.empty(size, dtype=torch.uint8, device=device)

    def pack(self) -> Tensor:
        """``out``, with what the tensors hold now."""
        count = len(self._pieces)
        self._go("rrd_pack", (self._blocks, count), self._base, self._pieces, count, self.out)
        return self.out
