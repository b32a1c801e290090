"""Both ways to attend against the formula, written plainly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rrd.ops import attention as module
from rrd.ops.attention import _WithKernel, attention
from rrd.ops.rope import Angles, angles


def plain(qkv: Tensor, at: Angles, n_head: int, window: int | None) -> Tensor:
    """Positions turned as complex numbers, keys repeated, one full square of scores."""
    B, T, N, D = qkv.shape
    G = (N - n_head) // 2
    q, k, v = qkv.split([n_head, G, G], 2)
    turn = torch.complex(at.cos, at.sin)

    def turned(x: Tensor) -> Tensor:
        y = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((y.real, y.imag), -1)

    q, k, v = (x.repeat_interleave(n_head // x.shape[2], 2).transpose(1, 2) for x in (turned(q), turned(k), v))
    t, s = torch.arange(T)[:, None], torch.arange(T)
    unseen = (s > t) | (s <= t - (window or T))
    p = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(unseen, float("-inf")).softmax(-1)
    return (p @ v).transpose(1, 2).reshape(B, T, n_head * D)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("B", "T", "H", "G", "window"), [
    (1, 1, 2, 2, None), (2, 33, 4, 4, None), (1, 300, 2, 1, None), (2, 150, 6, 2, None), (1, 200, 4, 2, 20),
    (1, 150, 4, 4, 140), (1, 40, 2, 2, 40)])
@pytest.mark.parametrize("way", [attention, _WithKernel.apply])
def test_outputs_and_gradients_are_those_of_the_formula(
    way: object, B: int, T: int, H: int, G: int, window: int | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(module, "KEPT", 0)
    g = torch.Generator().manual_seed(0)
    D = 16
    at = angles(torch.arange(T), 1.0 / 100.0 ** (torch.arange(0, D, 2) / D), torch.float32)
    qkv = torch.randn(B, T, H + 2 * G, D, generator=g, requires_grad=True)
    dy = torch.randn(B, T, H * D, generator=g)
    y = attention(qkv, at, n_head=H, window=window) if way is attention else _WithKernel.apply(qkv, at, H, window)
    (grad,) = torch.autograd.grad(y, qkv, dy)
    expected = plain(qkv, at, H, window)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, qkv, dy)[0], atol=2e-5, rtol=1e-4)


def test_bf16_is_attended_in_fp32() -> None:
    g = torch.Generator().manual_seed(0)
    at = angles(torch.arange(40), torch.ones(8), torch.bfloat16)
    qkv = torch.randn(1, 40, 6, 16, generator=g).bfloat16().requires_grad_()
    y = attention(qkv, at, n_head=2)
    assert y.dtype == torch.bfloat16
    exact = attention(qkv.float(), Angles(at.cos.float(), at.sin.float()), n_head=2)
    assert torch.equal(y, exact.bfloat16())
    assert torch.autograd.grad(y.sum(), qkv)[0].dtype == torch.bfloat16
