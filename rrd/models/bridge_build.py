"""A model of transformers without weights, with its linears replaced by ours, and what its files call its tensors."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rrd.errors import BadJob
from rrd.models.bridge_experts import mark
from rrd.models.layers import Linear
from rrd.ops.linear import Group
from rrd.ops.pulse import beat
from rrd.text import one_line


class OurLinear(Linear):
    """An ``nn.Linear`` of theirs, multiplied by ours."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool) -> None:
        super().__init__(n_in, n_out, bias=bias)
        self.in_features, self.out_features = n_in, n_out
        self._group = Group(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._group(x)


class OurConv1D(Linear):
    """GPT-2's linear, whose weight is stored [in, out]; [out, in] where it is int8, like all others."""

    @property
    def transposed(self) -> bool:  # type: ignore[override]
        return self.scale is None

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=True)
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self._group = Group(_Turned(self))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:  # full fine-tuning
            assert self.bias is not None
            beat()
            y = x @ self.weight + self.bias
            if y.requires_grad:
                y.register_hook(lambda _: beat())  # type: ignore[no-untyped-call]
            return y
        return self._group(x)


class _Turned:
    """A ``OurConv1D`` as a product sees it: the weight [out, in]."""

    def __init__(self, module: OurConv1D) -> None:
        self._module = module

    @property
    def weight(self) -> Tensor:
        return self._module.weight.t() if self._module.transposed else self._module.weight

    @property
    def scale(self) -> Any:
        return self._module.scale

    @property
    def bias(self) -> Any:
        return self._module.bias

    @property
    def lora(self) -> Any:
        return self._module.lora

    @property
    def training(self) -> bool:
        return self._module.training


def parts_of(theirs: Any, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The tensors in the files, ``names``, by the tensor of the model that each is or is a part of.

    As transformers says it: modules were renamed since models were published, and the experts of a mixture, once a
    tensor each, are now one. Raises BadJob where more is done to them than putting one behind the other.
    """
    known = theirs.state_dict(keep_vars=True)
    rename = _renaming(theirs, known)
    found: dict[str, list[tuple[list[int], int, str]]] = {}
    for name in names:
        target, order = rename(name)
        if target in known:
            numbers = [int(n) for n in re.findall(r"\.(\d+)(?=\.)", name)]
            found.setdefault(target, []).append((numbers, order, name))
    return {target: tuple(name for *_, name in sorted(parts)) for target, parts in found.items()}


def _renaming(theirs: Any, known: Mapping[str, Any]) -> Callable[[str], tuple[str, int]]:
    """A file's name to (the model's name, place among the parts of one expert)."""
    prefix = theirs.base_model_prefix

    def plain(name: str) -> tuple[str, int]:
        return (f"{prefix}.{name}" if f"{prefix}.{name}" in known else name), 0

    try:
        rules = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(theirs)
        loading = importlib.import_module("transformers.core_model_loading")
    except (ImportError, AttributeError):  # before transformers 5, files are named as modules are
        return plain
    converters = [r for r in rules if isinstance(r, loading.WeightConverter)]
    renamings = [r for r in rules if not isinstance(r, loading.WeightConverter)]
    behind = {("MergeModulelist", 0, ""), ("MergeModulelist", 0, "Concatenate", 1, "")}

    def renamed(name: str) -> tuple[str, int]:
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if pattern is None:
            return target, 0
        rule = next(c for c in converters if pattern in c.source_patterns)
        done = (*(x for op in rule.operations for x in (type(op).__name__, getattr(op, "dim", None))), "")
        if done not in behind:
            raise BadJob(f"this model's tensors ({theirs.config.model_type}) are not laid out as they are used")
        return target, rule.source_patterns.index(pattern)

    return renamed


def skeleton_of(raw: Mapping[str, Any]) -> Any:
    """The model that ``raw`` describes: parameters without memory, buffers as computed, linears ours."""
    kind, auto = raw["model_type"], transformers_module("models.auto")
    try:
        config = auto.configuration_auto.CONFIG_MAPPING[kind].from_dict(
            {k: v for k, v in raw.items() if k not in ("auto_map", "torch_dtype", "dtype")})
        config.dtype = torch.float32
        model_class = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("cpu"), _without_memory():
            model = model_class._from_config(config)
    except BadJob:
        raise
    except Exception as e:  # whatever a strange configuration makes transformers raise
        raise BadJob(f"transformers cannot build this model ({one_line(str(kind), 40)}): {one_line(str(e), 200)}",
                     hint="is its config.json whole, and the installed transformers new enough?") from e
    _replace_linears(model)
    mark(model)
    return model


def _replace_linears(model: nn.Module) -> None:
    conv1d = transformers_module("pytorch_utils").Conv1D
    for parent in list(model.modules()):
        for name, m in list(parent.named_children()):
            theirs: Any = m
            with torch.device("meta"):
                if type(m) is nn.Linear:
                    ours: Linear = OurLinear(m.in_features, m.out_features, bias=m.bias is not None)
                elif type(m) is conv1d:
                    n_in, n_out = theirs.weight.shape
                    ours = OurConv1D(n_in, n_out)
                else:
                    continue
            ours.weight, ours.bias = theirs.weight, theirs.bias  # the very same: a tied one stays tied
            setattr(parent, name, ours)


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Within, every parameter that a module registers stands on the meta device. Buffers are left alone."""
    register: Any = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def version() -> str:
    """The version of transformers: its numbers are part of a job's identity."""
    return str(importlib.import_module("transformers").__version__)


def transformers_module(module: str) -> Any:
    """A module of transformers, offline. Raises BadJob where it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return importlib.import_module(f"transformers.{module}")
    except ImportError as e:
        raise BadJob("this model needs transformers, which is not installed", hint="pip install 'rrd[hf]'") from e
