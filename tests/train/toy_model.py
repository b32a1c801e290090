"""Small llama models as transformers writes them, random adapters for them, and what they compute."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor

from rrd.train import export

AS_STORED = {"dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype": "auto"}
"""For from_pretrained: no other dtype than the files'."""


def save_model(directory: Path, *, tied: bool = False,
               dtype: torch.dtype = torch.float32, vocab: int = 64) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(40)[None]).logits
    return found


def adapter(model: torch.nn.Module, rank: int = 4, ranks: dict[str, int] | None = None) -> dict[str, Tensor]:
    """A random adapter of every linear in the blocks, as training would leave it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for path, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and path != "lm_head":
            r = (ranks or {}).get(path.rpartition(".")[2], (ranks or {}).get(path, rank))
            tensors[f"{path}.lora_A.weight"] = torch.randn(r, linear.in_features, generator=generator) / 4
            tensors[f"{path}.lora_B.weight"] = torch.randn(linear.out_features, r, generator=generator) / 4
    return tensors


def with_adapter(model: torch.nn.Module, tensors: dict[str, Tensor], scale: dict[int, float]) -> Tensor:
    """The logits by the formula, in float64: y = W x + scale B A x."""
    model = model.double()
    for path, r in export.ranks(tensors).items():
        delta = tensors[f"{path}.lora_B.weight"].double() @ tensors[f"{path}.lora_A.weight"].double()
        model.get_submodule(path).weight.data += scale[r] * delta  # type: ignore[operator]
    return logits(model).float()


def load(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(directory, **AS_STORED).eval()
    return model
