"""Samples in the order they are trained on: a permutation per epoch, and no state but a position.

A position counts the samples consumed since step 0. Everything about a batch follows from (data, seed, position), so
a job resumes exactly with one number.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from rrd.errors import Damaged
from rrd.train import sealed
from rrd.train.portion import TooLong
from rrd.train.prepare import KIND, Prepared, data_digest, prepare
from rrd.train.step import NO_LABEL, Batch

__all__ = ["Dataset", "Prepared", "TooLong", "data_digest", "order", "prepare"]

_INT32 = 4


class Dataset:
    """The samples of one token cache, mapped: memory is the page cache's, shared by every job on the same data.

    ``digest`` names the exact tokens (``Prepared.digest``).
    """

    def __init__(self, tokens: mmap.mmap, offsets: mmap.mmap, digest: str) -> None:
        self.digest = digest
        self._tokens, self._offsets = tokens, memoryview(offsets).cast("q")
        self._orders: dict[tuple[int, int], Tensor] = {}
        if self._offsets[-1] * _INT32 != len(tokens):
            raise Damaged("the token cache's offsets do not fit its tokens")

    @staticmethod
    def open(path: Path) -> Dataset:
        """Map the cache at ``Prepared.path``. Raises Damaged if it is not whole (``prepare`` mends that)."""
        seal = sealed.read_seal(path, KIND)
        return Dataset(_map(path / "tokens.bin"), _map(path / "offsets.bin"), seal.facts["digest"])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def sample(self, i: int) -> tuple[Tensor, Tensor]:
        """Sample ``i`` as (idx [T], labels [T]), int64; labels[t] is the token after idx[t], or -100 for no loss."""
        start, end = self._offsets[i], self._offsets[i + 1]
        raw = torch.frombuffer(bytearray(self._tokens[start * _INT32 : end * _INT32]), dtype=torch.int32).long()
        idx = torch.where(raw < 0, ~raw, raw)
        return idx[:-1], raw.masked_fill(raw < 0, NO_LABEL)[1:]

    def batch_at(self, position: int, batch_size: int, seed: int) -> Batch:
        """The ``batch_size`` samples from ``position`` on, through the end of an epoch into the next."""
        return collate([self.sample(self.at(position + k, seed)) for k in range(batch_size)])

    def at(self, position: int, seed: int) -> int:
        """Which sample stands at ``position``."""
        epoch, i = divmod(position, len(self))
        if (seed, epoch) not in self._orders:
            while len(self._orders) >= 2:  # a batch touches two epochs at most, unless the data is tiny
                del self._orders[next(iter(self._orders))]
            self._orders[seed, epoch] = order(seed, epoch, len(self))
        return int(self._orders[seed, epoch][i])

    def in_file(self, start: int, count: int) -> Batch:
        """Up to ``count`` samples from ``start`` on, in the file's order: for evaluation."""
        return collate([self.sample(i) for i in range(start, min(start + count, len(self)))])

    def total_steps(self, epochs: float, batch_size: int, grad_accum: int) -> int:
        """Optimizer steps that consume at least ``epochs`` passes over the samples; one at the least."""
        samples = Fraction(repr(epochs)) * len(self)  # 0.1 means a tenth, not the double next to it
        return max(1, ceil(samples / (batch_size * grad_accum)))


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def order(seed: int, epoch: int, n: int) -> Tensor:
    """The order of ``n`` samples in one epoch: int64 [n], a permutation that depends on nothing else."""
    digest = hashlib.sha256(f"rrd order {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(n, generator=generator)


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Samples side by side, padded on the right to the longest: causal attention never looks there, so no mask."""
    B, T = len(samples), max(len(idx) for idx, _ in samples)
    idx, labels = torch.zeros(B, T, dtype=torch.int64), torch.full((B, T), NO_LABEL, dtype=torch.int64)
    for b, (x, y) in enumerate(samples):
        idx[b, : len(x)], labels[b, : len(y)] = x, y
    return Batch(idx, labels)
