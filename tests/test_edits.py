"""What an edit of a job file may change: kinds of keys, identity, and what a running job takes over."""

from __future__ import annotations

import pytest

from rrd import edits, job
from rrd.errors import BadJob
from rrd.job import JobSpec


def spec(**keys: object) -> JobSpec:
    return JobSpec.model_validate({"model": "/m", "data": "/d.jsonl", **keys})


def test_identity_ignores_what_changes_no_number() -> None:
    same = edits.identity(spec())
    for keys in ({"weight": 3.0}, {"die": 1}, {"output": "/o"}, {"lora_alpha": 64.0}, {"resume": "compatible"},
                 {"max_steps": 3}, {"lora_rank": 32}, {"eval_data": "/e"}, {"keep": 9}, {"export_merged": True},
                 {"model": "/moved"}, {"data": "/moved.txt"}, {"tokenizer": "/moved.json"}, {"init_adapter": "/moved"}):
        assert edits.identity(spec(**keys)) == same, keys
    assert edits.identity(spec(lora_targets=["a", "b"])) == edits.identity(spec(lora_targets=["b", "a"]))
    assert edits.identity(spec(method="full")) == edits.identity(spec(method="full", lora_rank=8))


def test_identity_changes_with_every_identity_key() -> None:
    other: dict[str, object] = {"lora_rank": 8, "lora_alpha": 1.0, "seed": 1, "lr": 0.1,
                                "quantize": True, "lora_targets": ["q_proj"], "betas": [0.8, 0.9], "dtype": "float32"}
    hashes = {edits.identity(spec(**{k: v})) for k, v in other.items()}
    assert len(hashes | {edits.identity(spec())}) == len(other) + 1


def test_an_identity_written_down_long_ago_still_holds() -> None:
    """Checkpoints carry it: changing the normalization, or any default, orphans them all."""
    assert edits.identity(spec()) == "eb55066e48e49af263f324db507051df6af20188efbe4a18d41302c03608fee7"


def test_every_key_is_of_one_kind_only() -> None:
    assert not edits.LIVE_KEYS & edits.RESTART_KEYS
    assert not (edits.LIVE_KEYS | edits.RESTART_KEYS) & edits.PLACE_KEYS
    assert set(JobSpec.model_fields) >= edits.LIVE_KEYS | edits.RESTART_KEYS | edits.PLACE_KEYS | set(job.PATH_KEYS)


def test_edits_are_told_apart() -> None:
    old, new = spec(), spec(weight=2.0, die=3, lora_rank=8, output="/o", lora_alpha=64.0)
    assert edits.changes(old, new) == ({"weight", "die"}, {"lora_rank", "output"})
    assert edits.changes(old, spec(lora_alpha=64.0)) == (set(), set())
    taken = edits.with_live(old, new)
    assert (taken.weight, taken.die, taken.lora_rank, taken.output) == (2.0, 3, 32, None)


def test_live_keys_that_do_not_fit_the_rest_are_found() -> None:
    """An edit is checked against the keys that stay, too: of one that only fits as a whole nothing is taken."""
    assert edits.changes(spec(), spec(eval_data="/e", eval_every=5, weight=2.0)) == (
        set(), {"eval_data", "eval_every", "weight"})
    assert edits.changes(spec(warmup_steps=10), spec(max_steps=5)) == (set(), {"warmup_steps", "max_steps"})
    with pytest.raises(BadJob, match="warmup_steps"):
        edits.with_live(spec(warmup_steps=10), spec(max_steps=5))
