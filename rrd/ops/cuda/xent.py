"""Cross-entropy straight from activations to their gradient, by ``kernels/xent.cu`` and the BLAS.

Logits exist a tile at a time, in one kept buffer. Where all words of some rows fit, a tile is whole rows, and the
product that made it is not repeated; else tiles are parts of the vocabulary, seen twice: for the loss, and for the
gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rrd.ops.cuda.launch import Launcher
from rrd.ops.grad import opened
from rrd.ops.stored import blocks

TILE = 1 << 23
"""Logits that may exist at once: 32 MB."""
ROWS = 64
"""Fewer rows would multiply too slowly: beyond, the vocabulary is divided."""


class Rows(NamedTuple):
    """What is known of some rows: targets [n] int64; running maximum, sum of exp and the target's logit, [n]."""

    targets: Tensor
    top: Tensor
    sum: Tensor
    hit: Tensor


def loss_and_grad(go: Launcher, hidden: Tensor, head: Tensor, targets: Tensor, *, scale: float,
                  bias: Tensor | None = None, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy, a scalar in fp32, and ``scale`` times its gradient in ``hidden``.

    hidden [n, C] fp32; head [V, C]; targets [n] int64, negative where there is no label; bias [V]. Where ``head`` and
    ``bias`` are trained, ``scale`` times their gradient is added to it. At most about ``tile`` logits stand at a time.
    """
    total, grad = hidden.new_zeros(1), torch.zeros_like(hidden)
    n, words = len(hidden), len(head)
    rows = min(n, max(ROWS, tile // words))
    width = min(words, max(1, tile // max(1, rows)))
    for start in range(0, n, max(1, rows)):
        part = slice(start, start + rows)
        _rows(go, hidden[part], head, targets[part], grad[part], total, scale, bias, width)
    return total.view(()), grad


def _rows(go: Launcher, x: Tensor, head: Tensor, targets: Tensor, grad: Tensor, total: Tensor, scale: float,
          bias: Tensor | None, width: int) -> None:
    of = Rows(targets.contiguous(), *x.new_empty(3, len(x)).unbind())
    words = len(head)
    for first in range(0, words, width):
        logits = _logits(x, head, bias, first, min(width, words - first))
        fold(go, of, logits, first)
    loss(go, of, total)
    for first in range(0, words, width):
        if width < words:
            logits = _logits(x, head, bias, first, min(width, words - first))
        gradient(go, of, logits, first, scale)
        _back(logits, x, head, grad, bias, first)


def fold(go: Launcher, of: Rows, logits: Tensor, first: int) -> None:
    """Take a tile, logits [n, width] of the words from ``first``, into what is known. The first tile is word 0's."""
    n, width = logits.shape
    go("rrd_xent_fold", (n,), logits, *of, n, width, logits.stride(0), first, int(first == 0))


def loss(go: Launcher, of: Rows, total: Tensor, losses: Tensor | None = None) -> None:
    """Add the rows' losses to ``total`` [1], once all tiles are folded; ``losses`` [n] gets them one by one."""
    n = len(of.targets)
    go("rrd_xent_loss", (1,), of.top, of.sum, of.hit, of.targets, losses, total, n)


def gradient(go: Launcher, of: Rows, logits: Tensor, first: int, scale: float) -> None:
    """Overwrite a tile of logits with ``scale`` times their gradient."""
    n, width = logits.shape
    go("rrd_xent_grad", (n, -(-width // 1024)), logits, of.targets, of.top, of.sum, n, width, logits.stride(0), first,
       scale)


def _logits(x: Tensor, head: Tensor, bias: Tensor | None, first: int, width: int) -> Tensor:
    logits = _buffer(len(x) * width, x).view(len(x), width)
    for at, w in blocks(head.detach()[first : first + width], x.dtype):
        torch.mm(x, w.t(), out=logits[:, at : at + len(w)])
    return logits if bias is None else logits.add_(bias.detach()[first : first + width])


def _back(d: Tensor, x: Tensor, head: Tensor, grad: Tensor, bias: Tensor | None, first: int) -> None:
    """The gradient of the words from ``first``, d [n, width], to that of x, of the head and of the bias."""
    width = d.shape[1]
    for at, w in blocks(head.detach()[first : first + width], x.dtype):
        grad.addmm_(d[:, at : at + len(w)], w)
    if head.requires_grad:
        opened(head)[first : first + width].addmm_(d.t(), x)
    if bias is not None and bias.requires_grad:
        opened(bias)[first : first + width].add_(d.sum(0))


_kept: dict[torch.device, Tensor] = {}


def release() -> None:
    """Give the kept buffers back; the next loss makes new ones."""
    _kept.clear()


def _buffer(size: int, like: Tensor) -> Tensor:
    if like.device not in _kept or _kept[like.device].numel() < size:
        _kept[like.device] = torch.empty(size, device=like.device)
    return _kept[like.device][:size]
