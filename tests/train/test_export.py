from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from toy_model import adapter, load, logits, save_model, with_adapter
from toy_tokenizer import byte_level, save

from rrd.errors import BadJob, Damaged, RrdError
from rrd.job import JobSpec
from rrd.models import load_base
from rrd.train import export, publish
from rrd.train.data import Dataset, prepare
from rrd.train.export import AdapterSpec, export_adapter
from rrd.train.trainer import Trainer

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("rs", "ranks"), [
    (False, {}), (True, {}), (False, {"q_proj": 2, "down_proj": 8}), (True, {"model.layers.1.mlp.up_proj": 7}),
])
def test_peft_loads_it_and_computes_the_same(model_dir: Path, tmp_path: Path, rs: bool, ranks: dict[str, int]) -> None:
    tensors, spec = adapter(load(model_dir), 4, ranks), AdapterSpec(str(model_dir), rank=4, alpha=6.0, rs=rs)
    assert export_adapter(tensors, tmp_path / "out", spec, step=1) == []
    peft = PeftModel.from_pretrained(load(model_dir), tmp_path / "out").eval()
    scale = {r: 6.0 / (r**0.5 if rs else r) for r in range(1, 9)}
    expected = with_adapter(load(model_dir), tensors, scale)
    assert torch.allclose(logits(peft), expected, atol=2e-5)
    assert not torch.allclose(logits(load(model_dir)), expected, atol=1e-2)


def test_what_lies_in_the_directory(model_dir: Path, tmp_path: Path) -> None:
    tensors = adapter(load(model_dir))
    export_adapter(tensors, tmp_path / "deep" / "out", AdapterSpec(str(model_dir), 4, 8.0, dropout=0.1), step=7)
    out = tmp_path / "deep" / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "MANIFEST.json", "README.md", "adapter.safetensors", "adapter_config.json", "adapter_model.safetensors"]
    assert os.readlink(out / "adapter.safetensors") == "adapter_model.safetensors"
    found = load_file(out / "adapter.safetensors")
    assert found.keys() == {f"base_model.model.{n}" for n in tensors}
    assert all(torch.equal(found[f"base_model.model.{n}"], t) for n, t in tensors.items())
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["rank_pattern"]) == (4, 8, 0.1, {})
    assert config["target_modules"] == sorted(LEAVES)
    assert [p.name for p in out.parent.iterdir()] == ["out"], "nothing is left beside it"


def test_the_same_adapter_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    tensors, spec = adapter(load(model_dir)), AdapterSpec(str(model_dir), 4, 8.0)
    export_adapter(tensors, tmp_path / "a", spec, step=7)
    export_adapter(dict(reversed(tensors.items())), tmp_path / "b", spec, step=7)
    a, b = ({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / d).iterdir()} for d in "ab")
    assert a == b


def trained(root: Path, steps: int = 3, **keys: Any) -> Trainer:
    """A job of a few steps on a model of one's own."""
    tok = byte_level(["<eos>"])
    save_model(root / "model", vocab=tok.get_vocab_size())
    save(tok, root / "model", eos_token="<eos>")
    (root / "d.jsonl").write_text('{"prompt": "a die is ", "completion": "one chip that trains"}\n' * 4)
    spec = JobSpec.model_validate({"model": str(root / "model"), "data": str(root / "d.jsonl"), "lr": 0.01,
                                   "lora_rank": 4, "dtype": "float32", **keys})
    data = prepare(spec.data, spec.model, seq_len=64, cache_dir=root / "cache")
    base = load_base(spec.model, dtype=getattr(torch, spec.dtype), trainable=spec.method == "full")
    trainer = Trainer(spec, base, Dataset.open(data.path), None, threads=1)
    for _ in range(steps):
        trainer.run_step(10, "stop")
    return trainer


def ours(trainer: Trainer) -> Tensor:
    with torch.no_grad():
        return trainer.model.eval()(torch.arange(40)[None])


@pytest.mark.parametrize("keys", [
    {}, {"lora_rs": True, "lora_alpha": 3.0}, {"lora_ranks": {"q_proj": 2}, "lora_dropout": 0.5},
    {"lora_targets": ["v_proj", "o_proj"]},
    {"lora_alphas": {"q_proj": 3, "up_proj": 20.0}, "lora_ranks": {"q_proj": 2}},
])
def test_a_trained_adapter_is_the_same_in_peft_and_merged(tmp_path: Path, keys: dict[str, Any]) -> None:
    trainer, out = trained(tmp_path, export_merged=True, **keys), tmp_path / "out"
    assert export.export(trainer, out) == []
    expected = ours(trainer)
    assert torch.allclose(logits(PeftModel.from_pretrained(load(tmp_path / "model"), out)), expected, atol=1e-5)
    assert torch.allclose(logits(load(out / "merged")), expected, atol=1e-5)
    assert not torch.allclose(logits(load(tmp_path / "model")), expected, atol=1e-3)


def test_the_written_adapter_gives_the_trained_output_bit_for_bit(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    export.export(trainer, tmp_path / "out")
    fresh = trained(tmp_path, steps=0, seed=5)
    assert not torch.equal(ours(fresh), ours(trainer))
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, tensor in export.masters(fresh).items():
        tensor.copy_(found[export.PREFIX + name])
    assert torch.equal(ours(fresh), ours(trainer))


def test_an_adapter_that_changes_nothing_is_said(tmp_path: Path) -> None:
    trainer = trained(tmp_path, steps=0)
    assert export.export(trainer, tmp_path / "out") == ["the adapter is zero: it does not change the model's output"]
    for tensor in export.masters(trainer).values():
        tensor.fill_(1e-30)
    [note] = export.export(trainer, tmp_path / "out")
    assert "below its precision" in note


@pytest.mark.parametrize(("what", "value"), [("0.self_attn.q_proj.lora_A", "nan"), ("1.mlp.down_proj.lora_B", "inf"),
                                             ("", "1e38")])
def test_an_adapter_that_is_no_number_is_not_exported(tmp_path: Path, what: str, value: str) -> None:
    trainer = trained(tmp_path)
    for name, tensor in export.masters(trainer).items():
        if what in name:
            tensor.fill_(float(value))
    with pytest.raises(RrdError, match="infinite or no number"):
        export.export(trainer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_export_is_of_the_masters(tmp_path: Path, dtype: str) -> None:
    trainer = trained(tmp_path, method="full", dtype=dtype)
    assert export.export(trainer, tmp_path / "out") == []
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[n], t) for n, t in export.masters(trainer).items())
    close = 1e-5 if dtype == "float32" else 0.2
    assert torch.allclose(logits(load(tmp_path / "out")), ours(trainer).float(), atol=close)


def test_a_whole_model_that_is_no_number_is_not_exported(tmp_path: Path) -> None:
    trainer = trained(tmp_path, method="full")
    next(iter(export.masters(trainer).values()))[0] = float("nan")
    with pytest.raises(RrdError, match="infinite or no number"):
        export.export(trainer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_does_not_read_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"q.lora_A.weight": torch.ones(4, 8), "q.lora_B.weight": torch.ones(8, 4)}
    real = publish.Publication.add

    def flip(self: publish.Publication, name: str, chunks: Iterator[bytes], *, size: int = 0) -> None:
        real(self, name, [bytes(c)[:-1] + b"\x01" for c in chunks] if size else chunks, size=size)

    monkeypatch.setattr(publish.Publication, "add", flip)
    with pytest.raises((Damaged, BadJob)):
        export_adapter(tensors, tmp_path / "out", AdapterSpec("/a/model", 4, 8.0), step=1)
    assert list(tmp_path.iterdir()) == []
