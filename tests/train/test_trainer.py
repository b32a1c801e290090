"""I1 within one process: a step depends on nothing but the job, the state and its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from faults import Faults
from rwkv_toys import make_rwkv
from safetensors.torch import load_file, save_file

from rrd.job import JobSpec
from rrd.models import load_base
from rrd.savings import Rung
from rrd.train import step as step_module
from rrd.train.data import Dataset, prepare
from rrd.train.state import Staging, restore
from rrd.train.step import NO_LABEL, Batch, NotFinite
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


def test_a_checkpoint_knows_with_what_savings_its_steps_were_run(tmp_path: Path) -> None:
    """The ledger may have lost them: a crash between the order and the record."""
    rungs = (Rung(what="checkpointing", step=3), Rung(what="split", step=5, factor=2))
    straight = make_trainer(tmp_path, batch_size=2)
    for _ in range(STEPS):
        straight.run_step(STEPS, "stop", rungs)
    first = make_trainer(tmp_path, batch_size=2)
    for _ in range(6):
        first.run_step(STEPS, "stop", rungs)
    staging = Staging(first.optimizer)
    staging.fill(first.optimizer)
    second = make_trainer(tmp_path, batch_size=2)
    restore(second.optimizer, staging.chunk(), "here")
    second.resume(json.loads(json.dumps(first.state(STEPS, 0))))
    assert second.rungs == rungs
    for _ in range(STEPS - 6):
        second.run_step(STEPS, "stop")
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


# --- steps that are no number -----------------------------------------------------------------------------------------


class Poison:
    """Spoils one step of ``trainer``: "loss" or "grad" is then no number; or "labels": there are none."""

    def __init__(self, trainer: Trainer, step: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer, self.step, self.how = trainer, step, how
        batch_at = trainer.data.batch_at
        monkeypatch.setattr(trainer.data, "batch_at", lambda *args: self._batch(batch_at(*args)))
        gather = trainer.optimizer.gather
        monkeypatch.setattr(trainer.optimizer, "gather", lambda: gather().fill_(float("inf")) if self._now("grad")
                            else gather())
        if how == "loss":
            inner = step_module.loss_and_grad
            monkeypatch.setattr(step_module, "loss_and_grad", lambda *a, **k: tuple(
                t * float("nan") for t in inner(*a, **k)) if self._now("loss") else inner(*a, **k))

    def _now(self, how: str) -> bool:
        return self.how == how and self.trainer.step + 1 == self.step

    def _batch(self, batch: Batch) -> Batch:
        return batch._replace(labels=torch.full_like(batch.labels, NO_LABEL)) if self._now("labels") else batch


@pytest.mark.parametrize("how", ["loss", "grad"])
def test_a_skipped_step_is_as_if_it_had_not_been_and_is_counted_also_after_a_resume(
        tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    Poison(trainer, 4, how, monkeypatch)
    for _ in range(3):
        trainer.run_step(STEPS, "skip")
    before, applied, norms = flat(trainer), trainer.optimizer.steps, list(trainer.norms)
    result = trainer.run_step(STEPS, "skip")
    assert result.skipped and trainer.skipped == 1 and trainer.step == 4
    assert_same(before, flat(trainer))
    assert trainer.optimizer.steps == applied == 3 and list(trainer.norms) == norms
    staging = Staging(trainer.optimizer)
    staging.fill(trainer.optimizer)
    again = make_trainer(tmp_path)
    restore(again.optimizer, memoryview(bytearray(staging.chunk())), "here")
    again.resume(trainer.state(STEPS, 0))
    assert again.skipped == 1 and list(again.norms) == norms
    assert [again.run_step(STEPS, "skip").loss for _ in range(4)] == [
        trainer.run_step(STEPS, "skip").loss for _ in range(4)]
    assert_same(flat(trainer), flat(again))


@pytest.mark.parametrize(("how", "said"), [("loss", "the loss is nan"), ("grad", "the gradient's norm is inf")])
def test_a_step_that_stops_the_job_says_which_on_what_and_what_came_before(
        tmp_path: Path, how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    Poison(trainer, 9, how, monkeypatch)
    for _ in range(8):
        trainer.run_step(STEPS, "stop")
    norms = ", ".join(f"{n:.3g}" for n in trainer.norms)
    assert len(trainer.norms) == 5
    ids = ", ".join(str(trainer.data.at(trainer.position + k, trainer.spec.seed) + 1) for k in range(2))
    before = flat(trainer)
    with pytest.raises(NotFinite) as e:
        trainer.run_step(STEPS, "stop")
    assert e.value.message == f"{said} at step 9, on sample {ids} of the data; the gradient's norms before: {norms}"
    assert "on_nan" in e.value.hint and trainer.step == 8
    assert_same(before, flat(trainer))


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_step_without_a_label_is_no_number_lost_and_none_to_stop_for(
        tmp_path: Path, on_nan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    Poison(trainer, 4, "labels", monkeypatch)
    results = [trainer.run_step(STEPS, on_nan) for _ in range(5)]
    assert [r.applied for r in results] == [True, True, True, False, True]
    assert trainer.skipped == 0 and not any(r.skipped for r in results) and trainer.optimizer.steps == 4


@pytest.mark.parametrize("keys", [{}, {"quantize": True}, {"method": "full"}], ids=str)
def test_weights_that_are_no_numbers_are_named_and_no_setting_is_blamed(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Unless the weights are what training has made of them."""
    file = Path(toy_keys(tmp_path)["model"]) / "model.safetensors"
    tensors = load_file(file)
    bad, good = "model.layers.1.mlp.up_proj.weight", {n: t.clone() for n, t in tensors.items()}
    tensors[bad][3, 5] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NotFinite) as e:
        make_trainer(tmp_path, **keys).run_step(STEPS, "stop")
    assert e.value.message.endswith(f"; in the model's files, {bad} holds what is no number")
    assert e.value.hint == "fetch the model again, all of its files"
    for name in good:
        good[name] *= 1e30
    save_file(good, file, metadata={"format": "pt"})
    trainer = make_trainer(tmp_path, **keys)
    with pytest.raises(NotFinite, match="before anything was trained, and its weights are all numbers"):
        trainer.run_step(STEPS, "stop")
    trainer.optimizer.steps = 1
    with pytest.raises(NotFinite) as e:
        trainer.run_step(STEPS, "stop")
    assert e.value.message.endswith("none yet") and e.value.hint.startswith("lower lr")


