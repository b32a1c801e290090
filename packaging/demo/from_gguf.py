"""A GGUF file of the llama family, as the directory that everybody else reads: config, safetensors, tokenizer.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the quantized blocks are those of
``ggml-common.h``. Only what SmolLM2's file holds is read: F32, F16, Q8_0 and Q4_1, and a byte-level BPE.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL, USER_DEFINED = 3, 4  # kinds of token

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_COUNTS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Gguf:
    """One GGUF file: ``meta`` (its key-value pairs) and ``tensor(name)`` (dequantized to float32)."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        if self._bytes[:4] != b"GGUF" or self._scalar("I") not in (2, 3):
            raise ValueError(f"{path} is no GGUF file of version 2 or 3")
        n_tensors, n_meta = self._scalar("Q"), self._scalar("Q")
        self.meta: dict[str, Any] = {self._string(): self._value(self._scalar("I")) for _ in range(n_meta)}
        self._infos = dict(self._info() for _ in range(n_tensors))
        alignment = self.meta.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        self._at += size
        return self._bytes[self._at - size : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            kind, n = self._scalar("I"), self._scalar("Q")
            return [self._value(kind) for _ in range(n)]
        return self._scalar(SCALARS[kind])

    def _info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, (shape[::-1], self._scalar("I"), self._scalar("Q"))  # GGUF names the fastest axis first

    def names(self) -> list[str]:
        return list(self._infos)

    def tensor(self, name: str) -> Array:
        """The tensor as float32, in the row-major shape that torch would print."""
        shape, kind, offset = self._infos[name]
        n = int(np.prod(shape))
        if kind not in KINDS:
            raise ValueError(f"the tensor {name} is stored in GGUF kind {kind}, which this reader does not know")
        dtype, weights_per_block, decode = KINDS[kind]
        raw = np.frombuffer(self._bytes, dtype, n // weights_per_block, self._data + offset)
        return decode(raw).reshape(shape)


def _q8_0(blocks: Array) -> Array:
    weights: Array = blocks["d"].astype(np.float32)[:, None] * blocks["q"]
    return weights


def _q4_1(blocks: Array) -> Array:
    q = np.concatenate([blocks["q"] & 0xF, blocks["q"] >> 4], axis=1)  # low nibbles are the first 16 weights
    weights: Array = blocks["d"].astype(np.float32)[:, None] * q + blocks["m"].astype(np.float32)[:, None]
    return weights


def _plain(values: Array) -> Array:
    return values.astype(np.float32)


# kind -> (layout of one block, weights in it, decoder)
KINDS: dict[int, tuple[np.dtype[Any], int, Callable[[Array], Array]]] = {
    0: (np.dtype("<f4"), 1, _plain),
    1: (np.dtype("<f2"), 1, _plain),
    3: (np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))]), 32, _q4_1),
    8: (np.dtype([("d", "<f2"), ("q", "i1", (32,))]), 32, _q8_0),
}


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[1]}"


def hf_tensor(gguf: Gguf, name: str) -> Array:
    """The tensor in the order of transformers: llama.cpp interleaves the two halves of each rotary head."""
    w, kind = gguf.tensor(name), name.split(".")[-2]
    if kind not in HEAD_COUNTS:
        return w
    heads: int = gguf.meta[HEAD_COUNTS[kind]]
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:])
    halves: Array = pairs.swapaxes(1, 2).reshape(w.shape)
    return halves


def config(gguf: Gguf) -> dict[str, Any]:
    """``config.json`` of transformers' LlamaForCausalLM."""
    m = gguf.meta
    if m["general.architecture"] != "llama":
        raise ValueError(f"the GGUF file holds a {m['general.architecture']} model, not a llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": m["llama.embedding_length"],
        "intermediate_size": m["llama.feed_forward_length"],
        "num_hidden_layers": m["llama.block_count"],
        "num_attention_heads": m["llama.attention.head_count"],
        "num_key_value_heads": m["llama.attention.head_count_kv"],
        "head_dim": m["llama.rope.dimension_count"],
        "vocab_size": m["llama.vocab_size"],
        "max_position_embeddings": m["llama.context_length"],
        "rms_norm_eps": float(f"{m['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        "rope_theta": m["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.names(),
        "bos_token_id": m["tokenizer.ggml.bos_token_id"],
        "eos_token_id": m["tokenizer.ggml.eos_token_id"],
        "pad_token_id": m["tokenizer.ggml.padding_token_id"],
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(gguf: Gguf, directory: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``: byte-level BPE that splits numbers into digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    m = gguf.meta
    if (m["tokenizer.ggml.model"], m["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file's tokenizer is {m['tokenizer.ggml.pre']}, not SmolLM's")
    tokens: list[str] = m["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in m["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, m["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    named = {key: tokens[m[f"tokenizer.ggml.{meta_key}"]] for key, meta_key in ids.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "pad_token": tokens[m["tokenizer.ggml.padding_token_id"]],
        "model_max_length": m["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": m["tokenizer.chat_template"],
    }
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def convert(source: Path, directory: Path) -> None:
    """Write ``directory`` (which exists and is empty) from the GGUF file ``source``, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    gguf = Gguf(source)
    tensors = {hf_name(n): torch.from_numpy(hf_tensor(gguf, n)).bfloat16().contiguous() for n in gguf.names()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    settings = config(gguf)
    write_json(directory / "config.json", settings)
    ids = {k: settings[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", ids)
    write_tokenizer(gguf, directory)
