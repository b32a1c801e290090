from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrd.errors import BadJob
from rrd.train import read
from rrd.train.read import BadLine, BadLines, DataFile, Record, Turn, parse, records


def read_all(path: Path, limit: int = 100) -> tuple[list[Record], BadLines]:
    bad = BadLines(str(path), limit)
    with DataFile(str(path)) as source:
        return list(records(source, bad)), bad


def jsonl(tmp_path: Path, data: bytes, name: str = "d.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("row", "turns"), [
    ({"text": "hi", "id": 7}, [("text", "hi")]),
    ({"prompt": "a", "completion": " b"}, [("prompt", "a"), ("completion", " b")]),
    ({"prompt": "", "completion": "b"}, [("prompt", ""), ("completion", "b")]),
    ({"instruction": "do", "output": "done"}, [("user", "do"), ("assistant", "done")]),
    ({"instruction": "do", "input": "this", "output": "done", "text": "all"},
     [("user", "do\n\nthis"), ("assistant", "done")]),
    ({"instruction": "do", "input": "", "output": "done"}, [("user", "do"), ("assistant", "done")]),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                   {"role": "assistant", "content": "a"}]}, [("system", "s"), ("user", "u"), ("assistant", "a")]),
    ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"},
                        {"from": "human", "value": "x"}]},
     [("user", "u"), ("assistant", "a")]),
    ({"question": "q", "answer": "a", "system": "s"}, [("system", "s"), ("user", "q"), ("assistant", "a")]),
    ({"prompt": "q", "response": "a"}, [("user", "q"), ("assistant", "a")]),
    ({"instruction": "q", "response": "a", "text": "all"}, [("user", "q"), ("assistant", "a")]),
    ({"input": "q", "output": "a"}, [("user", "q"), ("assistant", "a")]),
    ({"system": "s", "conversations": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
     [("system", "s"), ("user", "u"), ("assistant", "a")]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]},
                   {"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "w"},
                   {"role": "assistant", "content": "b", "weight": 1, "from": None}]},
     [("user", "uv"), ("assistant", "a", False), ("user", "w"), ("assistant", "b")]),
    ({"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
                 {"role": "user", "content": "v"}], "completion": [{"role": "assistant", "content": "b"}]},
     [("user", "u", False), ("assistant", "a", False), ("user", "v", False), ("assistant", "b")]),
])
def test_every_shape(row: dict[str, object], turns: list[tuple[Any, ...]]) -> None:
    assert list(parse(json.dumps(row).encode())) == [Turn(*t) for t in turns]


