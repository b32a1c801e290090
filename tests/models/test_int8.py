"""INT8 bases: what they hold, that products and gradients are those of s q, and that training hardly notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import toy_keys
from rwkv_toys import make_rwkv
from safetensors.torch import load_file, save_file
from toys import make_data, make_model

from rrd.job import JobSpec
from rrd.lora import attach
from rrd.models import Base, CausalLM, build, files, load_base
from rrd.models.dtypes import itemsize
from rrd.models.int8 import quantize, quantized_names, scale_of
from rrd.optim import AdamW
from rrd.train.data import Dataset, prepare
from rrd.train.export import export
from rrd.train.memory import estimate
from rrd.train.step import Batch, train_step
from rrd.train.trainer import Trainer

SMOL = Path(__file__).parents[2] / ".demo" / "models" / "SmolLM2-135M-Instruct"


def make(path: Path, family: str) -> Path:
    return make_rwkv(path) if family == "rwkv7" else make_model(path, tie=False)


def test_a_row_is_within_half_a_step_and_zeros_stay_zeros() -> None:
    w = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 9)[:, None]
    w[3] = 0.0
    q, s = quantize(w)
    assert q.dtype == torch.int8
    assert bool(((w - q * s[:, None]).abs() <= 0.5001 * s[:, None]).all())
    assert q[3].count_nonzero() == 0
    assert bool((q[s != 1.0].abs().amax(1) == 127).all())


@pytest.mark.parametrize("family", ["llama", "rwkv7"])
@pytest.mark.parametrize("piece", [1 << 20, 200])
def test_only_linears_of_blocks_are_quantized_wherever_the_file_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, piece: int
) -> None:
    monkeypatch.setattr(files, "PIECE", piece)
    path = make(tmp_path / "m", family)
    exact, base = load_base(path).tensors, load_base(path, quantize="int8").tensors
    linear = {n for n, t in base.items() if t.dtype == torch.int8}
    assert linear == {n for n in exact if n.endswith(("_proj.weight", "key.weight", "value.weight", "output.weight",
                                                      "receptance.weight"))}
    assert base.keys() == exact.keys() | {scale_of(n) for n in linear}
    for name, t in exact.items():
        if name in linear:
            q, s = quantize(t)
            assert torch.equal(base[name], q)
            assert torch.equal(base[scale_of(name)], s)
        else:
            assert torch.equal(base[name], t)


def test_the_store_holds_int8_beside_the_float_copy(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", hidden=128, ffn=256)
    own = load_base(path, quantize=True)
    for _ in range(2):  # written, then found
        base = load_base(path, quantize=True, store_dir=tmp_path / "store")
        assert (base.key, base.digest) == (own.key, own.digest)
        assert all(torch.equal(t, own.tensors[n]) for n, t in base.tensors.items())
    exact = load_base(path, store_dir=tmp_path / "store")
    assert (exact.digest, exact.key != base.key) == (base.digest, True)
    linears = [n for n, t in base.tensors.items() if t.dtype == torch.int8]
    held = sum(base.tensors[m].numel() * itemsize(base.tensors[m].dtype) for n in linears for m in (n, scale_of(n)))
    assert held <= 1.05 * sum(exact.tensors[n].numel() for n in linears)


def gradient(model: CausalLM, targets: tuple[str, ...], *, length: int = 48, ids: torch.Tensor | None = None
             ) -> tuple[float, torch.Tensor]:
    """Loss and all LoRA gradients of one step, B's included: they begin at a random place."""
    named = attach(model, targets=targets, rank=4)
    g = torch.Generator().manual_seed(3)
    for name, p in named:
        if "lora_B" in name:
            p.data.normal_(generator=g, std=0.01)
    optimizer = AdamW(named)
    ids = torch.randint(0, 90, (2, length + 1), generator=g) if ids is None else ids
    result = train_step(model, optimizer, [Batch(ids[:, :-1], ids[:, 1:])], lr=0.0, clip_norm=0.0, seeds=[0])
    return result.loss, optimizer.grad.clone()


def dequantized(path: Path) -> Base:
    """The float base whose linears are what the int8 ones stand for."""
    base, held = load_base(path), load_base(path, quantize=True).tensors
    for name, turned in quantized_names(base.family, base.config).items():
        w = held[name] * held[scale_of(name)][..., None]
        base.tensors[name] = w.transpose(-1, -2).contiguous() if turned else w
    return base


@pytest.mark.parametrize("family", ["llama", "rwkv7"])
def test_gradients_are_those_of_the_weights_it_stands_for(tmp_path: Path, family: str) -> None:
    path = make(tmp_path / "m", family)
    base = load_base(path, quantize=True)
    targets = base.family.lora_targets
    loss, grad = gradient(build(base), targets)
    expected_loss, expected = gradient(build(dequantized(path)), targets)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert float((grad - expected).norm() / expected.norm()) < 1e-4


