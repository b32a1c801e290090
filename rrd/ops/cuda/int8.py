"""Products with int8 weights by ``kernels/int8.cu``: y = (x q^T) s and dx = (dy s) q, without an fp32 copy of W.

x, dx: [M, in] and y, dy: [M, out], fp32, whose rows may lie apart (columns of something wider); q [out, in] int8 and
s [out] fp32, contiguous. ``add``: add to what ``out`` holds; else overwrite it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rrd.ops.cuda.launch import Launcher

TILE_M, TILE_N, TILE_DP4A = 128, 64, 64
MOST_TERMS = 130_000
"""Products of int8 that an int32 surely holds the sum of."""


def y(go: Launcher, x: Tensor, q: Tensor, s: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """``out`` [M, out] = (x q^T) s."""
    (M, width), n = x.shape, q.shape[0]
    _check(x, out, q, s, (M, width), (M, n))
    go("rrd_int8_y", (_tiles(M, TILE_M), _tiles(n, TILE_N)), x, q, s, out, M, width, n, _row(x), _row(out), int(add))
    return out


def dx(go: Launcher, dy: Tensor, q: Tensor, s: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """``out`` [M, in] = (dy s) q."""
    (M, n), width = dy.shape, q.shape[1]
    _check(dy, out, q, s, (M, n), (M, width))
    go("rrd_int8_dx", (_tiles(M, TILE_M), _tiles(width, TILE_N)), dy, q, s, out, M, width, n, _row(dy), _row(out),
       int(add))
    return out


def y_dp4a(go: Launcher, x: Tensor, q: Tensor, s: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """``y``, by integer products (sm_61 and newer): x is rounded to 2^-23 of its row's largest element."""
    (M, width), n = x.shape, q.shape[0]
    _check(x, out, q, s, (M, width), (M, n))
    limbs, unit = _limbs(go, x, None)
    go("rrd_int8_y_dp4a", (_tiles(M, TILE_DP4A), _tiles(n, TILE_DP4A)), limbs, unit, q, s, out, M, width, n, _row(out),
       int(add))
    return out


def dx_dp4a(go: Launcher, dy: Tensor, q: Tensor, s: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """``dx``, by integer products: dy s is rounded to 2^-23 of its row's largest element."""
    (M, n), width = dy.shape, q.shape[1]
    _check(dy, out, q, s, (M, n), (M, width))
    limbs, unit = _limbs(go, dy, s)
    go("rrd_int8_dx_dp4a", (_tiles(M, TILE_DP4A), _tiles(width, TILE_DP4A)), limbs, unit, q, out, M, width, n,
       _row(out), int(add))
    return out


def _limbs(go: Launcher, x: Tensor, s: Tensor | None) -> tuple[Tensor, Tensor]:
    M, width = x.shape
    assert width <= MOST_TERMS, width
    limbs = torch.empty(3, M, _tiles(width, 4), dtype=torch.int32, device=x.device)
    unit = x.new_empty(M)
    go("rrd_int8_limbs", (M,), x, s, limbs, unit, M, width, _row(x))
    return limbs, unit


def _check(x: Tensor, out: Tensor, q: Tensor, s: Tensor, x_shape: tuple[int, int], out_shape: tuple[int, int]) -> None:
    assert x.shape == x_shape and out.shape == out_shape and s.shape == q.shape[:1], (x.shape, q.shape, out.shape)
    assert x.dtype == out.dtype == s.dtype == torch.float32 and q.dtype == torch.int8, (x.dtype, q.dtype, out.dtype)
    assert q.is_contiguous() and s.is_contiguous() and all(t.stride(1) == 1 or t.shape[1] <= 1 for t in (x, out))


def _row(x: Tensor) -> int:
    return x.stride(0)


def _tiles(n: int, size: int) -> int:
    return -(-n // size)
