"""RWKV-X and the other hybrids, read off their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rwkv_toys import Tensors, hybrid, saved

from rrd.errors import BadJob
from rrd.lora import attach
from rrd.models import build, load_base
from rrd.models.registry import Shape
from rrd.models.rwkv7 import Rwkv7, RwkvLM
from rrd.models.rwkv7_init import new_config
from rrd.ops import reference
from rrd.optim import AdamW
from rrd.savings import Savings
from rrd.train.step import Batch, train_step


def model_of(tensors: Tensors, path: Path, chunk: int = 8, **how: Any) -> RwkvLM:
    saved(tensors, path)
    (path / "config.json").write_text(json.dumps({"moba_chunk_size": chunk}))
    model = build(load_base(path, **how))
    assert isinstance(model, RwkvLM)
    return model


def order(model: RwkvLM) -> list[str]:
    return [b.path for b in model.config.blocks]


def test_blocks_stand_where_rwkv_x_has_them(tmp_path: Path) -> None:
    two = model_of(hybrid(prefix="rwkv.", moba=2), tmp_path / "two")
    assert order(two) == ["rwkv.blocks.0", "rwkv.blocks.1", "moba.0", "rwkv.blocks.2", "rwkv.blocks.3", "moba.1"]
    assert order(model_of(hybrid(L=3, moba=1), tmp_path / "one")) == ["blocks.0", "blocks.1", "blocks.2", "moba.0"]
    mixed = model_of(hybrid(moba=1, attn=2, rfa=4), tmp_path / "mixed")
    assert order(mixed) == ["blocks.0", "rfa.0", "blocks.1", "attn.0", "rfa.1", "blocks.2", "rfa.2", "blocks.3",
                            "moba.0", "attn.1", "rfa.3"]


def test_a_block_is_attention_then_a_channel_mix(tmp_path: Path) -> None:
    """One moba block written out, beyond chunk * topk tokens: norms, products, the reference's attention."""
    tensors = hybrid(moba=1)
    model, x = model_of(tensors, tmp_path), torch.randn(2, 40, 128)
    t = {n.removeprefix("moba.0."): p for n, p in tensors.items() if n.startswith("moba.0.")}
    norm = torch.nn.functional.layer_norm

    def heads(name: str, y: torch.Tensor) -> torch.Tensor:
        return (y @ t[f"att.{name}.weight"].T).view(2, 40, 2, 64)

    n = norm(x, (128,), t["ln1.weight"], t["ln1.bias"])
    y = reference.moba(heads("receptance", n), heads("key", n), heads("value", n), 8, 3).flatten(2)
    middle = x + y @ t["att.output.weight"].T
    n = norm(middle, (128,), t["ln2.weight"], t["ln2.bias"])
    before = torch.cat([torch.zeros(2, 1, 128), n[:, :-1]], 1)
    h = torch.relu((n + (before - n) * t["ffn.x_k"]) @ t["ffn.key.weight"].T) ** 2
    with torch.no_grad():
        got, v_first, _ = model.get_submodule("moba.0")(x, None, None)
    assert v_first is None
    torch.testing.assert_close(got, middle + h @ t["ffn.value.weight"].T, atol=2e-5, rtol=1e-4)


def test_moba_is_plain_attention_up_to_chunk_times_topk(tmp_path: Path) -> None:
    sparse = hybrid(moba=2)
    dense = {n.replace("moba.", "attn."): t for n, t in sparse.items()}
    one, two = model_of(sparse, tmp_path / "a"), model_of(dense, tmp_path / "b")
    with torch.no_grad():
        for T, same in ((24, True), (40, False)):
            idx = torch.randint(97, (1, T))
            assert torch.allclose(one(idx), two(idx), atol=1e-4) is same


def test_blocks_without_a_time_mix_are_plain_attention_in_place(tmp_path: Path) -> None:
    tensors = hybrid(L=4)
    for i in (0, 2):
        bare = {"receptance.weight", "key.weight", "value.weight", "output.weight"}
        tensors = {n: t for n, t in tensors.items()
                   if not n.startswith(f"blocks.{i}.att.") or n.removeprefix(f"blocks.{i}.att.") in bare}
    model = model_of(tensors, tmp_path)
    assert [b.kind for b in model.config.blocks] == ["attn", "rwkv", "attn", "rwkv"]
    with torch.no_grad():
        assert model(torch.randint(97, (1, 20))).isfinite().all()


