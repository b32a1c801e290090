"""Cross-entropy straight from activations to their gradient; the logits never stand whole.

Rows are taken in slices, so that at most ``SLICE`` logits exist at a time, in one kept buffer. One visit to a slice's
logits gives its loss and, as softmax minus one-hot, its gradient (Wijmans et al., 2024, "Cut Your Losses", do the same
in a kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rrd.ops.grad import add_product

SLICE = 1 << 22
"""Logits that may exist at once: 16 MB of fp32."""


def loss_and_grad(hidden: Tensor, head: Tensor, targets: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy, a scalar in fp32, and ``scale`` times its gradient in ``hidden``.

    hidden [n, C]: activations after the final norm; head [V, C]; targets [n] int64. Where ``head`` is trained,
    ``scale`` times its gradient is added to it.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad = torch.empty_like(hidden)
    w = head.detach().to(hidden.dtype)
    slices = _slices(len(hidden), len(head))
    buffer = _buffer(slices, w)
    for rows in slices:
        x = hidden[rows]
        losses, p = _losses(torch.mm(x, w.t(), out=buffer[: len(x)]), targets[rows])
        total += losses.sum()
        p[torch.arange(len(p), device=p.device), targets[rows]] -= 1.0
        d_logits = p.to(hidden.dtype)
        torch.addmm(grad[rows], d_logits, w, beta=0.0, alpha=scale, out=grad[rows])
        if head.requires_grad:
            add_product([head], d_logits, x, scale=scale)
    return total, grad


def loss_sum(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy alone, for evaluation. Shapes as above."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    w = head.detach().to(hidden.dtype)
    slices = _slices(len(hidden), len(head))
    buffer = _buffer(slices, w)
    for rows in slices:
        x = hidden[rows]
        total += _losses(torch.mm(x, w.t(), out=buffer[: len(x)]), targets[rows])[0].sum()
    return total


def _slices(rows: int, words: int) -> list[slice]:
    """Slices of about one size, each of at most ``SLICE`` logits (and of one row at least)."""
    count = -(-rows // max(1, SLICE // words))
    size = -(-rows // max(1, count))
    return [slice(i, min(i + size, rows)) for i in range(0, rows, max(1, size))]


_kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}
"""The buffers: fresh memory for every slice would cost its page faults, a tenth of the product's time."""


def _buffer(slices: list[slice], head: Tensor) -> Tensor:
    """Room for one slice's logits: [rows, V]."""
    rows, words = max((s.stop - s.start for s in slices), default=0), len(head)
    key = head.device, head.dtype
    if key not in _kept or _kept[key].numel() < rows * words:
        _kept[key] = torch.empty(rows * words, device=head.device, dtype=head.dtype)
    return _kept[key][: rows * words].view(rows, words)


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] and softmax [n, V], both fp32. ``logits`` is overwritten where it is fp32."""
    logits = logits.float()
    target = logits.gather(1, targets[:, None])
    top = logits.amax(1, keepdim=True)
    p = torch._softmax(logits, 1, False, out=logits)
    # log sum exp = top - log max p, and max p >= 1/V keeps every digit, where log p[target] might be log 0
    return (top - p.amax(1, keepdim=True).log_() - target).squeeze(1), p
