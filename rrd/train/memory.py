"""How much memory a job will take on a die, from headers and settings alone; nothing is loaded to find out.

Per block and micro-step, in units of U = 4 B T C bytes, training keeps for the backward pass about (10 + 4F/C) U when
all weights are trained and 19 U with LoRA on a Llama block, F being the width of its feed-forward; recomputing
("gradient checkpointing") keeps 1 U a block and one block whole. A model that runs a sample in pieces holds one of
them. Trained parameters take 16 bytes each: master, both moments, gradient. A tenth is added for what the allocator
cannot use.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from rrd.job import JobSpec
from rrd.models.dtypes import itemsize
from rrd.models.files import ModelFiles
from rrd.models.layout import Layout
from rrd.models.registry import lora_targets_of
from rrd.train.loss import SLICE

TRAINED_BYTES = 16
SAVED_BYTES = 12
"""The same without the gradient: what a checkpoint holds."""
CONTEXT_BYTES = 600 << 20
"""What CUDA and torch's own kernels take of a die before anything is trained."""
SPARE = 1.1


class Needs(NamedTuple):
    """Bytes: ``total`` of them all in all, of which ``base`` for the frozen weights, which jobs of one die share."""

    total: int
    base: int
    saved: int = 0
    """On disk, for one checkpoint."""


def estimate(spec: JobSpec, files: ModelFiles, stored: torch.dtype, *, cuda: bool) -> Needs:
    """What ``spec`` needs on a die that stores weights as ``stored``."""
    weights = sum(prod(shape) for shape in files.wanted.values())
    full = spec.method == "full"
    base = 0 if full else Layout(files, stored, int8=bool(spec.quantize)).size
    trained = weights if full else _adapter(spec, files)
    own = weights * itemsize(stored) if full and stored != torch.float32 else 0
    needs = base + own + trained * TRAINED_BYTES + _activations(spec, files) + 3 * 4 * SLICE
    return Needs(int(needs * SPARE) + (CONTEXT_BYTES if cuda else 0), base, trained * SAVED_BYTES)


def _adapter(spec: JobSpec, files: ModelFiles) -> int:
    """Parameters of the adapter: r (in + out) for every linear it is on."""
    targets = spec.lora_targets or lora_targets_of(files.family, files.config)
    total = 0
    for name, shape in files.wanted.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if len(shape) == 2 and leaf in targets:
            total += spec.lora_ranks.get(leaf, spec.lora_rank) * sum(shape)
    return total


def _activations(spec: JobSpec, files: ModelFiles) -> int:
    c = files.config
    at_once = min(spec.seq_len, spec.chunk_len or getattr(c, "longest", spec.seq_len))
    unit = 4 * spec.batch_size * at_once * c.n_embd
    widen = getattr(c, "n_inner", 4 * c.n_embd) / c.n_embd
    block = (10 + 4 * widen if spec.method == "full" else max(19.2, 10 + 2.5 * widen)) * unit
    if spec.gradient_checkpointing:
        return int(c.n_layer * unit + block + 10 * unit)
    return int(c.n_layer * block + 10 * unit)
