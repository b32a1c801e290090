"""LoRA (Hu et al., 2021): y = W x + (alpha / r) B A dropout(x), on named linear modules of a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from rrd.models.registry import CausalLM


def attach(
    model: CausalLM,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    rs: bool = False,
    ranks: Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[tuple[str, nn.Parameter]]:
    """Give every linear module of ``model`` whose last path component is in ``targets`` an adapter.

    Returns the adapters' parameters, all of them fp32, in a fixed order; a name is PEFT's key without its prefix
    ``base_model.model.``, such as ``model.layers.0.self_attn.q_proj.lora_A.weight`` [r, in] and ``….lora_B.weight``
    [out, r]. A is kaiming-uniform(sqrt 5) from a generator seeded by (``seed``, name), B is zero.

    ``alpha`` None means 2 x rank, of each module's own rank; ``ranks`` overrides the rank by last path component;
    ``rs`` divides alpha by sqrt(rank) (rsLoRA, Kalajdzievski, 2023) instead of rank.

    Raises:
        BadJob: a target that is no linear module of the model.
    """
    raise NotImplementedError
