"""Names and logits equal transformers', for tiny random models of every member of the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from rrd.errors import BadJob
from rrd.models import build, load_base
from rrd.optim import AdamW
from rrd.train.step import NO_LABEL, Batch, train_step

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32}


def rope(theta: float, scaling: dict[str, Any]) -> dict[str, Any]:
    """As the transformers that is here has it in a configuration."""
    if int(transformers.__version__.split(".")[0]) < 5:
        return {"rope_theta": theta, "rope_scaling": scaling}
    return {"rope_parameters": {**scaling, "rope_theta": theta}}


CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied-biased-llama3-rope": LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **rope(50000.0, LLAMA3)),
    "llama-linear-rope-one-kv-head": LlamaConfig(
        **SIZES | {"num_key_value_heads": 1}, **rope(10000.0, {"rope_type": "linear", "factor": 4.0})),
    "mistral-window": MistralConfig(**SIZES, sliding_window=16),
    "mistral-wide-heads": MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
if hasattr(transformers, "Qwen3Config"):  # in those that go with torch 2.0.1 it is not, and Qwen2's window covers all
    CONFIGS["qwen2-window-above"] = Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    CONFIGS["qwen3"] = transformers.Qwen3Config(**SIZES, head_dim=32)


def saved(config: PretrainedConfig, path: Path, **how: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # norms of one and biases of zero would hide a mistake
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(path, **how)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(CONFIGS[name], tmp_path)
    idx, labels = torch.randint(97, (2, 40)), torch.randint(97, (2, 40))
    labels[:, :10], labels[0, 30:] = NO_LABEL, NO_LABEL
    logits = theirs(idx).logits
    with torch.no_grad():
        frozen = build(load_base(tmp_path))
        torch.testing.assert_close(frozen(idx), logits.detach(), atol=2e-6, rtol=1e-5)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    ours = build(load_base(tmp_path, trainable=True))
    optimizer = AdamW(list(ours.named_parameters()))
    result = train_step(ours, optimizer, [Batch(idx, labels)], lr=0.0, clip_norm=0.0, seeds=[0])
    assert result.loss == pytest.approx(float(loss), rel=1e-5)
    expected = dict(theirs.named_parameters())
    assert set(optimizer.names) == set(expected)
    for slot in optimizer.layout:
        grad = expected[slot.name].grad
        torch.testing.assert_close(optimizer.view("grad", slot), grad, atol=2e-5 * float(grad.abs().max()), rtol=1e-4)


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    saved(CONFIGS["qwen2-tied"], tmp_path / "one")
    saved(CONFIGS["qwen2-tied"], tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_base(tmp_path / "one"), load_base(tmp_path / "many")
    assert one.digest == many.digest
    assert one.tensors.keys() == many.tensors.keys()
    assert all(torch.equal(t, many.tensors[n]) for n, t in one.tensors.items())


def test_bf16_stored_and_computed_is_near_fp32(tmp_path: Path) -> None:
    theirs = saved(CONFIGS["llama"], tmp_path)
    idx = torch.randint(97, (1, 24))
    with torch.no_grad():
        expected = theirs(idx).logits
        for compute in (torch.float32, torch.bfloat16):
            ours = build(load_base(tmp_path, dtype=torch.bfloat16, compute=compute))
            assert (ours(idx).float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_chosen_rows_equal_those_of_the_whole(tmp_path: Path) -> None:
    saved(CONFIGS["llama"], tmp_path)
    model = build(load_base(tmp_path))
    idx, rows = torch.randint(97, (2, 24)), torch.tensor([3, 17, 30, 47])
    with torch.no_grad():
        whole = model.hidden(idx).flatten(0, 1)
        torch.testing.assert_close(model.hidden(idx, rows=rows), whole[rows], atol=1e-6, rtol=1e-5)


REFUSED = {
    "'yarn'": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "gives no usable hidden_size": {"hidden_size": "64"},
    "is quantized": {"quantization_config": {"bits": 4}},
    "(model_type 'mystery') (rrd reads llama, mistral, qwen2, qwen3, rwkv7, the other": {"model_type": "mystery"},
    "lacks layer 9999999": {"num_hidden_layers": 10_000_000},
    "in shape [112, 64], and its config.json says [100, 64]": {"intermediate_size": 100},
    "lacks lm_head.weight": {},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_model_we_cannot_do_gets_one_sentence(sentence: str, tmp_path: Path) -> None:
    config = "llama-tied-biased-llama3-rope" if "lm_head" in sentence else "llama"
    saved(CONFIGS[config], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | REFUSED[sentence]
    if "lm_head" in sentence:
        raw["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(BadJob) as caught:
        load_base(tmp_path)
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)
