"""The demo's model: a GGUF file read, dequantized and written as what transformers and rrd read."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging" / "demo"))

import fetch
import from_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: object) -> bytes:
    """A GGUF value behind its kind."""
    if isinstance(value, list):
        kind = typed(value[0])[:4]
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(typed(v)[4:] for v in value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 64, 96, 4, 2, 16
BYTES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789Ġ", "ab", "abc", "12"]
META = {
    "general.architecture": "llama", "llama.block_count": 4, "llama.context_length": 128,
    "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS, "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": HEAD,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": len(BYTES), "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": BYTES, "tokenizer.ggml.merges": ["a b", "ab c", "1 2"],
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(BYTES) - 3), "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip
SHAPES = {
    "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * HEAD, HIDDEN),
    "attn_v": (KV_HEADS * HEAD, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def q8_0(w: np.ndarray) -> bytes:
    rows = w.reshape(-1, 32)
    d = (np.abs(rows).max(1) / 127).astype("<f2")
    q = np.round(rows / d[:, None]).clip(-127, 127).astype("i1")
    return b"".join(d[i].tobytes() + q[i].tobytes() for i in range(len(rows)))


def q4_1(w: np.ndarray) -> bytes:
    rows = w.reshape(-1, 32)
    m = rows.min(1).astype("<f2")
    d = ((rows.max(1) - m) / 15).astype("<f2")
    q = np.round((rows - m[:, None]) / d[:, None]).clip(0, 15).astype("u1")
    packed = q[:, :16] | q[:, 16:] << 4
    return b"".join(d[i].tobytes() + m[i].tobytes() + packed[i].tobytes() for i in range(len(rows)))


STORED = {0: lambda w: w.astype("<f4").tobytes(), 8: q8_0, 3: q4_1}
ERROR = {0: 1e-7, 8: 0.02, 3: 0.2}  # of weights about 1 in size


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny llama as GGUF; returns its weights under GGUF's names, before quantization."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(BYTES), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{i}.{n}.weight": s for i in range(META["llama.block_count"]) for n, s in SHAPES.items()}  # type: ignore[call-overload]
    weights = {name: rng.uniform(-1, 1, shape).astype("f4") for name, shape in shapes.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(META))
    head += b"".join(text(key) + typed(value) for key, value in META.items())
    body = b""
    for name, w in weights.items():
        head += text(name) + struct.pack(f"<I{w.ndim}QIQ", w.ndim, *w.shape[::-1], kind(name), len(body))
        body += STORED[kind(name)](w)
        body += b"\0" * (-len(body) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return weights


def kind(name: str) -> int:
    return 0 if "norm" in name else 8 if "embd" in name else 3


def test_the_gguf_reader_gives_the_weights_that_were_quantized(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "x.gguf")
    gguf = from_gguf.Gguf(tmp_path / "x.gguf")
    assert gguf.meta == {k: pytest.approx(v) if isinstance(v, float) else v for k, v in META.items()}
    assert set(gguf.names()) == set(weights)
    for name, w in weights.items():
        assert gguf.tensor(name).shape == w.shape
        assert np.abs(gguf.tensor(name) - w).max() < ERROR[kind(name)], name


def test_rotary_halves_are_put_back_in_order(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    gguf = from_gguf.Gguf(tmp_path / "x.gguf")
    stored, wanted = gguf.tensor("blk.0.attn_k.weight"), from_gguf.hf_tensor(gguf, "blk.0.attn_k.weight")
    # llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute
    permuted = wanted.reshape(KV_HEADS, 2, HEAD // 2, HIDDEN).swapaxes(1, 2).reshape(wanted.shape)
    assert (permuted == stored).all()
    assert not (wanted == stored).all()


def test_the_converted_model_is_read_by_transformers_and_by_rrd(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rrd.models import build, load_base

    write_gguf(tmp_path / "x.gguf")
    directory = tmp_path / "model"
    directory.mkdir()
    from_gguf.convert(tmp_path / "x.gguf", directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("<|im_start|>abcab12") == ["<|im_start|>", "abc", "ab", "1", "2"]
    idx = torch.tensor([tokenizer("abc ab 12<|im_end|>").input_ids])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(idx).logits
        ours = build(load_base(directory, device="cpu", dtype=torch.float32))(idx)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_small_model_is_the_large_ones_first_layers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_gguf(tmp_path / "x.gguf")
    fetch.model_dir(tmp_path).mkdir(parents=True)
    from_gguf.convert(tmp_path / "x.gguf", fetch.model_dir(tmp_path))
    fetch.make_small_model(tmp_path)
    small = load_file(fetch.small_model_dir(tmp_path) / "model.safetensors")
    large = load_file(fetch.model_dir(tmp_path) / "model.safetensors")
    assert {fetch.layer(name) for name in small} == {-1, *range(fetch.SMALL_LAYERS)}
    assert all(torch.equal(small[name], large[name]) for name in small)
    config = json.loads((fetch.small_model_dir(tmp_path) / "config.json").read_text())
    assert config["num_hidden_layers"] == fetch.SMALL_LAYERS


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"version https://git-lfs" * 4)
    with pytest.raises(ValueError, match="no GGUF file"):
        from_gguf.Gguf(tmp_path / "x.gguf")