# --- held-out data in pieces ------------------------------------------------------------------------------------------


def test_an_evaluation_interrupted_anywhere_gives_the_same_number(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, batch_size=2)
    trainer.held_out = trainer.data
    whole = trainer.evaluation().go_on((), lambda share: False)
    shares: list[float] = []
    evaluation, found, visits = trainer.evaluation(), None, 0
    while found is None:
        found, visits = evaluation.go_on((), lambda share: (shares.append(share), len(shares) % 3 == 0)[1]), visits + 1
    assert found == whole and visits == -(-len(shares) // 3) > 2 and shares == sorted(shares) and shares[-1] == 1.0
    assert trainer.evaluated == trainer.step


def test_an_evaluation_that_ran_out_of_memory_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    trainer = make_trainer(tmp_path)
    trainer.held_out = trainer.data
    whole = trainer.evaluation().go_on((), lambda share: False)
    evaluation = trainer.evaluation()
    evaluation.go_on((), lambda share: share > 0.4)
    at = evaluation.at
    with pytest.raises(torch.cuda.OutOfMemoryError), Faults(out_of_memory_at=5):
        evaluation.go_on((), lambda share: False)
    assert evaluation.at == at > 0
    assert evaluation.go_on((), lambda share: False) == whole
    finer = trainer.evaluation().go_on((Rung(what="logits", step=1, factor=8),), lambda share: False)
    assert finer == pytest.approx(whole, rel=1e-6)
