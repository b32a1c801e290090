"""Training with every op's kernel, by the host build: the numbers of torch to rounding, and the same checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import rwkv_toys
import torch
from host_build import PLAIN, Host, host_of, needs_gxx
from kernel_cases import CASES
from toys import make_data, make_model

from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.models import load_base
from rrd.ops import choice
from rrd.train import data
from rrd.train.state import Staging, named_parameters, restore
from rrd.train.step import NotFinite
from rrd.train.trainer import Trainer
from rrd.worker import resident

pytestmark = needs_gxx

STEPS = 3
METHODS = {"lora": {"lora_rank": 4, "lora_dropout": 0.1}, "int8": {"lora_rank": 4, "quantize": True},
           "full": {"method": "full", "weight_decay": 0.1}}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host_of(list(CASES), tmp_path_factory.mktemp("kernels"), PLAIN) as made:
        yield made


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_model(root / "llama", vocab=320)
    rwkv_toys.make_rwkv(root / "rwkv", C=64, L=2, V=320)
    make_data(root / "data.jsonl", rows=12)
    return root


def trainer_of(inputs: Path, family: str, method: str) -> Trainer:
    spec = JobSpec.model_validate({
        "model": str(inputs / family), "data": str(inputs / "data.jsonl"), "seq_len": 24, "batch_size": 2,
        "grad_accum": 2, "max_steps": 20, "dtype": "float32", "lr": 1e-3, "tokenizer": str(inputs / "llama"),
        **METHODS[method]})
    prepared = data.prepare(spec.data, str(inputs / "llama"), seq_len=spec.seq_len, cache_dir=inputs / "cache")
    base = load_base(inputs / family, dtype=torch.float32, trainable=method == "full", quantize=bool(spec.quantize))
    trainer = Trainer(spec, base, data.Dataset.open(prepared.path), None, threads=1)
    for module in trainer.model.modules():
        if hasattr(module, "plain"):
            module.plain = True  # the way of a CUDA die, which has no compiled CPU kernels
    return trainer


def run(trainer: Trainer, steps: int = STEPS) -> list[tuple[float, float]]:
    done = [trainer.run_step(20, "stop") for _ in range(steps)]
    return [(d.loss, d.grad_norm) for d in done]


def by_kernels(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    monkeypatch.setattr(choice, "launcher", lambda op, device: host)
    host.launches.clear()


@pytest.mark.parametrize(("family", "method", "used"), [
    ("llama", "lora", {"xent", "adamw"}), ("llama", "int8", {"xent", "adamw", "int8"}),
    ("llama", "full", {"xent", "adamw"}), ("rwkv", "lora", {"wkv7", "xent", "adamw"}),
    ("rwkv", "full", {"wkv7", "xent", "adamw"})])
def test_kernels_train_as_torch_does(inputs: Path, host: Host, monkeypatch: pytest.MonkeyPatch, family: str,
                                     method: str, used: set[str]) -> None:
    torchs = trainer_of(inputs, family, method)
    expected = run(torchs)
    by_kernels(monkeypatch, host)
    kernels = trainer_of(inputs, family, method)
    got = run(kernels)
    assert {name.split("_")[1] for name in host.launches} == used
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    for key in torchs.optimizer.flat:  # Adam's quotient of tiny numbers magnifies rounding: hold it to the step's size
        error = (kernels.optimizer.flat[key] - torchs.optimizer.flat[key]).abs().max()
        assert error <= {"param": 0.02 * STEPS * 1e-3, "exp_avg": 2e-5, "exp_avg_sq": 2e-5}[key], key
    assert kernels.optimizer.steps == torchs.optimizer.steps == STEPS


def test_a_checkpoint_of_one_is_a_checkpoint_of_the_other(inputs: Path, host: Host, monkeypatch: pytest.MonkeyPatch
                                                          ) -> None:
    torchs = trainer_of(inputs, "llama", "lora")
    run(torchs)
    saved = Staging(torchs.optimizer)
    saved.fill(torchs.optimizer)
    by_kernels(monkeypatch, host)
    kernels = trainer_of(inputs, "llama", "lora")
    restore(kernels.optimizer, saved.chunk(), "state.safetensors")
    kernels.step = kernels.optimizer.steps = STEPS
    again = Staging(kernels.optimizer)
    again.fill(kernels.optimizer)
    assert bytes(again.chunk()) == bytes(saved.chunk())
    run(kernels, 1)
    assert int(kernels.optimizer._kernel.steps) == STEPS + 1
    again.fill(kernels.optimizer)
    assert named_parameters(again.chunk(), "state").keys() == named_parameters(saved.chunk(), "state").keys()


def test_straight_through_and_from_a_checkpoint_are_the_same_bits(inputs: Path, host: Host,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernels(monkeypatch, host)
    straight, first, second = (trainer_of(inputs, "rwkv", "lora") for _ in range(3))
    run(straight, 3)
    run(first, 2)
    saved = Staging(first.optimizer)
    saved.fill(first.optimizer)
    restore(second.optimizer, saved.chunk(), "state.safetensors")
    second.step = second.optimizer.steps = 2
    run(second, 1)
    assert all(torch.equal(second.optimizer.flat[k], straight.optimizer.flat[k]) for k in straight.optimizer.flat)


def test_a_step_that_is_no_number_changes_nothing(inputs: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernels(monkeypatch, host)
    trainer = trainer_of(inputs, "llama", "lora")
    run(trainer, 1)
    before = {k: t.clone() for k, t in trainer.optimizer.flat.items()}
    norm = trainer.base.tensors["model.norm.weight"]
    kept = norm.clone()
    norm.fill_(float("inf"))
    with pytest.raises(NotFinite):
        trainer.run_step(20, "stop")
    assert not trainer.run_step(20, "skip").applied
    norm.copy_(kept)
    assert all(torch.equal(t, before[k]) for k, t in trainer.optimizer.flat.items())
    assert trainer.optimizer.steps == 1
    trainer.run_step(20, "stop")
    assert trainer.optimizer.steps == 2 == int(trainer.optimizer._kernel.steps)


def test_the_reference_trains_as_torch_does(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(trainer_of(inputs, "rwkv", "lora"), 2)
    monkeypatch.setenv("RRD_OPS", "wkv7=reference")
    choice._asked.cache_clear()
    try:
        got = run(trainer_of(inputs, "rwkv", "lora"), 2)
    finally:
        choice._asked.cache_clear()
    assert got != expected
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


# ---- a job goes on as it began --------------------------------------------------------------------------------------


def as_on_a_die(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    """Kernels by the table's rules: what is overruled goes by torch."""
    wished = lambda op, device: choice._asked().get(op, "kernel")  # noqa: E731
    host.digests = dict.fromkeys(choice.TABLE, "0123")
    monkeypatch.setattr(choice, "wished", wished)
    monkeypatch.setattr(choice, "launcher", lambda op, device: host if wished(op, device) in choice.KERNELS else None)
    monkeypatch.setattr(choice, "why_not", lambda op, device: "no NVRTC")
    host.launches.clear()


