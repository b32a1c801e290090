from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toys import make_model
from transformers import AutoModelForCausalLM

from rrd.errors import BadJob
from rrd.lora import attach
from rrd.models import Base, CausalLM, build, load_base
from rrd.models.llama import Llama
from rrd.optim import AdamW
from rrd.savings import Savings
from rrd.train.step import NO_LABEL, Batch, train_step

ALL = Llama.lora_targets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", tie=False)


@pytest.fixture
def base(path: Path) -> Base:
    return load_base(path)


def window(seed: int = 0, masked: int = 5) -> Batch:
    g = torch.Generator().manual_seed(seed)
    idx, labels = (torch.randint(320, (2, 24), generator=g) for _ in range(2))
    labels[:, :masked] = NO_LABEL
    return Batch(idx, labels)


def grads_of(model: CausalLM, optimizer: AdamW, batch: Batch, seed: int = 0, **how: Any) -> torch.Tensor:
    train_step(model, optimizer, [batch], lr=0.0, clip_norm=0.0, seeds=[seed], **how)
    return optimizer.grad.clone()


@pytest.mark.parametrize("settings", [
    {"targets": ALL, "rank": 4}, {"targets": ("q_proj", "v_proj"), "rank": 8, "alpha": 4.0},
    {"targets": ALL, "rank": 4, "rs": True, "ranks": {"down_proj": 2, "k_proj": 6}},
    {"targets": ("o_proj",), "rank": 3}])
def test_logits_and_gradients_equal_pefts(path: Path, base: Base, settings: dict[str, Any]) -> None:
    model = build(base)
    named = attach(model, **settings)
    for i, (_, p) in enumerate(named):
        p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(i))
    rank = settings["rank"]
    config = LoraConfig(
        r=rank, lora_alpha=settings.get("alpha", 2 * rank), target_modules=list(settings["targets"]),
        use_rslora=settings.get("rs", False), rank_pattern=settings.get("ranks", {}),
        alpha_pattern={n: 2 * r for n, r in settings.get("ranks", {}).items()})
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    theirs = {n.removeprefix("base_model.model.").replace(".default", ""): p for n, p in peft.named_parameters()}
    assert {n for n, p in theirs.items() if p.requires_grad} == {n for n, _ in named}
    with torch.no_grad():
        for name, p in named:
            theirs[name].copy_(p)
    batch = window()
    logits = peft(batch.idx).logits
    with torch.no_grad():
        torch.testing.assert_close(model(batch.idx), logits, atol=1e-5, rtol=1e-5)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    optimizer = AdamW(named)
    grads_of(model, optimizer, batch)
    for slot in optimizer.layout:
        grad = theirs[slot.name].grad
        torch.testing.assert_close(optimizer.view("grad", slot), grad, atol=2e-5 * float(grad.abs().max()), rtol=1e-4)


def test_a_new_adapter_changes_nothing_and_depends_on_seed_and_name_only(base: Base) -> None:
    plain, model, again, few = (build(base) for _ in range(4))
    named = attach(model, targets=ALL, rank=4, seed=7)
    idx = window().idx
    with torch.no_grad():
        assert torch.equal(plain(idx), model(idx))
    same = dict(attach(again, targets=tuple(reversed(ALL)), rank=4, seed=7))
    part = dict(attach(few, targets=("up_proj",), rank=4, seed=7))
    assert [n for n, _ in named] == list(same)
    assert all(torch.equal(p, same[n]) for n, p in named)
    assert all(torch.equal(p, same[n]) for n, p in part.items())
    other = dict(attach(build(base), targets=ALL, rank=4, seed=8))
    a_name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(other[a_name], same[a_name])
    assert not torch.equal(same[a_name], same["model.layers.1.self_attn.q_proj.lora_A.weight"])
    bound = 1 / math.sqrt(32)
    assert 0.8 * bound < same[a_name].abs().max() <= bound


def test_parameter_count_is_rank_times_inputs_and_outputs(base: Base) -> None:
    named = attach(build(base), targets=ALL, rank=5)
    assert sum(p.numel() for _, p in named) == 2 * 5 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 64) * 3)
    assert all(p.dtype == torch.float32 for _, p in named)


def test_only_the_adapters_are_trained(base: Base) -> None:
    before = {n: t.clone() for n, t in base.tensors.items()}
    model = build(base)
    named = attach(model, targets=ALL, rank=4)
    optimizer = AdamW(named, weight_decay=0.1)
    a, b = (copy.deepcopy(p.data) for _, p in (named[0], named[3]))
    for i in range(2):
        train_step(model, optimizer, [window(i)], lr=1e-2, clip_norm=1.0, seeds=[i])
    assert not torch.equal(a, named[0][1])
    assert not torch.equal(b, named[3][1])
    assert all(torch.equal(t, before[n]) for n, t in base.tensors.items())


def test_dropout_follows_the_seed_and_only_trains(base: Base) -> None:
    model = build(base)
    optimizer = AdamW(attach(model, targets=ALL, rank=4, dropout=0.3))
    torch.nn.init.normal_(optimizer.flat["param"], std=0.1)
    batch = window()
    one = grads_of(model, optimizer, batch, seed=1)
    assert torch.equal(one, grads_of(model, optimizer, batch, seed=1))
    assert torch.equal(one, grads_of(model, optimizer, batch, seed=1, savings=Savings(checkpointing=True)))
    assert not torch.equal(one, grads_of(model, optimizer, batch, seed=2))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch.idx), model(batch.idx))


def test_dropout_gradients_are_those_of_the_function(base: Base) -> None:
    """Against autograd through the same formula, written plainly, with the same mask."""
    from rrd.models.layers import Linear, Lora
    from rrd.ops.linear import Group

    module = Linear(6, 5)
    module.weight = torch.nn.Parameter(torch.randn(5, 6), requires_grad=False)
    module.lora = Lora(torch.randn(2, 6), torch.randn(5, 2), scale=1.5, dropout=0.4)
    x = torch.randn(7, 6, requires_grad=True)
    torch.manual_seed(3)
    y = Group(module)(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    ours = x.grad, module.lora.a.grad_place.view, module.lora.b.grad_place.view
    x.grad = None
    torch.manual_seed(3)
    seen, _ = torch.native_dropout(x, 0.4, True)
    plain = x @ module.weight.t() + 1.5 * seen @ module.lora.a.t() @ module.lora.b.t()
    torch.testing.assert_close(y, plain)
    plain.backward(dy)
    for got, expected in zip(ours, (x.grad, module.lora.a.grad, module.lora.b.grad), strict=True):
        torch.testing.assert_close(got, expected)


def test_bf16_adapters_are_fp32_masters(path: Path) -> None:
    model = build(load_base(path, dtype=torch.bfloat16, compute=torch.bfloat16))
    optimizer = AdamW(attach(model, targets=ALL, rank=4))
    exact = build(load_base(path))
    reference = AdamW(attach(exact, targets=ALL, rank=4))
    for o in (optimizer, reference):
        o.flat["param"].normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    got, expected = grads_of(model, optimizer, window()), grads_of(exact, reference, window())
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.99


def test_a_wrong_target_gets_one_sentence(base: Base) -> None:
    with pytest.raises(BadJob, match=r"no linear module 'query'.*it has down_proj, gate_proj"):
        attach(build(base), targets=("q_proj", "query"), rank=4)


def test_a_rank_for_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadJob, match="no linear module 'nope'"):
        attach(build(load_base(make_model(tmp_path / "m"))), targets=Llama.lora_targets, rank=4, ranks={"nope": 3})
