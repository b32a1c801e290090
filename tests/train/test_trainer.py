"""I1 within one process: a step depends on nothing but the job, the state and its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from rwkv_toys import make_rwkv

from rrd.job import JobSpec
from rrd.models import load_base
from rrd.train.data import Dataset, prepare
from rrd.train.state import Staging, restore
from rrd.train.trainer import Trainer

STEPS = 12


def make_trainer(tmp_path: Path, *, family: str = "llama", **keys: Any) -> Trainer:
    toys = toy_keys(tmp_path)
    if family == "rwkv7":
        toys["model"] = str(tmp_path / "rwkv7")
        make_rwkv(tmp_path / "rwkv7")
    spec = JobSpec.model_validate({**toys, **keys})
    data = prepare(spec.data, spec.model, seq_len=spec.seq_len, cache_dir=tmp_path / "cache")
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    base = load_base(spec.model, dtype=dtype, trainable=spec.method == "full", quantize=spec.quantize)
    return Trainer(spec, base, Dataset.open(data.path), None, threads=1)


def flat(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in trainer.optimizer.flat.items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for key in a:
        assert torch.equal(a[key], b[key]), key


JOBS = [
    pytest.param({}, id="lora"),
    pytest.param({"dtype": "bfloat16"}, id="lora-bf16-base"),
    pytest.param({"quantize": True}, id="lora-int8-base"),
    pytest.param({"family": "rwkv7", "dtype": "bfloat16", "quantize": "int8"}, id="rwkv7-int8-base"),
    pytest.param({"batch_size": 3, "grad_accum": 1, "schedule": "linear", "warmup_steps": 4}, id="batch"),
    pytest.param({"method": "full", "weight_decay": 0.1}, id="full"),
    pytest.param({"method": "full", "dtype": "bfloat16"}, id="full-bf16"),
    pytest.param({"gradient_checkpointing": True}, id="checkpointed"),
    pytest.param({"family": "rwkv7"}, id="rwkv7"),
    pytest.param({"family": "rwkv7", "dtype": "bfloat16", "gradient_checkpointing": True}, id="rwkv7-checkpointed"),
    pytest.param({"family": "rwkv7", "method": "full", "weight_decay": 0.1, "lr": 1e-3}, id="rwkv7-full"),
]


@pytest.mark.parametrize("keys", JOBS)
def test_saved_and_restored_at_any_step_it_gives_the_same_bits(tmp_path: Path, keys: dict[str, Any]) -> None:
    straight = make_trainer(tmp_path, **keys)
    losses = [straight.run_step(STEPS, "stop").loss for _ in range(STEPS)]
    assert losses[-1] != losses[0]
    for cut in (0, 1, 7, STEPS - 1):
        first = make_trainer(tmp_path, **keys)
        for _ in range(cut):
            first.run_step(STEPS, "stop")
        staging = Staging(first.optimizer)
        staging.fill(first.optimizer)
        state, saved = first.state(STEPS, 0), bytes(staging.chunk())
        torch.rand(cut + 1)  # whoever uses the generator in between makes no difference
        second = make_trainer(tmp_path, **keys)
        restore(second.optimizer, memoryview(bytearray(saved)), "here")
        second.resume(state)
        assert [second.run_step(STEPS, "stop").loss for _ in range(STEPS - cut)] == losses[cut:]
        assert_same(flat(straight), flat(second))


def test_two_jobs_in_turn_on_one_base_are_as_each_alone(tmp_path: Path) -> None:
    alone = [make_trainer(tmp_path, seed=seed) for seed in (1, 2)]
    for t in alone:
        for _ in range(STEPS):
            t.run_step(STEPS, "stop")
    spec = alone[0].spec
    base = load_base(spec.model)
    mixed = [Trainer(t.spec, base, t.data, None, threads=1) for t in alone]
    for turn in range(STEPS):
        for t in mixed if turn % 2 else reversed(mixed):
            t.run_step(STEPS, "stop")
    for a, m in zip(alone, mixed, strict=True):
        assert_same(flat(a), flat(m))


def test_the_seed_matters_and_the_loss_falls(tmp_path: Path) -> None:
    a, b = make_trainer(tmp_path, seed=1), make_trainer(tmp_path, seed=2)
    one = [a.run_step(60, "stop").loss for _ in range(60)]
    two = [b.run_step(60, "stop").loss for _ in range(60)]
    assert one != two
    assert sum(one[-10:]) < 0.9 * sum(one[:10])
