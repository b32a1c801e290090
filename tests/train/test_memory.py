"""What a job will need, by estimate: it grows with what it must grow with, and comes near what torch allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from boxes import toy_keys

from rrd.job import JobSpec
from rrd.models.files import inspect
from rrd.train.memory import CONTEXT_BYTES, Needs, estimate


def needs(tmp_path: Path, dtype: torch.dtype = torch.float32, *, cuda: bool = False, **keys: Any) -> Needs:
    spec = JobSpec.model_validate(toy_keys(tmp_path, **keys))
    return estimate(spec, inspect(Path(spec.model)), dtype, cuda=cuda)


def test_it_counts_the_weights_once_as_base_or_as_trained(tmp_path: Path) -> None:
    weights = sum(t.numel() for t in _tensors(tmp_path))
    lora, full = needs(tmp_path), needs(tmp_path, method="full")
    assert lora.base == 4 * weights
    assert needs(tmp_path, torch.bfloat16).base == 2 * weights
    assert full.base == 0
    assert full.total > 16 * weights


def test_it_grows_with_rank_batch_and_length_and_shrinks_with_recomputing(tmp_path: Path) -> None:
    least = needs(tmp_path).total
    assert needs(tmp_path, lora_rank=64).total > least
    assert needs(tmp_path, lora_ranks={"q_proj": 64}).total > least
    assert needs(tmp_path, batch_size=8).total > least
    recomputed = needs(tmp_path, seq_len=4096, gradient_checkpointing=True).total
    assert needs(tmp_path, seq_len=4096).total > recomputed > least
    assert needs(tmp_path, cuda=True).total == least + CONTEXT_BYTES


def _tensors(tmp_path: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(Path(toy_keys(tmp_path)["model"]) / "model.safetensors").values())


def test_a_model_that_runs_in_pieces_needs_no_more_for_a_longer_sample(tmp_path: Path) -> None:
    from rwkv_toys import make_rwkv

    model = str(make_rwkv(tmp_path / "rwkv7"))
    long = needs(tmp_path, model=model, seq_len=65536).total
    assert long == needs(tmp_path, model=model, seq_len=2048).total > needs(tmp_path, model=model, seq_len=512).total
    assert needs(tmp_path, model=model, seq_len=65536, chunk_len=512).total == needs(
        tmp_path, model=model, seq_len=512).total
