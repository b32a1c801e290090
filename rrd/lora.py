"""LoRA (Hu et al., 2021): y = W x + (alpha / r) B A dropout(x), on named linear modules of a frozen model."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rrd.adapter import leaf
from rrd.inputs import no_module
from rrd.models.layers import Linear, Lora
from rrd.models.registry import CausalLM
from rrd.ops.grad import moved


def attach(
    model: CausalLM,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    rs: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    seed: int = 0,
) -> list[tuple[str, nn.Parameter]]:
    """Give every linear module of ``model`` whose last path component is in ``targets`` an adapter.

    Returns the adapters' parameters, all of them fp32, in a fixed order; a name is PEFT's key without its prefix
    ``base_model.model.``, such as ``model.layers.0.self_attn.q_proj.lora_A.weight`` [r, in] and ``….lora_B.weight``
    [out, r]. A is kaiming-uniform(sqrt 5) from a generator seeded by (``seed``, name), B is zero.

    ``alpha`` None means 2 x rank, of each module's own rank; ``ranks`` and ``alphas`` override both by last path
    component; ``rs`` divides alpha by sqrt(rank) (rsLoRA, Kalajdzievski, 2023) instead of rank.

    Raises:
        BadJob: a target that is no linear module of the model.
    """
    found = find(model, targets, (*(ranks or {}), *(alphas or {})))
    for name, module in found:
        r = (ranks or {}).get(leaf(name), rank)
        own = (alphas or {}).get(leaf(name), 2 * r if alpha is None else alpha)
        scale = own / (math.sqrt(r) if rs else r)
        module.lora = _new(module, name, r, scale=scale, dropout=dropout, seed=seed)
    moved()
    return _in_order(found)


def find(model: CausalLM, targets: Sequence[str], named: Sequence[str] = ()) -> list[tuple[str, Linear]]:
    """The linear modules of ``model`` whose last path component is in ``targets``, by path.

    Raises BadJob where one of ``targets``, or of those that are ``named`` beside, is not among them.
    """
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, Linear)]
    found = [(n, m) for n, m in linears if leaf(n) in set(targets)]
    missing = [t for t in (*targets, *named) if t not in {leaf(n) for n, _ in found}]
    if missing:
        raise no_module(missing[0], (leaf(n) for n, _ in linears))
    return found


def _new(module: Linear, name: str, rank: int, *, scale: float, dropout: float, seed: int) -> Lora:
    n_out, n_in = reversed(module.weight.shape) if module.transposed else module.weight.shape
    bound = 1.0 / math.sqrt(n_in)  # kaiming_uniform_(a=sqrt 5)
    a = torch.empty(rank, n_in).uniform_(-bound, bound, generator=_generator(seed, name))
    device = module.weight.device
    return Lora(a.to(device), torch.zeros(n_out, rank, device=device), scale=scale, dropout=dropout)


def _generator(seed: int, name: str) -> torch.Generator:
    """Random numbers of its own for each module: adding a target changes no other's start. Drawn on the CPU, always."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _in_order(found: Sequence[tuple[str, Linear]]) -> list[tuple[str, nn.Parameter]]:
    """Modules of one parent have their A's side by side, then their B's: what is multiplied as one stands as one."""
    parameters: list[tuple[str, nn.Parameter]] = []
    for _, group in itertools.groupby(found, key=lambda named: named[0].rpartition(".")[0]):
        members = [(name, module.lora) for name, module in group]
        parameters += [(f"{name}.lora_A.weight", lora.a) for name, lora in members if lora is not None]
        parameters += [(f"{name}.lora_B.weight", lora.b) for name, lora in members if lora is not None]
    return parameters