@pytest.mark.parametrize(("line", "reason"), [
    (b"{", "not JSON"), (b'{"text": NaN}', "NaN"), (b'{"text": Infinity}', "Infinity"),
    (b"[1]", "not a JSON object"), (b"3", "object"),
    (b'{"text": "\\ud800"}', "surrogate"), (b'{"text": "\xff"}', "UTF-8 at byte 11"),
    (b'{"txt": "a"}', "found txt"), (b"{}", "found none"),
    (b'{"text": 3}', "text is not a string"), (b'{"text": null}', "text is missing"),
    (b'{"text": "  "}', "text is empty"),
    (b'{"prompt": "a", "completion": ""}', "completion is empty"),
    (b'{"instruction": "", "output": "x"}', "instruction is empty"),
    (b'{"messages": []}', "messages is empty"), (b'{"messages": 1}', "not a list"),
    (b'{"messages": ["a"]}', r"messages\[0\] is not an object"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "no turn of the assistant"),
    (b'{"messages": [{"role": "user", "content": ""}]}', r"messages\[0\]: content is empty"),
    (b'{"messages": [{"role": "pope", "content": "a"}]}', "'pope', not system"),
    (b'{"conversations": [{"from": "gpt"}]}', "value is missing"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "a part that is no text: 'image_url'"),
    (b'{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "no turn of the assistant"),
    (b'{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "weight is 0.5, not 0 or 1"),
    (b'{"text": ' + b"[" * 100_000, "not JSON"), (b'{"text": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"\\u202e\\u0007": 1}', r"found \\u0007\\u202e|found \\u202e\\u0007"),
])
def test_bad_lines_say_why(line: bytes, reason: str) -> None:
    with pytest.raises(BadLine, match=reason):
        parse(line)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    data = "\ufeff" + '{"text": "a\u2028b\x85c"}\r\n\n  \r\n{"text": "last"}'
    found, bad = read_all(jsonl(tmp_path, data.encode()))
    assert [r.turns[0].text for r in found] == ["a\u2028b\x85c", "last"]
    assert [r.line for r in found] == [1, 4]
    assert bad.count == 0


def test_bad_lines_are_named_and_skipped_up_to_the_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path, b'{"text": "a"}\nrubbish\n{"text": "b"}\n{"txt": "c"}\n')
    found, bad = read_all(path, limit=2)
    assert [r.line for r in found] == [1, 3]
    assert [line for line, _ in bad.named] == [2, 4]
    with pytest.raises(BadJob, match=r"d\.jsonl:4: no keys.*max_bad_lines = 1") as e:
        read_all(path, limit=1)
    assert (e.value.file, e.value.line) == (str(path), 4)
    with pytest.raises(BadJob, match=r":2: not JSON"):
        read_all(path, limit=0)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LINE_LIMIT", 1000)
    just = b'{"text": "%s"}' % (b"a" * 988)
    assert len(just) == 1000
    long = b'{"text": "%s"}' % (b"a" * 989)
    found, bad = read_all(jsonl(tmp_path, b"\n".join([just, long, b"x" * 5000, just])))
    assert [r.line for r in found] == [1, 4]
    assert [line for line, reason in bad.named if "longer than" in reason] == [2, 3]


@pytest.mark.parametrize(("name", "data", "sentence"), [
    ("d.parquet", b"PAR1", "parquet"), ("d.csv", b"a,b", r"end in \.jsonl, \.txt or \.parquet, not \.csv"),
    ("d", b"", "not nothing"),
    ("d.jsonl", '{"text": "a"}'.encode("utf-16"), "UTF-16"), ("d.jsonl", b"\x1f\x8b\x08", "compressed"),
    ("d.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "LFS"),
    ("d.json", b'[{"text": "a"}]', "one JSON array"),
    ("d.jsonl", b'[\n{"text": "a"}\n]', "one JSON array"),
])
def test_other_kinds_of_file_are_one_sentence(tmp_path: Path, name: str, data: bytes, sentence: str) -> None:
    with pytest.raises(BadJob, match=sentence) as e:
        read_all(jsonl(tmp_path, data, name))
    assert e.value.hint


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    for name, why in [("pipe.jsonl", "not a regular"), ("dir.jsonl", "not a regular"), ("no.jsonl", "no such file"),
                      ("a\0.jsonl", "null")]:
        with pytest.raises(BadJob, match=why):
            DataFile(str(tmp_path / name))


def test_plain_text_comes_whole_in_pieces(tmp_path: Path) -> None:
    paragraph = "\n".join(f"some words here and there, line {i}" for i in range(40)) + "\n\n"
    text = paragraph * 200
    found, bad = read_all(jsonl(tmp_path, text.replace("\n", "\r\n").encode(), "d.txt"))
    assert "".join(r.turns[0].text for r in found) == text
    assert len(found) > 2
    assert [r.continues for r in found] == [False] + [True] * (len(found) - 1)
    assert all(r.turns[0].text.startswith("some") for r in found), "pieces start where a paragraph starts"
    assert bad.count == 0


def test_a_text_line_that_is_not_utf8_is_left_out(tmp_path: Path) -> None:
    found, bad = read_all(jsonl(tmp_path, b"good\n\xff\xfe\nalso good\n", "d.txt"))
    assert found[0].turns[0].text == "good\nalso good\n"
    assert bad.named == [(2, "not UTF-8 at byte 1")]


def test_the_digest_is_of_every_byte(tmp_path: Path) -> None:
    import hashlib
    data = b"\xef\xbb\xbf{}\r\n\n[]"
    with DataFile(str(jsonl(tmp_path, data))) as source:
        list(source.lines())
        assert source.sha256 == hashlib.sha256(data).hexdigest()
        assert source.position == source.size == len(data)


keys = st.sampled_from(["text", "prompt", "completion", "messages", "role", "content", "conversations", "from", "text"])
json_ish = st.recursive(st.none() | st.booleans() | st.floats() | st.text(),
                        lambda c: st.lists(c, max_size=3) | st.dictionaries(keys, c, max_size=4), max_leaves=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=80), json_ish.map(lambda v: json.dumps(v).encode())), max_size=8),
       st.sampled_from([".jsonl", ".txt"]), st.integers(0, 3))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ending: str,
                                   limit: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"d{ending}"
    path.write_bytes(b"\n".join(lines))
    refusal: BadJob | None = None
    try:
        found, bad = read_all(path, limit)
    except BadJob as e:
        refusal = e
    if refusal:
        assert refusal.file == str(path)
        assert refusal.line > 0
        assert "\n" not in str(refusal)
        return
    assert bad.count == len(bad.named) <= limit
    for record in found:
        assert all(t.text.encode() is not None for t in record.turns)
        assert any(t.role in {"text", "completion", "assistant"} and t.text.strip() for t in record.turns)
