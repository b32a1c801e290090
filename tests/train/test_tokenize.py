from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from toy_tokenizer import byte_level, chatml_dir, metaspace, plain_dir, save

from rrd.errors import BadJob
from rrd.train.read import Record, Turn
from rrd.train.tokenize import HuggingFace, load_tokenizer, pieces


def learned_and_not(directory: str, *turns: tuple[str, str]) -> tuple[str, list[tuple[str, bool]]]:
    """The whole text that one record becomes, and its stretches with and without loss."""
    tok = load_tokenizer(directory)
    rust = tokenizers.Tokenizer.from_file(directory + "/tokenizer.json")
    [tokens] = tok.encode([Record(1, tuple(Turn(*t) for t in turns))])
    tokens = tok.closed(tokens)
    parts: list[tuple[list[int], bool]] = []
    for t in tokens:
        if not parts or parts[-1][1] != (t >= 0):
            parts.append(([], t >= 0))
        parts[-1][0].append(t if t >= 0 else ~t)
    whole = rust.decode([t if t >= 0 else ~t for t in tokens], skip_special_tokens=False)
    return whole, [(rust.decode(ids, skip_special_tokens=False), learn) for ids, learn in parts]


def test_text_is_all_learned_and_ends(tmp_path: Path) -> None:
    assert learned_and_not(plain_dir(tmp_path), ("text", "a die 日本"))[1] == [("a die 日本<eos>", True)]


def test_a_prompt_carries_no_loss_and_is_tokenized_as_at_generation(tmp_path: Path) -> None:
    where = plain_dir(tmp_path)
    assert learned_and_not(where, ("prompt", "what is a "), ("completion", "die"))[1] == [
        ("what is a ", False), ("die<eos>", True)]
    tok, rust = load_tokenizer(where), tokenizers.Tokenizer.from_file(where + "/tokenizer.json")
    [tokens] = tok.encode([Record(1, (Turn("prompt", "what is a "), Turn("completion", "die")))])
    assert [~t for t in tokens if t < 0] == rust.encode("what is a ").ids


def test_plain_turns(tmp_path: Path) -> None:
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "yo "), ("user", "more"), ("assistant", "ok")]
    assert learned_and_not(plain_dir(tmp_path), *turns)[1] == [
        ("System: be brief\n\nUser: hi\n\nAssistant:", False), (" yo<eos>", True),
        ("\n\nUser: more\n\nAssistant:", False), (" ok<eos>", True)]


def test_chatml_where_the_tokenizer_has_its_markers(tmp_path: Path) -> None:
    turns = [("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok")]
    whole, parts = learned_and_not(chatml_dir(tmp_path), *turns)
    assert parts == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False), ("yo<|im_end|>", True),
        ("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", False), ("ok<|im_end|><eos>", True)]
    rust = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert rust.token_to_id("<|im_end|>") in rust.encode(whole).ids, "markers are single tokens"


def test_an_end_that_is_there_is_not_doubled(tmp_path: Path) -> None:
    where = save(byte_level(["<|im_start|>", "<|im_end|>", "<eos>"]), tmp_path, eos_token="<|im_end|>")
    assert learned_and_not(where, ("user", "a"), ("assistant", "b"))[0].endswith("b<|im_end|>")
    assert learned_and_not(where, ("text", "b<|im_end|>"))[0] == "b<|im_end|>"


def test_without_an_end_token_none_is_added(tmp_path: Path) -> None:
    assert learned_and_not(save(byte_level([]), tmp_path), ("text", "a"))[0] == "a"


@pytest.mark.parametrize(("files", "expected"), [
    ({"tokenizer_config.json": {"eos_token": "<b>"}, "config.json": {"eos_token_id": 0}}, "<b>"),
    ({"special_tokens_map.json": {"eos_token": {"content": "<b>"}}}, "<b>"),
    ({"generation_config.json": {"eos_token_id": [1, 0]}, "config.json": {"eos_token_id": 0}}, "<b>"),
    ({"config.json": {"eos_token_id": 1}}, "<b>"),
    ({"tokenizer_config.json": {"eos_token": "<nowhere>"}, "config.json": {"eos_token_id": 0}}, "<a>"),
    ({"config.json": {"eos_token_id": 99_999}}, None), ({"config.json": {"eos_token_id": True}}, None), ({}, None),
])
def test_where_the_end_token_is_found(tmp_path: Path, files: dict[str, object], expected: str | None) -> None:
    tok = byte_level(["<a>", "<b>"])
    tok.save(str(tmp_path / "tokenizer.json"))
    for name, body in files.items():
        (tmp_path / name).write_text(json.dumps(body))
    assert load_tokenizer(str(tmp_path)).eos == (tok.token_to_id(expected) if expected else None)


