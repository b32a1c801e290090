"""RWKV-7 against the `rwkv` package, and what its files may look like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rwkv_toys import Tensors, rwkv7, saved
from torch import Tensor

from rrd.errors import BadJob
from rrd.lora import attach
from rrd.models import build, load_base
from rrd.models.rwkv7 import RwkvLM
from rrd.ops import native
from rrd.optim import AdamW
from rrd.optim.adamw import Treatment
from rrd.savings import Savings
from rrd.train.step import NO_LABEL, Batch, train_step


@pytest.fixture(scope="module")
def peer() -> Any:
    """The `rwkv` package, which reads its settings when it is imported."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    if not hasattr(torch, "compiler"):
        pytest.skip("the rwkv package needs torch 2.1")
    return pytest.importorskip("rwkv.model")


def peer_logits(peer: Any, tensors: Tensors, idx: Tensor, path: Path) -> Tensor:
    path.mkdir(exist_ok=True)
    torch.save(tensors, path / "peer.pth")
    logits, _ = peer.RWKV(model=str(path / "peer"), strategy="cpu fp32").forward(idx.tolist(), None, full_output=True)
    return logits


def model_of(tensors: Tensors, path: Path, **how: Any) -> RwkvLM:
    model = build(load_base(saved(tensors, path), **how))
    assert isinstance(model, RwkvLM)
    return model


@pytest.mark.parametrize("T", [1, 7, 70])
def test_logits_equal_the_rwkv_packages(peer: Any, tmp_path: Path, T: int) -> None:
    tensors, idx = rwkv7(C=192), torch.randint(97, (T,), generator=torch.Generator().manual_seed(T))
    expected = peer_logits(peer, tensors, idx, tmp_path / "peer")
    with torch.no_grad():
        logits = model_of(tensors, tmp_path)(idx[None])[0]
    torch.testing.assert_close(logits, expected.view(T, -1), atol=1e-4, rtol=1e-5)


