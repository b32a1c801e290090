"""AdamW (Loshchilov and Hutter, 2019) over one flat fp32 buffer.

Parameters, gradients and both moments of a job stand in four 1-D tensors of one layout. A step is then a handful of
calls however many tensors the job trains, a checkpoint is one copy, and neighbours in the layout (the adapters of
q, k and v) can be multiplied as one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rrd.ops import choice
from rrd.ops.cuda import adamw as kernel
from rrd.ops.cuda.launch import Launcher
from rrd.ops.grad import give_place, opened, place_of


class Slot(NamedTuple):
    """Where one parameter stands in the flat buffers; ``offset`` and ``numel`` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


class Update(NamedTuple):
    """What an update was made from: losses and the gradient's norm before clipping; whether they were numbers."""

    losses: list[float]
    norm: float
    applied: bool


class Treatment(NamedTuple):
    """How a parameter is updated."""

    decayed: bool
    lr_scale: float = 1.0


Rule = Callable[[str, nn.Parameter], Treatment]


def matrices_decay(name: str, p: nn.Parameter) -> Treatment:
    """The usual rule: weight decay on matrices, none on vectors."""
    return Treatment(decayed=p.dim() >= 2)


class AdamW:
    """AdamW with decoupled weight decay where ``rule`` says; moments and masters are always fp32.

    Taking over a parameter makes an fp32 one a view of ``flat["param"]``. One stored in another dtype keeps its
    storage, in one buffer of its own dtype and the same layout, and is refreshed from its master after each step.

    Gradients: backward passes write straight into ``grad`` (``rrd.ops.grad``) or leave a tensor in ``.grad``, which
    is gathered when the window ends. ``zero_grad`` starts a new window.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rule: Rule = matrices_decay,
    ) -> None:
        """``params``: (name, parameter) pairs, no parameter twice; of one device. Order is kept, decayed ones first."""
        assert params and len({id(p) for _, p in params}) == len(params), "nothing to train, or a parameter twice"
        ordered = sorted(params, key=lambda np: _place_in_order(rule(*np)))
        self.layout = _lay_out(ordered)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.groups = _groups([rule(*np) for np in ordered], self.layout)
        self.steps = 0
        """Updates applied so far; the bias correction counts them."""
        self.whole = True
        """False while an update is being made, and for ever where one was cut short: the state is then of no use."""
        size, device = self.layout[-1].offset + self.layout[-1].numel, ordered[0][1].device
        self.state = torch.zeros(3 * size, device=device)
        """All that a checkpoint keeps, in the order of its file: one copy takes it aside."""
        self.flat = dict(zip(("param", "exp_avg", "exp_avg_sq"), torch.split(self.state, size), strict=True))
        self.grad = torch.zeros(size, device=device)
        self._params = [p for _, p in ordered]
        self._stored = self._take_over()
        self._kernel: kernel.Update | None = None
        """What updates on a die that has a kernel for it, once it has been asked for."""

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.layout]

    def view(self, key: str, slot: Slot) -> Tensor:
        """One parameter's part of ``flat[key]`` or, for ``"grad"``, of the gradient."""
        buffer = self.grad if key == "grad" else self.flat[key]
        return buffer[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def zero_grad(self) -> None:
        """Start a new window: what is written first overwrites, so nothing needs to be cleared."""
        for p in self._params:
            p.grad, place_of(p).begun = None, False

    def gather(self) -> Tensor:
        """The window's whole gradient, flat: parameters that saw none have zeros there."""
        for p in self._params:
            grad = opened(p)
            if p.grad is not None:
                grad.add_(p.grad)
                p.grad = None
        return self.grad

    def grad_norm(self) -> float:
        """The L2 norm of the window's gradient."""
        return float(_norm(self.gather()))

    @torch.no_grad()
    def update(self, lr: float, clip: float, losses: Sequence[Tensor]) -> Update:
        """One update with the gradient clipped to the norm ``clip`` (0: not at all), and what it was made from.

        Where a loss, a scalar on the die, or the norm is not finite, nothing is changed. The report is all that is
        waited for.
        """
        norm = _norm(self.gather())
        report = torch.stack([*losses, norm])
        go = choice.launcher("adamw", norm.device)
        if go is not None:  # a loss that is no number makes the norm none
            on_die, norm = self._on_die(go), norm + (0.0 * report).sum()
            self.whole = False
            on_die.step(lr, norm.view(1), clip)
            self.refresh()
            self.whole = True
        *found, size = report.tolist()
        applied = all(math.isfinite(x) for x in (*found, size))
        if go is None and applied:
            self.step(lr, scale=min(1.0, clip / (size + 1e-6)) if clip else 1.0)
        elif applied:
            self.steps += 1
        return Update(found, size, applied)

    def _on_die(self, go: Launcher) -> kernel.Update:
        """The kernel's side of this optimizer, at the step that this one is at."""
        if self._kernel is None:
            groups = [kernel.Group(part.stop, t.lr_scale, self.weight_decay if t.decayed else 0.0)
                      for part, t in self.groups]
            self._kernel = kernel.Update(go, self.flat["param"], self.grad, self.flat["exp_avg"],
                                         self.flat["exp_avg_sq"], groups=groups, betas=self.betas, eps=self.eps)
        self._kernel.at(self.steps)
        return self._kernel

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """One update with the gathered gradient times ``scale``; ``grad`` may be changed by it."""
        self.whole = False
        self.steps += 1
        for part, treatment in self.groups:
            self._update(part, lr * treatment.lr_scale, self.weight_decay if treatment.decayed else 0.0, scale)
        self.refresh()
        self.whole = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what the model computes with in line with the masters: after a step, and after loading them."""
        if self._stored is not None:
            self._stored.copy_(self.flat["param"])

    def _update(self, part: slice, lr: float, decay: float, scale: float) -> None:
        p, g = self.flat["param"][part], self.grad[part]
        m, v = self.flat["exp_avg"][part], self.flat["exp_avg_sq"][part]
        if _FUSED:
            _fused(p, g, m, v, self.steps, lr=lr, betas=self.betas, eps=self.eps, decay=decay, scale=scale)
        else:
            _plain(p, g, m, v, self.steps, lr=lr, betas=self.betas, eps=self.eps, decay=decay, scale=scale)

    @torch.no_grad()
    def _take_over(self) -> Tensor | None:
        """Point every parameter into the flat buffers; the buffer of those not stored in fp32, if there are any."""
        dtypes = {p.dtype for p in self._params} - {torch.float32}
        assert len(dtypes) <= 1 and (not dtypes or all(p.dtype != torch.float32 for p in self._params)), dtypes
        stored = self.flat["param"].to(dtypes.pop()) if dtypes else None
        for p, slot in zip(self._params, self.layout, strict=True):
            master = self.view("param", slot)
            master.copy_(p)
            if stored is None:
                p.data = master
            else:
                p.data = stored[slot.offset : slot.offset + slot.numel].view(slot.shape).copy_(p)
            give_place(p, self.view("grad", slot))
        return stored


_ROW, _SHORT = 4096, 1 << 18
"""Elements whose squares are added up in one go: of a long vector, and of one that is no longer than this."""


def _norm(flat: Tensor) -> Tensor:
    """The L2 norm of ``flat`` [n], a scalar: where it is long, of rows of 4,096 elements, then of those norms.

    In one go, torch on a CPU adds up all squares in fp32 and on one thread: of 191 million elements the norm is 3 % too
    small, of 262,144 it is right to two millionths.
    """
    if len(flat) <= _SHORT:
        short: Tensor = torch.linalg.vector_norm(flat)
        return short
    whole = len(flat) // _ROW * _ROW
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts, torch.linalg.vector_norm(flat[whole:]).view(1)]))
    return norm


def _lay_out(params: Sequence[tuple[str, nn.Parameter]]) -> list[Slot]:
    layout, offset = [], 0
    for name, p in params:
        layout.append(Slot(name, tuple(p.shape), offset, prod(p.shape)))
        offset += p.numel()
    return layout


def _place_in_order(treatment: Treatment) -> tuple[bool, float]:
    return not treatment.decayed, treatment.lr_scale


def _groups(treatments: Sequence[Treatment], layout: Sequence[Slot]) -> list[tuple[slice, Treatment]]:
    """The flat buffers' parts that are updated alike."""
    groups = []
    for treatment, members in groupby(zip(treatments, layout, strict=True), key=lambda member: member[0]):
        slots = [slot for _, slot in members]
        groups.append((slice(slots[0].offset, slots[-1].offset + slots[-1].numel), treatment))
    return groups


def _fused(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: int, *,
    lr: float, betas: tuple[float, float], eps: float, decay: float, scale: float,
) -> None:
    """One pass over the four buffers. It divides the gradient by ``grad_scale``, so that clipping costs no pass."""
    inverse = torch.tensor(1.0 / scale, device=g.device) if scale != 1.0 else None
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [torch.tensor(float(steps), device=p.device)], lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=decay, eps=eps, amsgrad=False, maximize=False, grad_scale=inverse, found_inf=None,
    )


def _plain(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: int, *,
    lr: float, betas: tuple[float, float], eps: float, decay: float, scale: float,
) -> None:
    """The reference, and what torch without the fused kernel for this device runs."""
    if scale != 1.0:
        g.mul_(scale)
    p.mul_(1 - lr * decay)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    root = v.sqrt().div_((1 - betas[1] ** steps) ** 0.5).add_(eps)
    p.addcdiv_(m, root, value=-lr / (1 - betas[0] ** steps))


def _has_fused() -> bool:
    """Whether the fused kernel runs on CPUs here; torch got it after 2.0, and older ones raise."""
    try:
        p, g, m, v = (torch.ones(1) for _ in range(4))
        _fused(p, g, m, v, 1, lr=0.0, betas=(0.9, 0.999), eps=1e-8, decay=0.0, scale=1.0)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True


_FUSED = _has_fused()
