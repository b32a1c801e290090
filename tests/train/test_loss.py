from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from rrd.ops.grad import place_of
from rrd.train import loss
from rrd.train.loss import loss_and_grad, loss_sum


def problem(n: int = 37, C: int = 16, V: int = 101) -> tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(n, C, generator=g), torch.nn.Parameter(torch.randn(V, C, generator=g))
    return hidden, head, torch.randint(V, (n,), generator=g)


@pytest.mark.parametrize("slice_size", [1, 500, 1 << 22])
def test_capped_logits_equal_the_plain_ones(slice_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SLICE", slice_size)
    hidden, head, targets = problem()
    total, grad = loss_and_grad(hidden, head, targets, scale=0.1, cap=4.0)
    x = hidden.clone().requires_grad_()
    plain = cross_entropy(4.0 * torch.tanh(x @ head.t() / 4.0), targets, reduction="sum")
    (0.1 * plain).backward()
    torch.testing.assert_close(total, plain.detach())
    torch.testing.assert_close(grad, x.grad)
    torch.testing.assert_close(place_of(head).view, head.grad)
    torch.testing.assert_close(loss_sum(hidden, head, targets, cap=4.0), plain.detach())


@pytest.mark.parametrize("slice_size", [1, 500, 1 << 22])
def test_loss_and_gradients_equal_the_plain_ones(slice_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SLICE", slice_size)
    hidden, head, targets = problem()
    total, grad = loss_and_grad(hidden, head, targets, scale=0.1)
    x = hidden.clone().requires_grad_()
    plain = cross_entropy(x @ head.t(), targets, reduction="sum")
    (0.1 * plain).backward()
    torch.testing.assert_close(total, plain.detach())
    torch.testing.assert_close(grad, x.grad)
    torch.testing.assert_close(place_of(head).view, head.grad)
    torch.testing.assert_close(loss_sum(hidden, head, targets), plain.detach())


def test_the_logits_never_stand_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = problem(64)
    seen: list[int] = []
    losses = loss._losses

    def spy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(logits.numel())
        return losses(logits, targets)

    monkeypatch.setattr(loss, "_losses", spy)
    monkeypatch.setattr(loss, "SLICE", 10 * 101)
    loss_and_grad(hidden, head, targets, scale=1.0)
    assert max(seen) <= 10 * 101
    assert sum(seen) == 64 * 101


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = problem()
    loss_and_grad(hidden, head.requires_grad_(False), targets, scale=1.0)
    assert not hasattr(head, "grad_place")


def test_a_certain_and_wrong_answer_has_its_exact_loss() -> None:
    """softmax underflows to 0 there; the loss must not become infinite."""
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[0.0], [500.0]])
    total, grad = loss_and_grad(hidden, head, torch.tensor([0]), scale=1.0)
    assert float(total) == 500.0
    assert float(grad) == 500.0


def test_bf16_losses_are_taken_in_fp32() -> None:
    hidden, head, targets = problem()
    total, grad = loss_and_grad(hidden.bfloat16(), head, targets, scale=1.0)
    logits = (hidden.bfloat16() @ head.bfloat16().t()).float()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, cross_entropy(logits, targets, reduction="sum").detach(), rtol=1e-5, atol=1e-3)
    assert grad.dtype == torch.bfloat16
