from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Faults
from rwkv_toys import make_rwkv
from toys import make_model

from rrd.lora import attach
from rrd.models import Base, CausalLM, build, load_base
from rrd.models.registry import lora_targets_of
from rrd.ops import pulse
from rrd.optim import AdamW
from rrd.savings import Savings
from rrd.train.step import NO_LABEL, Batch, NotFinite, StepResult, eval_loss, train_step

METHODS = ["lora", "full"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m")


class Job:
    """A model and its optimizer; ``step`` is ``train_step`` with the settings of the test."""

    def __init__(self, path: Path, method: str = "lora", dropout: float = 0.0, base: Base | None = None) -> None:
        full = method == "full"
        base = base or load_base(path, trainable=full)
        self.model: CausalLM = build(base)
        named = list(self.model.named_parameters()) if full else attach(
            self.model, targets=lora_targets_of(base.family, base.config), rank=4, dropout=dropout)
        self.optimizer = AdamW(named, weight_decay=0.01)

    def step(self, batches: list[Batch], lr: float = 1e-2, clip: float = 1.0, seed: int = 0, **how: Any) -> StepResult:
        seeds = [seed * 1000 + i for i in range(len(batches))]
        return train_step(self.model, self.optimizer, batches, lr=lr, clip_norm=clip, seeds=seeds, **how)

    def state(self) -> dict[str, torch.Tensor]:
        return {k: t.clone() for k, t in self.optimizer.flat.items()}


def batch(seed: int, B: int = 1, T: int = 24, labels: int = 24) -> Batch:
    g = torch.Generator().manual_seed(seed)
    idx, targets = torch.randint(320, (B, T), generator=g), torch.randint(320, (B, T), generator=g)
    targets[:, : T - labels] = NO_LABEL
    return Batch(idx, targets)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("method", METHODS)
def test_losses_fall(path: Path, method: str) -> None:
    job = Job(path, method)
    losses = [job.step([batch(0)], seed=i).loss for i in range(15)]
    assert losses[0] == pytest.approx(math.log(320), rel=0.1)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_is_one_large_batch_whatever_the_labels(path: Path, method: str) -> None:
    """The loss is the mean over the labels of the whole window, not a mean of means."""
    whole, parts = Job(path, method), Job(path, method)
    one = batch(0, B=3)
    for row, first in enumerate((20, 3, 11)):
        one.labels[row, :first] = NO_LABEL
    a = whole.step([one])
    b = parts.step([Batch(one.idx[i : i + 1], one.labels[i : i + 1]) for i in range(3)])
    assert (a.labels, a.tokens) == (b.labels, b.tokens) == (38, 72)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    torch.testing.assert_close(whole.optimizer.grad, parts.optimizer.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_bitwise_the_same_alone_or_with_others_and_after_a_reload(path: Path, method: str) -> None:
    alone = Job(path, method, dropout=0.1)
    straight = [alone.step([batch(i), batch(i + 50)], seed=i).loss for i in range(6)]
    base = load_base(path, store_dir=path / "store") if method == "lora" else None
    mine, other = Job(path, method, 0.1, base), Job(path, method, 0.0, base)
    losses = []
    for i in range(3):
        losses.append(mine.step([batch(i), batch(i + 50)], seed=i).loss)
        other.step([batch(99, B=2, T=40)], seed=77)
        torch.rand(i)  # nobody else's randomness matters
    again = Job(path, method, 0.1, base)
    for key, buffer in mine.optimizer.flat.items():
        again.optimizer.flat[key].copy_(buffer)
    again.optimizer.steps = mine.optimizer.steps
    losses += [again.step([batch(i), batch(i + 50)], seed=i).loss for i in range(3, 6)]
    assert losses == straight
    assert equal(alone.state(), again.state())


@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_changes_no_bit_and_keeps_less(path: Path, method: str) -> None:
    plain, again = Job(path, method, dropout=0.2), Job(path, method, dropout=0.2)
    for i in range(2):
        assert plain.step([batch(i)], seed=i) == again.step([batch(i)], seed=i, savings=Savings(checkpointing=True))
    assert equal(plain.state(), again.state())

    def kept(job: Job, **how: bool) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            job.model.hidden(batch(0).idx, **how)
        return sum(sizes)

    assert kept(again, checkpointing=True) < kept(plain) / 5


def test_clipping_scales_the_gradient_to_the_norm(path: Path) -> None:
    """Adam forgets a constant factor, so one step with a large eps shows it."""
    moved = {}
    for clip in (0.0, 0.5):
        job = Job(path, "full")
        job.optimizer.eps, job.optimizer.weight_decay = 1e3, 0.0
        before = job.optimizer.flat["param"].clone()
        norm = job.step([batch(0)], lr=1e6, clip=clip).grad_norm
        assert norm > 0.6
        moved[clip] = job.optimizer.flat["param"] - before
    torch.testing.assert_close(moved[0.5], moved[0.0] * (0.5 / norm), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_window_without_labels_contributes_nothing(path: Path, method: str) -> None:
    job = Job(path, method)
    job.step([batch(0)])
    before = job.state()
    assert job.step([batch(1, labels=0)]) == StepResult(0.0, 0.0, 24, 0, applied=False)
    assert equal(before, job.state())
    assert job.optimizer.steps == 1
    mixed, plain = Job(path, method), Job(path, method)
    a, b = mixed.step([batch(1, labels=0), batch(2)]), plain.step([batch(2)])
    assert (a.loss, a.grad_norm, a.labels) == (b.loss, b.grad_norm, b.labels)
    assert equal(mixed.state(), plain.state())


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_changes_nothing(path: Path, method: str) -> None:
    job, same = Job(path, method), Job(path, method)
    job.step([batch(0)])
    same.step([batch(0)])
    before = job.state()
    norm = job.model.model.norm.weight  # type: ignore[union-attr]
    healthy = norm.data.clone()
    norm.data.fill_(float("nan"))
    poisoned = job.state()
    with pytest.raises(NotFinite, match="the loss is nan") as caught:
        job.step([batch(1)])
    assert math.isnan(caught.value.loss)
    skipped = job.step([batch(1)], on_nan="skip")
    assert not skipped.applied
    assert math.isnan(skipped.loss)
    assert all(torch.equal(t.nan_to_num(), poisoned[k].nan_to_num()) for k, t in job.state().items())
    norm.data.copy_(healthy)
    assert equal(before, job.state())
    assert job.step([batch(2)]) == same.step([batch(2)])
    assert equal(job.state(), same.state())


def test_padding_at_the_end_costs_and_changes_nothing(path: Path) -> None:
    short, padded = Job(path), Job(path)
    one = batch(0)
    pad = torch.nn.functional.pad
    wide = Batch(pad(one.idx, (0, 40)), pad(one.labels, (0, 40), value=NO_LABEL))
    a, b = short.step([one]), padded.step([wide])
    assert (a.loss, a.grad_norm, a.labels) == (b.loss, b.grad_norm, b.labels)
    assert equal(short.state(), padded.state())


def test_eval_loss_is_the_training_loss_without_dropout(path: Path) -> None:
    job, plain = Job(path, dropout=0.5), Job(path)
    batches = [batch(0, labels=10), batch(1), batch(2, labels=0)]
    total, labels = eval_loss(job.model, batches)
    assert labels == 34
    assert total / labels == pytest.approx(plain.step(batches).loss, rel=1e-6)
    assert eval_loss(job.model, [batch(2, labels=0)]) == (0.0, 0)


ONE_STEP = """
import sys
from pathlib import Path
import rrd.worker.loop
from test_step import Job, Savings, batch
before = set(sys.modules)
for checkpointing in (False, True):
    Job(Path(sys.argv[1])).step([batch(0)], savings=Savings(checkpointing=checkpointing))
print(*sorted(m for m in set(sys.modules) - before if not m.startswith("rrd.")))
"""


def test_a_step_imports_nothing_that_the_nursery_has_not(path: Path) -> None:
    """What a worker imports it holds alone: sympy, say, which torch likes to import late, would be 40 MB in each."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", ONE_STEP, str(path)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": ":".join(here)})
    assert len(done.stdout.split()) < 10, done.stdout


class GivenUp(Exception):
    """Raised by whoever hears a sign of life."""


def _gives_up_at(nth: int) -> Callable[[float], None]:
    heard = itertools.count(1)

    def listener(share: float) -> None:
        if next(heard) == nth:
            raise GivenUp

    return listener


@pytest.mark.parametrize(("family", "savings"), [
    ("llama", Savings()), ("llama", Savings(True, 8, 2)), ("rwkv7", Savings(True, 8, 2)), ("gpt2", Savings(True))],
    ids=str)
def test_a_step_given_up_at_any_sign_of_life_has_not_been(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, savings: Savings) -> None:
    """Also where it comes in the midst of a backward pass, or of one within another; and, as far as the modules are
    ours alone, it leaves no tensor to the collector."""
    if family == "gpt2":
        from bridge_toys import make_bridged  # transformers: not for the test of what a step imports

        model = make_bridged(tmp_path / "m", "gpt2")
    else:
        model = make_model(tmp_path / "m") if family == "llama" else make_rwkv(tmp_path / "m", V=320)
    monkeypatch.setattr(pulse, "EVERY", 0.0)
    straight, job = Job(model, dropout=0.2), Job(model, dropout=0.2)
    cpu, window = torch.device("cpu"), [batch(1, B=2), batch(2, B=2)]
    straight.step(window, seed=1)
    expected = straight.step(window, seed=2, savings=savings)
    job.step(window, seed=1)
    before, kept, at = job.state(), list[Any](), 1
    gc.collect()
    gc.disable()
    try:
        while True:
            try:
                with Faults(watch=kept), pulse.heard(_gives_up_at(at), cpu) as beats:
                    found = job.step(window, seed=2, savings=savings)
                break
            except GivenUp:
                pass
            assert beats.count == at and job.optimizer.whole and job.optimizer.steps == 1
            assert equal(before, job.state())
            assert family != "llama" or not [r for r in kept if r() is not None], f"after sign of life {at}"
            kept.clear()
            at += 1 + at // 3
    finally:
        gc.enable()
    blocks = len(job.model.blocks) * len(window) * savings.parts
    assert beats.count > (3 if savings.checkpointing else 2) * blocks  # forward, backward, and forward again
    assert found == expected and equal(straight.state(), job.state())


# --- the same step with less memory -----------------------------------------------------------------------------------


def ragged(B: int = 4, T: int = 24) -> Batch:
    """Samples of different lengths, one fully labelled, one hardly, one not at all."""
    one = batch(5, B=B, T=T)
    for row, first in enumerate((0, 20, 11, T)[:B]):
        one.labels[row, :first] = NO_LABEL
    return one


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("savings", [
    Savings(checkpointing=True), Savings(finer=8), Savings(parts=2), Savings(parts=3), Savings(True, 8, 4)], ids=str)
def test_a_step_with_savings_is_the_same_step(path: Path, method: str, savings: Savings) -> None:
    """Dropout included: each part has the whole's random numbers. What differs is the order of sums, if anything."""
    plain, saving = Job(path, method, dropout=0.3), Job(path, method, dropout=0.3)
    window = [ragged(), batch(6, B=3), batch(7, B=4, T=9, labels=4)]
    for i in range(3):
        a = plain.step(window, seed=i, clip=0.0, lr=1e-3)
        b = saving.step(window, seed=i, clip=0.0, lr=1e-3, savings=savings)
        assert (a.labels, a.tokens, a.applied) == (b.labels, b.tokens, b.applied)
        assert a.loss == pytest.approx(b.loss, rel=2e-6) and a.grad_norm == pytest.approx(b.grad_norm, rel=2e-5)
        torch.testing.assert_close(plain.optimizer.grad, saving.optimizer.grad, atol=1e-6, rtol=1e-4)
    if savings == Savings(checkpointing=True):
        assert equal(plain.state(), saving.state())


def test_with_other_random_numbers_it_would_not_be(path: Path) -> None:
    """The test above can fail: a part with masks of its own gives another gradient altogether."""
    plain, other = Job(path, dropout=0.3), Job(path, dropout=0.3)
    torch.nn.init.normal_(plain.optimizer.flat["param"], std=0.1)
    other.optimizer.flat["param"].copy_(plain.optimizer.flat["param"])
    one = batch(5, B=2)
    plain.step([one], clip=0.0)
    other.step([Batch(one.idx[i : i + 1], one.labels[i : i + 1]) for i in range(2)], clip=0.0)
    assert (plain.optimizer.grad - other.optimizer.grad).abs().max() > 0.01 * plain.optimizer.grad.abs().max()


@pytest.mark.parametrize("savings", [Savings(), Savings(True), Savings(True, 8, 2)], ids=str)
def test_a_step_that_ran_out_of_memory_leaves_nothing_behind_and_can_be_run_again(path: Path, savings: Savings) -> None:
    """At whatever allocation it happens, until the step goes through; the collector is off."""
    straight, job = Job(path, dropout=0.2), Job(path, dropout=0.2)
    window = [batch(1, B=2), batch(2, B=2)]
    straight.step(window, seed=1)
    expected = straight.step(window, seed=2, savings=savings)
    job.step(window, seed=1)
    before, kept, at = job.state(), [], 1
    gc.collect()
    gc.disable()
    try:
        while True:
            try:
                with Faults(out_of_memory_at=at, watch=kept):
                    found = job.step(window, seed=2, savings=savings)
                break
            except torch.cuda.OutOfMemoryError:
                pass
            if not job.optimizer.whole:  # in the update itself: the worker loads the job again
                for key, buffer in before.items():
                    job.optimizer.flat[key].copy_(buffer)
                job.optimizer.steps, job.optimizer.whole = 1, True
            assert equal(before, job.state()) and job.optimizer.steps == 1
            alive = [r for r in kept if r() is not None]
            assert not alive, f"after allocation {at}: {[r().shape for r in alive]}"
            kept.clear()
            at += 1 + at // 3
    finally:
        gc.enable()
    assert at > 200 and found == expected
    assert equal(straight.state(), job.state())
