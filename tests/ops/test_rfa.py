"""Random feature attention in chunks against the recurrence; and that it approximates what it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rrd.ops import reference
from rrd.ops.rfa import FLOOR, random_features, rfa


def inputs(T: int, gate: float = 1.0, B: int = 2, H: int = 2, F: int = 32, N: int = 16) -> list[Tensor]:
    g = torch.Generator().manual_seed(T)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    xs = [random(B, T, H, F), random(B, T, H, F), random(B, T, H, N), random(B, T, H) + gate]
    return [x.requires_grad_() for x in xs]


def assert_same(a: Tensor, b: Tensor, xs: list[Tensor]) -> None:
    dy = torch.randn(b.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    for x, y in zip(torch.autograd.grad(a, xs, dy), torch.autograd.grad(b, xs, dy), strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("gate", [-8.0, 1.0, 8.0])
def test_it_is_the_recurrence(T: int, gate: float) -> None:
    xs = inputs(T, gate)
    assert_same(rfa(*xs, None, None)[0], reference.rfa(*xs, FLOOR), xs)


def test_pieces_with_carried_states_equal_the_whole() -> None:
    xs, state, total, parts = inputs(100), None, None, []
    for rows in (slice(0, 1), slice(1, 70), slice(70, 100)):
        y, state, total = rfa(*(x[:, rows] for x in xs), state, total)
        parts.append(y)
    assert_same(torch.cat(parts, 1), rfa(*xs, None, None)[0], xs)


def test_features_approximate_the_gaussian_kernel() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 50, 1, 16, generator=g)
    unit = torch.nn.functional.normalize(x, dim=-1)[0, :, 0]
    sigma, features = torch.full((1, 16), 1.3), torch.randn(1, 4096, 16, generator=g)
    phi = random_features(x, features, sigma)[0, :, 0]
    kernel = torch.exp(-1.3**2 * torch.cdist(unit, unit).square() / 2)
    torch.testing.assert_close(phi @ phi.t(), kernel, atol=0.06, rtol=0.0)
