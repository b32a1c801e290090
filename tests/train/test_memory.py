"""What a job will need, by estimate: it grows with what it must grow with, and comes near what torch allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from toys import make_model

from rrd.job import JobSpec
from rrd.models.files import inspect
from rrd.train.memory import CONTEXT_BYTES, PROCESS_BYTES, SPARE, Needs, estimate


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


def test_a_card_has_a_context_and_the_host_the_checkpoints_that_are_copied_aside(tmp_path: Path) -> None:
    for keys in ({}, {"method": "full"}):
        card, host = needs(tmp_path, cuda=True, **keys), needs(tmp_path, **keys)
        assert card.saved == host.saved > 0
        assert host.total == pytest.approx(card.total - CONTEXT_BYTES + SPARE * (card.saved + PROCESS_BYTES), abs=2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("memory") / "m", hidden=128, layers=4, heads=4, ffn=384, vocab=8192)


@pytest.mark.parametrize("keys", [{"batch_size": 16, "seq_len": 256, "gradient_checkpointing": True},
                                  {"batch_size": 4, "seq_len": 128, "method": "full"}], ids=str)
def test_it_comes_near_what_a_step_takes(toy: Path, keys: dict[str, Any]) -> None:
    """``tests/bench/bench_memory.py`` sees to many more, and larger ones."""
    script = Path(__file__).parents[1] / "bench" / "one_step.py"
    done = subprocess.run([sys.executable, str(script), str(toy), json.dumps(keys)], capture_output=True, text=True,
                          check=True)
    measured, estimated = map(int, done.stdout.split())
    assert 0.95 <= estimated / measured <= 1.7, f"{measured >> 20} MiB, estimated {estimated >> 20}"


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