def test_a_start_token_where_the_tokenizer_adds_one(tmp_path: Path) -> None:
    tok = metaspace()
    one = save(tok, tmp_path / "1", bos_token="<s>", eos_token="</s>", add_bos_token=True)
    off = save(tok, tmp_path / "2", bos_token="<s>", eos_token="</s>", add_bos_token=False)
    tok.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    does = save(tok, tmp_path / "3", bos_token="<s>", eos_token="</s>")
    for where, start in [(one, "<s>"), (off, ""), (does, "<s>")]:
        assert learned_and_not(where, ("text", "a die"))[0].replace(" ", "") == f"{start}adie</s>"
        first = load_tokenizer(where).encode([Record(1, (Turn("text", "a"),))])[0][0]
        assert (first == ~1) == bool(start), "and it carries no loss"
    assert learned_and_not(one, ("text", "<s>a"))[0].count("<s>") == 1


def test_no_space_marker_in_the_middle_of_a_record(tmp_path: Path) -> None:
    where = save(metaspace(), tmp_path)
    tok = load_tokenizer(where)
    assert isinstance(tok, HuggingFace)
    whole = tokenizers.Tokenizer.from_file(where + "/tokenizer.json").encode("one chip that trains").ids
    [tokens] = tok.encode([Record(1, (Turn("prompt", "one chip"), Turn("completion", " that trains")))])
    assert [t if t >= 0 else ~t for t in tokens] == whole


@pytest.mark.parametrize("kind", [byte_level, metaspace])
def test_a_long_text_has_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr("rrd.train.tokenize.PIECE", 50)
    monkeypatch.setattr("rrd.train.tokenize.GROUP", 200)
    text = "One chip that trains; 17 adapters in rotation,\n\n    def add(a, b):  return 1\n" * 30
    assert max(map(len, pieces(text))) <= 50
    assert "".join(pieces("x" * 170)) == "x" * 170
    tok = kind(["<eos>"]) if kind is byte_level else kind()
    where = save(tok, tmp_path)
    [tokens] = load_tokenizer(where).encode([Record(1, (Turn("text", text),))])
    assert list(tokens) == tok.encode(text).ids


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    tok = byte_level(["<eos>"])
    tok.enable_truncation(4)
    tok.enable_padding(length=64)
    long = "a visit is one turn " * 20
    assert learned_and_not(save(tok, tmp_path, eos_token="<eos>"), ("text", long))[0] == long + "<eos>"


def test_the_digest_changes_with_what_changes_tokens(tmp_path: Path) -> None:
    tok = byte_level(["<eos>", "<|im_start|>", "<|im_end|>"])
    settings: list[dict[str, object]] = [{}, {"eos_token": "<eos>"}, {"eos_token": "<|im_end|>"},
                                          {"eos_token": "<eos>", "x": 1}]
    digests = [load_tokenizer(save(tok, tmp_path / str(i), **s)).digest for i, s in enumerate(settings)]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]
    assert load_tokenizer(save(byte_level(["<eos>", "<x>"]), tmp_path / "y", eos_token="<eos>")).digest not in digests


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[1]", b'{"model": {"type": "BPE"}}', b"null"])
def test_a_bad_tokenizer_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadJob, match="not a usable tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_missing_tokenizer_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(BadJob, match="no tokenizer found") as e:
        load_tokenizer(str(tmp_path))
    assert "tokenizer.json" in e.value.hint


def test_a_tokenizer_file_may_be_named(tmp_path: Path) -> None:
    where = plain_dir(tmp_path)
    assert load_tokenizer(where + "/tokenizer.json").digest == load_tokenizer(where).digest


def test_broken_settings_are_named(tmp_path: Path) -> None:
    where = plain_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadJob, match=r"tokenizer_config\.json: not JSON"):
        load_tokenizer(where)
