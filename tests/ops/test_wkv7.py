"""Every implementation of the recurrence against the reference in fp64, outputs, states and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rrd.ops import native, reference
from rrd.ops.rwkv7 import wkv7
from rrd.ops.wkv7 import wkv7_chunked

FORWARD, GRADIENT = 1e-5, 1e-4
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 300]


def inputs(T: int, *, B: int = 1, H: int = 2, seed: int = 0, decay: str = "usual", keys: str = "usual"
           ) -> list[Tensor]:
    """r, log_d, k, v, a, b, state as an RWKV-7 layer makes them, in fp64."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    r, k, v, z = (random(B, T, H, 64) for _ in range(4))
    z = {"usual": z - 2, "fastest": z * 0 + 40, "slowest": z * 0 - 60, "either": z * 40}[decay]
    if keys == "alike":  # the delta rule's hard case: (I - A_ab) is far from I
        k = random(B, 1, H, 64) + 1e-3 * k
    kappa = torch.nn.functional.normalize(k, dim=-1)
    alpha = torch.ones_like(k) if keys == "alike" else torch.sigmoid(random(B, T, H, 64))
    return [r, -math.exp(-0.5) * torch.sigmoid(z), k, v, -kappa, kappa * alpha, random(B, H, 64, 64) * 0.3]


def run(op, xs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """y, the last state, and the gradients of all seven under a random sum of both."""
    xs = [x.to(dtype).requires_grad_() for x in xs]
    y, state = op(*xs)
    g = torch.Generator().manual_seed(5)
    dy, ds = (torch.randn(t.shape, generator=g, dtype=torch.float64).to(dtype) for t in (y, state))
    torch.autograd.backward([y, state], [dy, ds])
    return [y.detach(), state.detach(), *(x.grad for x in xs)]


def assert_near(got: list[Tensor], expected: list[Tensor], forward: float, gradient: float) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30))
        assert error <= (forward if i < 2 else gradient), (i, error)


OPS = {"chunked": wkv7_chunked} | ({"compiled": wkv7} if native.kernels() else {})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", LENGTHS)
def test_it_is_the_recurrence_at_any_length(op: str, T: int) -> None:
    xs = inputs(T, B=2, seed=T)
    assert_near(run(OPS[op], xs, torch.float32), run(reference.wkv7, xs, torch.float64), FORWARD, GRADIENT)


@pytest.mark.parametrize("op", OPS)
def test_the_inputs_stay_as_they_are(op: str) -> None:
    """One head and whole chunks: there the op's own layout is the caller's memory."""
    xs = [x.float() for x in inputs(64, H=1)]
    before = [x.clone() for x in xs]
    run(OPS[op], xs, torch.float32)
    assert all(torch.equal(x, b) for x, b in zip(xs, before, strict=True))


EXTREMES = [(decay, keys) for decay in ("usual", "fastest", "slowest", "either") for keys in ("usual", "alike")]


def every_extreme(T: int) -> list[Tensor]:
    """Inputs with a head for each of EXTREMES."""
    heads = [inputs(T, H=1, seed=T, decay=decay, keys=keys) for decay, keys in EXTREMES]
    return [torch.cat(ts, dim=1 if i == 6 else 2) for i, ts in enumerate(zip(*heads, strict=True))]


def assert_each_head_near(op: str, T: int) -> None:
    xs = every_extreme(T)
    got, expected = run(OPS[op], xs, torch.float32), run(reference.wkv7, xs, torch.float64)
    for h in range(len(EXTREMES)):
        def head(ts: list[Tensor], h: int = h) -> list[Tensor]:
            return [t[:, h] if i in (1, 8) else t[:, :, h] for i, t in enumerate(ts)]  # states have no tokens

        assert_near(head(got), head(expected), FORWARD, GRADIENT)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 33, 80, 300])
def test_extremes_are_no_less_exact(op: str, T: int) -> None:
    assert_each_head_near(op, T)


def test_in_fp64_the_chunked_form_is_exact() -> None:
    xs = inputs(70, B=2)
    assert_near(run(wkv7_chunked, xs, torch.float64), run(reference.wkv7, xs, torch.float64), 1e-13, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_it_is_the_recurrence_at_every_length(op: str) -> None:
    for T in range(1, 301):
        assert_each_head_near(op, T)