def test_what_began_by_torch_goes_on_by_torch_beside_jobs_that_do_not(inputs: Path, host: Host,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    straight, first = trainer_of(inputs, "llama", "lora"), trainer_of(inputs, "llama", "lora")
    run(straight, 3)
    run(first, 2)
    saved, identity = Staging(first.optimizer), first.identity()
    saved.fill(first.optimizer)
    as_on_a_die(monkeypatch, host)
    other, second = trainer_of(inputs, "llama", "lora"), trainer_of(inputs, "llama", "lora")
    second.by_torch = choice.begun_without(identity.get("ops", {}), second.device)
    assert second.by_torch == tuple(choice.TABLE) and second.identity() == identity
    restore(second.optimizer, saved.chunk(), "state.safetensors")
    second.step = second.optimizer.steps = 2
    run(other, 1)
    used = len(host.launches)
    run(second, 1)
    assert used and len(host.launches) == used
    assert all(torch.equal(second.optimizer.flat[k], straight.optimizer.flat[k]) for k in straight.optimizer.flat)
    assert other.identity()["ops"] == host.digests and choice.begun_without(host.digests, other.device) == ()
    run(other, 1)
    assert len(host.launches) > used


def test_dp4a_is_chosen_by_hand(inputs: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_die(monkeypatch, host)
    kernels, dp4a = trainer_of(inputs, "llama", "int8"), trainer_of(inputs, "llama", "int8")
    expected = run(kernels, 1)
    host.launches.clear()
    with choice.overruled("int8", "dp4a"):
        [(loss, norm)] = run(dp4a, 1)
        assert dp4a.identity()["ops"]["int8"] == "0123-dp4a"
    assert {"rrd_int8_y_dp4a", "rrd_int8_dx_dp4a"} <= set(host.launches) and "rrd_int8_y" not in host.launches
    assert [(loss, norm)] == [(pytest.approx(expected[0][0], rel=2e-5), pytest.approx(expected[0][1], rel=2e-5))]


def test_a_loaded_job_is_told_so_and_what_cannot_go_on_is_said(inputs: Path, host: Host, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(inputs, "llama", "lora")
    saved = trainer.identity()
    monkeypatch.setattr(resident, "_saved_identity", lambda job_dir: saved)
    as_on_a_die(monkeypatch, host)
    notes: list[str] = []
    resident._go_on_as_begun(tmp_path, trainer, notes)
    resident._check_identity("ckpt-1", saved, trainer, notes)
    assert notes == ["it goes on without the kernels for wkv7, int8, adamw, xent, as it began; "
                     '`resume = "compatible"` uses them from here on: faster, and not bit for bit']
    for ops, said in (({"xent": "4567"}, "its kernels for xent were another build (4567) than those here (0123)"),
                      ({"xent": "0123", "old": "1"}, "its kernels for old are not to be had: no NVRTC")):
        trainer.by_torch = choice.begun_without(ops, trainer.device)
        with pytest.raises(BadJob) as e:
            resident._check_identity("ckpt-1", {**saved, "ops": ops}, trainer, notes)
        assert e.value.message == f"ckpt-1 cannot be continued exactly: {said}"
