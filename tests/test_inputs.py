"""What is seen of a job's inputs from outside: each thing that could only fail later is one sentence with a hint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import headers
import pytest
from bridge_toys import make_bridged
from toys import make_model

from rrd import inputs, safetensors_header
from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.models.llama import Llama
from rrd.models.registry import families, reads_of
from rrd.train.tokenize import KINDS
from rrd.worker import resident

GPT2 = {"model_type": "gpt2", "n_positions": 64}
RWKV = {"emb.weight": (32, 64), "head.weight": (32, 64), "blocks.0.ln0.weight": (64,),
        "blocks.0.att.key.weight": (64, 64)}


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """Models, adapters and data of every kind that a job may name by mistake."""
    headers.model(tmp_path / "model")
    headers.model(tmp_path / "unknown", None)
    headers.model(tmp_path / "mute", tokenizer=False)
    headers.model(tmp_path / "gpt2", GPT2, {"wpe.weight": (64, 8), "h.0.attn.c_attn.weight": (8, 24)})
    headers.model(tmp_path / "rwkv", None, RWKV)
    (tmp_path / "empty").mkdir()
    headers.lora(tmp_path / "lora")
    headers.lora(tmp_path / "deep", layer=7)
    headers.lora(tmp_path / "attention", linears={"self_attn.q_proj": (8, 8)})
    headers.lora(tmp_path / "wide", linears={**headers.LINEARS, "self_attn.q_proj": (8, 12)})
    for name in ("a.jsonl", "a.csv", "a.jsonl.gz", "none"):
        (tmp_path / name).write_text("x")
    (tmp_path / "nothing.txt").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path


def spec(box: Path, **keys: Any) -> JobSpec:
    paths = {k: str(box / keys.get(k, default)) for k, default in (("model", "model"), ("data", "a.jsonl"))}
    more = {k: str(box / v) if k in ("eval_data", "tokenizer", "init_adapter") else v for k, v in keys.items()}
    return JobSpec.model_validate({"lora_rank": 4, "seq_len": 32, **more, **paths})


BAD = [
    ({"data": "empty"}, "`data` is a directory", "cat *.jsonl"),
    ({"eval_data": "empty"}, "`eval_data` is a directory", "cat *.jsonl"),
    ({"data": "a.csv"}, "not .csv", "convert it to .jsonl"),
    ({"data": "a.jsonl.gz"}, "not .gz", "gunzip"),
    ({"data": "none"}, "not nothing", "rename it"),
    ({"data": "pipe.jsonl"}, "`data` is not a regular file", "write a file"),
    ({"model": "empty"}, "has no safetensors file", "name the directory"),
    ({"model": "unknown"}, "has no config.json that says what it is", "fetch"),
    ({"model": "lora"}, "is an adapter, no model", "`init_adapter`"),
    ({"model": "mute"}, "no tokenizer found at", "beside the model"),
    ({"tokenizer": "empty"}, "no tokenizer found at", "beside the model"),
    ({"lora_targets": ["query"]}, "`lora_targets`: the model has no linear module 'query'", "it has down_proj, q_proj"),
    ({"lora_ranks": {"query": 2}}, "`lora_ranks`: the model has no linear module 'query'", "down_proj"),
    ({"lora_alphas": {"query": 2.0}}, "`lora_alphas`: the model has no linear module 'query'", "down_proj"),
    ({"chunk_len": 16}, "llama models cannot run a sample in pieces", "leave it out"),
    ({"model": "gpt2", "seq_len": 65}, "the model has positions for 64 tokens", "seq_len = 64"),
    ({"init_adapter": "empty"}, "the adapter to start from has no adapter_config.json", "adapter_model.safetensors"),
    ({"init_adapter": "a.jsonl"}, "the adapter to start from is a file", "name the directory"),
    ({"init_adapter": "lora", "lora_rank": 8}, "has rank 4 on", "lora_rank = 4"),
    ({"init_adapter": "lora", "lora_alpha": 1.0}, "has alpha 8 on", "lora_alpha = 8"),
    ({"init_adapter": "lora", "lora_rs": True}, "is scaled by the other rule", "lora_rs = false"),
    ({"init_adapter": "attention"}, "is not on down_proj", 'lora_targets = ["q_proj"]'),
    ({"init_adapter": "deep"}, "is of another model: it has model.layers.7", "this very model"),
    ({"init_adapter": "wide"}, "lora_A.weight is [4, 12], and the weight there [8, 8]", "this very model"),
]


@pytest.mark.parametrize(("keys", "said", "hint"), BAD, ids=[said for _, said, _ in BAD])
def test_what_could_only_fail_later_is_said(box: Path, keys: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(BadJob) as e:
        inputs.look(spec(box, **keys))
    assert said in e.value.message and hint in e.value.hint and e.value.key


@pytest.mark.parametrize("keys", [
    {}, {"model": "rwkv", "chunk_len": 16, "lora_targets": ["key"]}, {"model": "gpt2", "seq_len": 64},
    {"init_adapter": "lora"}, {"init_adapter": "attention", "lora_targets": ["q_proj"]},
    {"method": "full", "lora_targets": ["query"]},
    {"model": "later", "data": "later.jsonl", "init_adapter": "later", "tokenizer": "later.json", "eval_data": "l.txt"},
], ids=str)
def test_what_is_right_or_not_there_yet_is_not_refused(box: Path, keys: dict[str, Any]) -> None:
    assert inputs.look(spec(box, **keys)) == []


@pytest.mark.parametrize(("keys", "said"), [
    ({"eval_data": "a.jsonl"}, "`eval_data` is the text that it trains on"),
    ({"data": "nothing.txt"}, "`data` is empty so far"),
    ({"seq_len": 2049}, "`seq_len` is 2049, and the model was made for up to 2048 tokens"),
    ({"model": "gpt2", "lora_targets": ["q_proj"]}, "no linear module 'q_proj', as far as its files tell: it has"),
])
def test_what_is_odd_but_may_be_meant_is_a_warning(box: Path, keys: dict[str, Any], said: str) -> None:
    [sentence] = inputs.look(spec(box, **keys))
    assert said in sentence


def test_what_this_user_may_not_read_is_left_to_the_daemon(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(safetensors_header.os, "open", closed)
    assert inputs.look(spec(box, lora_targets=["query"])) == []


def test_it_knows_the_same_models_and_tokenizers_as_the_worker() -> None:
    assert reads_of(Llama()) == inputs.LLAMAS
    assert {f.name for f in families()} == {"llama", "rwkv7", "transformers"}
    assert tuple(KINDS) == inputs.TOKENIZERS


@pytest.mark.parametrize(("family", "keys", "said"), [
    ("gpt2", {"lora_targets": ["q_proj"]}, "the model has no linear module 'q_proj'"),
    ("gpt2", {"lora_ranks": {"q_proj": 2}}, "the model has no linear module 'q_proj'"),
    ("gpt2", {"seq_len": 257}, "the model has positions for 256 tokens"),
    ("gpt2", {"chunk_len": 64}, "transformers models cannot run a sample in pieces"),
    ("llama", {"chunk_len": 64}, "llama models cannot run a sample in pieces"),
    ("llama", {"init_adapter": "deep", "lora_targets": ["q_proj", "v_proj", "down_proj"]}, "it has model.layers.7"),
])
def test_the_worker_that_prepares_a_job_looks_at_the_model_itself(box: Path, family: str, keys: dict[str, Any],
                                                                  said: str) -> None:
    """Also at one that comes through transformers, whose files do not tell all: no die is needed to see it."""
    make_model(box / "llama", vocab=32) if family == "llama" else make_bridged(box / "gpt2-real", "gpt2")
    model = "llama" if family == "llama" else "gpt2-real"
    (box / model / "tokenizer.json").touch()
    with pytest.raises(BadJob) as e:
        resident.check(spec(box, model=model, **keys), box / "out")
    assert said in e.value.message and e.value.hint
