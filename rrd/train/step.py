"""One optimizer update, top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rrd.errors import RrdError
from rrd.models.registry import CausalLM
from rrd.ops.grad import backward
from rrd.optim.adamw import AdamW
from rrd.train import pieces
from rrd.train.loss import loss_and_grad, loss_sum

NO_LABEL = -100
"""The label of a position on which no loss is taken."""


class Batch(NamedTuple):
    """One micro-step's tokens: both [B, T] int64 on the die. ``labels[b, t]`` is the target at position t."""

    idx: Tensor
    labels: Tensor


class NotFinite(RrdError):
    """The loss or the gradient is NaN or infinite; the step was not applied and nothing has changed."""

    def __init__(self, *, loss: float, grad_norm: float) -> None:
        what = f"the gradient's norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
        super().__init__(what, hint='lower lr, or set on_nan = "skip" to leave such steps out')
        self.loss, self.grad_norm = loss, grad_norm


@dataclass(frozen=True)
class StepResult:
    """What one step did. ``loss``: mean over the labels of the whole window; 0.0 where it has none.

    ``grad_norm`` is the norm before clipping; ``tokens`` counts positions, ``labels`` those with a target.
    ``applied`` is False for a window without labels (it contributes nothing: weights, moments and their count stay)
    and for one that was skipped because it is not finite.
    """

    loss: float
    grad_norm: float
    tokens: int
    labels: int
    applied: bool


def train_step(
    model: CausalLM,
    optimizer: AdamW,
    batches: Sequence[Batch],
    *,
    lr: float,
    clip_norm: float,
    seeds: Sequence[int],
    checkpointing: bool = False,
    on_nan: Literal["stop", "skip"] = "stop",
    alive: Callable[[], None] = lambda: None,
) -> StepResult:
    """One update from the accumulation window ``batches``. Calls ``alive`` before each micro-step.

    Randomness (dropout) is drawn from the global generator, seeded with ``seeds[i]`` before micro-step ``i``: a step
    depends on nothing but what it is given. ``clip_norm`` 0 means no clipping.

    Raises:
        NotFinite: loss or gradient is NaN or infinite, and ``on_nan`` is "stop". Parameters, moments and
            ``optimizer.steps`` are as before; so they are when it is "skip", and ``applied`` is False.
    """
    tokens = sum(b.idx.numel() for b in batches)
    labels = sum(int((b.labels != NO_LABEL).sum()) for b in batches)
    if labels == 0:
        return StepResult(0.0, 0.0, tokens, 0, applied=False)
    if not model.training:
        model.train()
    optimizer.zero_grad()
    total = 0.0
    for batch, seed in zip(batches, seeds, strict=True):
        alive()
        torch.manual_seed(seed)
        total += _micro_step(model, batch, scale=1.0 / labels, checkpointing=checkpointing)
    loss, norm = total / labels, optimizer.grad_norm()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        if on_nan == "stop":
            raise NotFinite(loss=loss, grad_norm=norm)
        return StepResult(loss, norm, tokens, labels, applied=False)
    optimizer.step(lr, scale=min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0)
    return StepResult(loss, norm, tokens, labels, applied=True)


def _micro_step(model: CausalLM, batch: Batch, *, scale: float, checkpointing: bool) -> float:
    """Adds the gradient of ``scale`` times the batch's summed loss to the window's; returns the summed loss."""
    if model.longest is not None and batch.idx.shape[1] > model.longest:
        parts = pieces.split(batch.idx, batch.labels, model.longest)
        return pieces.forward_backward(model, parts, scale=scale, checkpointing=checkpointing)
    idx, rows, targets = _labelled(batch)
    if len(targets) == 0:
        return 0.0
    hidden = model.hidden(idx, rows=rows, checkpointing=checkpointing).reshape(len(targets), -1)
    loss, grad = loss_and_grad(hidden.detach(), model.head_weight, targets, scale=scale, bias=model.head_bias)
    if hidden.requires_grad:
        backward(hidden, grad)
    return float(loss)


def _labelled(batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
    """The tokens that matter, the rows among them that have a label (None: all of them), and their targets.

    Attention is causal, so nothing after the last label is ever computed.
    """
    columns = (batch.labels != NO_LABEL).any(0).nonzero()
    end = int(columns[-1]) + 1 if len(columns) else 0
    idx, labels = batch.idx[:, :end], batch.labels[:, :end].reshape(-1)
    has_label = labels != NO_LABEL
    if bool(has_label.all()):
        return idx, None, labels
    rows = has_label.nonzero().squeeze(1)
    return idx, rows, labels[rows]


@torch.no_grad()
def eval_loss(model: CausalLM, batches: Sequence[Batch]) -> tuple[float, int]:
    """The summed loss of ``batches`` and the number of their labels, without dropout and without gradients."""
    model.eval()
    total, labels = 0.0, 0
    for batch in batches:
        idx, rows, targets = _labelled(batch)
        if model.longest is not None and idx.shape[1] > model.longest:
            total += pieces.summed_loss(model, pieces.split(batch.idx, batch.labels, model.longest))
            labels += len(targets)
        elif len(targets):
            hidden = model.hidden(idx, rows=rows).reshape(len(targets), -1)
            total += float(loss_sum(hidden, model.head_weight, targets, bias=model.head_bias))
            labels += len(targets)
    return total, labels
