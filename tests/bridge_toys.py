"""Tiny models of transformers' other families, random in every weight, as directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from toys import make_tokenizer

V = 320
_SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0,
          "eos_token_id": 0}
_GROUPED = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": V, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0,
                      "eos_token_id": 0}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
                          "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.2}),
    "phi": ("Phi", {**_SIZES, "intermediate_size": 64}),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**_GROUPED, "num_experts": 4, "moe_intermediate_size": 16,
                               "shared_expert_intermediate_size": 16}),
    "granitemoe": ("GraniteMoe", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
}
TURNED = {"gpt_oss": ("GptOss", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8})}
"""One whose experts are stored [in, out], and have biases."""
FUSED = int(transformers.__version__.split(".")[0]) >= 5
"""Whether transformers holds a layer's experts in one tensor; before, they and their router are linears."""
_WIDE = {"hidden_size": 128, "intermediate_size": 256}
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128}, "gemma": {**_WIDE, "head_dim": 32}, "gemma2": {**_WIDE, "head_dim": 32}, "phi": _WIDE,
    "mixtral": _WIDE, "granitemoe": _WIDE,
    "qwen2_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
}
"""Sizes at which a row's scale is little beside the row."""


def make_bridged(path: Path, kind: str, **more: Any) -> Path:
    """A model directory with a tokenizer; biases and norms are random too, so that none of them can be missed."""
    name, sizes = {**KINDS, **TURNED}[kind]
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    if kind == "gemma2" and not hasattr(torch, "compiler"):
        pytest.skip("transformers' gemma2 needs torch 2.1")
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    g = torch.Generator().manual_seed(7)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=g), alpha=0.05)
    model.save_pretrained(path)
    make_tokenizer(path, V)
    return path
