from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from toy_tokenizer import byte_level, save

from rrd.errors import BadJob, Damaged, DiskTrouble, RrdError
from rrd.job import JobSpec
from rrd.models import load_base
from rrd.train import export, publish, whole
from rrd.train.data import Dataset, prepare
from rrd.train.export import AdapterSpec, export_adapter, export_full, export_merged
from rrd.train.trainer import Trainer

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_model(directory: Path, *, tied: bool = False,
               dtype: torch.dtype = torch.float32, vocab: int = 64) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(40)[None]).logits
    return found


def adapter(model: torch.nn.Module, rank: int = 4, ranks: dict[str, int] | None = None) -> dict[str, Tensor]:
    """A random adapter of every linear in the blocks, as training would leave it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for path, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and path != "lm_head":
            r = (ranks or {}).get(path.rpartition(".")[2], (ranks or {}).get(path, rank))
            tensors[f"{path}.lora_A.weight"] = torch.randn(r, linear.in_features, generator=generator) / 4
            tensors[f"{path}.lora_B.weight"] = torch.randn(linear.out_features, r, generator=generator) / 4
    return tensors


def with_adapter(model: torch.nn.Module, tensors: dict[str, Tensor], scale: dict[int, float]) -> Tensor:
    """The logits by the formula, in float64: y = W x + scale B A x."""
    model = model.double()
    for path, r in export.ranks(tensors).items():
        delta = tensors[f"{path}.lora_B.weight"].double() @ tensors[f"{path}.lora_A.weight"].double()
        model.get_submodule(path).weight.data += scale[r] * delta  # type: ignore[operator]
    return logits(model).float()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


def load(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    return model


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


def digests(out: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()}


def test_the_same_adapter_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    tensors, spec = adapter(load(model_dir)), AdapterSpec(str(model_dir), 4, 8.0)
    export_adapter(tensors, tmp_path / "a", spec, step=7)
    export_adapter(dict(reversed(tensors.items())), tmp_path / "b", spec, step=7)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_model_loads_and_computes_the_same(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    base = save_model(tmp_path / "model", tied=tied, dtype=dtype)
    tensors = adapter(base)
    assert export_merged(tensors, tmp_path / "out", AdapterSpec(str(tmp_path / "model"), 4, 8.0), step=1) == []
    merged = load(tmp_path / "out")
    assert merged.dtype == dtype
    assert merged.config.tie_word_embeddings == tied
    expected = with_adapter(load(tmp_path / "model"), tensors, {4: 2.0})
    assert torch.allclose(logits(merged).float(), expected, atol=2e-5 if dtype == torch.float32 else 0.1)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("model", "out"))
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {f"{path}.weight" for path in export.ranks(tensors)}


def test_a_sharded_base_is_merged_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    base.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    made: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, shares = 0, []
    real = whole._merge

    def watched(w: Tensor, update: whole.Update) -> Tensor:
        nonlocal most
        merged = real(w, update)
        made.add(merged)
        most = max(most, len(made))
        return merged

    monkeypatch.setattr(whole, "_merge", watched)
    export_merged(adapter(base), tmp_path / "out", AdapterSpec(str(tmp_path / "model"), 4, 8.0), step=1,
                  alive=lambda _, share: shares.append(share))
    assert most == 1
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert torch.allclose(logits(load(tmp_path / "out")), with_adapter(base, adapter(base), {4: 2.0}), atol=2e-5)


def test_merging_into_a_model_that_lacks_a_weight_is_refused(model_dir: Path, tmp_path: Path) -> None:
    tensors = {"model.layers.9.q.lora_A.weight": torch.ones(4, 32), "model.layers.9.q.lora_B.weight": torch.ones(32, 4)}
    with pytest.raises(BadJob, match=r"no tensor model\.layers\.9\.q\.weight"):
        export_merged(tensors, tmp_path / "out", AdapterSpec(str(model_dir), 4, 8.0), step=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_trained_model_keeps_names_types_and_ties(tmp_path: Path, stored_twice: bool) -> None:
    base = save_model(tmp_path / "model", tied=True, dtype=torch.bfloat16)
    if stored_twice:
        from safetensors.torch import save_file
        found = load_file(tmp_path / "model" / "model.safetensors")
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
        save_file(found, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    trained = {n: p.detach().float() + 0.25 for n, p in base.named_parameters()}
    assert export_full(trained, tmp_path / "out", str(tmp_path / "model"), step=1) == []
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    assert all(torch.equal(after[n], t.bfloat16()) for n, t in trained.items())
    assert ("lm_head.weight" in after) == stored_twice
    model = load(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, trained["model.embed_tokens.weight"].bfloat16())


def test_a_model_that_training_left_as_it_was_is_said(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model")
    notes = export_full(dict(base.named_parameters()), tmp_path / "out", str(tmp_path / "model"), step=0)
    assert notes == ["the model is still what it was before training"]
    assert torch.equal(logits(load(tmp_path / "out")), logits(base))


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


Small = tuple[dict[str, Tensor], AdapterSpec]


@pytest.fixture
def small() -> Small:
    tensors = {"q.lora_A.weight": torch.ones(4, 8), "q.lora_B.weight": torch.ones(8, 4)}
    return tensors, AdapterSpec("/a/model", 4, 8.0)


def test_only_what_is_ours_is_replaced(tmp_path: Path, small: Small) -> None:
    out = tmp_path / "out"
    export_adapter(small[0], out, small[1], step=1)
    small[0]["q.lora_B.weight"] = torch.zeros(8, 4)
    (tmp_path / ".trash-out-0badcafe").mkdir()
    (tmp_path / ".tmp-out-0badcafe").mkdir()
    (tmp_path / ".tmp-out2-0badcafe").mkdir()
    assert export_adapter(small[0], out, small[1], step=2) == []
    assert not load_file(out / "adapter_model.safetensors")["base_model.model.q.lora_B.weight"].any()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-out2-0badcafe", "out"], "another output's is left alone"


@pytest.mark.parametrize("what", ["directory", "file", "older tool", "forged"])
def test_what_is_not_ours_is_refused(tmp_path: Path, small: Small, what: str) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / ("adapter.safetensors" if what == "older tool" else "notes.txt")).write_text("mine")
        if what == "forged":
            (out / "MANIFEST.json").write_text('{"kind": "theirs"}')
    with pytest.raises(BadJob, match=r"rrd did not write|no directory") as e:
        export_adapter(small[0], out, small[1], step=1)
    assert "another output" in e.value.hint
    assert "mine" in (out if what == "file" else next(p for p in out.iterdir() if p.suffix != ".json")).read_text()


def test_an_empty_directory_and_a_link_to_one_are_fine(tmp_path: Path, small: Small) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export_adapter(small[0], tmp_path / "link", small[1], step=1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "adapter_config.json").exists()


def test_what_others_put_into_our_directory_is_kept(tmp_path: Path, small: Small) -> None:
    out = tmp_path / "out"
    export_adapter(small[0], out, small[1], step=1)
    (out / "notes.txt").write_text("mine")
    (out / "README.md").write_text("edited")
    [note] = export_adapter(small[0], out, small[1], step=2)
    [aside] = [p for p in tmp_path.iterdir() if p.name.startswith("out.before-")]
    assert str(aside) in note
    assert (aside / "notes.txt").read_text() == "mine"
    assert export_adapter(small[0], out, small[1], step=3) == []


def test_a_failed_write_keeps_the_earlier_output(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    export_adapter(small[0], tmp_path / "out", small[1], step=1)
    before = digests(tmp_path / "out")
    monkeypatch.setattr(export, "_check_file", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(DiskTrouble, match="the disk is full"):
        export_adapter(small[0], tmp_path / "out", small[1], step=2)
    assert digests(tmp_path / "out") == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_that_does_not_read_back_is_not_published(tmp_path: Path, small: Small,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    real = publish.Publication.add

    def flip(self: publish.Publication, name: str, chunks: Iterator[bytes], *, size: int = 0) -> None:
        real(self, name, [bytes(c)[:-1] + b"\x01" for c in chunks] if size else chunks, size=size)

    monkeypatch.setattr(publish.Publication, "add", flip)
    with pytest.raises((Damaged, BadJob)):
        export_adapter(small[0], tmp_path / "out", small[1], step=1)
    assert list(tmp_path.iterdir()) == []
