"""safetensors files written as a stream: the same tensors give the same bytes, and only one tensor is in memory.

Format: https://github.com/huggingface/safetensors#format. The library's own writer needs all tensors at once, and
orders more than one metadata key as it pleases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rrd.durable import Bytes
from rrd.safetensors_header import Located
from rrd.train.state import as_memory

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor to write. ``make`` is called when its turn comes, and what it returns is let go right after."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * torch.empty((), dtype=self.dtype).element_size()


def entry(name: str, tensor: Tensor) -> Entry:
    """A tensor that is at hand, as it stands."""
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def stream(entries: Iterable[Entry], alive: Callable[[float], None] = lambda _: None) -> tuple[Iterator[Bytes], int]:
    """The file as chunks, each good only until the next is asked for; and its size.

    Calls ``alive`` with the share done after each tensor.
    """
    ordered = sorted(entries, key=lambda e: (-torch.empty((), dtype=e.dtype).element_size(), e.name))
    header = _header(ordered)
    size = len(header) + sum(e.nbytes for e in ordered)
    return _chunks(header, ordered, size, alive), size


def _chunks(header: bytes, ordered: list[Entry], size: int, alive: Callable[[float], None]) -> Iterator[Bytes]:
    yield header
    done = len(header)
    for e in ordered:
        tensor = e.make().detach().cpu().contiguous()
        assert (tensor.dtype, tuple(tensor.shape)) == (e.dtype, e.shape), e.name
        yield as_memory(tensor)
        del tensor  # before the next one is made
        done += e.nbytes
        alive(done / size)


def _header(ordered: list[Entry]) -> bytes:
    """8 bytes of length, then JSON with spaces up to a multiple of 64, so that the tensors are aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    at = 0
    for e in ordered:
        table[e.name] = {"dtype": NAMES[e.dtype], "shape": list(e.shape), "data_offsets": [at, at + e.nbytes]}
        at += e.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def read_tensor(located: Located) -> Tensor:
    """One tensor of a file whose header is checked, in its own memory and dtype."""
    tensor = torch.empty(located.info.shape, dtype=DTYPES[located.info.dtype])
    with open(located.path, "rb", buffering=0) as f:
        f.seek(located.info.begin)
        view, at = as_memory(tensor), 0
        while at < len(view) and (n := f.readinto(view[at:])):
            at += n
    assert at == len(view), "the header was checked against the file's size"
    return tensor
