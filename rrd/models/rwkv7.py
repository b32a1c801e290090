"""RWKV-7 (Peng et al., 2025, "RWKV-7 Goose") and its hybrids, under the names of BlinkDL's RWKV-LM.

Shapes: B samples, T tokens, C channels, H heads of N channels. A block takes and returns ``x`` [B, T, C], ``v_first``
[B, T, C] (the first time mix's values, which all later ones mix in) and its state: what it knows of the tokens before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rrd.models.layers import Embedding, Linear
from rrd.models.recompute import recomputed
from rrd.models.registry import CausalLM, Recipe, Shape
from rrd.models.rwkv7_config import BlockConfig, RwkvConfig, prefix_of, read_config
from rrd.ops import native
from rrd.ops.linear import Group
from rrd.ops.rwkv7 import Core, norm_shift, relu2, time_mix
from rrd.optim.adamw import Treatment

State = tuple[Tensor, ...]
"""A block's memory: the time mix's last input [B, C] and its S [B, H, N, N], the channel mix's last input [B, C]."""


TORCH = "torch"
"""The name of no compiled kernels."""


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


class _Body(nn.Module):
    """Everything but what stands between the blocks."""

    def __init__(self, c: RwkvConfig, compute: torch.dtype) -> None:
        super().__init__()
        main = [b for b in c.blocks if b.path.startswith(f"{c.prefix}blocks.")]
        self.emb = Embedding(c.n_vocab, c.n_embd, compute=compute)
        self.blocks = nn.ModuleList(Block(c, b, ln0=i == 0) for i, b in enumerate(main))
        self.ln_out = LayerNorm(c.n_embd, c.norm_eps)
        self.head = Linear(c.n_embd, c.n_vocab)


class RwkvLM(CausalLM):
    def __init__(self, config: RwkvConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        body = _Body(config, compute)
        if config.prefix:
            self.rwkv = body
        else:
            self.emb, self.blocks, self.ln_out, self.head = body.emb, body.blocks, body.ln_out, body.head

    def make_ready(self, cache_dir: Path, before: str | None, alive: Callable[[], None]) -> str:
        if self.head_weight.device.type != "cpu":
            return ""
        native.use(cache_dir, alive)
        if before == TORCH:
            for module in self.modules():
                if isinstance(module, (TimeMix, ChannelMix, LayerNorm)):
                    module.plain = True
        return f"RWKV runs on torch's operations, at half the speed: {why}" if (why := native.why_not()) else ""

    @property
    def kernels(self) -> str:
        if self.head_weight.device.type != "cpu":
            return ""
        lib = None if self.body.blocks[0].ffn.plain else native.kernels()
        return TORCH if lib is None else lib.name

    @property
    def body(self) -> Any:
        return self.rwkv if self.config.prefix else self

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.body.head.weight
        return weight

    def hidden(
        self,
        idx: Tensor,
        positions: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        checkpointing: bool = False,
    ) -> Tensor:
        return self.carry(idx, None, rows=rows, checkpointing=checkpointing)[0]

    def carry(
        self, idx: Tensor, states: list[State] | None, *, rows: Tensor | None = None, checkpointing: bool = False
    ) -> tuple[Tensor, list[State]]:
        """``hidden`` of tokens that come after others: takes the blocks' states (None: nothing before), returns them.

        Gradients go through the states, so a sequence run in pieces has those of the whole.
        """
        x = self.body.blocks[0].ln0(self.body.emb(idx))
        v_first: Tensor | None = None
        after = []
        for i, b in enumerate(self.config.blocks):
            block = self.get_submodule(b.path)
            state = None if states is None else states[i]
            x, v_first, state = self._through(block, x, v_first, state, checkpointing and torch.is_grad_enabled())
            after.append(state)
        if rows is not None:
            x = x.flatten(0, 1)[rows]
        return self.body.ln_out(x), after

    def _through(self, block: nn.Module, x: Tensor, v_first: Tensor | None, state: State | None, again: bool
                 ) -> tuple[Tensor, Tensor | None, State]:
        trained = next((p for p in block.parameters() if p.requires_grad), None)
        if not again or (trained is None and not x.requires_grad):
            return block(x, v_first, state)  # type: ignore[no-any-return]
        extra = () if v_first is None else (v_first,)

        def part(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
            v = more[0] if extra else None
            x, v, after = block(x, v, more[len(extra):] if state is not None else None)
            assert v is not None
            return x, v, *after

        x, v_first, *after = recomputed(part, trained, x, *extra, *(state or ()))
        return x, v_first, tuple(after)


def rule(name: str, p: nn.Parameter) -> Treatment:
    """As RWKV-LM trains: decay on two-dimensional weights only, w0 at twice the learning rate."""
    decayed = name.endswith(".weight") and sum(n > 1 for n in p.shape) >= 2
    return Treatment(decayed=decayed, lr_scale=2.0 if name.endswith(".att.w0") else 1.0)


class Rwkv7:
    """The family, for the registry."""

    name = "rwkv7"
    lora_targets = ("receptance", "key", "value", "output")
    recipe = Recipe(betas=(0.9, 0.99), eps=1e-18, rule=rule)

    def matches(self, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        return prefix_of(keys) is not None

    def read_config(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> RwkvConfig:
        return read_config(shapes)

    def tensors(self, c: RwkvConfig) -> dict[str, Shape]:
        """Matrices first, by module."""
        with torch.device("meta"):
            skeleton = RwkvLM(c, torch.float32)
        shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
        return dict(sorted(shapes.items(), key=lambda item: len(item[1]) != 2))

    def ignores(self, name: str, c: RwkvConfig) -> bool:
        """The first time mix has no values of an earlier one to mix in, but some files hold the parameters for it."""
        first = next(b.path for b in c.blocks if b.kind == "rwkv")
        return name in {f"{first}.att.{v}" for v in ("v0", "v1", "v2")}

    def skeleton(self, config: RwkvConfig, *, compute: torch.dtype) -> CausalLM:
        return RwkvLM(config, compute)
