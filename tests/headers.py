"""Models and adapters of which only the headers are there: enough for whoever looks from outside. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "max_position_embeddings": 2048}
LINEARS = {"self_attn.q_proj": (8, 8), "self_attn.v_proj": (4, 8), "mlp.down_proj": (8, 16)}
OF_LLAMA = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,),
            **{f"model.layers.0.{path}.weight": shape for path, shape in LINEARS.items()}}


def write_header(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros in bfloat16, with a hole for the zeros."""
    at, header = 0, {}
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with open(file, "r+b") as f:
        f.truncate(8 + len(raw) + at)


def model(path: Path, config: Mapping[str, Any] | None = LLAMA, shapes: Mapping[str, tuple[int, ...]] = OF_LLAMA, *,
          tokenizer: bool = True) -> Path:
    """A model's directory."""
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    write_header(path / "model.safetensors", shapes)
    return path


def lora(path: Path, rank: int = 4, alpha: float = 8, linears: Mapping[str, tuple[int, ...]] = LINEARS,
         layer: int = 0, **config: Any) -> Path:
    """An adapter's directory."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": alpha, **config}))
    start = f"base_model.model.model.layers.{layer}."
    write_header(path / "adapter_model.safetensors",
                 {f"{start}{name}.lora_A.weight": (rank, shape[1]) for name, shape in linears.items()}
                 | {f"{start}{name}.lora_B.weight": (shape[0], rank) for name, shape in linears.items()})
    return path