def relative(base: Base, other: Base, ids: torch.Tensor) -> tuple[float, float, float]:
    (loss, g), (other_loss, h) = (gradient(build(b), b.family.lora_targets, ids=ids) for b in (base, other))
    return abs(other_loss / loss - 1), abs(float(h.norm() / g.norm()) - 1), float(g @ h / g.norm() / h.norm())


@pytest.mark.slow
@pytest.mark.skipif(not SMOL.exists(), reason="the demo's model is not here")
def test_on_a_real_model_loss_and_gradient_are_within_one_percent() -> None:
    from tokenizers import Tokenizer

    text = (SMOL.parents[2] / "README.md").read_text()
    ids = torch.tensor(Tokenizer.from_file(str(SMOL / "tokenizer.json")).encode(text).ids[:513])[None]
    loss, norm, cosine = relative(load_base(SMOL), load_base(SMOL, quantize=True), ids)
    print(f"loss {loss:.2%}, norm of the gradient {norm:.2%}, cosine {cosine:.5f}")
    assert loss < 0.01
    assert norm < 0.01
    assert cosine > 0.995


def make_trainer(tmp_path: Path, **keys: Any) -> Trainer:
    spec = JobSpec.model_validate({**toy_keys(tmp_path), **keys})
    data = prepare(spec.data, spec.model, seq_len=spec.seq_len, cache_dir=tmp_path / "cache")
    base = load_base(spec.model, dtype=torch.float32, compute=torch.float32, quantize=spec.quantize)
    return Trainer(spec, base, Dataset.open(data.path), None, threads=1)


@pytest.mark.slow
def test_over_200_steps_the_loss_curve_is_within_one_percent(tmp_path: Path) -> None:
    make_data(tmp_path / "data.jsonl", rows=200)
    curves = []
    for quantized in (False, True):
        trainer = make_trainer(tmp_path, quantize=quantized, data=str(tmp_path / "data.jsonl"), max_steps=200, lr=2e-3,
                               model=str(make_model(tmp_path / "wide", hidden=128, layers=4, ffn=256)))
        curves.append(torch.tensor([trainer.run_step(200, "stop").loss for _ in range(200)]))
    exact, int8 = (c.view(10, 20).mean(1) for c in curves)
    print([f"{a:.4f} {b:.4f}" for a, b in zip(exact.tolist(), int8.tolist(), strict=True)])
    assert exact[-1] < 0.8 * exact[0]
    assert bool(((int8 / exact - 1).abs() < 0.01).all())


def test_identity_says_int8_and_the_estimate_counts_it(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(toy_keys(tmp_path, quantize=True))
    trainer = make_trainer(tmp_path, quantize=True)
    assert trainer.identity()["job"]["quantize"] == "int8"
    needs = estimate(spec, files.inspect(Path(spec.model)), torch.float32, cuda=False)
    assert needs.base == trainer.base.nbytes


def test_merged_is_the_float_model_with_the_adapter(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, quantize=True, export_merged=True, max_steps=3)
    for _ in range(3):
        trainer.run_step(3, "stop")
    export(trainer, tmp_path / "out")
    exact = load_file(Path(trainer.spec.model) / "model.safetensors")
    merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    assert torch.allclose(merged[f"{name}.weight"], exact[f"{name}.weight"] + 2 * b @ a, atol=1e-6)


def test_a_float_model_is_never_in_memory(tmp_path: Path) -> None:
    """The peak of a load stays far below the float model's size."""
    import subprocess
    import sys

    path = make_model(tmp_path / "m")
    big = {"model.layers.0.mlp.gate_proj.weight": torch.ones(1 << 17, 32)}
    config = (path / "config.json").read_text().replace('"intermediate_size": 64', f'"intermediate_size": {1 << 17}')
    (path / "config.json").write_text(config)
    tensors = load_file(path / "model.safetensors")
    for i in range(2):
        tensors |= {f"model.layers.{i}.mlp.{n}_proj.weight": big["model.layers.0.mlp.gate_proj.weight"].clone()
                    for n in ("gate", "up")}
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = torch.ones(32, 1 << 17)
    save_file(tensors, path / "model.safetensors")  # 6 x 16 MB
    code = ("import sys, torch, resource; from rrd.models import load_base\nfrom rrd.models.int8 import quantize\n"
            "quantize(torch.ones(1 << 17, 32)); peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "before = peak(); load_base(sys.argv[1], quantize=True, store_dir=sys.argv[2]); print(peak() - before)")
    done = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "store")], capture_output=True,
                          text=True, check=True)
    assert int(done.stdout) < 60 << 10
