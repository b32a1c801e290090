"""RWKV-7 from scratch: sizes as they are published, and the initialisation of BlinkDL's RWKV-LM.

With layer l of L, channel n of C:  rho = 1 - l / L,  q = l / (L - 1),  c = n / C,  lin = n / (C - 1) - 1/2,
s = ((n mod 64) - 31.5) / 31.5,  zz = s |s|. Attention blocks of hybrids begin as time mixes do: products orthogonal,
the output zero.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rrd.models.registry import Shape
from rrd.models.rwkv7_config import BETWEEN, BlockConfig, RwkvConfig

RFA_FEATURES = 64


def published_ranks(C: int) -> dict[str, int]:
    """The inner sizes of the low-rank products that the public models of width C have (but 0.4B, whose g is 128)."""

    def size(factor: float, power: float) -> int:
        return max(32, 32 * round(factor * math.pow(C, power) / 32))

    return {"d_w": size(1.8, 0.5), "d_a": size(1.8, 0.5), "d_v": size(1.3, 0.5), "d_g": size(0.6, 0.8)}


def new_config(n_layer: int, n_embd: int, n_vocab: int = 65536, *, n_inner: int | None = None, prefix: str = "",
               between: Mapping[str, int] | None = None, ranks: Mapping[str, int] | None = None) -> RwkvConfig:
    """Sizes of a new model. ``between``: how many blocks of each kind of ``BETWEEN``; a divisor of ``n_layer`` each."""
    inner, d = n_inner or 4 * n_embd, {**published_ranks(n_embd), **(ranks or {})}
    blocks: list[BlockConfig] = []
    for i in range(n_layer):
        d_i = d if i else {**d, "d_v": 0}
        blocks.append(BlockConfig(path=f"{prefix}blocks.{i}", kind="rwkv", n_inner=inner, **d_i))
        for kind in BETWEEN:
            m = (between or {}).get(kind, 0)
            if m and (i + 1) * m % n_layer == 0:
                features = RFA_FEATURES if kind == "rfa" else 0
                path = f"{kind}.{(i + 1) * m // n_layer - 1}"
                blocks.append(BlockConfig(path=path, kind=kind, n_inner=inner, n_features=features))
    return RwkvConfig(prefix=prefix, n_vocab=n_vocab, n_embd=n_embd, blocks=tuple(blocks))


def initial(name: str, shape: Shape, config: RwkvConfig, seed: int = 0) -> Tensor:
    """The tensor ``name`` of a new model, fp32. Its random numbers are its own: they depend on (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    leaf = ".".join(name.split(".")[-2:])
    if name.endswith("emb.weight"):
        return torch.empty(shape).uniform_(-1e-4, 1e-4, generator=generator)
    if name.endswith("head.weight"):
        return _orthogonal(shape, 0.5 * math.sqrt(max(1.0, shape[0] / shape[1])), generator)
    if name.endswith(("att.output.weight", "ffn.value.weight")) or re.fullmatch(r"att\.[wavg]1", leaf):
        return torch.zeros(shape)
    if re.fullmatch(r"att\.[wavg]2", leaf):
        return _orthogonal(shape, 0.1 * math.sqrt(max(1.0, shape[0] / shape[1])), generator)
    if leaf in RFA_PARAMETERS:
        return RFA_PARAMETERS[leaf](shape, generator)
    if len(shape) == 2 and name.endswith(".weight"):
        return _orthogonal(shape, 0.1 if name.endswith("att.key.weight") else 1.0, generator)
    return _channels(name, leaf, shape, config)


def _gaussian(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


RFA_PARAMETERS: dict[str, Callable[[Shape, torch.Generator], Tensor]] = {
    "att.features": _gaussian, "att.sigma": lambda shape, _: torch.ones(shape),
    "gate.weight": lambda shape, _: torch.zeros(shape),
    "gate.bias": lambda shape, _: torch.linspace(2.0, 6.0, shape[0]) if shape[0] > 1 else torch.full(shape, 4.0),
}
"""Heads forget over 1 / (1 - sigmoid(bias)): from 8 to 400 tokens."""


def _channels(name: str, leaf: str, shape: Shape, config: RwkvConfig) -> Tensor:
    """Vectors over the channels."""
    C = config.n_embd
    layer, L = _depth(name, config)
    n = torch.arange(C, dtype=torch.float64)
    rho, q, c = 1 - layer / L, layer / max(1, L - 1), n / C
    lin, s = n / (C - 1) - 0.5, (n % 64 - 31.5) / 31.5
    zz = s * s.abs()
    values: dict[str, Tensor | float] = {
        "att.x_r": 1 - c ** (0.2 * rho), "att.x_g": 1 - c ** (0.2 * rho), "att.x_w": 1 - c ** (0.9 * rho),
        "att.x_a": 1 - c ** (0.9 * rho), "att.x_k": 1 - c ** (0.7 * rho), "att.x_v": 1 - c ** (0.7 * rho),
        "ffn.x_k": 1 - c ** (rho**4),
        "att.w0": -6 + 6 * (n / (C - 1)) ** (1 + q**0.3) + 0.5 + 2.5 * zz, "att.a0": -0.19 + 0.3 * zz + 0.4 * lin,
        "att.v0": 0.73 - 0.4 * lin, "att.k_k": 0.71 - 0.1 * lin, "att.k_a": 1.02, "att.r_k": -0.04,
        "ln_x.weight": ((1 + layer) / L) ** 0.7}
    value = values.get(leaf, 1.0 if name.endswith(".weight") else 0.0)
    return (value if isinstance(value, Tensor) else torch.full(shape, value, dtype=torch.float64)).float().view(shape)


def _depth(name: str, config: RwkvConfig) -> tuple[int, int]:
    """(l, L) of the block a tensor is in, among those of ``blocks``; a block between counts with the one before it."""
    L = sum(b.path.startswith(f"{config.prefix}blocks.") for b in config.blocks)
    layer = -1
    for b in config.blocks:
        layer += b.path.startswith(f"{config.prefix}blocks.")
        if name.startswith(b.path + "."):
            return layer, L
    return 0, L


def _orthogonal(shape: Shape, gain: float, generator: torch.Generator) -> Tensor:
    """Rows or columns, whichever are fewer, orthonormal times ``gain`` (Saxe et al., 2013)."""
    rows, columns = shape
    wide = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    q, r = torch.linalg.qr(wide)
    q = q * (torch.diagonal(r).sign() * gain)
    found: Tensor = q if rows >= columns else q.t()
    return found.contiguous()
