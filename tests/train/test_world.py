"""RWKV World's tokenizer: the rwkv package's ids, and dialogues as RWKV models are taught."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from rrd.errors import BadJob
from rrd.ops import native
from rrd.train import world as world_module
from rrd.train.read import Record, Turn
from rrd.train.tokenize import load_tokenizer
from rrd.train.world import World

needs_compiler = pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def published() -> Path:
    spec = find_spec("rwkv")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the rwkv package, which brings the vocabulary, is not installed")
    return Path(spec.submodule_search_locations[0]) / "rwkv_vocab_v20230424.txt"


@pytest.fixture(scope="module")
def world(published: Path) -> World:
    found = load_tokenizer(str(published))
    assert isinstance(found, World)
    return found


def test_ids_are_the_rwkv_packages(published: Path, world: World) -> None:
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    peer = TRIE_TOKENIZER(str(published))
    chance = random.Random(0)
    texts = ["Hello, world!\n\nWhat is a die?", "def f(x):\n    return x ** 2\n\n\n", "中文 и русский 😀 e\u0301",
             "".join(chr(chance.randrange(1, 0xD7FF)) for _ in range(2000)), Path(__file__).read_text()]
    for text in texts:
        assert list(world.words(text)) == peer.encode(text)
    assert len(world.ids) == 65529


def test_dialogues_stop_at_261_and_learn_answers_alone(world: World) -> None:
    turns = (Turn("system", "Be brief."), Turn("user", "Hi\r\n\r\n\r\nthere"), Turn("assistant", " One.\n\nTwo. "))
    (tokens,) = world.encode([Record(1, turns)])
    assert world.closed(tokens) == tokens
    words = {i: w for w, i in world.ids.items()}
    assert b"".join(words[~t if t < 0 else t] for t in tokens).decode() == (
        "System: Be brief.\n\nUser: Hi\nthere\n\nAssistant: One.\nTwo.\n\n")
    learned = [t for t in tokens if t >= 0]
    assert b"".join(words[t] for t in learned) == b" One.\nTwo.\n\n"
    assert learned[-1] == 261
    assert tokens.count(~261) == 2


def test_texts_end_with_0_and_prompts_carry_no_loss(world: World) -> None:
    text, pair = world.encode([Record(1, (Turn("text", "a die"),)),
                               Record(2, (Turn("prompt", "2+2="), Turn("completion", "4")))])
    assert world.closed(text)[-1] == 0
    assert all(t >= 0 for t in text)
    assert list(pair) == [*(~t for t in world.words("2+2=")), *world.words("4")]


@pytest.mark.parametrize("line", ["1 'a'", "x 'a' 1", "1 'a' 2", "1 open('/etc/passwd') 1", "1 [1] 1", "1 '' 0"])
def test_a_bad_vocabulary_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rwkv_vocab_v20230424.txt"
    file.write_text(f"2 'b' 1\n{line}\n")
    with pytest.raises(BadJob) as caught:
        load_tokenizer(str(tmp_path))
    assert "line 2" in str(caught.value) or ":2" in str(caught.value)


def test_a_vocabulary_without_all_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rwkv_vocab_v20230424.txt").write_text("2 'b' 1\n")
    with pytest.raises(BadJob, match="256 bytes"):
        load_tokenizer(str(tmp_path))


@needs_compiler
def test_the_compiled_trie_gives_the_same_ids(published: Path, world: World, tmp_path: Path) -> None:
    fast = World(published)
    fast.make_ready(native.default_cache_dir(), lambda: None)
    assert fast.library.endswith("world.so")
    chance, words = random.Random(1), list(world.ids)
    texts = ["", "a", "\n" * 70, Path(__file__).read_text(),
             "".join(chr(chance.randrange(1, 0xD7FF)) for _ in range(3000))]
    for _ in range(300):  # beginnings and ends of words, put together where they do not belong
        parts = [w[chance.randrange(len(w)) :] if chance.random() < 0.5 else w[: chance.randrange(len(w)) + 1]
                 for w in chance.choices(words, k=20)]
        texts.append(b"".join(parts).decode("utf-8", "ignore"))
    for text in texts:
        assert fast.words(text) == world.words(text)
    other = World(published)
    other.use(Path(fast.library))
    assert other.words(texts[3]) == world.words(texts[3])


def test_without_a_compiler_the_dictionary_serves(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    monkeypatch.setattr(native, "_compiler", lambda: None)
    slow = World(published)
    slow.make_ready(tmp_path, lambda: None)
    assert (slow.library, slow.words("a die")) == ("", World(published).words("a die"))


@needs_compiler
def test_a_trie_that_finds_something_else_is_not_used(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    source = world_module.SOURCE.read_text()
    assert source.count("end = i + 1;") == 1
    (tmp_path / "wrong.cpp").write_text(source.replace("end = i + 1;", "end = at + 1;"))
    monkeypatch.setattr(world_module, "SOURCE", tmp_path / "wrong.cpp")
    wrong = World(published)
    wrong.make_ready(tmp_path, lambda: None)
    assert wrong.library == ""
