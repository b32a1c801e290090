"""RWKV-7 (Peng et al., 2025, "RWKV-7 Goose") and its hybrids, under the names of BlinkDL's RWKV-LM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rrd.models.layers import Embedding, Linear
from rrd.models.recompute import recomputed
from rrd.models.registry import CausalLM, Recipe, Shape, States
from rrd.models.rwkv7_config import BETWEEN, BlockConfig, RwkvConfig, prefix_of, read_config
from rrd.models.rwkv7_layers import Block, ChannelMix, LayerNorm, State, TimeMix
from rrd.models.rwkvx import AttentionBlock, RfaBlock
from rrd.ops import native
from rrd.optim.adamw import Treatment

TORCH = "torch"
"""The name of no compiled kernels."""


class _Body(nn.Module):
    """Everything but what stands between the blocks."""

    def __init__(self, c: RwkvConfig, compute: torch.dtype) -> None:
        super().__init__()
        main = [b for b in c.blocks if b.path.startswith(f"{c.prefix}blocks.")]
        self.emb = Embedding(c.n_vocab, c.n_embd, compute=compute)
        self.blocks = nn.ModuleList(_block(c, b, ln0=i == 0) for i, b in enumerate(main))
        self.ln_out = LayerNorm(c.n_embd, c.norm_eps)
        self.head = Linear(c.n_embd, c.n_vocab)


def _block(c: RwkvConfig, b: BlockConfig, *, ln0: bool = False) -> nn.Module:
    if b.kind == "rwkv":
        return Block(c, b, ln0=ln0)
    return RfaBlock(c, b, ln0=ln0) if b.kind == "rfa" else AttentionBlock(c, b, ln0=ln0)


class RwkvLM(CausalLM):
    def __init__(self, config: RwkvConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute, self.longest = config, compute, config.longest
        body = _Body(config, compute)
        if config.prefix:
            self.rwkv = body
        else:
            self.emb, self.blocks, self.ln_out, self.head = body.emb, body.blocks, body.ln_out, body.head
        for kind in BETWEEN:
            if found := [b for b in config.blocks if b.path.startswith(f"{kind}.")]:
                self.add_module(kind, nn.ModuleList(_block(config, b) for b in found))

    def make_ready(self, cache_dir: Path, before: str | None, alive: Callable[[], None]) -> str:
        if self.head_weight.device.type != "cpu":
            return ""
        native.use(cache_dir, alive)
        if why := native.why_not():
            self.without_kernels = f"RWKV runs on torch's operations, at half the speed: {why}"
        if before == TORCH:
            for module in self.modules():
                if isinstance(module, (TimeMix, ChannelMix, LayerNorm)):
                    module.plain = True
            return self.without_kernels or "RWKV runs on torch's operations, at half the speed: so the job began"
        return self.without_kernels

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

    def hidden(self, idx: Tensor, *, rows: Tensor | None = None, checkpointing: bool = False) -> Tensor:
        x, v_first = self.embed(idx), None
        for block in self.order:
            x, v_first, _ = _recomputed(block, x, v_first) if checkpointing else block(x, v_first, None)
        return self.normed(x, rows)

    def carry(self, idx: Tensor, states: States | None, *, rows: Tensor | None = None, checkpointing: bool = False
              ) -> tuple[Tensor, States]:
        x, v_first, after = self.embed(idx), None, []
        for i, block in enumerate(self.order):
            state = None if states is None else states[i]
            x, v_first, state = (_recomputed(block, x, v_first, state, keep=True) if checkpointing
                                 else block(x, v_first, state))
            after.append(state)
        return self.normed(x, rows), after

    @property
    def growing(self) -> list[tuple[bool, ...]]:
        return [tuple(getattr(block, "growing")) for block in self.order]  # noqa: B009

    @property
    def order(self) -> list[nn.Module]:
        """The blocks as they are executed."""
        return [self.get_submodule(b.path) for b in self.config.blocks]

    def embed(self, idx: Tensor) -> Tensor:
        x: Tensor = self.body.blocks[0].ln0(self.body.emb(idx))
        return x

    def normed(self, x: Tensor, rows: Tensor | None) -> Tensor:
        y: Tensor = self.body.ln_out(x if rows is None else x.flatten(0, 1)[rows])
        return y


def _recomputed(block: nn.Module, x: Tensor, v_first: Tensor | None, state: State | None = None, *, keep: bool = False
                ) -> tuple[Tensor, Tensor | None, State]:
    """The block, holding only its inputs for the backward pass; and the state after it, if it is to ``keep`` that."""
    trained = next((p for p in block.parameters() if p.requires_grad), None)
    if not torch.is_grad_enabled() or (trained is None and not x.requires_grad):
        return block(x, v_first, state)  # type: ignore[no-any-return]
    given = () if v_first is None else (v_first,)
    mixes = v_first is not None or isinstance(block, Block)

    def part(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        x, v, after = block(x, more[0] if given else None, more[len(given):] if state is not None else None)
        return x, *((v,) if mixes else ()), *(after if keep else ())

    x, *rest = recomputed(part, trained, x, *given, *(state or ()))
    return x, rest[0] if mixes else None, tuple(rest[mixes:])


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
        return read_config(config, shapes)

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
