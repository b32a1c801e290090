"""One optimizer update, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from rrd.errors import RrdError
from rrd.models.registry import CausalLM
from rrd.optim.adamw import AdamW

NO_LABEL = -100
"""The label of a position on which no loss is taken."""


class Batch(NamedTuple):
    """One micro-step's tokens: both [B, T] int64 on the die. ``labels[b, t]`` is the target at position t."""

    idx: Tensor
    labels: Tensor


class NotFinite(RrdError):
    """The loss or the gradient is NaN or infinite; the step was not applied and nothing has changed."""

    def __init__(self, *, loss: float, grad_norm: float) -> None:
        what = f"the loss is {loss}" if loss - loss != 0 else f"the gradient's norm is {grad_norm}"
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
) -> StepResult:
    """One update from the accumulation window ``batches``.

    Randomness (dropout) is drawn from the global generator, seeded with ``seeds[i]`` before micro-step ``i``: a step
    depends on nothing but what it is given. ``clip_norm`` 0 means no clipping.

    Raises:
        NotFinite: loss or gradient is NaN or infinite, and ``on_nan`` is "stop". Parameters, moments and
            ``optimizer.steps`` are as before; so they are when it is "skip", and ``applied`` is False.
    """
    raise NotImplementedError
