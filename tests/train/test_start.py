"""An existing adapter as the starting point: rrd's own and PEFT's, and what does not fit is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from toys import make_data, make_model
from transformers import AutoModelForCausalLM

from rrd import adapter
from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.models import load_base
from rrd.models.files import inspect
from rrd.models.registry import lora_targets_of
from rrd.train import export
from rrd.train.data import Dataset, prepare
from rrd.train.trainer import Trainer

IDX = torch.arange(24)[None]


def job(root: Path, **keys: Any) -> JobSpec:
    if not (root / "model").exists():
        make_model(root / "model")
        make_data(root / "data.jsonl")
    return JobSpec.model_validate({**toy_keys(root), "model": str(root / "model"), "lora_rank": 4, "lora_alpha": 6.0,
                                   "lr": 0.01, **keys})


def trainer(spec: JobSpec, root: Path, steps: int = 0) -> Trainer:
    files = inspect(Path(spec.model))
    if spec.init_adapter:
        adapter.check(Path(spec.init_adapter), spec, spec.lora_targets or lora_targets_of(files.family, files.config))
    data = prepare(spec.data, spec.model, seq_len=spec.seq_len, cache_dir=root / "cache" / "data")
    t = Trainer(spec, load_base(spec.model), Dataset.open(data.path), None, threads=1)
    for _ in range(steps):
        t.run_step(10, "stop")
    return t


def out_of(t: Trainer) -> torch.Tensor:
    with torch.no_grad():
        return t.model.eval()(IDX)


def test_it_goes_on_from_where_another_job_ended(tmp_path: Path) -> None:
    first = trainer(job(tmp_path, lora_alphas={"q_proj": 3.0}, lora_ranks={"v_proj": 2}, lora_rs=True), tmp_path, 3)
    export.export(first, tmp_path / "first")
    again = job(tmp_path, lora_alphas={"q_proj": 3}, lora_ranks={"v_proj": 2}, lora_rs=True, seed=5,
                init_adapter=str(tmp_path / "first"))
    second = trainer(again, tmp_path)
    assert torch.equal(out_of(second), out_of(first))
    assert second.step == 0 and second.identity()["init_adapter"] == second.began_as != ""
    assert "init_adapter" not in first.identity()
    second.run_step(10, "stop")
    assert not torch.equal(out_of(second), out_of(first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_peft_made(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = job(tmp_path, init_adapter=str(tmp_path / "theirs"), lora_targets=["q_proj", "down_proj"],
               lora_ranks={"down_proj": 7}, lora_alphas={"q_proj": 5.0})
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(spec.model), LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 7},
        alpha_pattern={"self_attn.q_proj": 5}, init_lora_weights=False)).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    t = trainer(spec, tmp_path)
    with torch.no_grad():
        expected = theirs.float().eval()(IDX).logits
    assert torch.allclose(out_of(t), expected, atol=1e-5 if dtype == torch.float32 else 0.05)
    export.export(t, tmp_path / "back")
    assert torch.allclose(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(spec.model), tmp_path / "back")
                          .eval()(IDX).logits, out_of(t), atol=1e-5)


def test_the_digest_follows_the_values_alone(tmp_path: Path) -> None:
    first = trainer(job(tmp_path), tmp_path, 2)
    digests = set()
    for name in ("a", "b"):
        export.export(first, tmp_path / name)
        digests.add(trainer(job(tmp_path, init_adapter=str(tmp_path / name)), tmp_path).began_as)
    assert len(digests) == 1
    file = tmp_path / "b" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] += 1e-3
    save_file(tensors, file)
    assert trainer(job(tmp_path, init_adapter=str(tmp_path / "b")), tmp_path).began_as not in digests


MISFITS: list[tuple[dict[str, Any], str, str]] = [
    ({"lora_rank": 8, "lora_alpha": 6.0}, r"has rank 4 on \w+, and this job 8", "lora_rank = 4"),
    ({"lora_alpha": 8.0}, r"has alpha 6 on \w+, and this job 8", "lora_alpha = 6"),
    ({"lora_alphas": {"o_proj": 1.0}}, "has alpha 6 on o_proj, and this job 1", "o_proj = 6"),
    ({"lora_rs": True}, "is scaled by the other rule", "lora_rs = false"),
    ({"lora_targets": ["q_proj"]}, "is on down_proj, unlike this job", "lora_targets = ["),
]


@pytest.mark.parametrize(("keys", "sentence", "hint"), MISFITS)
def test_what_does_not_fit_the_job_says_which_key(tmp_path: Path, keys: dict[str, Any], sentence: str, hint: str
                                                  ) -> None:
    export.export(trainer(job(tmp_path), tmp_path), tmp_path / "first")
    with pytest.raises(BadJob, match=sentence) as e:
        trainer(job(tmp_path, init_adapter=str(tmp_path / "first"), **keys), tmp_path)
    assert hint in e.value.hint and e.value.key == "init_adapter"


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "is no LoRA but IA3"), ({"use_dora": True}, "has DoRA"), ({"bias": "all"}, "has biases"),
    ({"modules_to_save": ["lm_head"]}, "trained as a whole"), ({"alpha_pattern": {"(a+)+$": 3}}, "more than names"),
    ({"alpha_pattern": 3}, "more than names"), ({"lora_alpha": None}, "has alpha nan"),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
def test_other_kinds_of_adapter_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    export.export(trainer(job(tmp_path), tmp_path), tmp_path / "first")
    config = tmp_path / "first" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(BadJob, match=sentence):
        trainer(job(tmp_path, init_adapter=str(tmp_path / "first")), tmp_path)


def test_an_adapter_of_another_model_is_refused_before_training(tmp_path: Path) -> None:
    export.export(trainer(job(tmp_path), tmp_path), tmp_path / "first")
    spec = job(tmp_path, init_adapter=str(tmp_path / "first"))
    file = tmp_path / "first" / "adapter_model.safetensors"
    good = load_file(file)
    first, *_ = good
    stranger = {"base_model.model.x.q_proj.lora_A.weight": torch.zeros(4, 2)}
    for tensors, sentence in (({n: t for n, t in good.items() if n != first}, "it lacks model"),
                              ({**good, **stranger}, "it has x.q_proj"),
                              ({**good, first: torch.zeros(good[first].shape[0], 3)}, "in shape"),
                              ({**good, first: torch.zeros(())}, "in shape"),
                              ({**good, first: torch.full_like(good[first], float("nan"))}, "no numbers")):
        save_file(tensors, file)
        with pytest.raises(BadJob, match=sentence):
            trainer(spec, tmp_path)
    file.rename(file.with_name("adapter_model.bin"))
    with pytest.raises(BadJob, match="pickled"):
        trainer(spec, tmp_path)