def test_names_may_have_a_prefix_and_block_0_unused_values(tmp_path: Path) -> None:
    plain, unused = rwkv7(), rwkv7(unused_v=True)
    unused |= plain
    prefixed = {f"rwkv.{n}": t for n, t in plain.items()}
    idx = torch.randint(97, (1, 20))
    with torch.no_grad():
        one, two, three = (model_of(t, tmp_path / str(i)) for i, t in enumerate((plain, unused, prefixed)))
        assert torch.equal(one(idx), two(idx))
        assert torch.equal(one(idx), three(idx))
    assert {n for n, _ in three.named_parameters()} == set(prefixed)
    assert {n for n, _ in two.named_parameters()} == set(plain)


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    tensors, idx = rwkv7(), torch.randint(97, (1, 20))
    saved(rwkv7(seed=1), tmp_path / "x")
    file = (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x" / "other.safetensors")
    saved(tensors, tmp_path / "x")
    with torch.no_grad():
        whole, other = build(load_base(tmp_path / "x" / "model.safetensors")), build(load_base(file))
        assert torch.equal(whole(idx), model_of(tensors, tmp_path / "y")(idx))
        assert not torch.equal(whole(idx), other(idx))


REFUSED: dict[str, Any] = {
    "does not explain: blocks.1.att.time_faaaa": lambda t: t | {"blocks.1.att.time_faaaa": torch.ones(2, 64)},
    "lacks blocks.1.att.k_a": lambda t: {n: x for n, x in t.items() if n != "blocks.1.att.k_a"},
    "does not explain: blocks.2": lambda t: {n: x for n, x in t.items() if not n.startswith("blocks.1.")},
    "blocks.1.att.g2 in shape [32, 64]": lambda t: t | {"blocks.1.att.g2": torch.ones(32, 64)},
    "multiple of 64": lambda t: t | {"emb.weight": torch.ones(97, 100)},
    "no family knows this model": lambda t: {n: x for n, x in t.items() if n != "ln_out.weight"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_other_layouts_are_refused_with_what_is_not_understood(sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadJob) as caught:
        load_base(saved(REFUSED[sentence](rwkv7()), tmp_path))
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_pieces_with_carried_states_equal_the_whole(tmp_path: Path) -> None:
    model, idx = model_of(rwkv7(), tmp_path), torch.randint(97, (2, 50))
    with torch.no_grad():
        whole, states, parts = model.hidden(idx), None, []
        for piece in torch.split(idx, [1, 30, 19], 1):
            hidden, states = model.carry(piece, states)
            parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def batch(T: int = 40) -> Batch:
    g = torch.Generator().manual_seed(1)
    idx, labels = torch.randint(97, (2, T), generator=g), torch.randint(97, (2, T), generator=g)
    labels[:, :10], labels[0, 30:] = NO_LABEL, NO_LABEL
    return Batch(idx, labels)


def step(model: RwkvLM, named: list[tuple[str, torch.nn.Parameter]], **how: Any) -> tuple[float, AdamW]:
    optimizer = AdamW(named)
    return train_step(model, optimizer, [batch()], lr=0.0, clip_norm=0.0, seeds=[0], **how).loss, optimizer


def test_gradients_equal_differences_in_fp64(tmp_path: Path) -> None:
    """Of every kind of parameter: the loss moves as the gradient says."""
    model = model_of(rwkv7(C=64, L=2), tmp_path, trainable=True)
    named = list(model.named_parameters())
    _, optimizer = step(model, named)
    double = model_of(rwkv7(C=64, L=2), tmp_path, trainable=True, dtype=torch.float64, compute=torch.float64)
    idx, labels = batch()
    for slot in optimizer.layout:
        grad = optimizer.view("grad", slot).double()
        p = double.get_parameter(slot.name)
        direction = torch.randn(p.shape, dtype=torch.float64) * grad.abs().max() + grad
        direction /= direction.norm()
        losses = []
        with torch.no_grad():
            for sign in (1, -1):
                p.add_(direction, alpha=sign * 1e-4)
                losses.append(torch.nn.functional.cross_entropy(double(idx).flatten(0, 1), labels.flatten()))
                p.sub_(direction, alpha=sign * 1e-4)
        expected = float(losses[0] - losses[1]) / 2e-4
        assert float((grad * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-7), slot.name


@pytest.mark.parametrize("method", ["lora", "full"])
def test_checkpointing_changes_nothing(tmp_path: Path, method: str) -> None:
    grads = []
    for checkpointing in (False, True):
        model = model_of(rwkv7(), tmp_path, trainable=method == "full")
        named = list(model.named_parameters()) if method == "full" else attach(
            model, targets=("receptance", "key", "value", "output"), rank=4, seed=1)
        with torch.no_grad():
            for name, p in named:
                if "lora_B" in name:
                    p.normal_(generator=torch.Generator().manual_seed(2))
        grads.append(step(model, named, savings=Savings(checkpointing=checkpointing))[1].grad)
    assert grads[0].count_nonzero() > 0.9 * grads[0].numel() - 97 * 128
    assert torch.equal(grads[0], grads[1])


def test_a_job_begun_without_kernels_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idx = torch.randint(97, (1, 40))
    kept, begun = model_of(rwkv7(), tmp_path), model_of(rwkv7(), tmp_path)
    assert kept.make_ready(native.default_cache_dir(), kept.kernels, lambda: None) == ""
    begun.make_ready(native.default_cache_dir(), "torch", lambda: None)
    assert begun.kernels == "torch"
    with torch.no_grad():
        compiled, plain = kept(idx), begun(idx)
        torch.testing.assert_close(compiled, plain, atol=2e-5, rtol=1e-5)
        assert native.kernels() is None or not torch.equal(compiled, plain)
        monkeypatch.setattr(native, "_loaded", None)
        monkeypatch.setattr(native, "_failed", native.NoKernels("nobody built them"))
        assert torch.equal(kept(idx), plain)
        assert kept.kernels == "torch"
        assert "nobody built them" in kept.make_ready(tmp_path, None, lambda: None)


def test_lora_takes_all_linears_of_the_blocks(tmp_path: Path) -> None:
    base = load_base(saved(rwkv7(), tmp_path))
    named = attach(build(base), targets=base.family.lora_targets, rank=4)
    assert {n.rsplit(".", 2)[0] for n, _ in named} == {
        f"blocks.{i}.{m}" for i in range(3) for m in
        ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")}


def test_bf16_stored_and_computed_is_near_fp32(tmp_path: Path) -> None:
    tensors, idx = rwkv7(), torch.randint(97, (1, 24))
    with torch.no_grad():
        expected = model_of(tensors, tmp_path)(idx)
        for compute in (torch.float32, torch.bfloat16):
            ours = model_of(tensors, tmp_path, dtype=torch.bfloat16, compute=compute)
            assert (ours(idx).float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_recipe_is_rwkv_lms(tmp_path: Path) -> None:
    base = load_base(saved(rwkv7(), tmp_path), trainable=True)
    recipe = base.family.recipe  # type: ignore[attr-defined]
    assert (recipe.betas, recipe.eps) == ((0.9, 0.99), 1e-18)
    kinds = {n: recipe.rule(n, p) for n, p in build(base).named_parameters()}
    assert kinds["blocks.1.att.w0"] == Treatment(decayed=False, lr_scale=2.0)
    decayed = {n for n, t in kinds.items() if t.decayed}
    assert {n.split(".", 2)[-1] for n in decayed if n.startswith("blocks.")} == {
        "att.receptance.weight", "att.key.weight", "att.value.weight", "att.output.weight", "ffn.key.weight",
        "ffn.value.weight"}
    assert decayed >= {"emb.weight", "head.weight"}
    assert [n for n, t in kinds.items() if t.lr_scale != 1] == [f"blocks.{i}.att.w0" for i in range(3)]
