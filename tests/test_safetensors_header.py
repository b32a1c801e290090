from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rrd.errors import BadJob
from rrd.safetensors_header import MAX_HEADER, MAX_TENSORS, model_tensors, read_header


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "s": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == {
        "a": ("F32", (2, 3)), "b": ("BF16", (5,)), "s": ("F32", ())}
    assert header.metadata == {"format": "pt"}
    at = header.tensors["b"]
    raw = (tmp_path / "m.safetensors").read_bytes()[at.begin : at.begin + at.nbytes]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.bfloat16), tensors["b"])


GOOD = {"a": entry(0, 8), "b": entry(8, 16)}
BAD = {
    "is cut short: 4 bytes": b"abcd",
    "is a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "over the limit": (MAX_HEADER + 1).to_bytes(8, "little") + b"{" * 100,
    "its header alone has 5,000 bytes": (5000).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_file_that_is_none_gets_one_sentence(tmp_path: Path, sentence: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(BAD[sentence])
    with pytest.raises(BadJob, match=sentence) as caught:
        read_header(tmp_path / "m.safetensors")
    assert "\n" not in caught.value.message
    assert str(tmp_path / "m.safetensors") in caught.value.message


HEADERS = {
    "tensors end at byte": {"a": entry(0, 8), "b": entry(8, 32)},
    "overlaps another": {"a": entry(0, 8), "b": entry(4, 12)},
    "'b' overlaps another": {"a": entry(0, 16), "b": entry(8, 12)},
    "has 8 bytes and needs 12": {"a": entry(0, 8, [3])},
    "unknown dtype 'F4'": {"a": entry(0, 8, dtype="F4")},
    "has a damaged header: Expecting": b'{"a": ',
    "the key 'a' stands there twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}',
    "no JSON object": [1],
    "no table of texts": {"__metadata__": {"format": 1}},
    "entry of tensor 'a' is not understood": {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "tensor 'b' is not understood": {"b": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
    "tensor 'c' is not understood": {"c": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
    "tensor 'd' is not understood": {"d": 7},
    "the limit is 20,000": {f"t{i}": 0 for i in range(MAX_TENSORS + 1)},
    "damaged header: maximum recursion": b"[" * 200_000,
}


@pytest.mark.parametrize("sentence", HEADERS)
def test_a_header_that_does_not_hold_gets_one_sentence(tmp_path: Path, sentence: str) -> None:
    with pytest.raises(BadJob) as caught:
        read_header(write(tmp_path / "m.safetensors", HEADERS[sentence], bytes(16)))
    assert sentence in str(caught.value)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from([b"", b"\xff", b"9", b'"', b"}", b"\x00"])), max_size=4),
       st.integers(0, 250))
def test_a_damaged_file_is_refused_or_read_never_anything_else(
    tmp_path: Path, edits: list[tuple[int, bytes]], length: int
) -> None:
    raw = write(tmp_path / "m.safetensors", GOOD, bytes(16)).read_bytes()
    for at, new in edits:
        raw = raw[:at] + new + raw[at + 1 :]
    (tmp_path / "m.safetensors").write_bytes(raw[:length])
    try:
        header = read_header(tmp_path / "m.safetensors")
    except BadJob:
        return
    assert all(t.begin + t.nbytes <= len(raw[:length]) for t in header.tensors.values())


def shards(path: Path, table: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    write(tmp_path / "x-1.safetensors", {"a": entry(0, 8)}, bytes(8))
    write(tmp_path / "x-2.safetensors", {"b": entry(0, 8)}, bytes(8))
    shards(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    assert {n: t.path.name for n, t in model_tensors(tmp_path).items()} == {
        "a": "x-1.safetensors", "b": "x-2.safetensors"}


def test_a_directory_that_is_not_whole_gets_one_sentence(tmp_path: Path) -> None:
    def refused(sentence: str) -> None:
        with pytest.raises(BadJob) as caught:
            model_tensors(tmp_path)
        assert sentence in str(caught.value)

    refused("has no safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("pickled weights only")
    shards(tmp_path, {"a": "x-1.safetensors"})
    refused("x-1.safetensors: is missing: model.safetensors.index.json names it")
    write(tmp_path / "x-1.safetensors", {"b": entry(0, 8)}, bytes(8))
    refused("does not hold tensor 'a'")
    shards(tmp_path, {"a": "../x-1.safetensors"})
    refused("no safetensors file beside it")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused("is no valid JSON")
    (tmp_path / "model.safetensors.index.json").write_text("version https://git-lfs.github.com/spec/v1")
    refused("Git LFS pointer")


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(BadJob, match="is not a regular file"):
        model_tensors(tmp_path)
    with pytest.raises(BadJob, match="is not there"):
        model_tensors(tmp_path / "nowhere")
