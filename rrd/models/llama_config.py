"""A ``config.json`` of the Llama family, read strictly: what would change the numbers and is not known is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rrd.errors import BadJob
from rrd.models.registry import Shape


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of one model."""

    model_type: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_size: int
    n_inner: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """For each block, how many positions attention looks back at, itself included; None: all."""
    rope_theta: float
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The scaling of the rotary frequencies; empty for none."""

    def inverse_frequencies(self, device: torch.device) -> Tensor:
        """[D/2] fp32, as transformers computes them."""
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.int64).float() / self.head_size
        plain = 1.0 / (self.rope_theta**exponents)
        return _scaled(plain, self.rope).to(device)


def _scaled(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    if not rope:
        return frequencies
    if rope["type"] == "linear":
        slower: Tensor = frequencies / rope["factor"]
        return slower
    return _llama3(frequencies, **{k: rope[k] for k in _LLAMA3})


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _llama3(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Llama 3.1's scaling: long waves slower by ``factor``, short ones as they are, a ramp between."""
    length = original_max_position_embeddings
    wave = 2 * math.pi / frequencies
    scaled = torch.where(wave > length / low_freq_factor, frequencies / factor, frequencies)
    ramp = (length / wave - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = (1 - ramp) * scaled / factor + ramp * scaled
    medium = (wave >= length / high_freq_factor) & (wave <= length / low_freq_factor)
    return torch.where(medium, smooth, scaled)


def read_config(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> LlamaConfig:
    """The model's config, with biases read off the tensors that are there. Raises BadJob for what we cannot do."""
    kind = str(raw["model_type"])
    n_embd, n_head = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    n_layer = _size(raw, "num_hidden_layers")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        _refuse(f"has hidden_act {raw['hidden_act']!r}; only silu is known")
    if raw.get("quantization_config"):
        _refuse("is quantized", "use the model's float weights")
    theta, rope = _rope(raw)
    if f"model.layers.{n_layer - 1}.input_layernorm.weight" not in shapes:
        _refuse(f"lacks layer {n_layer - 1} of the {n_layer} its config.json gives it")
    first = "model.layers.0."
    return LlamaConfig(
        model_type=kind, n_vocab=_size(raw, "vocab_size"), n_embd=n_embd, n_layer=n_layer, n_head=n_head,
        n_kv_head=_size(raw, "num_key_value_heads", n_head if kind != "mistral" else 8),
        head_size=_size(raw, "head_dim", 128 if kind == "qwen3" else n_embd // n_head),
        n_inner=_size(raw, "intermediate_size"), norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=first + "self_attn.q_proj.bias" in shapes, o_bias=first + "self_attn.o_proj.bias" in shapes,
        mlp_bias=first + "mlp.gate_proj.bias" in shapes, qk_norm=first + "self_attn.q_norm.weight" in shapes,
        windows=_windows(raw, kind, n_layer), rope_theta=theta, rope=rope,
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """theta and scaling, from where transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) puts them."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        _refuse("has a rope_scaling that is not understood")
    theta = _number(given, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if _number(raw, "partial_rotary_factor", _number(given, "partial_rotary_factor", 1.0)) != 1.0:
        _refuse("turns only a part of each head (partial_rotary_factor), which is not known here")
    if kind == "default":
        return theta, {}
    if kind == "linear":
        return theta, {"type": kind, "factor": _number(given, "factor")}
    if kind != "llama3":
        _refuse(f"scales its rotary positions by {kind!r}; known are linear and llama3")
    return theta, {"type": kind, **{k: _number(given, k) for k in _LLAMA3}}


def _windows(raw: Mapping[str, Any], kind: str, n_layer: int) -> tuple[int | None, ...]:
    """Each block's attention window. Qwen's layers from max_window_layers on have one, if it is switched on."""
    window = raw.get("sliding_window")
    if kind == "llama" or window is None or (kind.startswith("qwen") and not raw.get("use_sliding_window", False)):
        return (None,) * n_layer
    size = _size(raw, "sliding_window")
    types = raw.get("layer_types")
    if isinstance(types, list) and len(types) == n_layer:
        return tuple(size if t == "sliding_attention" else None for t in types)
    start = _size(raw, "max_window_layers", 28) if kind.startswith("qwen") else 0
    return tuple(size if i >= start else None for i in range(n_layer))


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value: Any = default if raw.get(key) is None else raw[key]
    if type(value) is not int or not 0 < value < 1 << 31:
        _refuse(f"gives no usable {key} in its config.json")
    return int(value)


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value: Any = default if raw.get(key) is None else raw[key]
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        _refuse(f"gives no usable {key} in its config.json")
    return float(value)


def _refuse(why: str, hint: str = "") -> Any:
    raise BadJob(f"the model {why}", hint=hint)
