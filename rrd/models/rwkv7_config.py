"""An RWKV-7 model's sizes, read off the names and shapes of its tensors: there is no ``config.json``.

The layouts known, with ``{p}`` either nothing or ``rwkv.``:

    {p}emb.weight {p}head.weight {p}ln_out.*     and {p}blocks.0.ln0.*
    {p}blocks.{i}.{ln1,ln2,ffn}.*                every block
    {p}blocks.{i}.att.{x_r … ln_x.bias}          a time mix (BlinkDL's RWKV-LM); one without x_r is plain attention
    moba.{j}.*  attn.{j}.*  rfa.{j}.*            attention blocks between (``rrd.models.rwkvx``)

With m blocks of one such kind, one stands after every L / m blocks of ``blocks``, as in RWKV-X. Of several kinds at one
place, moba comes first, then attn, then rfa.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrd.errors import BadJob
from rrd.models.registry import Shape

HEAD_SIZE = 64
BETWEEN = ("moba", "attn", "rfa")
"""Kinds of blocks that stand between those of ``blocks``; also their names in files."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One block. ``kind``: "rwkv", or one of ``BETWEEN``; D's are the inner sizes of the low-rank products."""

    path: str
    kind: str
    n_inner: int
    d_w: int = 0
    d_a: int = 0
    d_v: int = 0
    """0 in the first time mix, which begins ``v_first``."""
    d_g: int = 0
    n_features: int = 0
    """Random features a head, of ``rfa`` alone."""


@dataclass(frozen=True, kw_only=True)
class RwkvConfig:
    """Sizes of one model. ``blocks`` are in the order of their execution."""

    prefix: str
    n_vocab: int
    n_embd: int
    blocks: tuple[BlockConfig, ...]
    head_size: int = HEAD_SIZE
    norm_eps: float = 1e-5
    moba_chunk: int = 2048
    """Tokens in a chunk of ``moba`` blocks, which are sparse beyond ``moba_chunk * moba_topk`` tokens."""
    moba_topk: int = 3
    longest: int = 2048
    """Tokens of a sample that are in memory at once; more follow in pieces (``rrd.train.pieces``)."""

    @property
    def n_head(self) -> int:
        return self.n_embd // self.head_size

    @property
    def n_layer(self) -> int:
        """Blocks of every kind."""
        return len(self.blocks)

    @property
    def n_inner(self) -> int:
        """Of the widest channel mix."""
        return max(b.n_inner for b in self.blocks)


def prefix_of(keys: Collection[str]) -> str | None:
    """What stands before the body's names; None where these are no RWKV's tensors."""
    for prefix in ("", "rwkv."):
        if {f"{prefix}{n}" for n in ("emb.weight", "head.weight", "ln_out.weight", "blocks.0.ln1.weight")} <= set(keys):
            return prefix
    return None


def read_config(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> RwkvConfig:
    """The model's config. Raises BadJob for what is no RWKV-7, and for sizes that do not fit together.

    A ``config.json`` may stand beside the tensors; of it, ``moba_chunk_size`` and ``moba_topk`` are read.
    """
    prefix = prefix_of(shapes)
    assert prefix is not None
    emb = shapes[f"{prefix}emb.weight"]
    if len(emb) != 2 or not emb[1] or emb[1] % HEAD_SIZE:
        raise BadJob(f"emb.weight is {list(emb)}: the model's width must be a multiple of {HEAD_SIZE}")
    L = _count(shapes, f"{prefix}blocks.")
    main = [_block(shapes, f"{prefix}blocks.{i}", None) for i in range(L)]
    return RwkvConfig(prefix=prefix, n_vocab=emb[0], n_embd=emb[1], blocks=_in_order(main, shapes),
                      moba_chunk=_number(raw, "moba_chunk_size", 2048), moba_topk=_number(raw, "moba_topk", 3))


def _number(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise BadJob(f"gives no usable {key} in its config.json")
    return value


def _count(shapes: Mapping[str, Shape], start: str) -> int:
    """How many numbered modules there are: 0, 1, … without a gap. (What lies beyond a gap stays unexplained.)"""
    found = {int(m[1]) for name in shapes if (m := re.match(re.escape(start) + r"([0-9]{1,6})\.", name))}
    return next(i for i in range(len(found) + 1) if i not in found)


def _block(shapes: Mapping[str, Shape], path: str, kind: str | None) -> BlockConfig:
    def columns(name: str) -> int:
        shape = shapes.get(f"{path}.att.{name}", ())
        return shape[-1] if shape else 1  # missing: what is compared later says so

    inner = shapes.get(f"{path}.ffn.key.weight", (1, 1))[0]
    if kind is None:
        bare = f"{path}.att.x_r" not in shapes and f"{path}.att.receptance.weight" in shapes
        kind = "attn" if bare and f"{path}.att.r_k" not in shapes else "rwkv"
    if kind == "rfa":
        features = shapes.get(f"{path}.att.features", (1, 1, 1))
        return BlockConfig(path=path, kind=kind, n_inner=inner, n_features=features[1] if len(features) == 3 else 1)
    if kind != "rwkv":
        return BlockConfig(path=path, kind=kind, n_inner=inner)
    return BlockConfig(path=path, kind=kind, n_inner=inner, d_w=columns("w1"), d_a=columns("a1"), d_v=columns("v1"),
                       d_g=columns("g1"))


def _in_order(main: list[BlockConfig], shapes: Mapping[str, Shape]) -> tuple[BlockConfig, ...]:
    first = next((i for i, b in enumerate(main) if b.kind == "rwkv"), None)
    if first is None:
        raise BadJob("has no RWKV-7 time mix in any of its blocks")
    blocks = [_first(b) if i == first else b for i, b in enumerate(main)]
    after: dict[int, list[BlockConfig]] = {}
    for kind in BETWEEN:
        m = _count(shapes, f"{kind}.")
        if m and len(blocks) % m:
            raise BadJob(f"has {m} {kind} blocks, which cannot stand at equal distances among {len(blocks)}")
        for j in range(m):
            after.setdefault((j + 1) * len(blocks) // m - 1, []).append(_block(shapes, f"{kind}.{j}", kind))
    return tuple(b for i, block in enumerate(blocks) for b in (block, *after.get(i, [])))


def _first(b: BlockConfig) -> BlockConfig:
    return replace(b, d_v=0)
