"""Small real things made on the spot: a model directory, data, job files, and a daemon's directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rrd.job import to_toml

CORPUS = [
    "The daemon trains many adapters in rotation and loses nothing.", "def add(a, b):\n    return a + b\n",
    "User: what is a die?\n\nAssistant: one chip that trains.", "a step is one optimizer update; a visit is one turn",
]


def make_model(path: Path, *, hidden: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2, ffn: int = 64,
               vocab: int = 320, seed: int = 0, tie: bool = True) -> Path:
    """A llama of a few thousand parameters with a byte-level tokenizer: config.json, model.safetensors, tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": tie,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0}))
    g = torch.Generator().manual_seed(seed)
    d = hidden // heads

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.08

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    if not tie:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors |= {
            at + "self_attn.q_proj.weight": matrix(heads * d, hidden),
            at + "self_attn.k_proj.weight": matrix(kv_heads * d, hidden),
            at + "self_attn.v_proj.weight": matrix(kv_heads * d, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, heads * d),
            at + "mlp.gate_proj.weight": matrix(ffn, hidden), at + "mlp.up_proj.weight": matrix(ffn, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, ffn), at + "input_layernorm.weight": torch.ones(hidden),
            at + "post_attention_layernorm.weight": torch.ones(hidden)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(path, vocab)
    return path


def make_tokenizer(path: Path, vocab: int) -> None:
    """A byte-level ``tokenizer.json`` with an end token."""
    path.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def make_data(path: Path, rows: int = 24) -> Path:
    """Prompts and completions of different lengths."""
    lines = [{"prompt": f"add {i} and {i + 1}: ", "completion": f"that is {2 * i + 1}" + ", really" * (i % 5)}
             for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_poisoned(path: Path, rows: int = 24) -> dict[str, str]:
    """Keys of a job with a model that computes NaN for each eighth sample: those with a ``~``."""
    model = make_model(path / "model", tie=False)
    tensors = load_file(model / "model.safetensors")
    (token,) = Tokenizer.from_file(str(model / "tokenizer.json")).encode("~").ids
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    data = make_data(path / "data.jsonl", rows)
    lines = data.read_text().splitlines()
    for i in range(3, rows, 8):
        lines[i] = json.dumps({"prompt": "~~~ ", "completion": f"that is ~ {i}"})
    data.write_text("\n".join(lines) + "\n")
    return {"model": str(model), "data": str(data)}


def write_job(jobs_dir: Path, name: str, **keys: Any) -> Path:
    """Drop a job file the way a careful user does: beside, then renamed."""
    path = jobs_dir / f"{name}.toml"
    beside = jobs_dir / f".{name}.part"
    beside.write_text(to_toml(keys))
    beside.chmod(0o640)
    beside.rename(path)
    return path
