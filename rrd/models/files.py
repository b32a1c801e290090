"""A model directory's tensors, streamed from its files in pieces: never a whole model in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rrd.errors import BadJob
from rrd.models.dtypes import OF_FILE, itemsize
from rrd.models.registry import Family, Shape, family_of
from rrd.safetensors_header import Located, home_of, model_tensors, open_file, read_json
from rrd.text import one_line

PIECE = 16 << 20
"""Bytes read at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a model loads: the worker's heartbeat."""


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds, as far as headers tell: nothing of the weights has been read."""

    path: Path
    raw_config: dict[str, Any]
    family: Family
    config: Any
    wanted: Mapping[str, Shape]
    """The tensors the family needs, in the order they shall stand in memory."""
    located: Mapping[str, Located]

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum(at.info.nbytes for name in self.wanted for at in self.parts(name))

    def parts(self, name: str) -> list[Located]:
        """Where ``name`` stands: one place, or several to be put one behind the other."""
        return [self.located[n] for n in names_in_files(self.config, name)]


def names_in_files(config: Any, name: str) -> tuple[str, ...]:
    """What the files call the model's tensor ``name``: itself, unless the family's config has ``parts``."""
    parts: Mapping[str, tuple[str, ...]] = getattr(config, "parts", {})
    return parts.get(name, (name,))


def inspect(model_dir: Path) -> ModelFiles:
    """Read the headers and ``config.json`` and check that every tensor is there, in its shape. Raises BadJob."""
    located = model_tensors(model_dir)
    config_file = home_of(model_dir) / "config.json"
    raw = read_json(config_file) if config_file.exists() else {}
    shapes = {name: t.info.shape for name, t in located.items()}
    try:
        family = family_of(raw, shapes.keys())
        config = family.read_config(raw, shapes)
    except BadJob as e:
        raise BadJob(e.message, hint=e.hint, file=str(model_dir)) from None
    wanted = dict(family.tensors(config))
    ignored = {n for n in shapes if family.ignores(n, config)}
    files = ModelFiles(model_dir, raw, family, config, wanted, located)
    _compare(files, ignored, source="its config.json" if raw else f"the layout of {family.name}")
    return files


def _compare(files: ModelFiles, ignored: set[str], source: str) -> None:
    model_dir, located = files.path, files.located
    named = {n for name in files.wanted for n in names_in_files(files.config, name)}
    missing = [name for name in files.wanted if not located.keys() >= set(names_in_files(files.config, name))]
    extra = [n for n in located if n not in named and n not in ignored]
    if missing and extra:
        _refuse(model_dir, f"lacks {_named(missing)}, and holds what {source} does not explain: {_named(extra)}",
                "is it a model of another kind?")
    if missing:
        _refuse(model_dir, f"lacks {_named(missing)}", "fetch the model again, all of its files")
    if extra:
        _refuse(model_dir, f"holds tensors that {source} does not explain: {_named(extra)}", "")
    for name, shape in files.wanted.items():
        parts = files.parts(name)
        info = parts[0].info
        if info.shape != shape and (len(parts) == 1 or sum(prod(p.info.shape) for p in parts) != prod(shape)):
            _refuse(model_dir, f"has {name} in shape {list(info.shape)}, and {source} says {list(shape)}", "")
        if any(p.info.dtype not in OF_FILE or p.info.dtype != info.dtype for p in parts):
            _refuse(model_dir, f"has {name} in dtype {info.dtype}, which is no float we can read",
                    "use the model's float weights (bfloat16, float16 or float32)")


def _named(names: list[str]) -> str:
    shown = 8
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _refuse(path: Path, why: str, hint: str) -> None:
    raise BadJob(one_line(why), file=str(path), hint=hint)


class Stream:
    """One pass over a model's weights, in the family's order and in ``dtype``; the digest is known at its end."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, progress: Progress | None = None) -> None:
        self.files, self.dtype = files, dtype
        self._progress, self._done = progress, 0
        self._sums: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """sha256 of the configuration and of every tensor's name, dtype, shape and bytes, in whatever order."""
        facts = [self.files.raw_config, sorted(self._sums.items())]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, int, Tensor]]:
        """(name, index of the piece's first element, the piece: 1-D of ``dtype``, valid until the next one)."""
        open_files: dict[Path, BinaryIO] = {}
        try:
            for name, shape in self.files.wanted.items():
                parts = self.files.parts(name)
                sha, before = hashlib.sha256(repr((parts[0].info.dtype, shape)).encode()), 0
                for at in parts:
                    if at.path not in open_files:
                        open_files[at.path] = open_file(at.path)
                    for first, raw in self._pieces(open_files[at.path], at):
                        sha.update(raw)
                        piece = torch.frombuffer(raw, dtype=OF_FILE[at.info.dtype])
                        yield name, before + first, piece.to(self.dtype)
                    before += prod(at.info.shape)
                self._sums[name] = sha.hexdigest()
        finally:
            for file in open_files.values():
                file.close()

    def _pieces(self, file: BinaryIO, at: Located) -> Iterator[tuple[int, bytearray]]:
        size = itemsize(OF_FILE[at.info.dtype])
        file.seek(at.info.begin)
        for start in range(0, at.info.nbytes, PIECE):
            raw = bytearray(min(PIECE, at.info.nbytes - start))
            _read_into(file, raw, at.path)
            yield start // size, raw
            self._done += len(raw)
            if self._progress is not None:
                self._progress(self._done, self.files.nbytes)


def _read_into(file: BinaryIO, raw: bytearray, path: Path) -> None:
    """Fill ``raw``. Read, not mapped: a file cut short meanwhile is then a sentence, not a SIGBUS."""
    view = memoryview(raw)
    while view:
        try:
            n = file.readinto(view)  # type: ignore[attr-defined]
        except OSError as e:
            raise BadJob(f"cannot be read: {e.strerror}", file=str(path), hint="check the disk it lies on") from e
        if not n:
            raise BadJob("was cut short while it was being read", file=str(path), hint="fetch the file again")
        view = view[n:]
