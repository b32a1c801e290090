"""The experts of a mixture, as transformers 5 holds them: all of a layer's in one tensor [experts, out, in].

In an int8 base each expert's matrix is a product of ours, like any linear's; what surrounds the products (biases, the
gate, a norm, the router's weights) is done as transformers' ``grouped_mm_experts_forward`` does it. Experts get no
adapter: they pass on their input's gradient, and nothing more. Float experts are left to transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rrd.models.int8 import scale_of
from rrd.ops.linear import Group

_DOWN = "down_proj"


def mark(model: nn.Module) -> None:
    """Say of every layer's experts which of their weights can be int8, and whether they are stored [..., in, out].

    Only of those that say how they are put together: the classes that transformers 5 can compute in several ways do.
    """
    for module in model.modules():
        m: Any = module
        if not all(hasattr(m, told) for told in ("is_transposed", "has_bias", "_apply_gate", _DOWN)):
            continue
        up = getattr(m, _up(m), None)
        if isinstance(up, nn.Parameter) and up.dim() == getattr(m, _DOWN).dim() == 3:
            m.int8_weights = {_up(m): bool(m.is_transposed), _DOWN: bool(m.is_transposed)}


def use_int8(module: nn.Module) -> Collection[str]:
    """Have ``module`` compute with its int8 weights, if it has some. Returns those, to be left as they are."""
    held = [n for n in getattr(module, "int8_weights", {}) if getattr(module, n).dtype == torch.int8]
    if held:
        module.forward = partial(_forward, module, _groups(module, _up(module)), _groups(module, _DOWN))
    return {*held, *map(scale_of, held)}


def _up(module: Any) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _groups(module: nn.Module, name: str) -> list[Group]:
    return [Group(_Expert(module, name, e)) for e in range(len(getattr(module, name)))]  # type: ignore[arg-type]


class _Expert:
    """One expert's matrix as a product sees it."""

    lora = None
    training = False

    def __init__(self, module: nn.Module, name: str, number: int) -> None:
        self._module, self._name, self._number = module, name, number

    def _part(self, name: str) -> Any:
        return getattr(self._module, name)[self._number]

    @property
    def weight(self) -> Any:
        return self._part(self._name)

    @property
    def scale(self) -> Any:
        return self._part(scale_of(self._name))

    @property
    def bias(self) -> Any:
        return self._part(f"{self._name}_bias") if self._module.has_bias else None


def _forward(module: Any, ups: Sequence[Group], downs: Sequence[Group], hidden_states: Tensor, top_k_index: Tensor,
             top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, C], and for each token its k experts and their weights [T, k] -> [T, C]."""
    k, width = top_k_index.shape[-1], hidden_states.shape[-1]
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(chosen, minlength=len(ups)).tolist()
    x = hidden_states[:, None].expand(-1, k, -1).reshape(-1, width).index_select(0, order)
    h = _products(ups, x, counts)
    h = module._apply_gate(h) if getattr(module, "has_gate", True) else module.act_fn(h)
    y = _products(downs, h, counts)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1, 1).index_select(0, order)
    y = y.index_select(0, torch.argsort(order)).view(-1, k, width).sum(1)
    return y.to(hidden_states.dtype)


def _products(experts: Sequence[Group], x: Tensor, counts: list[int]) -> Tensor:
    """Rows of x, sorted by expert, ``counts`` of them for each."""
    return torch.cat([expert(part) for expert, part in zip(experts, torch.split(x, counts), strict=True) if len(part)])
