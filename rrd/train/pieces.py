"""A sequence longer than memory, trained exactly in pieces: for models whose blocks carry a state (RWKV and hybrids).

Forward once without gradients, keeping on the host the states before each piece. Then from the last piece to the first:
run it again from its states, and go back with the gradient of its own loss and of the states after it, which the
next piece has left; what arrives at the states before is left to the piece to the left. That is the gradient of the
whole sequence (no truncation), for one forward pass more, and memory for the activations of one piece.

States of attention blocks grow with the sequence: keys and values of all tokens. They are kept once, and a piece sees
the part that is before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rrd.models.layers import _rng_state, _set_rng_state
from rrd.models.recompute import backward_from
from rrd.models.registry import CausalLM, States
from rrd.train.loss import loss_and_grad, loss_sum

NO_LABEL = -100


class Piece(NamedTuple):
    """Part of a batch: tokens [B, T'], the rows among its B*T' positions that have a label, and their targets."""

    idx: Tensor
    rows: Tensor
    targets: Tensor


def split(idx: Tensor, labels: Tensor, length: int) -> list[Piece]:
    """The batch in pieces of ``length`` tokens; what lies behind the last label is left out."""
    columns = (labels != NO_LABEL).any(0).nonzero()
    end = int(columns[-1]) + 1 if len(columns) else 0
    pieces = []
    for at in range(0, end, length):
        part = labels[:, at : min(end, at + length)].reshape(-1)
        rows = (part != NO_LABEL).nonzero().squeeze(1)
        pieces.append(Piece(idx[:, at : min(end, at + length)], rows, part[rows]))
    return pieces


class _Kept:
    """States before each of ``n`` pieces but the first, on the host; of those that grow, the longest.

    What stays is in few large tensors made at once: between the activations that come and go it would keep the
    allocator from giving memory back.
    """

    def __init__(self, growing: Sequence[Sequence[bool]], n: int) -> None:
        self.growing, self.n = growing, n
        self.lengths = [0]
        self.fixed: list[list[Tensor]] = []  # block by block, of those that do not grow: [n, …]
        self.grown: States = []
        self.rng: Tensor | None = None

    def add_rng(self, i: int, state: Tensor) -> None:
        if self.rng is None:
            self.rng = state.new_empty(self.n, *state.shape)
        self.rng[i] = state

    def add(self, states: States, tokens: int) -> None:
        """The states after the piece that ``add_rng`` was last called for."""
        pairs = [list(zip(ts, gs, strict=True)) for ts, gs in zip(states, self.growing, strict=True)]
        fixed = [[t for t, grows in block if not grows] for block in pairs]
        if not self.fixed:
            self.fixed = [[torch.empty(self.n, *t.shape, dtype=t.dtype) for t in block] for block in fixed]
        for room, block in zip(self.fixed, fixed, strict=True):
            for all_pieces, t in zip(room, block, strict=True):
                all_pieces[len(self.lengths)] = t
        self.grown = [tuple(t for t, grows in block if grows) for block in pairs]
        self.lengths.append(self.lengths[-1] + tokens)

    def before(self, i: int, device: torch.device) -> list[list[Tensor]] | None:
        """The states before piece ``i``: leaves that want gradients. None before the first."""
        if i == 0:
            return None
        found = []
        for growing, fixed, grown in zip(self.growing, self.fixed, self.grown, strict=True):
            f, g = iter(fixed), iter(grown)
            block = [next(g)[:, : self.lengths[i]] if grows else next(f)[i].to(device) for grows in growing]
            found.append([t.detach().requires_grad_() for t in block])
        return found


def forward_backward(model: CausalLM, pieces: Sequence[Piece], *, scale: float, checkpointing: bool = False,
                     finer: int = 1) -> list[Tensor]:
    """Adds the gradient of ``scale`` times the summed loss to the window's; returns the pieces' losses, scalars."""
    device = model.head_weight.device
    kept = _walk(model, pieces)
    losses: list[Tensor] = []
    after: list[list[Tensor | None]] | None = None
    for i in reversed(range(len(pieces))):
        leaves = kept.before(i, device)
        assert kept.rng is not None
        _set_rng_state(device, kept.rng[i].clone())  # dropout is as it was on the way there; torch wants no view
        loss, after = _back(model, pieces[i], leaves, after, scale, checkpointing, finer)
        losses += loss
    return losses


@torch.no_grad()
def _walk(model: CausalLM, pieces: Sequence[Piece]) -> _Kept:
    """The states before each piece, and the random generator's."""
    kept, states = _Kept(model.growing, len(pieces)), None
    for i, piece in enumerate(pieces):
        kept.add_rng(i, _rng_state(piece.idx.device))
        if i < len(pieces) - 1:
            _, states = model.carry(piece.idx, states, rows=piece.rows[:0])
            kept.add(states, piece.idx.shape[1])
    return kept


def _back(model: CausalLM, piece: Piece, leaves: list[list[Tensor]] | None, after: list[list[Tensor | None]] | None,
          scale: float, checkpointing: bool, finer: int) -> tuple[list[Tensor], list[list[Tensor | None]] | None]:
    """One piece again, and back: its loss, where it has labels, and the gradients of the states before it."""
    states = None if leaves is None else [tuple(block) for block in leaves]
    hidden, ends = model.carry(piece.idx, states, rows=piece.rows, checkpointing=checkpointing)
    loss: list[Tensor] = []
    pairs = []
    if len(piece.targets):
        summed, grad = loss_and_grad(
            hidden.detach(), model.head_weight, piece.targets, scale=scale, bias=model.head_bias, finer=finer)
        loss = [summed]
        pairs.append((hidden, grad))
    for block, grads in zip(ends, after or [], strict=after is not None):
        pairs += [(t, g) for t, g in zip(block, grads, strict=True) if g is not None]
    backward_from([(t, g) for t, g in pairs if t.requires_grad])
    return loss, None if leaves is None else [[t.grad for t in block] for block in leaves]


@torch.no_grad()
def summed_loss(model: CausalLM, pieces: Sequence[Piece], finer: int = 1) -> float:
    """The summed loss alone, for evaluation."""
    total, states = 0.0, None
    for piece in pieces:
        hidden, states = model.carry(piece.idx, states, rows=piece.rows)
        if len(piece.targets):
            total += float(loss_sum(hidden, model.head_weight, piece.targets, bias=model.head_bias,
                                    finer=finer))
    return total
