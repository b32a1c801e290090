"""Cross-entropy straight from activations to their gradient; the logits never stand whole.

Rows are taken in slices, so that at most ``SLICE`` logits exist at a time, in one kept buffer. One visit to a slice's
logits gives its loss and, as softmax minus one-hot, its gradient (Wijmans et al., 2024, "Cut Your Losses", do the same
in a kernel).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rrd.ops import choice
from rrd.ops.cuda import xent
from rrd.ops.grad import add_product, opened
from rrd.ops.pulse import beat
from rrd.ops.stored import blocks

SLICE = 1 << 24
"""Logits that may exist at once: 64 MB of fp32. Of 65,536 words that is 256 rows; with half of them, products with a
head were seen to run at 120 GFLOP/s in place of 138."""


def loss_and_grad(hidden: Tensor, head: Tensor, targets: Tensor, *, scale: float, bias: Tensor | None = None,
                  cap: float | None = None, finer: int = 1) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy, a scalar in fp32, and ``scale`` times its gradient in ``hidden``.

    hidden [n, C]: activations after the final norm; head [V, C]; targets [n] int64; bias [V], of few heads. Where
    ``head`` and ``bias`` are trained, ``scale`` times their gradient is added to it. ``cap``: logits go
    through cap * tanh(logits / cap), in few models (Gemma 2). ``finer``: slices are so many times smaller, where memory
    is short.
    """
    if cap is None and hidden.dtype == torch.float32 and (go := choice.launcher("xent", hidden.device)) is not None:
        return xent.loss_and_grad(go, hidden, head, targets, scale=scale, bias=bias, tile=SLICE // finer)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad = torch.zeros_like(hidden)
    for rows, logits in _slices(hidden, head, bias, finer):
        slope = _cap(logits, cap)
        losses, p = _losses(logits, targets[rows])
        total += losses.sum()
        p[torch.arange(len(p), device=p.device), targets[rows]] -= 1.0
        d_logits = (p if slope is None else p.mul_(slope)).to(hidden.dtype)
        for first, w in blocks(head.detach(), hidden.dtype):
            grad[rows].addmm_(d_logits[:, first : first + len(w)], w, alpha=scale)
        if head.requires_grad:
            add_product([head], d_logits, hidden[rows], scale=scale)
        if bias is not None and bias.requires_grad:
            opened(bias).add_(d_logits.sum(0, dtype=torch.float32), alpha=scale)
    return total, grad


def loss_sum(hidden: Tensor, head: Tensor, targets: Tensor, *, bias: Tensor | None = None,
             cap: float | None = None, finer: int = 1) -> Tensor:
    """The summed cross-entropy alone, for evaluation. Shapes as above."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for rows, logits in _slices(hidden, head, bias, finer):
        _cap(logits, cap)
        total += _losses(logits, targets[rows])[0].sum()
    return total


def _cap(logits: Tensor, cap: float | None) -> Tensor | None:
    """Cap ``logits`` in place. Returns their slope, fp32; None where there is no cap."""
    if cap is None:
        return None
    logits.div_(cap).tanh_()
    slope = 1.0 - logits.float().square()
    logits.mul_(cap)
    return slope


def _slices(hidden: Tensor, head: Tensor, bias: Tensor | None, finer: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows, about equal, and their logits, which last until the next slice."""
    rows, words = len(hidden), len(head)
    count = -(-rows // max(1, SLICE // finer // words))
    size = -(-rows // max(1, count))
    buffer = _buffer(size * words, hidden)
    for start in range(0, rows, max(1, size)):
        beat()
        x = hidden[start : start + size]
        logits = buffer[: len(x) * words].view(len(x), words)
        for first, w in blocks(head.detach(), hidden.dtype):
            torch.mm(x, w.t(), out=logits[:, first : first + len(w)])
        if bias is not None:
            logits.add_(bias.detach())
        yield slice(start, start + len(x)), logits


_kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}
"""The buffers: fresh memory for every slice would cost its page faults, a tenth of the product's time."""


def release() -> None:
    """Give the kept buffers back; the next loss makes new ones."""
    _kept.clear()
    xent.release()


def _buffer(size: int, like: Tensor) -> Tensor:
    key = like.device, like.dtype
    if key not in _kept or _kept[key].numel() < size:
        _kept[key] = torch.empty(size, device=like.device, dtype=like.dtype)
    return _kept[key]


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] and softmax [n, V], both fp32. ``logits`` is overwritten where it is fp32."""
    logits = logits.float()
    target = logits.gather(1, targets[:, None])
    top = logits.amax(1, keepdim=True)
    p = torch._softmax(logits, 1, False, out=logits)
    # log sum exp = top - log max p, and max p >= 1/V keeps every digit, where log p[target] might be log 0
    return (top - p.amax(1, keepdim=True).log_() - target).squeeze(1), p
