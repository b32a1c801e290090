"""The Llama family: llama, mistral, qwen2 and qwen3, with the names and the logits of Hugging Face's transformers.

Touvron et al., 2023, and its kin: RMSNorm before each half of a block, rotary positions, queries in groups that share
keys and values, SwiGLU. Shapes: B samples, T positions, C channels, H query heads, G key heads, D channels a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rrd.inputs import LLAMAS
from rrd.models.layers import Embedding, Linear, RMSNorm, checkpointed
from rrd.models.llama_config import LlamaConfig, read_config
from rrd.models.registry import CausalLM, Shape
from rrd.ops.attention import attention
from rrd.ops.linear import Group
from rrd.ops.rope import Angles, angles
from rrd.ops.swiglu import swiglu


class Attention(nn.Module):
    """softmax(q k^T / sqrt(D)) v of rotated queries and keys, then o; added to ``residual``."""

    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_size, self.window = c.n_head, c.n_kv_head, c.head_size, c.windows[layer]
        self.q_proj = Linear(c.n_embd, c.n_head * c.head_size, bias=c.qkv_bias)
        self.k_proj = Linear(c.n_embd, c.n_kv_head * c.head_size, bias=c.qkv_bias)
        self.v_proj = Linear(c.n_embd, c.n_kv_head * c.head_size, bias=c.qkv_bias)
        self.o_proj = Linear(c.n_head * c.head_size, c.n_embd, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.qkv, self.o = Group(self.q_proj, self.k_proj, self.v_proj), Group(self.o_proj)

    def forward(self, x: Tensor, at: Angles, residual: Tensor, rows: Tensor | None) -> Tensor:
        B, T, _ = x.shape
        H, G, D = self.n_head, self.n_kv_head, self.head_size
        qkv = self.qkv(x).view(B, T, H + 2 * G, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = torch.split(qkv, [H, G, G], 2)  # [B, T, H or G, D]
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), 2)
        y = attention(qkv, at, n_head=H, window=self.window)
        if rows is not None:
            y, residual = y.flatten(0, 1)[rows], residual.flatten(0, 1)[rows]
        return self.o(y, residual)


class MLP(nn.Module):
    """down(silu(gate x) * up x), added to ``residual``."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(c.n_embd, c.n_inner, bias=c.mlp_bias)
        self.up_proj = Linear(c.n_embd, c.n_inner, bias=c.mlp_bias)
        self.down_proj = Linear(c.n_inner, c.n_embd, bias=c.mlp_bias)
        self.gate_up, self.down = Group(self.gate_proj, self.up_proj), Group(self.down_proj)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)), residual)


class Block(nn.Module):
    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.n_embd, c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.n_embd, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, at: Angles, rows: Tensor | None = None) -> Tensor:
        """x [B, T, C] -> the same, or [len(rows), C] when only some of the B*T positions go on."""
        x = self.self_attn(self.input_layernorm(x), at, x, rows)
        y: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return y


class _Body(nn.Module):
    """What the files call ``model``: everything below the head."""

    def __init__(self, c: LlamaConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.n_vocab, c.n_embd, compute=compute)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.norm = RMSNorm(c.n_embd, c.norm_eps)


class LlamaLM(CausalLM):
    def __init__(self, config: LlamaConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        self.model = _Body(config, compute)
        self.lm_head = None if config.tied else Linear(config.n_embd, config.n_vocab)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        return self.model.layers

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, idx: Tensor, *, rows: Tensor | None = None, checkpointing: bool = False) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        at = angles(positions, self.config.inverse_frequencies(idx.device), self.compute)
        x = self.model.embed_tokens(idx)
        for i, block in enumerate(self.blocks):
            last = rows if i == len(self.blocks) - 1 else None
            x = self._through(block, x, at, last, checkpointing and torch.is_grad_enabled())
        return self.model.norm(x)  # type: ignore[no-any-return]

    def _through(self, block: nn.Module, x: Tensor, at: Angles, rows: Tensor | None, again: bool) -> Tensor:
        if not again:
            return block(x, at, rows)  # type: ignore[no-any-return]
        trained = next((p for p in block.parameters() if p.requires_grad), None)
        if trained is None and not x.requires_grad:
            return block(x, at, rows)  # type: ignore[no-any-return]
        return checkpointed(lambda y: block(y, at, rows), x, x if trained is None else trained)


class Llama:
    """The family, for the registry."""

    name = "llama"
    reads = LLAMAS
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def matches(self, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        return config.get("model_type") in LLAMAS

    def read_config(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> LlamaConfig:
        return read_config(config, shapes)

    def tensors(self, c: LlamaConfig) -> dict[str, Shape]:
        """Matrices first, by module: so q, k, v are neighbours, and gate, up, which ``rrd.ops.linear`` makes use of."""
        with torch.device("meta"):
            skeleton = LlamaLM(c, torch.float32)
        shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
        return dict(sorted(shapes.items(), key=lambda item: len(item[1]) < 2))

    def ignores(self, name: str, c: LlamaConfig) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (c.tied and name == "lm_head.weight")

    def skeleton(self, config: LlamaConfig, *, compute: torch.dtype) -> CausalLM:
        return LlamaLM(config, compute)
