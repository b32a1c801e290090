"""One optimizer update, top to bottom."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rrd.errors import RrdError
from rrd.models.registry import CausalLM
from rrd.ops import pulse
from rrd.ops.dropout import Part, Rows, part_of_batch
from rrd.ops.grad import backward
from rrd.optim.adamw import AdamW
from rrd.savings import Savings
from rrd.train import pieces
from rrd.train.loss import loss_and_grad, loss_sum

NO_LABEL = -100
"""The label of a position on which no loss is taken."""


class Batch(NamedTuple):
    """One micro-step's tokens, both [B, T] int64. ``labels[b, t]`` is the target at position t.

    On the host as they come from the data: where the labels are is then known without waiting for the die.
    """

    idx: Tensor
    labels: Tensor


class NotFinite(RrdError):
    """The loss or the gradient is NaN or infinite; the step was not applied and nothing has changed."""

    def __init__(self, *, loss: float, grad_norm: float, where: str = "", hint: str = "") -> None:
        what = f"the gradient's norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
        super().__init__(what + where, hint=hint or 'lower lr, or set on_nan = "skip" to leave such steps out')
        self.loss, self.grad_norm = loss, grad_norm


@dataclass(frozen=True)
class StepResult:
    """What one step did. ``loss``: mean over the labels of the whole window; 0.0 where it has none.

    ``grad_norm`` is the norm before clipping; ``tokens`` counts positions, ``labels`` those with a target.
    ``applied`` is False for a window without labels (it contributes nothing: weights, moments and their count stay)
    and for one that was ``skipped`` because it is not finite.
    """

    loss: float
    grad_norm: float
    tokens: int
    labels: int
    applied: bool

    @property
    def skipped(self) -> bool:
        """Whether its loss or gradient was no number."""
        return self.labels > 0 and not self.applied


def train_step(
    model: CausalLM,
    optimizer: AdamW,
    batches: Sequence[Batch],
    *,
    lr: float,
    clip_norm: float,
    seeds: Sequence[int],
    savings: Savings = Savings(),
    on_nan: Literal["stop", "skip"] = "stop",
) -> StepResult:
    """One update from the accumulation window ``batches``.

    Until the update itself it gives signs of life (``rrd.ops.pulse``), and whoever hears them may raise: nothing of
    the step has happened then.

    Randomness (dropout) is drawn from the global generator, seeded with ``seeds[i]`` before micro-step ``i``: a step
    depends on nothing but what it is given. ``clip_norm`` 0 means no clipping. ``savings`` hold less memory and are the
    same step: to the bit or to rounding, as ``docs/exact-resume.md`` says.

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
    losses: list[Tensor] = []
    for i, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
        losses += _micro_step(model, batch, seed, scale=1.0 / labels, savings=savings)
        pulse.done((i + 1) / len(batches))
    update = optimizer.update(lr, clip_norm, losses)
    loss = sum(update.losses) / labels
    if not update.applied and on_nan == "stop":
        raise NotFinite(loss=loss, grad_norm=update.norm)
    return StepResult(loss, update.norm, tokens, labels, update.applied)


class _Labelled(NamedTuple):
    """What of a batch is computed: tokens [B, T'], the rows of its B*T' positions that have a label (None: all), and
    their targets."""

    idx: Tensor
    rows: Tensor | None
    targets: Tensor


def _micro_step(model: CausalLM, batch: Batch, seed: int, *, scale: float, savings: Savings) -> list[Tensor]:
    """Adds the gradient of ``scale`` times the batch's summed loss to the window's; returns summed losses, scalars that
    nobody has waited for."""
    if savings.parts == 1:
        torch.manual_seed(seed)
        return _forward_backward(model, batch, _labelled(batch), scale, savings)
    losses: list[Tensor] = []
    for samples, labelled, part in _parts(batch, savings.parts):
        torch.manual_seed(seed)  # every part draws the whole batch's numbers, and takes its own
        few = Batch(batch.idx[samples.first : samples.last], batch.labels[samples.first : samples.last])
        with part_of_batch(Part(samples, labelled)):
            losses += _forward_backward(model, few, part, scale, savings)
    return losses


def _forward_backward(model: CausalLM, batch: Batch, what: _Labelled, scale: float, savings: Savings
                      ) -> list[Tensor]:
    die = model.head_weight.device
    if model.longest is not None and batch.idx.shape[1] > model.longest:
        split = [pieces.Piece(*(_on(die, t) for t in p)) for p in pieces.split(batch.idx, batch.labels, model.longest)]
        return pieces.forward_backward(model, split, scale=scale, checkpointing=savings.checkpointing,
                                       finer=savings.finer)
    idx, rows, targets = what
    if len(targets) == 0:
        return []
    idx, targets, rows = _on(die, idx), _on(die, targets), None if rows is None else _on(die, rows)
    hidden = model.hidden(idx, rows=rows, checkpointing=savings.checkpointing).reshape(len(targets), -1)
    loss, grad = loss_and_grad(hidden.detach(), model.head_weight, targets, scale=scale, bias=model.head_bias,
                               cap=model.head_cap, finer=savings.finer)
    if hidden.requires_grad:
        backward(hidden, grad)
    return [loss]


def _on(die: torch.device, t: Tensor) -> Tensor:
    return t.to(die, non_blocking=True)


def _parts(batch: Batch, count: int) -> Iterator[tuple[Rows, Rows, _Labelled]]:
    """The batch in ``count`` parts by samples: which samples, which of its labelled rows, and what is computed.

    A part is as wide as the whole: its random numbers are the whole's.
    """
    idx, rows, targets = _labelled(batch)
    B, T = idx.shape
    bounds = [B * i // count for i in range(count + 1)]
    for first, last in pairwise(bounds):
        if rows is None:
            chosen = slice(first * T, last * T)
            yield (Rows(first, last, B), Rows(chosen.start, chosen.stop, B * T),
                   _Labelled(idx[first:last], None, targets[chosen]))
        else:
            start, stop = (int((rows < edge * T).sum()) for edge in (first, last))
            yield (Rows(first, last, B), Rows(start, stop, len(rows)),
                   _Labelled(idx[first:last], rows[start:stop] - first * T, targets[start:stop]))


def _labelled(batch: Batch) -> _Labelled:
    """Attention is causal, so nothing after the last label is ever computed."""
    columns = (batch.labels != NO_LABEL).any(0).nonzero()
    end = int(columns[-1]) + 1 if len(columns) else 0
    idx, labels = batch.idx[:, :end], batch.labels[:, :end].reshape(-1)
    has_label = labels != NO_LABEL
    if bool(has_label.all()):
        return _Labelled(idx, None, labels)
    rows = has_label.nonzero().squeeze(1)
    return _Labelled(idx, rows, labels[rows])


@torch.no_grad()
def eval_loss(model: CausalLM, batches: Sequence[Batch], *, finer: int = 1) -> tuple[float, int]:
    """The summed loss of ``batches`` and the number of their labels, without dropout and without gradients."""
    model.eval()
    total, labels = 0.0, 0
    for batch in batches:
        idx, rows, targets = _labelled(batch)
        labels += len(targets)
        if model.longest is not None and idx.shape[1] > model.longest:
            total += pieces.summed_loss(model, pieces.split(batch.idx, batch.labels, model.longest), finer)
        elif len(targets):
            hidden = model.hidden(idx, rows=rows).reshape(len(targets), -1)
            total += float(loss_sum(hidden, model.head_weight, targets, bias=model.head_bias, cap=model.head_cap,
                                    finer=finer))
    return total, labels
