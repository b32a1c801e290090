"""Attention blocks of RWKV-7's hybrids: MoBA as in RWKV-X (Hou et al., 2025), plain, and random features.

All have the names of RWKV-X's: ``{ln1,ln2}.*``, ``att.{receptance,key,value,output}.weight`` [C, C] (receptance makes
the queries) and ``ffn.{x_k,key.weight,value.weight}``, a channel mix. Heads of 64 channels, no bias, no positions, no
token shift. ``moba.{j}`` is sparse beyond ``chunk * topk`` tokens; ``attn.{j}``, and a block of ``blocks`` without a
time mix's parameters, sees all before it; ``rfa.{j}`` (a layout of ours, as no public model has one) has a state of
constant size and, with H heads and D features:

    att.gate.weight [H, C], att.gate.bias [H]    how much of the state each token keeps, before the sigmoid
    att.features [H, D, 64], att.sigma [H, 64]   random features, never trained, and their scale (``rrd.ops.rfa``)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rrd.models.layers import Linear
from rrd.models.rwkv7_config import BlockConfig, RwkvConfig
from rrd.models.rwkv7_layers import ChannelMix, LayerNorm, State
from rrd.ops.linear import Group
from rrd.ops.rfa import random_features, rfa
from rrd.ops.rwkv7_torch import wide
from rrd.ops.sparse_attention import sparse_attention


class _Projections(nn.Module):
    """Queries, keys, values and the output product."""

    def __init__(self, c: RwkvConfig) -> None:
        super().__init__()
        self.heads = (c.n_head, c.head_size)
        self.receptance, self.key, self.value, self.output = (Linear(c.n_embd, c.n_embd) for _ in range(4))
        self._qkv = Group(self.receptance, self.key, self.value)
        self._out = Group(self.output)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v: [B, T, H, N] each."""
        q, k, v = self._qkv(x).view(*x.shape[:2], 3, *self.heads).unbind(2)
        return q, k, v


class Attention(_Projections):
    """Causal attention; ``state`` is the keys and values [B, S, C] of all tokens before."""

    def __init__(self, c: RwkvConfig, kind: str) -> None:
        super().__init__(c)
        self.chunk, self.topk = (c.moba_chunk if kind == "moba" else None), c.moba_topk

    def forward(self, x: Tensor, residual: Tensor, state: State | None) -> tuple[Tensor, State]:
        q, k, v = self.project(x)
        if state is not None:
            k, v = (torch.cat([t.view(*t.shape[:2], *self.heads), new], 1)
                    for t, new in zip(state, (k, v), strict=True))
        y = sparse_attention(q, k, v, chunk=self.chunk, topk=self.topk)
        return self._out(y, residual), (k.flatten(2), v.flatten(2))


class RandomFeatureAttention(_Projections):
    """Gated random feature attention; ``state`` is that of ``rrd.ops.rfa.rfa``."""

    def __init__(self, c: RwkvConfig, b: BlockConfig) -> None:
        super().__init__(c)
        self.gate = Linear(c.n_embd, c.n_head, bias=True)
        self._gate = Group(self.gate)
        self.sigma = nn.Parameter(torch.empty(c.n_head, c.head_size))
        self.features = nn.Parameter(torch.empty(c.n_head, b.n_features, c.head_size))

    def forward(self, x: Tensor, residual: Tensor, state: State | None) -> tuple[Tensor, State]:
        q, k, v = (wide(t) for t in self.project(x))
        q, k = (random_features(t, wide(self.features), wide(self.sigma)) for t in (q, k))
        y, *after = rfa(q, k, v, wide(self._gate(x)), *(state or (None, None)))
        return self._out(y.flatten(2).to(x.dtype), residual), tuple(after)


class _Between(nn.Module):
    """Attention, then a channel mix. ``v_first`` passes by."""

    att: nn.Module
    growing: tuple[bool, ...]
    """Which tensors of the state hold something of every token, along their second axis."""

    def __init__(self, c: RwkvConfig, b: BlockConfig, *, ln0: bool) -> None:
        super().__init__()
        if ln0:
            self.ln0 = LayerNorm(c.n_embd, c.norm_eps)
        self.ln1, self.ln2 = LayerNorm(c.n_embd, c.norm_eps), LayerNorm(c.n_embd, c.norm_eps)
        self.ffn = ChannelMix(c.n_embd, b.n_inner)

    def forward(self, x: Tensor, v_first: Tensor | None, state: State | None) -> tuple[Tensor, Tensor | None, State]:
        x, att = self.att(self.ln1(x), x, None if state is None else state[:2])
        x, ffn = self.ffn(x, self.ln2, None if state is None else state[2])
        return x, v_first, (*att, ffn)


class AttentionBlock(_Between):
    growing = (True, True, False)

    def __init__(self, c: RwkvConfig, b: BlockConfig, *, ln0: bool = False) -> None:
        super().__init__(c, b, ln0=ln0)
        self.att = Attention(c, b.kind)


class RfaBlock(_Between):
    growing = (False, False, False)

    def __init__(self, c: RwkvConfig, b: BlockConfig, *, ln0: bool = False) -> None:
        super().__init__(c, b, ln0=ln0)
        self.att = RandomFeatureAttention(c, b)
