"""What RWKV-7 blocks are made of, under the names of BlinkDL's RWKV-LM.

Shapes: B samples, T tokens, C channels, H heads of N channels. A block takes and returns ``x`` [B, T, C], ``v_first``
[B, T, C] (the first time mix's values, which all later ones mix in) and its state: what it knows of the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rrd.models.layers import Linear
from rrd.models.rwkv7_config import BlockConfig, RwkvConfig
from rrd.ops.linear import Group
from rrd.ops.rwkv7 import Core, norm_shift, relu2, time_mix

State = tuple[Tensor, ...]
"""A block's memory: the time mix's last input [B, C] and its S [B, H, N, N], the channel mix's last input [B, C]."""


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last axis (Ba et al., 2016)."""

    plain = False
    """Whether torch computes what there are compiled kernels for."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, (x.shape[-1],), w, b, self.eps)

    def shift(self, x: Tensor, mus: Sequence[Tensor], before: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """Mixes of the norm with the one of the token before: see ``rrd.ops.rwkv7.norm_shift``."""
        return norm_shift(x, self.weight, self.bias, mus, before, self.eps, plain=self.plain)


class _GroupNorm(nn.Module):
    """The parameters of ``ln_x``; the norm itself is part of ``rrd.ops.rwkv7.time_mix``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))


def _vector(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, 1, size))


def _low_rank(n: int, d: int) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.empty(n, d)), nn.Parameter(torch.empty(d, n))


class TimeMix(nn.Module):
    plain = False

    def __init__(self, c: RwkvConfig, b: BlockConfig) -> None:
        super().__init__()
        C, H = c.n_embd, c.n_head
        self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g = (_vector(C) for _ in range(6))
        self.w0, self.a0, self.k_k, self.k_a = (_vector(C) for _ in range(4))
        self.w1, self.w2 = _low_rank(C, b.d_w)
        self.a1, self.a2 = _low_rank(C, b.d_a)
        self.g1, self.g2 = _low_rank(C, b.d_g)
        self.first = b.d_v == 0
        if not self.first:
            self.v0 = _vector(C)
            self.v1, self.v2 = _low_rank(C, b.d_v)
        self.r_k = nn.Parameter(torch.empty(H, c.head_size))
        self.receptance, self.key, self.value, self.output = (Linear(C, C) for _ in range(4))
        self.ln_x = _GroupNorm(C)
        self._r, self._k, self._v = Group(self.receptance), Group(self.key), Group(self.value)
        self._out = Group(self.output)

    def forward(self, x: Tensor, norm: LayerNorm, v_first: Tensor | None, state: State | None
                ) -> tuple[Tensor, Tensor, State]:
        """x [B, T, C] -> (x + the mix of its norm, v_first, the state after)."""
        before, wkv = (None, None) if state is None else state
        (x_r, x_w, x_k, x_v, x_a, x_g), last = norm.shift(
            x, (self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g), before)
        r, k, v = self._r(x_r), self._k(x_k), self._v(x_v)
        z = torch.tanh(_product(x_w, self.w1))
        gate = torch.sigmoid(_product(x_g, self.g1))
        nu = None if self.first else _product(_product(x_v, self.v1), self.v2)
        y, wkv = time_mix(
            r, _product(z, self.w2), k, v, _product(_product(x_a, self.a1), self.a2), nu, _product(gate, self.g2),
            v_first, self._core(), wkv, plain=self.plain)
        return self._out(y, x), v if v_first is None else v_first, (last, wkv)

    def _core(self) -> Core:
        return Core(self.w0, self.a0, None if self.first else self.v0, self.k_k, self.k_a, self.r_k, self.ln_x.weight,
                    self.ln_x.bias)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """x [..., n] times w [n, m], as it stands in the files."""
    return x @ w.to(x.dtype)


class ChannelMix(nn.Module):
    """x + W_v relu(W_k x_k)^2 of its norm."""

    plain = False

    def __init__(self, n: int, n_inner: int) -> None:
        super().__init__()
        self.x_k = _vector(n)
        self.key, self.value = Linear(n, n_inner), Linear(n_inner, n)
        self._k, self._v = Group(self.key), Group(self.value)

    def forward(self, x: Tensor, norm: LayerNorm, before: Tensor | None) -> tuple[Tensor, Tensor]:
        (x_k,), last = norm.shift(x, (self.x_k,), before)
        return self._v(relu2(self._k(x_k), plain=self.plain), x), last


class Block(nn.Module):
    growing = (False, False, False)

    def __init__(self, c: RwkvConfig, b: BlockConfig, *, ln0: bool) -> None:
        super().__init__()
        if ln0:
            self.ln0 = LayerNorm(c.n_embd, c.norm_eps)
        self.ln1, self.ln2 = LayerNorm(c.n_embd, c.norm_eps), LayerNorm(c.n_embd, c.norm_eps)
        self.att, self.ffn = TimeMix(c, b), ChannelMix(c.n_embd, b.n_inner)

    def forward(self, x: Tensor, v_first: Tensor | None, state: State | None) -> tuple[Tensor, Tensor | None, State]:
        x, v_first, att = self.att(x, self.ln1, v_first, None if state is None else state[:2])
        x, ffn = self.ffn(x, self.ln2, None if state is None else state[2])
        return x, v_first, (*att, ffn)
