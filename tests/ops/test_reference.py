"""The references themselves: their gradients are those of finite differences, their updates torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from rrd.ops import reference


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_recurrences_gradient_is_that_of_finite_differences() -> None:
    r, w, k, v, a, b = (random(i, 2, 3, 1, 2) for i in range(6))
    xs = [x.requires_grad_() for x in (r, -torch.sigmoid(w), k, v, a, b, random(7, 2, 1, 2, 2))]
    assert torch.autograd.gradcheck(lambda *x: reference.wkv7(*x), xs)


def test_the_losses_gradient_is_autograds() -> None:
    logits, targets = random(1, 5, 7).requires_grad_(), torch.tensor([0, 6, -1, 3, 3])
    losses, grad = reference.xent(logits, targets, 0.5)
    assert torch.allclose(torch.autograd.grad(losses.sum(), logits)[0] * 0.5, grad, atol=1e-14)
    assert losses[2] == 0 and not grad[2].any()


def test_the_int8_products_are_each_others_gradient() -> None:
    x, q, s = random(1, 3, 5).requires_grad_(), torch.arange(-10, 10).view(4, 5).to(torch.int8), random(2, 4).float()
    y, dy = reference.int8_y(x, q, s), random(3, 3, 4)
    assert torch.allclose(torch.autograd.grad(y, x, dy)[0], reference.int8_dx(dy, q, s), atol=1e-14)


def test_adamw_is_torchs() -> None:
    p, g = random(1, 6), random(2, 6)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    m = v = torch.zeros(6, dtype=torch.float64)
    for t in (1, 2, 3):
        theirs.grad = g * t
        optimizer.step()
        p, m, v = reference.adamw(p, g * t, m, v, t, lr=0.1, betas=(0.8, 0.95), eps=1e-6, decay=0.3)
    assert torch.allclose(theirs.detach(), p, atol=1e-14)
