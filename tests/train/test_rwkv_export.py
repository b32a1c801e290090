"""Adapters of RWKV models: PEFT's layout, RWKV's own names, and merged models that load where the base did."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from rwkv_toys import Random, hybrid, make_rwkv, saved
from safetensors.torch import load_file
from toys import make_data, make_model, make_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from rwkv_peer import Peer, recurrence

from rrd.errors import BadJob, Damaged
from rrd.job import JobSpec
from rrd.models import build, load_base
from rrd.train import export, whole
from rrd.train.data import Dataset, prepare
from rrd.train.export import AdapterSpec
from rrd.train.trainer import Trainer

IDX = torch.randint(320, (1, 40), generator=torch.Generator().manual_seed(0))


def models(root: Path) -> dict[str, Path]:
    made = {"rwkv7": make_rwkv(root / "rwkv7")}
    for name, prefix, kinds in ("prefixed", "rwkv.", {"moba": 1}), ("hybrid", "", {"moba": 1, "attn": 1, "rfa": 1}):
        tensors = hybrid(prefix=prefix, L=2, C=64, **kinds)
        for end, scale in ("emb", 1.0), ("head", 0.1):  # a vocabulary of the tokenizer's size
            tensors[f"{prefix}{end}.weight"] = Random(3)(320, 64, scale=scale)
        make_tokenizer(root / name, vocab=320)
        made[name] = saved(tensors, root / name)
    return made


def trained(root: Path, model: Path, **keys: Any) -> Trainer:
    make_data(root / "data.jsonl")
    spec = JobSpec.model_validate({**toy_keys(root), "model": str(model), "lr": 0.01, **keys})
    data = prepare(spec.data, str(root / "rwkv7"), seq_len=spec.seq_len, cache_dir=root / "cache" / "data")
    trainer = Trainer(spec, load_base(spec.model), Dataset.open(data.path), None, threads=1)
    for _ in range(3):
        trainer.run_step(3, "stop")
    return trainer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDX % model.config.n_vocab)


KEYS: list[dict[str, Any]] = [{}, {"lora_rs": True, "lora_alpha": 5.0, "lora_ranks": {"key": 3},
                                   "lora_alphas": {"value": 9}}]


@pytest.mark.parametrize(("kind", "keys"), [*itertools.product(("rwkv7", "prefixed"), KEYS), ("hybrid", {})])
def test_merged_and_in_rwkvs_names_it_computes_what_was_trained(tmp_path: Path, kind: str, keys: dict[str, Any]
                                                                 ) -> None:
    path = models(tmp_path)[kind]
    base = load_file(path / "model.safetensors")
    trainer = trained(tmp_path, path, **keys)
    expected, spec = logits(trainer.model), AdapterSpec.of(trainer.spec)
    tensors = export.masters(trainer)
    assert export.export_merged(tensors, tmp_path / "merged", spec, step=3) == []
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == base.keys()
    assert torch.allclose(logits(build(load_base(tmp_path / "merged"))), expected, atol=2e-4)

    assert export.export_rwkv(tensors, tmp_path / "native", spec, step=3) == []
    lora = load_file(tmp_path / "native" / "rwkv_lora.safetensors")
    alpha = json.loads((tmp_path / "native" / "MANIFEST.json").read_text())["facts"]["lora_alpha"]
    assert f"lora_alpha = {alpha:g}" in (tmp_path / "native" / "README.md").read_text()
    for name, w in base.items():  # as RWKV's own tools do it
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A" in lora:
            a, b = lora.pop(f"{stem}.lora_A"), lora.pop(f"{stem}.lora_B")
            w += b @ a * (alpha / b.shape[1])
            assert torch.allclose(w, merged[name], atol=1e-6)
    assert lora == {}, "every pair has its weight"


def test_peft_names_are_the_models(tmp_path: Path) -> None:
    path = models(tmp_path)["rwkv7"]
    export.export(trained(tmp_path, path), tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    base = load_file(path / "model.safetensors")
    stems = {n.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for n in found if "lora_A" in n}
    assert stems and all(f"{s}.weight" in base for s in stems)
    again = trained(tmp_path, path, init_adapter=str(tmp_path / "out"), seed=9)
    assert again.began_as


@pytest.mark.parametrize("kind", ["rwkv7", "prefixed"])
def test_what_the_readme_says_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its programs, in the directory of a merged model. (That `rrd export` takes its command: tests/cli.)"""
    path = models(tmp_path)[kind]
    trainer = trained(tmp_path, path, lora_targets=["key"])
    export.export(trainer, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "AutoModelForCausalLM" not in card
    assert "rrd export JOB merged --merged\n" in card
    programs = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(programs) == (2 if kind == "rwkv7" else 1)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}.items():
        monkeypatch.setenv(name, value)  # for good where the package is imported here first
    export.export_merged(export.masters(trainer), Path("merged"), AdapterSpec.of(trainer.spec), step=3)
    with torch.no_grad():
        expected = trainer.model.eval()(torch.tensor([[1, 2, 3]]))[0]
    for program in programs if hasattr(torch, "compiler") else programs[:1]:  # the package needs torch 2.1
        found: dict[str, Any] = {}
        exec(program, found)
        assert torch.allclose(found["logits"].detach().view(-1, len(expected[0]))[-1], expected[-1], atol=2e-4)


