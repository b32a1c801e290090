"""Every other causal language model, through Hugging Face's transformers (the extra ``hf``).

The model's own class is built from its ``config.json`` without weights, and given ours by reference. Its linears, and
GPT-2's ``Conv1D``, become ours, so that adapters, int8 and gradients work as everywhere; the rest runs as it is. Only
classes that transformers itself brings are used: no code from a model directory is run, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rrd.adapter import leaf
from rrd.errors import BadJob
from rrd.models.bridge_build import OurConv1D, parts_of, skeleton_of, transformers_module, version
from rrd.models.bridge_experts import use_int8
from rrd.models.layers import Linear
from rrd.models.registry import CausalLM, Shape

_PROBE = 8
_OTHER_LOGITS = "the model turns its logits into others, in a way that rrd's loss does not know"


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """What rrd needs to know of the model, and the configuration that transformers reads of it."""

    raw: Mapping[str, Any] = field(repr=False)
    n_vocab: int
    n_embd: int
    n_layer: int
    n_inner: int
    lora_targets: tuple[str, ...]
    fan_in_fan_out: bool
    """Whether some linears are stored [in, out], as GPT-2's are."""
    shapes: Mapping[str, Shape] = field(repr=False)
    parts: Mapping[str, tuple[str, ...]] = field(repr=False)
    """What the files call a tensor of ``shapes``, or those of its parts that stand one behind the other in it."""

    trains_whole: bool
    """Whether all of it can be trained: files and model name the same tensors, and all of these are parameters."""


