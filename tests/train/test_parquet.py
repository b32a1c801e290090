"""Rows of parquet files: what the same JSON lines give, in any number of portions; damage is a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizer import plain_dir

from rrd.errors import BadJob
from rrd.train import portion
from rrd.train.parquet import row_ranges
from rrd.train.prepare import prepare

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"add {i}"},
                  {"role": "assistant", "content": f"that is {i}" * (i % 9 + 1)}], "id": i} for i in range(700)]


def write(path: Path, rows: list[dict[str, Any]], **how: Any) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), path, **how)
    return str(path)


@pytest.mark.parametrize("group", [10, 333, 10_000])
@pytest.mark.parametrize("processes", [1, 2])
def test_it_gives_what_json_lines_give(tmp_path: Path, group: int, processes: int, monkeypatch: pytest.MonkeyPatch
                                       ) -> None:
    monkeypatch.setattr(portion, "SIZE", 4000)
    tok = plain_dir(tmp_path / "model")
    data = write(tmp_path / "d.parquet", ROWS, row_group_size=group)
    assert len(row_ranges(data, 4000)) > 4
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    ours = prepare(data, tok, seq_len=32, cache_dir=tmp_path / "a", processes=processes)
    lines = prepare(str(tmp_path / "d.jsonl"), tok, seq_len=32, cache_dir=tmp_path / "b")
    assert ours.samples == 700
    for name in ("tokens.bin", "offsets.bin"):
        assert (ours.path / name).read_bytes() == (lines.path / name).read_bytes()


def test_shapes_and_bad_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a ", "completion": "b", "text": None}, {"prompt": None, "completion": None, "text": "plain"},
            {"prompt": "a", "completion": None, "text": None}]
    done = prepare(write(tmp_path / "d.parquet", rows), plain_dir(tmp_path / "m"), seq_len=8, cache_dir=tmp_path / "c")
    assert (done.samples, done.records) == (2, 2)
    assert done.bad_lines == [(3, "no keys that make an example (text; prompt and completion; instruction and output; "
                                  "question and answer; messages; conversations): found prompt")]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 100, b'{"text": "a"}\n', None])
def test_what_is_no_parquet_is_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "d.parquet"
    if content is None:
        data = Path(write(path, ROWS)).read_bytes()
        content = data[: len(data) // 2]
    path.write_bytes(content)
    with pytest.raises(BadJob, match=r"d\.parquet: not a usable parquet file"):
        prepare(str(path), plain_dir(tmp_path / "m"), seq_len=8, cache_dir=tmp_path / "c")


def test_damage_within_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    data = bytearray(Path(write(path, ROWS, compression="none")).read_bytes())
    data[200:2200] = b"\xff" * 2000
    path.write_bytes(data)
    with pytest.raises(BadJob, match=r"d\.parquet: (not a usable parquet file|.*holds nothing)"):
        prepare(str(path), plain_dir(tmp_path / "m"), seq_len=8, max_bad_lines=0, cache_dir=tmp_path / "c")


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "d.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadJob, match="pyarrow, which is not installed") as e:
        prepare(data, plain_dir(tmp_path / "m"), seq_len=8, cache_dir=tmp_path / "c")
    assert "rrd[parquet]" in e.value.hint
