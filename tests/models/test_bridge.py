"""Models through transformers: logits and gradients are its own, and jobs on them are like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from bridge_toys import KINDS, make_bridged
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.lora import attach
from rrd.models import CausalLM, build, load_base
from rrd.models.registry import lora_targets_of
from rrd.optim import AdamW
from rrd.savings import Savings
from rrd.train.data import Dataset, prepare
from rrd.train.export import export
from rrd.train.state import Staging, restore
from rrd.train.step import Batch, train_step
from rrd.train.trainer import Trainer

kinds = pytest.mark.parametrize("kind", KINDS)


def theirs_at(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).float().eval()


def ids(rows: int = 2, length: int = 25) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(1))


@kinds
def test_logits_equal_transformers(tmp_path: Path, kind: str) -> None:
    path = make_bridged(tmp_path / "m", kind)
    with torch.no_grad():
        for base in (load_base(path), load_base(path, store_dir=tmp_path / "store")):
            assert torch.allclose(build(base).eval()(ids()), theirs_at(path)(ids()).logits, atol=2e-6)


def adapted(model: CausalLM, targets: tuple[str, ...]) -> AdamW:
    named = attach(model, targets=targets, rank=4)
    g = torch.Generator().manual_seed(3)
    for name, p in named:
        if "lora_B" in name:
            p.data.normal_(generator=g, std=0.05)
    return AdamW(named)


@kinds
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_equal_pefts(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    from peft import LoraConfig, get_peft_model

    path = make_bridged(tmp_path / "m", kind)
    base = load_base(path)
    targets = lora_targets_of(base.family, base.config)
    model = build(base).eval()
    optimizer = adapted(model, targets)
    model.train = lambda mode=True: model  # type: ignore[method-assign,assignment]  # no dropout: peers agree
    for m in model.modules():
        m.training = checkpointing  # transformers recomputes in training only
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
        for drop in ("attention_dropout", "attn_pdrop"):
            if hasattr(m, drop):
                setattr(m, drop, 0.0)
    x = ids()
    result = train_step(model, optimizer, [Batch(x[:, :-1], x[:, 1:])], lr=0.0, clip_norm=0.0, seeds=[0],
                        savings=Savings(checkpointing=checkpointing))
    peer = get_peft_model(theirs_at(path), LoraConfig(r=4, lora_alpha=8, target_modules=list(targets))).eval()
    given = dict(peer.named_parameters())
    for name, p in model.named_parameters():
        if ".lora." in name:
            part = f"lora_{name[-1].upper()}.default.weight"
            given["base_model.model." + name.rpartition("lora.")[0] + part].data.copy_(p.detach())
    loss = peer(input_ids=x, labels=x).loss
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for slot in optimizer.layout:
        g = given["base_model.model." + slot.name.replace(".weight", ".default.weight")].grad
        assert torch.allclose(optimizer.view("grad", slot), g, atol=1e-5 * float(g.abs().max()) + 1e-7), slot.name


def test_checkpointing_runs_blocks_again(tmp_path: Path) -> None:
    base = load_base(make_bridged(tmp_path / "m", "gemma"))
    model = build(base)
    attach(model, targets=base.config.lora_targets, rank=2)
    runs: list[object] = []
    model.blocks[0].self_attn.register_forward_pre_hook(lambda *_: runs.append(0))  # type: ignore[union-attr,operator]
    for checkpointing, expected in ((True, 2), (False, 3), (True, 5)):
        model.train().hidden(ids(), checkpointing=checkpointing).sum().backward()
        assert len(runs) == expected


def make_trainer(tmp_path: Path, kind: str, **keys: Any) -> Trainer:
    path = tmp_path / kind
    if not path.exists():
        make_bridged(path, kind)
    spec = JobSpec.model_validate({**toy_keys(tmp_path), "model": str(path), **keys})
    data = prepare(spec.data, spec.model, seq_len=spec.seq_len, cache_dir=tmp_path / "cache")
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    base = load_base(spec.model, dtype=dtype, compute=torch.float32, trainable=spec.method == "full",
                     quantize=spec.quantize)
    return Trainer(spec, base, Dataset.open(data.path), None, threads=1)


JOBS = [("gpt2", {}), ("gemma", {"gradient_checkpointing": True}), ("phi", {"quantize": True}), ("gemma2", {}),
        ("mixtral", {"dtype": "bfloat16"}), ("qwen2_moe", {"quantize": True}),
        ("gpt2", {"method": "full", "weight_decay": 0.1}), ("phi", {"method": "full"}), ("gemma", {"method": "full"})]


@pytest.mark.parametrize(("kind", "keys"), JOBS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "lora")
def test_resumed_it_gives_the_same_bits(tmp_path: Path, kind: str, keys: dict[str, Any]) -> None:
    straight = make_trainer(tmp_path, kind, **keys)
    losses = [straight.run_step(6, "stop").loss for _ in range(6)]
    assert losses[-1] != losses[0]
    first = make_trainer(tmp_path, kind, **keys)
    for _ in range(3):
        first.run_step(6, "stop")
    staging = Staging(first.optimizer)
    staging.fill(first.optimizer)
    second = make_trainer(tmp_path, kind, **keys)
    restore(second.optimizer, staging.chunk(), "here")
    second.resume(json.loads(json.dumps(first.state(6, 0))))
    assert [second.run_step(6, "stop").loss for _ in range(3)] == losses[3:]
    for key in ("param", "exp_avg"):
        assert torch.equal(second.optimizer.flat[key], straight.optimizer.flat[key])
    assert "transformers" in straight.identity()


@kinds
def test_the_adapter_loads_in_peft_and_merges(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    trainer = make_trainer(tmp_path, kind, export_merged=True, lr=0.01)
    for _ in range(3):
        trainer.run_step(3, "stop")
    assert export(trainer, tmp_path / "out") == []
    with torch.no_grad():
        ours = trainer.model.eval()(ids())
        plain = theirs_at(tmp_path / kind)(ids()).logits
        peer = PeftModel.from_pretrained(theirs_at(tmp_path / kind), tmp_path / "out").eval()
        assert torch.allclose(peer(ids()).logits, ours, atol=1e-5)
        assert torch.allclose(theirs_at(tmp_path / "out" / "merged")(ids()).logits, ours, atol=1e-4)
        assert not torch.allclose(ours, plain, atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "phi", "gemma", "gemma2"])
def test_a_whole_model_is_exported_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    trainer = make_trainer(tmp_path, kind, method="full", lr=0.01)
    before = {name: p.detach().clone() for name, p in trainer.named}
    for _ in range(3):
        trainer.run_step(3, "stop")
    assert all(not torch.equal(p, before[name]) for name, p in trainer.named if "k_proj.bias" not in name)
    export(trainer, tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(theirs_at(tmp_path / "out")(ids()).logits, trainer.model.eval()(ids()), atol=1e-5)


def test_a_gpt2_without_its_prefix_is_read(tmp_path: Path) -> None:
    """As published: names begin at wte, and attention's old mask is stored."""
    path = make_bridged(tmp_path / "m", "gpt2")
    expected = theirs_at(path)(ids()).logits
    old = {n.removeprefix("transformer."): t for n, t in load_file(path / "model.safetensors").items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 256, 256)}, path / "model.safetensors", {"format": "pt"})
    base = load_base(path)
    assert torch.allclose(build(base).eval()(ids()), expected, atol=2e-6)
    with pytest.raises(BadJob, match="not trained as a whole"):
        load_base(path, trainable=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "no family knows"),
    ({"final_logit_softcapping": 0.1}, "turns its logits into others"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"hidden_act": "nonsense", "hidden_activation": "nonsense"}, "cannot build"),
    ({"num_hidden_layers": 3}, "lacks"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_is_not_understood_gets_a_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = make_bridged(tmp_path / "m", "gemma")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    (path / "evil.py").write_text("raise SystemExit('code from a model directory was run')")
    with pytest.raises(BadJob, match=sentence):
        build(load_base(path))
