"""The learning rate as a function of the step's number: no state, so resuming needs none."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def lr_at(step: int, *, lr: float, min_lr: float, warmup_steps: int, total: int, schedule: Schedule) -> float:
    """The rate used by step number ``step + 1`` (``step`` steps are done already).

    Warm-up is linear and reaches ``lr`` at step ``warmup_steps``; then ``schedule`` falls from ``lr`` to ``min_lr``,
    which the last step, number ``total``, is the first to reach. Beyond ``total`` it stays at ``min_lr``.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, total - 1 - warmup_steps))
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done
    return min_lr + (lr - min_lr) * left
