"""Attention in pieces against all scores at once, dense and sparse, whole and continued."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rrd.ops import reference, sparse_attention
from rrd.ops.sparse_attention import sparse_attention as attend


def inputs(T: int, B: int = 2, H: int = 3, N: int = 16) -> list[Tensor]:
    g = torch.Generator().manual_seed(T)
    return [torch.randn(B, T, H, N, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def grads(y: Tensor, xs: list[Tensor]) -> list[Tensor]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return list(torch.autograd.grad(y, xs, dy))


@pytest.mark.parametrize("scores", [200, 1 << 22])
@pytest.mark.parametrize(("T", "chunk", "topk"), [
    (1, 8, 3), (8, 8, 3), (24, 8, 3), (25, 8, 3), (61, 8, 3), (64, 8, 3), (64, 8, 1), (50, 7, 2), (40, None, 3)])
def test_it_equals_the_softmax_over_what_is_seen(T: int, chunk: int | None, topk: int, scores: int,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "SCORES", scores)
    xs = inputs(T)
    expected = reference.moba(*xs, chunk or T, topk).flatten(2)
    y = attend(*xs, chunk=chunk, topk=topk)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)
    for a, b in zip(grads(y, xs), grads(expected, xs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("cut", [1, 8, 20, 30, 59])
def test_later_queries_alone_see_the_same(chunk: int | None, cut: int) -> None:
    xs = inputs(60)
    q, k, v = xs
    whole = attend(q, k, v, chunk=chunk)
    first = attend(q[:, :cut], k[:, :cut], v[:, :cut], chunk=chunk)
    parts = torch.cat([first, attend(q[:, cut:], k, v, chunk=chunk)], 1)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)
    for a, b in zip(grads(parts, xs), grads(whole, xs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_up_to_chunk_times_topk_it_is_dense_and_beyond_it_is_not() -> None:
    for T, same in ((24, True), (40, False)):
        xs = inputs(T)
        assert torch.allclose(attend(*xs, chunk=8), attend(*xs)) is same


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_types_are_as_near_as_they_can_be(dtype: torch.dtype, tolerance: float) -> None:
    xs = [x.detach().to(dtype).requires_grad_() for x in inputs(60)]
    wide = [x.detach().double().requires_grad_() for x in xs]
    y, expected = attend(*xs, chunk=8), attend(*wide, chunk=8)
    for a, b in zip([y, *grads(y, xs)], [expected, *grads(expected, wide)], strict=True):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()
