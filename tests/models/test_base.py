from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import make_model

from rrd.errors import BadJob
from rrd.models import build, load_base


def test_tensors_are_those_of_the_file_in_the_dtype_asked_for(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    base = load_base(path, dtype=torch.bfloat16)
    expected = load_file(path / "model.safetensors")
    assert base.tensors.keys() == expected.keys()
    assert all(torch.equal(t, expected[n].bfloat16()) for n, t in base.tensors.items())
    assert all(t.data_ptr() % 64 == 0 for t in base.tensors.values())


def test_models_of_one_base_share_its_memory(tmp_path: Path) -> None:
    base = load_base(make_model(tmp_path / "m"))
    one, two = build(base), build(base)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert p.data_ptr() == q.data_ptr() == base.tensors[name].data_ptr()
        assert not p.requires_grad


def test_a_trainable_base_moves_into_its_model(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    base = load_base(path, trainable=True, store_dir=tmp_path / "store")
    model = build(base)
    assert base.tensors == {}
    assert all(p.requires_grad for p in model.parameters())
    assert load_base(path).key != base.key


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    first = load_base(path).digest
    assert load_base(path, dtype=torch.bfloat16).digest == first
    assert load_base(make_model(tmp_path / "copy")).digest == first
    assert load_base(make_model(tmp_path / "other", seed=1)).digest != first
    config = json.loads((path / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    (path / "config.json").write_text(json.dumps(config))
    assert load_base(path).digest != first


def test_progress_counts_up_to_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_base(make_model(tmp_path / "m"), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_damage_gets_one_sentence(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    file = path / "model.safetensors"
    tensors = load_file(file)

    def refused(sentence: str) -> None:
        with pytest.raises(BadJob) as caught:
            load_base(path)
        assert sentence in str(caught.value)

    save_file(tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, file)
    refused("model.norm.weight in dtype I8")
    save_file(tensors | {"model.layers.0.self_attn.x": torch.ones(1)}, file)
    refused("does not explain: model.layers.0.self_attn.x")
    save_file({n: t for n, t in tensors.items() if "norm" not in n}, file)
    refused("lacks layer 1")
    save_file(tensors, file)
    os.truncate(file, file.stat().st_size - 4)
    refused("is cut short")
    (path / "config.json").unlink()
    save_file(tensors, file)
    refused("no family knows this model")