KINDS: list[dict[str, int]] = [{"moba": 2}, {"attn": 1}, {"rfa": 2}, {"moba": 1, "attn": 2, "rfa": 4}]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_pieces_with_carried_states_equal_the_whole(kinds: dict[str, int], tmp_path: Path) -> None:
    model, idx = model_of(hybrid(**kinds), tmp_path), torch.randint(97, (2, 60))
    with torch.no_grad():
        whole, states, parts = model.hidden(idx), None, []
        for piece in torch.split(idx, [1, 40, 19], 1):
            hidden, states = model.carry(piece, states)
            parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradients_are_those_of_fp64_and_checkpointing_changes_nothing(kinds: dict[str, int], method: str,
                                                                       tmp_path: Path) -> None:
    tensors, found = hybrid(L=2 if 4 not in kinds.values() else 4, C=64, **kinds), []
    g = torch.Generator().manual_seed(1)
    batch = Batch(torch.randint(97, (1, 40), generator=g), torch.randint(97, (1, 40), generator=g))
    for dtype, checkpointing in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        model = model_of(tensors, tmp_path, trainable=method == "full", dtype=dtype, compute=dtype)
        named = list(model.named_parameters()) if method == "full" else attach(
            model, targets=("receptance", "key", "value", "output"), rank=4, seed=1)
        with torch.no_grad():
            for name, p in named:
                if "lora_B" in name:
                    p.normal_(generator=torch.Generator().manual_seed(2))
        optimizer = AdamW(named)
        train_step(model, optimizer, [batch], lr=0.0, clip_norm=0.0, seeds=[0],
                   savings=Savings(checkpointing=checkpointing))
        found.append({s.name: optimizer.view("grad", s).clone() for s in optimizer.layout})
    exact, plain, again = found
    for name, grad in exact.items():
        assert (plain[name] - grad).abs().max() <= 1e-3 * grad.abs().max(), name
        assert torch.equal(plain[name], again[name]), name
        assert grad.count_nonzero() == 0 if name.endswith("features") else grad.count_nonzero() > 0, name


REFUSED: dict[str, Any] = {
    "3 moba blocks, which cannot stand at equal distances among 4": lambda: hybrid(moba=3),
    "does not explain: moba.1.att.key.weight": lambda: {
        n.replace("moba.0", "moba.1"): t for n, t in hybrid(moba=1).items()},
    "does not explain: moba.0.att.x_r": lambda: hybrid(moba=1) | {"moba.0.att.x_r": torch.ones(1, 1, 128)},
    "lacks rfa.0.att.sigma": lambda: {n: t for n, t in hybrid(rfa=1).items() if not n.endswith("sigma")},
    "does not explain: mamba.0.A": lambda: hybrid() | {"mamba.0.A": torch.ones(3)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_keys_that_no_layout_explains_are_listed(sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadJob) as caught:
        load_base(saved(REFUSED[sentence](), tmp_path))
    assert sentence in str(caught.value)


def count(shapes: dict[str, Shape]) -> int:
    return sum(torch.Size(s).numel() for s in shapes.values())


@pytest.mark.parametrize(("L", "C", "m", "n"), [(12, 768, 4, 219_361_536), (32, 2560, 8, 3_576_983_040)])
def test_parameter_counts_of_the_public_sizes(L: int, C: int, m: int, n: int) -> None:
    assert count(Rwkv7().tensors(new_config(L, C, prefix="rwkv.", between={"moba": m}))) == n


def test_lora_on_all_linears_of_3_6b_has_59_million_parameters() -> None:
    shapes = Rwkv7().tensors(new_config(32, 2560, between={"moba": 8}))
    adapted = [s for n, s in shapes.items() if n.split(".")[-2] in Rwkv7.lora_targets and n.endswith(".weight")]
    assert sum(32 * sum(s) for s in adapted) == 58_982_400