class Tree(Peer):
    """Public code's RWKV-7 with real ``nn.Linear``s, under the names of the model's files."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors, 0, recurrence)
        for name, w in tensors.items():
            if name.startswith("blocks.") and w.dim() == 2 and name.endswith(".weight"):
                *parents, leaf = name.removesuffix(".weight").split(".")
                at: torch.nn.Module = self
                for part in parents:
                    if not hasattr(at, part):
                        at.add_module(part, torch.nn.Module())
                    at = at.get_submodule(part)
                linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
                linear.weight.data = w
                at.add_module(leaf, linear)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.get_submodule(name)(x)
        return y


@pytest.mark.parametrize("keys", KEYS, ids=["plain", "mixed"])
def test_peft_loads_it_and_computes_the_same(tmp_path: Path, keys: dict[str, Any]) -> None:
    from peft import PeftModel

    path = models(tmp_path)["rwkv7"]
    trainer = trained(tmp_path, path, **keys)
    export.export(trainer, tmp_path / "out")
    plain = load_file(path / "model.safetensors")
    peer = PeftModel.from_pretrained(Tree(plain), tmp_path / "out").eval()
    with torch.no_grad():
        ours, base = logits(trainer.model), Tree(plain)(IDX)
        assert torch.allclose(peer(IDX), ours, atol=1e-4)
        assert not torch.allclose(base, ours, atol=1e-2)


def test_other_families_have_no_such_format(tmp_path: Path) -> None:
    make_model(tmp_path / "llama")
    with pytest.raises(BadJob, match="llama models have no format of RWKV's"):
        export.export_rwkv({}, tmp_path / "out", AdapterSpec(str(tmp_path / "llama"), 4, 8.0), step=1)


def test_a_merge_that_went_wrong_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models(tmp_path)["rwkv7"]
    trainer = trained(tmp_path, path)
    real, calls = whole._merge, []

    def once_wrong(w: torch.Tensor, update: whole.Update) -> torch.Tensor:
        calls.append(1)
        return w + 1 if len(calls) <= len(export.ranks(export.masters(trainer))) else real(w, update)

    monkeypatch.setattr(whole, "_merge", once_wrong)
    with pytest.raises(Damaged, match=r"does not hold .* as it was merged"):
        export.export_merged(export.masters(trainer), tmp_path / "out", AdapterSpec.of(trainer.spec), step=3)
    assert not (tmp_path / "out").exists()



