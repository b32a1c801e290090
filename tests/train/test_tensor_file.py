from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from rrd.durable import Bytes
from rrd.safetensors_header import Located, read_header
from rrd.train.tensor_file import DTYPES, Entry, entry, read_tensor, stream

TENSORS = {
    "b": torch.arange(6.0).view(2, 3), "a": torch.tensor(3, dtype=torch.int64), "empty": torch.zeros(0, 4),
    "half": torch.arange(5).bfloat16(), "bytes": torch.arange(3, dtype=torch.uint8), "turned": torch.rand(4, 3).T,
}


def whole(chunks: Iterator[Bytes]) -> bytes:
    return b"".join(bytes(c) for c in chunks)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    chunks, size = stream(entry(n, t) for n, t in TENSORS.items())
    data = whole(chunks)
    assert len(data) == size
    found = load(data)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in TENSORS.items())
    (tmp_path / "x.safetensors").write_bytes(data)
    header = read_header(tmp_path / "x.safetensors").tensors
    assert all(torch.equal(read_tensor(Located(tmp_path / "x.safetensors", header[n])), t) for n, t in TENSORS.items())
    assert all(header[n].begin % t.element_size() == 0 for n, t in TENSORS.items())


def test_the_order_given_makes_no_difference() -> None:
    a, b = (whole(stream(entry(n, TENSORS[n]) for n in names)[0]) for names in (TENSORS, reversed(TENSORS)))
    assert a == b


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_goes_there_and_back(tmp_path: Path, name: str) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(DTYPES[name])
    (tmp_path / "x").write_bytes(whole(stream([entry("t", tensor)])[0]))
    info = read_header(tmp_path / "x").tensors["t"]
    assert info.dtype == name
    assert torch.equal(read_tensor(Located(tmp_path / "x", info)), tensor)


def test_a_tensor_is_made_when_its_turn_comes() -> None:
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.ones(2)

    chunks, _ = stream([Entry(n, torch.float32, (2,), lambda n=n: make(n)) for n in "ab"])  # type: ignore[misc]
    next(chunks)
    assert made == []
    next(chunks)
    assert made == ["a"]
