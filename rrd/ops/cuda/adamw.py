"""AdamW's update by ``kernels/adamw.cu``: two launches for everything a job trains, and nothing read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rrd.ops.cuda.launch import Launcher

BLOCK = 1024
"""Elements of a block."""


class Group(NamedTuple):
    """A part of the flat buffers that is updated alike: up to ``end``, from where the group before ends."""

    end: int
    lr_scale: float
    decay: float


class Facts(NamedTuple):
    """What an update found and did, on the die: 1-element fp32 tensors. ``applied`` is 1 or 0."""

    factor: Tensor
    root: Tensor
    applied: Tensor
    step: Tensor


class Update:
    """The update of four flat buffers: parameters, gradients, moments. ``steps`` [1] int64 counts those applied."""

    def __init__(self, go: Launcher, p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, groups: Sequence[Group],
                 betas: tuple[float, float], eps: float, steps: int = 0) -> None:
        assert groups and groups[-1].end == p.numel(), "the groups are all of the buffers"
        assert all(t.is_contiguous() and t.dtype == torch.float32 and t.shape == p.shape for t in (p, g, m, v))
        self._go, self._buffers, self._groups = go, (p, g, m, v), len(groups)
        self.betas, self.eps = betas, eps
        at = p.device
        self.steps = torch.tensor([steps], dtype=torch.int64, device=at)
        self._counted = steps
        self._ends = torch.tensor([g.end for g in groups], dtype=torch.int64, device=at)
        self._rules = torch.tensor([[g.lr_scale, g.decay] for g in groups], dtype=torch.float64, device=at)
        self._rates = torch.zeros(len(groups), 2, device=at)
        self._facts = torch.zeros(4, device=at)

    @property
    def facts(self) -> Facts:
        """Of the newest update; to look at them is to wait for it."""
        return Facts(*torch.split(self._facts, 1))

    def at(self, steps: int) -> None:
        """Have ``steps`` updates behind it, as the caller counts them. Costs nothing where that is so."""
        if steps != self._counted:
            self.steps.fill_(steps)
        self._counted = steps

    def step(self, lr: float, norm: Tensor | None = None, clip: float = 0.0) -> None:
        """One update. ``norm`` [1]: the gradient's; where it is not finite nothing is changed. ``clip`` 0: none."""
        assert not clip or norm is not None, "clipping wants the norm"
        self._counted += 1  # unless it is not applied, which only the die knows yet
        beta1, beta2 = self.betas
        self._go("rrd_adamw_begin", (1,), norm, float(clip), lr, beta1, beta2, self._rules, self._groups, self.steps,
                 self._rates, self._facts)
        n = self._buffers[0].numel()
        self._go("rrd_adamw_update", (-(-n // BLOCK),), *self._buffers, n, self._ends, self._rates, self._facts,
                 beta2, 1.0 - beta1, 1.0 - beta2, self.eps)
