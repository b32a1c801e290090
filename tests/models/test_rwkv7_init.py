"""RWKV-7 from scratch: counts, the published initialisation, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rrd.models import build, load_base, new
from rrd.models.rwkv7 import Rwkv7
from rrd.models.rwkv7_init import initial, new_config, published_ranks
from rrd.optim import AdamW
from rrd.train.step import Batch, train_step


@pytest.mark.parametrize(("L", "C", "ranks", "n"), [
    (12, 768, {}, 191_034_624), (24, 1024, {"d_g": 128}, 450_767_872), (24, 2048, {}, 1_527_404_544),
    (32, 2560, {}, 2_947_735_040)])
def test_parameter_counts_of_the_public_sizes(L: int, C: int, ranks: dict[str, int], n: int) -> None:
    config = new_config(L, C, ranks=ranks)
    assert sum(torch.Size(s).numel() for s in Rwkv7().tensors(config).values()) == n
    with torch.device("meta"):
        assert sum(p.numel() for p in Rwkv7().skeleton(config, compute=torch.float32).parameters()) == n


def test_ranks_grow_as_in_the_public_sizes() -> None:
    assert published_ranks(768) == {"d_w": 64, "d_a": 64, "d_v": 32, "d_g": 128}
    assert published_ranks(2560) == {"d_w": 96, "d_a": 96, "d_v": 64, "d_g": 320}


L, C, V = 4, 128, 300


def tensor(name: str) -> Tensor:
    config = new_config(L, C, V, between={"moba": 2, "rfa": 1})
    return initial(name, Rwkv7().tensors(config)[name], config, seed=3)


def test_vectors_are_as_published() -> None:
    """Numbers worked out by hand for layer 1 of 4, channels 0, 40 and 127 of 128."""
    expected = {
        "att.x_r": [1.0, 0.1601, 0.00118], "att.x_a": [1.0, 0.54394, 0.00528], "att.x_v": [1.0, 0.457, 0.00411],
        "att.w0": [-8.0, -4.4947, 3.0], "att.a0": [-0.69, -0.24217, 0.31], "att.v0": [0.93, 0.80402, 0.53],
        "att.k_k": [0.76, 0.72850, 0.66], "att.k_a": [1.02] * 3, "ffn.x_k": [1.0, 0.3079, 0.00248],
        "att.ln_x.weight": [0.61557] * 3, "ln1.weight": [1.0] * 3, "ln2.bias": [0.0] * 3, "att.ln_x.bias": [0.0] * 3}
    for name, numbers in expected.items():
        got = tensor(f"blocks.1.{name}").flatten()[torch.tensor([0, 40, 127])]
        torch.testing.assert_close(got, torch.tensor(numbers), atol=2e-5, rtol=0.0, msg=name)
    assert torch.equal(tensor("blocks.1.att.r_k"), torch.full((2, 64), -0.04))


def gain(w: Tensor) -> float:
    """The one singular value that an orthogonal matrix has."""
    s = torch.linalg.svdvals(w.double())
    assert (s.max() - s.min()) < 1e-4 * s.max()
    return float(s.max())


def test_matrices_are_as_published() -> None:
    for at in ("blocks.1", "moba.1", "rfa.0"):
        assert tensor(f"{at}.att.output.weight").count_nonzero() == 0
        assert tensor(f"{at}.ffn.value.weight").count_nonzero() == 0
        assert gain(tensor(f"{at}.att.key.weight")) == pytest.approx(0.1, rel=1e-4)
        assert gain(tensor(f"{at}.att.receptance.weight")) == pytest.approx(1.0, rel=1e-4)
        assert gain(tensor(f"{at}.ffn.key.weight")) == pytest.approx(1.0, rel=1e-4)
    for n in "wavg":
        assert tensor(f"blocks.1.att.{n}1").count_nonzero() == 0
        assert gain(tensor(f"blocks.1.att.{n}2")) == pytest.approx(0.1, rel=1e-4)
    assert gain(tensor("head.weight")) == pytest.approx(0.5 * (V / C) ** 0.5, rel=1e-4)
    emb = tensor("emb.weight")
    assert 0.99e-4 < emb.abs().max() <= 1e-4
    assert not torch.equal(tensor("blocks.1.att.key.weight"), tensor("blocks.2.att.key.weight"))
    assert torch.equal(tensor("head.weight"), tensor("head.weight"))


def test_a_new_model_directory_loads_and_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    where = tmp_path / "new"
    command = f"rwkv7 {where} --layers 2 --width 64 --vocab 40 --moba 1 --beside {file}".split()
    assert new.main(command) == 0
    assert "parameters" in capsys.readouterr().out
    assert (where / "tokenizer.json").read_text() == "{}"
    model = build(load_base(where, trainable=True))
    optimizer = AdamW(list(model.named_parameters()), betas=(0.9, 0.99), eps=1e-18, rule=Rwkv7.recipe.rule)
    idx = torch.arange(33).remainder(11)[None].repeat(2, 1)
    batch = Batch(idx[:, :-1], idx[:, 1:])
    losses = [train_step(model, optimizer, [batch], lr=3e-3, clip_norm=1.0, seeds=[0]).loss for _ in range(40)]
    assert losses[0] == pytest.approx(3.69, abs=0.05)  # log 40: it knows nothing
    assert losses[-1] < 0.1
    assert new.main(command) == BAD_JOB
    assert "is there already" in capsys.readouterr().err


BAD_JOB = 78


@pytest.mark.parametrize(("option", "sentence"), [
    (["--width", "100"], "multiple of 64"), (["--moba", "3"], "equal distances")])
def test_sizes_that_cannot_be_are_refused(option: list[str], sentence: str, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert new.main(["rwkv7", str(tmp_path / "x"), "--layers", "4", "--width", "64", *option]) == BAD_JOB
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
