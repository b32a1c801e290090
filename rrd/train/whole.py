"""Whole models: written tensor by tensor in the names and storage types of the model they came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rrd.errors import BadJob, Damaged, RrdError
from rrd.models.files import inspect, names_in_files
from rrd.safetensors_header import Located, home_of, model_tensors, read_json
from rrd.train.read import open_regular
from rrd.train.sealed import Sealing
from rrd.train.tensor_file import DTYPES, Entry, read_tensor, stream

WEIGHTS = "model.safetensors"
BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
    "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
)
"""What belongs to a model besides its weights; copied as it stands, where it is there."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Update(NamedTuple):
    """What a LoRA adapter does to one weight: W + scale * B A."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float
    turned: bool = False
    """Whether the weight is stored [in, out]."""


def add_merged(new: Sealing, model_dir: Path, updates: Mapping[str, Update], *, inside: str = "",
               alive: Callable[[float], None] = lambda _: None) -> None:
    """The model in ``model_dir`` with ``updates`` (by the weight's name) merged in, in fp32, then stored as it was.

    Raises:
        BadJob: the model lacks a weight that the adapter changes, or holds it as something else than plain floats.
    """
    found = model_tensors(model_dir)
    updates = _as_stored(updates, inspect(model_dir).config)
    for name in updates:
        if name not in found or not DTYPES.get(found[name].info.dtype, torch.int8).is_floating_point:
            raise BadJob(f"the model has no tensor {name} in floats, which the adapter changes", file=str(model_dir),
                         hint="use the adapter beside its model instead of merging it")
    _add(new, model_dir, inside, found, lambda name, t: _merge(t, updates[name]) if name in updates else t, alive)


def check(new: Path, model_dir: Path, updates: Mapping[str, Update]) -> None:
    """Whether the model written to ``new`` loads as the one in ``model_dir`` did, with ``updates`` in it.

    Raises:
        Damaged: it has other tensors, or a weight (the first and the last that changed are read again) is another.
        RrdError: merging has made a weight infinite.
    """
    found, before = model_tensors(new), model_tensors(model_dir)
    updates = _as_stored(updates, inspect(model_dir).config)
    inspect(new)
    if {n: (t.info.dtype, t.info.shape) for n, t in found.items()} != {
            n: (t.info.dtype, t.info.shape) for n, t in before.items()}:
        raise Damaged(f"{new} does not hold the tensors of {model_dir}")
    for name in {*list(updates)[:1], *list(updates)[-1:]}:
        there = read_tensor(found[name])
        if not torch.equal(there, _merge(read_tensor(before[name]), updates[name])):
            raise Damaged(f"{new / WEIGHTS} does not hold {name} as it was merged")
        if not torch.isfinite(there).all():
            raise RrdError(f"merging makes {name} infinite", hint="use the adapter beside its model")


def _as_stored(updates: Mapping[str, Update], config: Any) -> dict[str, Update]:
    """``updates`` by the names in the files, and turned where weights are stored [in, out]."""
    turned = getattr(config, "fan_in_fan_out", False)
    return {names_in_files(config, n)[0]: u._replace(turned=turned) for n, u in updates.items()}


def _merge(w: Tensor, update: Update) -> Tensor:
    delta = update.b.detach().cpu().float() @ update.a.detach().cpu().float()
    return w.float().add_(delta.t() if update.turned else delta, alpha=update.scale).to(w.dtype)


def add_trained(new: Sealing, model_dir: Path, trained: Mapping[str, Tensor], *,
                alive: Callable[[float], None] = lambda _: None) -> int:
    """The model in ``model_dir`` with ``trained`` in place of its weights. Returns how many tensors changed."""
    found = model_tensors(model_dir)
    config = home_of(model_dir) / "config.json"
    tied = config.exists() and bool(read_json(config).get("tie_word_embeddings")) and _HEAD not in trained
    changed = 0

    def make(name: str, old: Tensor) -> Tensor:
        nonlocal changed
        value = trained.get(_EMBEDDING if tied and name == _HEAD else name)  # a tied head may be stored twice
        if value is None:
            return old  # a buffer, or what this family does not use
        weight = value.detach().cpu().to(old.dtype)
        changed += not torch.equal(weight, old)
        return weight

    strangers = trained.keys() - found.keys()
    assert not strangers, f"trained tensors that the model's files do not name: {sorted(strangers)[:3]}"
    _add(new, model_dir, "", found, make, alive)
    return changed


def _add(new: Sealing, model_dir: Path, inside: str, found: Mapping[str, Located],
         make: Callable[[str, Tensor], Tensor], alive: Callable[[float], None]) -> None:
    for name, located in found.items():
        if located.info.dtype not in DTYPES:
            raise BadJob(f"tensor {name} is stored as {located.info.dtype}, which rrd does not write",
                         file=str(located.path))

    def one(name: str, at: Located) -> Entry:
        return Entry(name, DTYPES[at.info.dtype], at.info.shape, lambda: make(name, read_tensor(at)))

    chunks, size = stream((one(name, at) for name, at in found.items()), alive)
    new.add(inside + WEIGHTS, chunks, size=size)
    home = home_of(model_dir)
    for name in BESIDE:
        if (home / name).is_file():
            new.add(inside + name, _bytes(home / name))


def _bytes(file: Path) -> Iterator[bytes]:
    with open_regular(str(file), what="the model's file") as f:
        while part := f.read(1 << 20):
            yield part
