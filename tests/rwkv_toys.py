"""Small RWKV models made on the spot: random weights in BlinkDL's names, no value that would hide a mistake."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from toys import make_tokenizer

Tensors = dict[str, Tensor]


class Random:
    """Normal numbers from a generator of their own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale + mean


def norm(name: str, C: int, random: Random) -> Tensors:
    return {f"{name}.weight": random(C, scale=0.1, mean=1.0), f"{name}.bias": random(C, scale=0.1)}


def channel_mix(at: str, C: int, inner: int, random: Random) -> Tensors:
    return {f"{at}.x_k": random(1, 1, C, scale=0.3, mean=0.5), f"{at}.key.weight": random(inner, C, scale=C**-0.5),
            f"{at}.value.weight": random(C, inner, scale=inner**-0.5)}


def time_mix(at: str, C: int, random: Random, *, v: bool) -> Tensors:
    found = {f"{at}.x_{s}": random(1, 1, C, scale=0.3, mean=0.5) for s in "rwkvag"}
    found |= {f"{at}.{n}": random(1, 1, C, scale=0.5, mean=m) for n, m in
              {"w0": -2.0, "a0": 0.0, "k_k": 0.8, "k_a": 1.0}.items()}
    for name, d in {"w": 24, "a": 16, "g": 32, **({"v": 8} if v else {})}.items():
        found[f"{at}.{name}1"] = random(C, d, scale=C**-0.5)
        found[f"{at}.{name}2"] = random(d, C, scale=d**-0.5)
    if v:
        found[f"{at}.v0"] = random(1, 1, C, scale=0.5)
    found[f"{at}.r_k"] = random(C // 64, 64, scale=0.3)
    found |= norm(f"{at}.ln_x", C, random)
    return found | attention(at, C, random)


def attention(at: str, C: int, random: Random) -> Tensors:
    return {f"{at}.{n}.weight": random(C, C, scale=C**-0.5) for n in ("receptance", "key", "value", "output")}


def rwkv7(*, C: int = 128, L: int = 3, V: int = 97, inner: int = 0, unused_v: bool = False, seed: int = 0) -> Tensors:
    """The tensors of an RWKV-7. ``unused_v``: block 0 has the v0, v1, v2 that nothing uses."""
    random = Random(seed)
    found = {"emb.weight": random(V, C), "head.weight": random(V, C, scale=C**-0.5)} | norm("ln_out", C, random)
    found |= norm("blocks.0.ln0", C, random)
    for i in range(L):
        at = f"blocks.{i}"
        found |= norm(f"{at}.ln1", C, random) | norm(f"{at}.ln2", C, random)
        found |= time_mix(f"{at}.att", C, random, v=i > 0 or unused_v)
        found |= channel_mix(f"{at}.ffn", C, inner or 4 * C, random)
    return found


def between(kind: str, j: int, C: int, inner: int, random: Random, features: int = 16) -> Tensors:
    """An attention block: ``kind`` is moba, attn or rfa."""
    at = f"{kind}.{j}"
    found = norm(f"{at}.ln1", C, random) | norm(f"{at}.ln2", C, random) | channel_mix(f"{at}.ffn", C, inner, random)
    found |= attention(f"{at}.att", C, random)
    if kind == "rfa":
        H = C // 64
        found |= {f"{at}.att.gate.weight": random(H, C, scale=C**-0.5), f"{at}.att.gate.bias": random(H, mean=2.0),
                  f"{at}.att.sigma": random(H, 64, scale=0.2, mean=1.0),
                  f"{at}.att.features": random(H, features, 64)}
    return found


def hybrid(*, prefix: str = "", L: int = 4, C: int = 128, seed: int = 0, **kinds: int) -> Tensors:
    """An RWKV-7 with attention blocks: ``moba=2`` for two of them. ``prefix`` goes before the body's names."""
    random = Random(seed + 1)
    found = {prefix + n: t for n, t in rwkv7(C=C, L=L, seed=seed).items()}
    for kind, m in kinds.items():
        for j in range(m):
            found |= between(kind, j, C, 4 * C, random)
    return found


def saved(tensors: Tensors, path: Path) -> Path:
    """A model directory with nothing but the tensors."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def make_rwkv(path: Path, **sizes: int) -> Path:
    """A small RWKV-7 with a byte-level tokenizer beside it: ``toys.make_model`` of this family."""
    make_tokenizer(path, vocab=320)
    return saved(rwkv7(**{"V": 320, "C": 64, "L": 2, **sizes}), path)
