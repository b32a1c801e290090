"""Causal attention over all earlier tokens, or over the chunks that matter: MoBA (Lu et al., 2025), as in RWKV-X.

Beyond ``chunk * topk`` tokens a query sees its own chunk up to itself and the ``topk - 1`` earlier complete chunks
whose mean key it matches best; one softmax over all of these. The choice is made in fp32 and has no gradient.

Scores never stand whole: queries go against ranges of keys in pieces of at most ``SCORES`` numbers; pieces of one
softmax are merged by their log-sum-exp, and the backward pass computes the probabilities again (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES = 1 << 22
"""Scores that may stand at once: 16 MB."""


class Shape(NamedTuple):
    """``offset`` tokens stand before the first query; chunk None: every query sees all before it."""

    offset: int
    chunk: int | None
    topk: int


class Piece(NamedTuple):
    """Queries against the keys ``first`` to ``end``: a range of queries of all heads, or chosen ones of one head.

    ``diagonal``: query i of the piece sees keys up to ``diagonal + i`` of the range; None: all of them.
    """

    head: int | None
    queries: slice | Tensor
    first: int
    end: int
    diagonal: int | None


def pieces(q: Tensor, k: Tensor, shape: Shape) -> Iterator[Piece]:
    """Everything that q [BH, T, D] sees of k [BH, S, D]: each pair of a query and a visible key in just one piece."""
    BH, T, _ = q.shape
    chunk = shape.chunk or shape.offset + T
    at = 0
    while at < T:
        position = shape.offset + at
        c = position // chunk
        sparse = shape.chunk is not None and c >= shape.topk
        first = c * chunk if sparse else 0
        rows = max(16, min(256, SCORES // (BH * (position + 256 - first))))
        end = min(T, at + rows, (c + 1) * chunk - shape.offset)
        yield Piece(None, slice(at, end), first, shape.offset + end, position - first)
        at = end
    if shape.chunk is not None:
        yield from _chosen(q, k, shape, shape.chunk)


def _chosen(q: Tensor, k: Tensor, shape: Shape, chunk: int) -> Iterator[Piece]:
    """The earlier chunks that queries chose, chunk by chunk, for each head the queries that chose it."""
    BH, T, _ = q.shape
    last = (shape.offset + T - 1) // chunk
    if last < shape.topk:
        return
    chosen = _gates(q, k, shape, chunk, last)
    rows = max(16, SCORES // chunk)
    for j in range(last):
        for head in range(BH):
            for queries in torch.split(chosen[head, :, j].nonzero().squeeze(1), rows):
                if len(queries):
                    yield Piece(head, queries, j * chunk, (j + 1) * chunk, None)


def _gates(q: Tensor, k: Tensor, shape: Shape, chunk: int, last: int) -> Tensor:
    """Whether a query of a chunk beyond the first ``topk`` chose an earlier chunk: [BH, T, last] bool."""
    BH, T, D = q.shape
    means = _wide(k[:, : last * chunk]).view(BH, last, chunk, D).mean(2)
    chosen = torch.zeros(BH, T, last, dtype=torch.bool, device=q.device)
    for c in range(max(shape.topk, shape.offset // chunk), last + 1):
        rows = slice(max(0, c * chunk - shape.offset), min(T, (c + 1) * chunk - shape.offset))
        scores = _wide(q[:, rows]) @ means[:, :c].transpose(1, 2)
        best = scores.topk(shape.topk - 1, dim=-1).indices
        chosen[:, rows, :c] = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return chosen


def _scores(q: Tensor, k: Tensor, p: Piece, scale: float) -> Tensor:
    """q's scores, masked where the piece's diagonal says."""
    s = _wide(q @ k.transpose(-1, -2)).mul_(scale)
    if p.diagonal is not None:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(p.diagonal + 1)
        s.masked_fill_(hidden, float("-inf"))
    return s


def _of(t: Tensor, p: Piece) -> Tensor:
    """The piece's queries: [BH, n, …] or, for one head, [n, …]."""
    return t[:, p.queries] if p.head is None else t[p.head].index_select(0, p.queries)  # type: ignore[arg-type]


def _keys(t: Tensor, p: Piece) -> Tensor:
    return t[:, p.first : p.end] if p.head is None else t[p.head, p.first : p.end]


def _put(t: Tensor, p: Piece, value: Tensor) -> None:
    if p.head is None:
        t[:, p.queries] = value
    else:
        t[p.head].index_copy_(0, p.queries, value)  # type: ignore[arg-type]


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        scale = q.shape[-1] ** -0.5
        y = torch.zeros_like(_wide(q))
        lse = y.new_full(q.shape[:2], float("-inf"))
        ctx.pieces = list(pieces(q, k, shape))
        for p in ctx.pieces:
            s = _scores(_of(q, p), _keys(k, p), p, scale)
            here, before = torch.logsumexp(s, -1), _of(lse, p)
            both = torch.logaddexp(here, before)
            new = _wide(s.sub_(both[..., None]).exp_().to(v.dtype) @ _keys(v, p))
            _put(y, p, new.addcmul_(_of(y, p), (before - both).exp_()[..., None]))
            _put(lse, p, both)
        y = y.to(q.dtype)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(_wide(t)) for t in (q, k, v))
        delta = (_wide(dy) * _wide(y)).sum(-1)
        for p in ctx.pieces:
            qs, ks, vs, dys = _of(q, p), _keys(k, p), _keys(v, p), _of(dy, p)
            prob = _scores(qs, ks, p, ctx.scale).sub_(_of(lse, p)[..., None]).exp_()
            _keys(dv, p).add_(prob.to(dy.dtype).transpose(-1, -2) @ dys)
            ds = _wide(dys @ vs.transpose(-1, -2)).sub_(_of(delta, p)[..., None])
            ds = ds.mul_(prob).mul_(ctx.scale).to(q.dtype)
            _put(dq, p, _of(dq, p) + ds @ ks)
            _keys(dk, p).add_(ds.transpose(-1, -2) @ qs)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, *, chunk: int | None = None, topk: int = 3) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over what a query sees. q [B, T, H, D]; k, v [B, S, H, D] -> [B, T, H * D].

    The S - T first keys are of tokens before the first query. ``chunk`` None: a query sees all before it.
    """
    B, T, H, D = q.shape
    flat = [t.transpose(1, 2).reshape(B * H, -1, D) for t in (q, k, v)]
    y: Tensor = _Attention.apply(*flat, Shape(k.shape[1] - T, chunk, topk))  # type: ignore[no-untyped-call]
    return y.view(B, H, T, D).transpose(1, 2).reshape(B, T, H * D)
