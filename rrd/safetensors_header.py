"""What a safetensors file holds, read from its header alone and checked before it is believed.

A file is 8 bytes of length, little endian, that many bytes of JSON, then the tensors (the format's README). Model
files come from anywhere, so nothing here trusts them: sizes are limited, offsets must lie in the file and apart from
each other, and every refusal is one sentence. No torch: the plan reads models in the daemon.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from rrd import roots
from rrd.errors import BadJob, NotReadable
from rrd.text import one_line

MAX_HEADER = 10 << 20
"""Bytes of JSON; a header of 35 MB costs a parser 5 s and 510 MB."""
MAX_TENSORS = 20_000
MAX_RANK = 8

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}
"""Bytes of one element of every dtype known here."""

_LFS = b"version https://git-lfs"
_FETCH = "fetch the file again"


class TensorInfo(NamedTuple):
    """One tensor of a file: ``begin`` is counted from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The tensors of one file, by name and in the file's order, and its free-form metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


class Located(NamedTuple):
    """A tensor and the file that has it."""

    path: Path
    info: TensorInfo


def read_header(path: Path) -> Header:
    """The checked header of the safetensors file ``path``.

    Raises:
        BadJob: the file cannot be read, is no safetensors file, is cut short, or its header does not hold.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_LFS))
        if start.startswith(_LFS):
            _refuse(path, "is a Git LFS pointer, not the weights", "run `git lfs pull` where it was cloned")
        if len(start) < 8:
            _refuse(path, f"is cut short: {size} bytes", _FETCH)
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER:
            _refuse(path, f"is no safetensors file, or its header of {length:,} bytes is over the limit",
                    f"the limit is {MAX_HEADER:,} bytes")
        if length + 8 > size:
            _refuse(path, f"is cut short: its header alone has {length:,} bytes and the file {size:,}", _FETCH)
        file.seek(8)
        raw = file.read(length)
    return _check(path, _parse(path, raw), data=8 + length, size=size)


def open_file(path: Path) -> BinaryIO:
    """Open a model's file for reading. Raises BadJob unless it is a regular file one may read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        kind = NotReadable if isinstance(e, PermissionError) else BadJob
        raise kind(f"cannot be opened: {os.strerror(e.errno or 0).lower()}", file=str(path),
                   hint="check the path and its permissions") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        _refuse(path, "is not a regular file", "")
    roots.check(fd, str(path), "model")
    return os.fdopen(fd, "rb", buffering=0)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        _refuse(path, f"has a damaged header: {e}", _FETCH)
    if not isinstance(header, dict):
        _refuse(path, "has a damaged header: no JSON object", _FETCH)
    if len(header) > MAX_TENSORS:
        _refuse(path, f"has {len(header):,} tensors", f"the limit is {MAX_TENSORS:,}")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(k for k, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands there twice")
    return table


def _check(path: Path, header: dict[str, Any], *, data: int, size: int) -> Header:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(path, "has a damaged header: its metadata is no table of texts", _FETCH)
    tensors = {name: _tensor(path, name, entry, data) for name, entry in header.items()}
    end = data
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if t.begin < end:
            _refuse(path, f"has a damaged header: tensor {name!r} overlaps another", _FETCH)
        end = t.begin + t.nbytes
    if end > size:
        _refuse(path, f"is cut short: its tensors end at byte {end:,} and the file has {size:,}", _FETCH)
    return Header(tensors, metadata)


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, begin, end)) or len(shape) > MAX_RANK:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        _refuse(path, f"has a damaged header: the entry of tensor {name!r} is not understood", _FETCH)
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _refuse(path, f"holds tensor {name!r} in the unknown dtype {dtype!r}", "convert the model to bfloat16")
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        _refuse(path, f"has a damaged header: tensor {name!r} has {end - begin:,} bytes and needs {nbytes:,}", _FETCH)
    return TensorInfo(dtype, shape, data + begin, nbytes)


def model_tensors(model: Path) -> dict[str, Located]:
    """Every tensor of a model: of a directory's shards or its one safetensors file, or of ``model``, such a file.

    Raises:
        BadJob: there is none, a shard is missing, or one does not hold what the index says.
    """
    index = model / "model.safetensors.index.json"
    if index.exists():
        return _sharded(index)
    path = model if is_file(model) else _single(model)
    return {name: Located(path, info) for name, info in read_header(path).tensors.items()}


def is_file(model: Path) -> bool:
    """Whether a model is given by a single file in place of a directory."""
    return model.suffix == ".safetensors" and not model.is_dir()


def home_of(model: Path) -> Path:
    """The directory in which a model's config.json and tokenizer lie: itself, or that of its one file."""
    return model.parent if is_file(model) else model


def _single(model_dir: Path) -> Path:
    if not model_dir.is_dir():
        _refuse(model_dir, "is no directory" if model_dir.exists() else "is not there",
                "name the directory that holds config.json and *.safetensors")
    if (model_dir / "model.safetensors").exists():
        return model_dir / "model.safetensors"
    found = sorted(p for p in model_dir.glob("*.safetensors") if not p.name.startswith("adapter"))
    if len(found) == 1:
        return found[0]
    if found:
        _refuse(model_dir, f"has {len(found)} safetensors files and no model.safetensors.index.json", _FETCH)
    if any(p.suffix in {".bin", ".pt", ".pth"} for p in model_dir.iterdir()):
        _refuse(model_dir, "has pickled weights only, which rrd never opens",
                "convert them: `model.save_pretrained(dir, safe_serialization=True)`")
    if (model_dir / "adapter_config.json").exists():
        _refuse(model_dir, "is an adapter, no model", "give its base model as `model`, and this as `init_adapter`")
    raise BadJob("has no safetensors file", file=str(model_dir), hint="name the directory that holds config.json and "
                 "*.safetensors")


def _sharded(index: Path) -> dict[str, Located]:
    shards: dict[str, Header] = {}
    tensors: dict[str, Located] = {}
    for name, shard in weight_map(index).items():
        path = index.parent / shard
        if shard not in shards:
            if not path.exists():
                _refuse(path, f"is missing: {index.name} names it", "fetch the model again, all of its files")
            shards[shard] = read_header(path)
        if name not in shards[shard].tensors:
            _refuse(path, f"does not hold tensor {name!r}, which {index.name} says it does", _FETCH)
        tensors[name] = Located(path, shards[shard].tensors[name])
    return tensors


def weight_map(index: Path) -> Mapping[str, str]:
    """The index file's table from tensor to shard. Raises BadJob when it is none, or names a path elsewhere."""
    body = read_json(index)
    table = body.get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()) or len(table) > MAX_TENSORS:
        _refuse(index, "has no usable weight_map", _FETCH)
    for shard in set(table.values()):
        if os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            _refuse(index, f"names {shard!r}, which is no safetensors file beside it", "")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's file of at most 10 MB. Raises BadJob."""
    with open_file(path) as file:
        raw = file.read(MAX_HEADER + 1)
    if raw.startswith(_LFS):
        _refuse(path, "is a Git LFS pointer", "run `git lfs pull` where it was cloned")
    if len(raw) > MAX_HEADER:
        _refuse(path, "is too large", f"the limit is {MAX_HEADER:,} bytes")
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        _refuse(path, f"is no valid JSON: {e}", _FETCH)
    if not isinstance(body, dict):
        _refuse(path, "is no JSON object", _FETCH)
    return body


def _refuse(path: Path, why: str, hint: str) -> NoReturn:
    raise BadJob(one_line(why), file=str(path), hint=hint)