class BridgeLM(CausalLM):
    """Shares the modules of a transformers model under their own names; keeps that model to be called."""

    splits = False  # some draw random numbers of their own, or take a mean over the batch

    def __init__(self, theirs: nn.Module, config: BridgeConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        self._modules = theirs._modules
        self._theirs = [theirs]  # in a list: not a module of this one, or every name would be there twice
        self._names = dict(theirs.named_parameters(remove_duplicate=False))

    @property
    def recomputes(self) -> bool:
        return bool(getattr(self._theirs[0], "supports_gradient_checkpointing", False))

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        return next(m for m in self.modules() if isinstance(m, nn.ModuleList))

    @property
    def _head(self) -> Any:
        return self._theirs[0].get_output_embeddings()  # type: ignore[operator]

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self._head.weight
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self._head, "bias", None)

    @property
    def head_cap(self) -> float | None:
        """Gemma 2's and RecurrentGemma's."""
        settings: Any = self._theirs[0].config
        cap = getattr(settings, "final_logit_softcapping", None) or getattr(settings, "logits_soft_cap", None)
        return float(cap) if cap else None

    def hidden(self, idx: Tensor, *, rows: Tensor | None = None, checkpointing: bool = False) -> Tensor:
        self._recompute(checkpointing and torch.is_grad_enabled())
        body: Any = self._theirs[0].base_model
        x: Tensor = body(input_ids=idx, use_cache=False, return_dict=True).last_hidden_state
        x = x if rows is None else x.flatten(0, 1).index_select(0, rows)
        return x * self._factor() if self._factor() != 1.0 else x

    def forward(self, idx: Tensor) -> Tensor:
        return self._logits(self.hidden(idx))

    def _logits(self, hidden: Tensor) -> Tensor:
        bias, cap = self.head_bias, self.head_cap
        logits = nn.functional.linear(hidden, self.head_weight.to(hidden.dtype),
                                      None if bias is None else bias.to(hidden.dtype))
        return logits if cap is None else logits.div(cap).tanh().mul(cap)

    def _factor(self) -> float:
        """What logits are scaled by: it may as well scale the activations, for a head without a bias."""
        settings: Any = self._theirs[0].config
        return float(getattr(settings, "logit_scale", None) or 1.0) / float(
            getattr(settings, "logits_scaling", None) or 1.0)

    def _recompute(self, on: bool) -> None:
        theirs: Any = self._theirs[0]
        if on and not self.recomputes:
            raise BadJob("this model cannot recompute its activations", key="gradient_checkpointing",
                         hint="leave gradient_checkpointing out")
        if on != getattr(self, "_recomputes", False):
            self._recomputes = on
            if on:
                theirs.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                theirs.gradient_checkpointing_disable()

    def settle(self) -> None:
        """Once the weights are in place: tie what is tied, put the rest where and as it is computed with.

        Raises:
            BadJob: logits are not the head's product of activations: our loss would be another.
        """
        theirs = self._theirs[0]
        for name, before in self._names.items():
            path, _, leaf = name.rpartition(".")
            module = theirs.get_submodule(path)
            if getattr(module, leaf).is_meta:  # the second name of a tied weight
                twin = next(n for n, p in self._names.items() if p is before and not _at(theirs, n).is_meta)
                setattr(module, leaf, _at(theirs, twin))
        self._names, device = {}, self.head_weight.device
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(self._as_computed)
            elif not isinstance(module, Linear):
                kept = use_int8(module)
                for name, p in module.named_parameters(recurse=False):
                    p.data = p.data if name in kept else p.data.to(self.compute)
            for name, b in module.named_buffers(recurse=False):
                module.register_buffer(name, b.to(device), persistent=False)
        self._check_logits()

    def _as_computed(self, module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
        return y.to(self.compute)

    @torch.no_grad()
    def _check_logits(self) -> None:
        training = self.training
        idx = torch.arange(_PROBE, device=self.head_weight.device)[None] % self.config.n_vocab
        theirs: Any = self._theirs[0].eval()
        ours = self._logits(self.eval().hidden(idx))
        logits = theirs(input_ids=idx, use_cache=False).logits
        self.train(training)
        near = (1e-4 if self.compute == torch.float32 else 4e-2) * float(logits.abs().max())
        if not torch.allclose(ours.float(), logits.float(), rtol=0.0, atol=near):
            raise BadJob(_OTHER_LOGITS, hint="train another model")


def _at(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


class Bridge:
    """The family, for the registry; the last one to be asked."""

    name = "transformers"
    reads = ("the other causal language models of transformers",)
    lora_targets: tuple[str, ...] = ()
    """The model's own: see ``BridgeConfig``."""

    def matches(self, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        if not isinstance(config.get("model_type"), str) or not config.get("architectures"):
            return False
        transformers_module("configuration_utils")
        kind = config["model_type"]
        return kind in transformers_module("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def read_config(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> BridgeConfig:
        if config.get("quantization_config"):
            raise BadJob("the model is quantized", hint="use the model's float weights")
        theirs = skeleton_of(config)
        parts = parts_of(theirs, shapes)
        tied = theirs.get_output_embeddings()
        if tied is None or getattr(theirs, "base_model", theirs) is theirs:
            raise BadJob(f"the model ({config['model_type']}) has no head of its own, which rrd needs")
        linears = {n: m for n, m in theirs.named_modules() if isinstance(m, Linear) and m is not tied}
        if not linears:
            raise BadJob(f"the model ({config['model_type']}) has no linear modules to put an adapter on")
        wanted, trainable = _wanted(theirs, parts), dict(theirs.named_parameters())
        rows, width = tied.weight.shape
        return BridgeConfig(
            raw=dict(config), n_vocab=min(rows, theirs.get_input_embeddings().weight.shape[0]), n_embd=width,
            n_layer=int(getattr(theirs.config, "num_hidden_layers", 1)),
            n_inner=max(max(m.weight.shape) for m in linears.values()),
            lora_targets=tuple(dict.fromkeys(map(leaf, linears))),
            fan_in_fan_out=any(isinstance(m, OurConv1D) for m in linears.values()), shapes=wanted, parts=parts,
            trains_whole=all(n in trainable and parts.get(n) == (n,) for n in wanted))

    def tensors(self, c: BridgeConfig) -> Mapping[str, Shape]:
        return c.shapes

    def ignores(self, name: str, c: BridgeConfig) -> bool:
        """Buffers that older versions stored, and the second copy of a tied head."""
        tied = name == "lm_head.weight" and name not in c.shapes
        return tied or name.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq"))

    def facts(self) -> dict[str, Any]:
        """Another transformers may compute otherwise."""
        return {"transformers": version()}

    def skeleton(self, config: BridgeConfig, *, compute: torch.dtype) -> CausalLM:
        return BridgeLM(skeleton_of(config.raw), config, compute)


def _wanted(theirs: nn.Module, there: Collection[str]) -> dict[str, Shape]:
    """Parameters, a tied one once and under the name that the files have, and buffers that the files have."""
    found: dict[int, list[str]] = {}
    for name, p in theirs.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    chosen = [next((n for n in names if n in there), names[0]) for names in found.values()]
    wanted = {n: tuple(_at(theirs, n).shape) for n in chosen}
    wanted |= {n: tuple(b.shape) for n, b in theirs.named_buffers() if n in there}
    return dict(sorted(wanted.items(), key=lambda item: len(item[1]) < 2))
