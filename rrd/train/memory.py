"""How much memory a job will take on a die, from headers and settings alone; nothing is loaded to find out.

What training keeps for the backward pass is counted op by op, in floats a token (``_llama``, ``_rwkv``); of models that
come through transformers it is a measured multiple (``_bridge``). Recomputing ("gradient checkpointing") keeps each
block's input, and one block whole. A model that runs a sample in pieces holds one of them. Trained parameters take 16
bytes each (master, both moments, gradient), and on CPU dies, whose memory is the host's, 12 more for the checkpoint
that is copied aside. docs/exact-resume.md has how near this comes; ``tests/bench/bench_memory.py`` measures it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from rrd.adapter import leaf
from rrd.job import JobSpec
from rrd.models.bridge import BridgeConfig
from rrd.models.bridge_build import skeleton_of
from rrd.models.dtypes import itemsize
from rrd.models.files import ModelFiles
from rrd.models.layout import Layout
from rrd.models.llama_config import LlamaConfig
from rrd.models.registry import lora_targets_of
from rrd.ops.attention import KEPT, ROWS
from rrd.train.loss import SLICE

TRAINED_BYTES = 16
SAVED_BYTES = 12
"""The same without the gradient: what a checkpoint holds."""
CONTEXT_BYTES = 600 << 20
"""What CUDA and torch's own kernels take of a die before anything is trained."""
PROCESS_BYTES = 32 << 20
"""What a worker on a CPU die takes besides: scratch of the BLAS, buffers that are kept."""
BRIDGE_BYTES = 110 << 20
"""The modules of transformers, which no worker has before a job needs them."""
SPARE = 1.1


class Needs(NamedTuple):
    """Bytes: ``total`` of them all in all, of which ``base`` for the frozen weights, which jobs of one die share."""

    total: int
    base: int
    saved: int = 0
    """On disk, for one checkpoint."""


class _Floats(NamedTuple):
    """Floats a token: that a block keeps for the backward pass, and that pass by in it at most."""

    kept: float
    passing: float


def estimate(spec: JobSpec, files: ModelFiles, stored: torch.dtype, *, cuda: bool) -> Needs:
    """What ``spec`` needs on a die that stores weights as ``stored``."""
    weights = sum(prod(shape) for shape in files.wanted.values())
    full = spec.method == "full"
    base = 0 if full else Layout(files, stored, int8=bool(spec.quantize)).size
    trained = weights if full else _adapter(spec, files)
    each = TRAINED_BYTES + (0 if cuda else SAVED_BYTES)
    if full and isinstance(files.config, BridgeConfig):
        each += 4  # most of its gradients are autograd's, and gathered at the end
    own = weights * itemsize(stored) if full and stored != torch.float32 else 0
    process = 0 if cuda else PROCESS_BYTES + BRIDGE_BYTES * isinstance(files.config, BridgeConfig)
    needs = base + own + trained * each + _activations(spec, files) + process
    return Needs(int(needs * SPARE) + (CONTEXT_BYTES if cuda else 0), base, trained * SAVED_BYTES)


def _adapter(spec: JobSpec, files: ModelFiles) -> int:
    """Parameters of the adapter: r (in + out) for every linear it is on."""
    targets = spec.lora_targets or lora_targets_of(files.family, files.config)
    total = 0
    for name, shape in files.wanted.items():
        module = leaf(name.removesuffix(".weight"))
        if len(shape) == 2 and module in targets:
            total += spec.lora_ranks.get(module, spec.lora_rank) * sum(shape)
    return total


def _activations(spec: JobSpec, files: ModelFiles) -> int:
    c, B = files.config, spec.batch_size
    T = min(spec.seq_len, spec.chunk_len or getattr(c, "longest", spec.seq_len))
    of = _llama if isinstance(c, LlamaConfig) else _bridge if isinstance(c, BridgeConfig) else _rwkv
    block = of(spec, c, T)
    kept = block.kept * c.n_layer
    if spec.gradient_checkpointing:
        kept = c.n_embd * c.n_layer + block.kept
    logits = min(B * T * c.n_vocab, SLICE) * (1 if spec.dtype == "float32" else 2)
    return int(4 * (B * T * (kept + block.passing + 4 * c.n_embd) + logits))


def _masks(spec: JobSpec, inputs: float) -> float:
    """Dropout's masks, of a byte each, over so many inputs of linears."""
    return inputs / 4 if spec.method == "lora" and spec.lora_dropout else 0.0


def _llama(spec: JobSpec, c: LlamaConfig, T: int) -> _Floats:
    """Inputs of both norms and of all four products, queries, keys, values, gate and up; and softmax weights, where
    attention keeps them."""
    C, F, A, G = c.n_embd, c.n_inner, c.n_head * c.head_size, c.n_kv_head * c.head_size
    qkv, rows = A + 2 * G, max(16, ROWS // (c.n_head // c.n_kv_head))
    kept = 4 * C + A + qkv * (2 if c.qk_norm else 1) + 3 * F + _masks(spec, 2 * C + A + F)
    if c.n_head * T * T <= KEPT:
        kept += c.n_head * (T + rows) / 2
    scores = 3 * c.n_head * min(T, rows)  # of one block of queries: weights, and what comes back through them
    return _Floats(kept, max(5 * F, 3 * qkv + scores) + 2 * C)


def _rwkv(spec: JobSpec, c: Any, T: int) -> _Floats:
    """Time mix: its input, the mixes that products keep, eight inputs of the recurrence and its states, the output's
    input. Channel mix: its input, the key's, and what relu^2 takes and gives."""
    C, F = c.n_embd, c.n_inner
    kept = (16 + 3 * (spec.method == "full") + 4) * C + 2 * F
    return _Floats(kept + _masks(spec, 5 * C + F), 18 * C)


def _bridge(spec: JobSpec, c: BridgeConfig, T: int) -> _Floats:
    """As measured with GPT-2, whose attention keeps its weights because it drops some of them, and Gemma."""
    whole = any(v for k, v in c.raw.items() if ("attn" in k or "attention" in k) and ("drop" in k or "cap" in k))
    whole = whole or getattr(skeleton_of(c.raw).config, "_attn_implementation", "eager") != "sdpa"
    weights = T * int(c.raw.get("num_attention_heads") or c.raw.get("n_head") or 1) if whole else 0
    return _Floats(20 * c.n_embd + 2.8 * weights, (40 if whole else 30) * c.n_embd + 7 * weights)
