"""INT8 bases of transformers' models: GPT-2's turned weights, the experts of mixtures, and what is left in floats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from bridge_toys import FUSED, KINDS, TURNED, WIDE, make_bridged
from test_int8 import dequantized, gradient

from rrd.errors import BadJob
from rrd.models import build, files, layout, load_base
from rrd.models.int8 import note, quantize, quantized_names, scale_of
from rrd.models.registry import lora_targets_of

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_the_weights_of_the_blocks_take_a_byte_wherever_the_file_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = make_bridged(tmp_path / "m", kind, **WIDE[kind])
    exact = load_base(path)
    monkeypatch.setattr(files, "PIECE", 10_000)
    held = load_base(path, quantize=True).tensors
    names = quantized_names(exact.family, exact.config)
    for name, turned in names.items():
        w = exact.tensors[name].transpose(-1, -2) if turned else exact.tensors[name]
        q, s = quantize(w.reshape(-1, w.shape[-1]))
        assert torch.equal(held[name], q.view(w.shape))
        assert torch.equal(held[scale_of(name)], s.view(w.shape[:-1]))
    if kind == "granitemoe" and not FUSED:  # experts of a class of its own, which does not say how it is put together
        assert "block_sparse_moe.input_linear.weight" in note(held)
        return
    in_blocks = {n for n, w in exact.tensors.items() if w.dim() > 1 and re.search(r"\.\d+\.", n)}
    taken = sum(t.numel() * t.element_size() for n, t in held.items() if n in in_blocks or n.endswith("scale"))
    assert taken <= 1.05 * sum(exact.tensors[n].numel() for n in in_blocks)
    assert all(torch.equal(held[n], w) for n, w in exact.tensors.items() if n not in names)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "qwen2_moe", *TURNED])
def test_gradients_are_those_of_the_weights_it_stands_for(tmp_path: Path, kind: str) -> None:
    path = make_bridged(tmp_path / "m", kind)
    base = load_base(path, quantize=True)
    targets = lora_targets_of(base.family, base.config)
    loss, grad = gradient(build(base), targets)
    expected_loss, expected = gradient(build(dequantized(path)), targets)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert float((grad - expected).norm() / expected.norm()) < 1e-5


def test_what_is_left_in_floats_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, mixture = (make_bridged(tmp_path / kind, kind) for kind in ("gpt2", "mixtral"))
    assert note(load_base(whole, quantize=True).tensors) == ""
    router = "99 % of the block weights are held in 8 bits; model.layers.*.mlp.gate.weight are not"
    assert note(load_base(mixture, quantize=True).tensors) == (router if FUSED else "")
    monkeypatch.setattr(layout, "quantized_names", lambda *_: {})
    with pytest.raises(BadJob, match="none of this model's weights can be held in 8 bits"):
        load_base(mixture, quantize=True)


@pytest.mark.parametrize(("kind", "sizes"), [
    ("gpt2", {"n_inner": 1 << 16, "n_layer": 4}),
    ("mixtral", {"intermediate_size": 1 << 15, "num_hidden_layers": 1}),
])
def test_a_float_model_is_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                          sizes: dict[str, int]) -> None:
    """What a load adds to this process's memory at its peak, beside the float model's 67 and 50 MB."""
    path = make_bridged(tmp_path / "m", kind, **sizes)
    monkeypatch.setattr(files, "PIECE", 1 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = peak()
    base = load_base(path, quantize=True, store_dir=tmp_path / "store")
    assert sum(t.numel() for t in base.tensors.values() if t.dtype == torch.int8) > 12_000_000
    assert peak() - before < 40 << 20


def peak() -> int:
    """Bytes of this process that were in memory at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
