"""What decides whether two builds of the kernels give the same numbers: the bits that they give.

Every function is run on fixed inputs, usual ones and extreme ones, forward and back, fp32 and bf16, over ends of chunks
and more than one head; a digest of all results is the fingerprint. A new compiler or a comment in the source changes
nothing as long as it computes the same, and another order of additions anywhere is seen.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

B, T, H, N, MIXES = 2, 70, 3, 64, 6
C = H * N


class Library(Protocol):
    """What is needed of ``rrd.ops.native.Kernels``."""

    chunk: int
    piece: int
    lanes: int

    def __call__(self, function: str, *args: object, units: int) -> None: ...


def fingerprint(k: Library) -> str:
    """Sixteen hexadecimal digits."""
    digest = hashlib.sha256()
    for extreme in (False, True):
        wave = _Wave(extreme)
        for t in (*_wkv7(k, wave), *_parts(k, wave, torch.float32, "f32"), *_parts(k, wave, torch.bfloat16, "bf16")):
            digest.update(ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()))
    return digest.hexdigest()[:16]


class _Wave:
    """Numbers that are the same everywhere, to the last bit: from integers, without a library's sine or generator."""

    def __init__(self, extreme: bool) -> None:
        self.seed, self.spread = 1, 40.0 if extreme else 1.0

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.seed += 1
        n = torch.Size(shape).numel()
        steps = (torch.arange(1, n + 1, dtype=torch.int64) * 48271 * self.seed) % 65521
        return ((steps.float() - 32760.0) * (self.spread / 32768.0)).view(shape).to(dtype)


def _states(k: Library) -> tuple[Tensor, Tensor]:
    """Room for what a forward pass keeps, and for the last state."""
    return torch.zeros(B, H, -(-T // k.chunk), N, N), torch.zeros(B, H, N, N)


def _wkv7(k: Library, wave: _Wave) -> Iterator[Tensor]:
    xs = [wave(B, T, H, N) * 0.2 for _ in range(6)]
    xs[1] = -xs[1].abs()
    first, y = wave(B, H, N, N), torch.zeros(B, T, H, N)
    kept, last = _states(k)
    k("rrd_wkv7_forward", xs, first, y, kept, last, T, H, units=B * H)
    grads, dfirst = [torch.zeros(B, T, H, N) for _ in xs], torch.zeros(B, H, N, N)
    k("rrd_wkv7_backward", xs, kept, wave(B, T, H, N), wave(B, H, N, N), grads, dfirst, T, H, units=B * H)
    yield from (y, last, *grads, dfirst)


def _parts(k: Library, wave: _Wave, dtype: torch.dtype, suffix: str) -> Iterator[Tensor]:
    yield from _time_mix(k, wave, dtype, suffix, mixes_values=True)
    yield from _time_mix(k, wave, dtype, suffix, mixes_values=False)
    yield from _norm_shift(k, wave, dtype, suffix)
    h, dy = wave(T, C, dtype=dtype), wave(T, C, dtype=dtype)
    y, dh, n = torch.zeros_like(h), torch.zeros_like(h), T * C // k.lanes
    k(f"rrd_relu2_forward_{suffix}", h, y, units=n)
    k(f"rrd_relu2_backward_{suffix}", h, dy, dh, units=n)
    yield from (y, dh)


def _time_mix(k: Library, wave: _Wave, dtype: torch.dtype, suffix: str, *, mixes_values: bool) -> Iterator[Tensor]:
    absent = () if mixes_values else (5, 7)  # the values' gate and the first values
    xs: Sequence[Tensor | None] = [None if i in absent else wave(B, T, C, dtype=dtype) for i in range(8)]
    params = [None if i == 2 and absent else wave(C) for i in range(8)]
    first, y = wave(B, H, N, N), torch.zeros(B, T, C, dtype=dtype)
    kept, last = _states(k)
    k(f"rrd_time_mix_forward_{suffix}", xs, params, first, y, kept, last, T, H, units=B * H)
    grads = [None if x is None else torch.zeros_like(x) for x in xs]
    dparams, dfirst = torch.zeros(B, H, 8, N), torch.zeros(B, H, N, N)
    k(f"rrd_time_mix_backward_{suffix}", xs, params, kept, wave(B, T, C, dtype=dtype), wave(B, H, N, N), grads, dparams,
      dfirst, T, H, units=B * H)
    yield from (y, last, *(g for g in grads if g is not None), dparams, dfirst)


def _norm_shift(k: Library, wave: _Wave, dtype: torch.dtype, suffix: str) -> Iterator[Tensor]:
    x, before = wave(B, T, C, dtype=dtype), wave(B, C, dtype=dtype)
    weight, bias, *mus = (wave(C) for _ in range(2 + MIXES))
    outs, last, stats = [torch.zeros_like(x) for _ in mus], torch.zeros_like(before), torch.zeros(B, T, 2)
    pieces = -(-T // k.piece)
    k(f"rrd_norm_shift_forward_{suffix}", x, weight, bias, mus, MIXES, before, outs, last, stats, T, C, 1e-5,
      units=B * pieces)
    dx, dbefore, dparams = torch.zeros_like(x), torch.zeros_like(before), torch.zeros(B, pieces, 2 + MIXES, C)
    k(f"rrd_norm_shift_backward_{suffix}", x, stats, weight, bias, mus, MIXES, before,
      [wave(B, T, C, dtype=dtype) for _ in mus], wave(B, C, dtype=dtype), dx, dbefore, dparams, T, C, units=B * pieces)
    yield from (*outs, last, stats, dx, dbefore, dparams)
