"""Steps on a CUDA die: swapped out and in they are the same bits, hold the memory planned, and wait for nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from toys import make_data, make_model

from rrd.job import JobSpec
from rrd.models import load_base
from rrd.models.files import inspect
from rrd.train import data
from rrd.train.memory import estimate
from rrd.train.state import Staging, restore
from rrd.train.trainer import Trainer

pytestmark = pytest.mark.gpu

METHODS = {"lora": {"lora_rank": 32, "lora_dropout": 0.1}, "int8": {"lora_rank": 32, "quantize": True},
           "full": {"method": "full", "weight_decay": 0.1}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_model(root / "model", hidden=512, layers=6, heads=8, kv_heads=4, ffn=1536, vocab=2048)
    make_data(root / "data.jsonl", rows=64)
    return root


def spec_of(inputs: Path, method: str) -> JobSpec:
    return JobSpec.model_validate({
        "model": str(inputs / "model"), "data": str(inputs / "data.jsonl"), "seq_len": 256, "batch_size": 2,
        "grad_accum": 2, "max_steps": 20, "dtype": "float32", "lr": 1e-3, **METHODS[method]})


def trainer_of(inputs: Path, method: str, device: str) -> Trainer:
    spec = spec_of(inputs, method)
    prepared = data.prepare(spec.data, str(inputs / "model"), seq_len=spec.seq_len, cache_dir=inputs / "cache")
    base = load_base(inputs / "model", device=torch.device(device), dtype=torch.float32,
                     trainable=method == "full", quantize=bool(spec.quantize))
    return Trainer(spec, base, data.Dataset.open(prepared.path), None, threads=1)


def run(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.run_step(20, "stop")


@pytest.mark.parametrize("method", METHODS)
def test_ten_steps_a_swap_and_ten_are_twenty(inputs: Path, device: str, method: str, row) -> None:
    straight = trainer_of(inputs, method, device)
    run(straight, 20)
    want = straight.optimizer.flat["param"].cpu()
    first, other = trainer_of(inputs, method, device), trainer_of(inputs, "lora", device)
    run(first, 10)
    staging = Staging(first.optimizer)
    staging.fill(first.optimizer)
    run(other, 3)  # somebody else's turn
    run(first, 10)
    assert torch.equal(first.optimizer.flat["param"].cpu(), want)
    del first
    second = trainer_of(inputs, method, device)
    restore(second.optimizer, staging.chunk(), "state.safetensors")
    second.step = second.optimizer.steps = 10
    run(second, 10)
    assert torch.equal(second.optimizer.flat["param"].cpu(), want)
    row(f"{method}: 10 steps + swap + 10, and from the checkpoint", "identical", "bitwise 20 straight: yes")


@pytest.mark.parametrize("method", METHODS)
def test_memory_stays_within_the_plan(inputs: Path, device: str, method: str, row) -> None:
    if not device.startswith("cuda"):
        pytest.skip("a CPU die does not count what it allocates")
    trainer = trainer_of(inputs, method, device)
    torch.cuda.reset_peak_memory_stats(device)
    run(trainer, 3)
    peak = torch.cuda.max_memory_reserved(device)
    planned = estimate(trainer.spec, inspect(inputs / "model"), torch.float32, cuda=False).total
    row(f"{method}: memory, peak reserved", f"{peak / 2**20:.0f} MiB, {peak / planned:.0%} of the plan", "<= 100 %")
    assert peak <= planned


def test_a_step_waits_for_the_die_only_to_report(inputs: Path, device: str, row) -> None:
    """Loss and norm come over together, once a step; every other wait would leave the die idle."""
    if not device.startswith("cuda"):
        pytest.skip("a CPU die has nothing to wait for")
    trainer = trainer_of(inputs, "lora", device)
    run(trainer, 2)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(trainer, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    row("waits for the die in a step", str(len(waits)), "1: loss and norm together")
    assert len(waits) <= 1, waits
