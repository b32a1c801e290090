from __future__ import annotations

import weakref
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_model import adapter, load, logits, save_model, with_adapter

from rrd.errors import BadJob
from rrd.train import export, whole
from rrd.train.export import AdapterSpec, export_full, export_merged


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
    alive, most, shares = 0, 0, []
    real = whole._merge

    def watched(w: Tensor, update: whole.Update) -> Tensor:
        nonlocal alive, most
        memory = array("f", real(w, update).flatten().tolist())  # a tensor's own memory cannot be watched
        weakref.finalize(memory, gone)
        alive += 1
        most = max(most, alive)
        return torch.frombuffer(memory, dtype=torch.float32).view(w.shape)

    def gone() -> None:
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(whole, "_merge", watched)
    export_merged(adapter(base), tmp_path / "out", AdapterSpec(str(tmp_path / "model"), 4, 8.0), step=1,
                  alive=lambda _, share: shares.append(share))
    assert most == 1
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert torch.allclose(logits(load(tmp_path / "out")), with_adapter(base, adapter(base), {4: 2.0}), atol=2e-5)


def test_merging_into_a_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    tensors = {"model.layers.9.q.lora_A.weight": torch.ones(4, 32), "model.layers.9.q.lora_B.weight": torch.ones(32, 4)}
    with pytest.raises(BadJob, match=r"no tensor model\.layers\.9\.q\.weight"):
        export_merged(tensors, tmp_path / "out", AdapterSpec(str(tmp_path / "model"), 4, 8.0), step=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_trained_model_keeps_names_types_and_ties(tmp_path: Path, stored_twice: bool) -> None:
    base = save_model(tmp_path / "model", tied=True, dtype=torch.bfloat16)
    if stored_twice:
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
