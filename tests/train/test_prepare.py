from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from toy_tokenizer import plain_dir

from rrd.errors import BadJob
from rrd.train import portion
from rrd.train import prepare as module
from rrd.train.portion import batches
from rrd.train.prepare import Prepared, data_digest, prepare
from rrd.train.read import Record, Turn


class Place:
    """A tokenizer, a cache and a data file to prepare."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, root / "cache"
        self.tokenizer = plain_dir(root / "model")
        self.rust = tokenizers.Tokenizer.from_file(self.tokenizer + "/tokenizer.json")
        self.seen: list[float] = []

    def write(self, *rows: object, name: str = "d.jsonl") -> str:
        path = self.root / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return str(path)

    def prepare(self, data: str, seq_len: int = 16, **settings: object) -> Prepared:
        return prepare(data, self.tokenizer, seq_len=seq_len, cache_dir=self.cache, progress=self.seen.append,
                       **settings)

    def samples(self, prepared: Prepared) -> list[list[int]]:
        tokens, offsets = array("i"), array("q")
        tokens.frombytes((prepared.path / "tokens.bin").read_bytes())
        offsets.frombytes((prepared.path / "offsets.bin").read_bytes())
        return [list(tokens[a:b]) for a, b in pairwise(offsets)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_is_counted(place: Place) -> None:
    pair = {"prompt": "a die ", "completion": "trains"}
    done = place.prepare(place.write({"text": "one"}, "rubbish", pair, {"text": "step " * 50}))
    samples = place.samples(done)
    assert samples[0] == [*place.rust.encode("one").ids, place.rust.token_to_id("<eos>")]
    assert len(samples) == done.samples == 3
    assert done.tokens == sum(map(len, samples))
    assert done.labels == sum(t >= 0 for s in samples for t in s[1:])
    assert done.max_id == max(t if t >= 0 else ~t for s in samples for t in s)
    assert (done.records, done.truncated, done.split, done.unlabelled) == (3, 1, 0, 0)
    assert done.bad_lines == [(2, "not JSON: Expecting value at column 1")]
    assert done.notes() == ["1 bad line left out; line 2: not JSON: Expecting value at column 1",
                            '1 record longer than seq_len cut off at its end']
    assert place.seen == sorted(place.seen)
    assert place.seen[-1] == 1.0


@pytest.mark.parametrize("length", range(1, 48, 3))
def test_split_predicts_every_token_once(place: Place, length: int) -> None:
    text = "one chip trains many adapters in rotation 日本語 "[:length]
    done = place.prepare(place.write({"text": text}), seq_len=4, too_long="split")
    whole = [*place.rust.encode(text).ids, place.rust.token_to_id("<eos>")]
    samples = place.samples(done)
    assert all(2 <= len(s) <= 5 for s in samples)
    assert whole[:1] + [t for s in samples for t in s[1:]] == whole
    assert (done.split, done.unlabelled) == (len(whole) > 5, 0)


def test_truncation_keeps_seq_len_positions(place: Place) -> None:
    [sample] = place.samples(place.prepare(place.write({"text": "step " * 50}), seq_len=10))
    assert sample == place.rust.encode("step " * 50).ids[:11]


def test_samples_without_labels_are_left_out(place: Place) -> None:
    rows = [{"prompt": "visit " * 40, "completion": "a"}, {"prompt": "b", "completion": "c"}]
    done = place.prepare(place.write(*rows))
    assert (done.samples, done.unlabelled, done.truncated) == (1, 1, 1)
    with pytest.raises(BadJob, match="nothing to learn from") as e:
        place.prepare(place.write(rows[0], name="e.jsonl"))
    assert "raise it" in e.value.hint
    for empty in ("", "\n\n"):
        with pytest.raises(BadJob, match="nothing to learn from"):
            place.prepare(place.write(empty, name="f.jsonl"))
    assert list(place.cache.glob("*/[!l]*")) == [done.path], "a refused file leaves nothing but a lock behind"


def test_plain_text_is_one_stream_of_windows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrd.train.read.TEXT_PIECE", 100)
    monkeypatch.setattr(portion, "_BATCH_CHARACTERS", 300)
    text = "A die is one chip that trains.\n\nA visit is one turn.\n\n" * 20
    done = place.prepare(place.write(text.removesuffix("\n"), name="d.txt"), seq_len=7)
    samples = place.samples(done)
    assert samples[0][:1] + [t for s in samples for t in s[1:]] == [
        *place.rust.encode(text).ids, place.rust.token_to_id("<eos>")]
    assert {len(s) for s in samples[:-1]} == {8}


def test_done_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    data = place.write({"text": "one"}, "bad")
    first = place.prepare(data)
    monkeypatch.setattr(module._Builder, "write", lambda *_: pytest.fail("it was tokenized again"))
    assert place.prepare(data) == first
    with pytest.raises(BadJob, match=":2: not JSON"):
        place.prepare(data, max_bad_lines=0)


def test_the_digest_follows_data_tokenizer_and_settings(place: Place, tmp_path: Path) -> None:
    data = place.write({"text": "one"})
    settings: list[dict[str, object]] = [{}, {"seq_len": 17}, {"too_long": "split"}]
    keys = [place.prepare(data, **s).digest for s in settings]
    keys.append(place.prepare(place.write({"text": "two"})).digest)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    keys.append(place.prepare(place.write({"text": "one"})).digest)
    assert len(set(keys)) == 5


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_cache_is_made_again(place: Place, name: str, damage: str) -> None:
    data = place.write({"text": "one chip"}, {"text": "two"})
    done = place.prepare(data)
    file = done.path / name
    good = file.read_bytes()
    if damage == "flip":
        file.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    elif damage == "remove":
        file.unlink()
    else:
        file.write_bytes(good[: len(good) // 2 if damage == "cut" else 0])
    assert place.prepare(data) == done
    assert file.read_bytes() == good


def test_what_a_dead_builder_left_is_swept(place: Place) -> None:
    data = place.write({"text": "one"})
    home = place.prepare(data).path.parent
    (home / "ready" / "tokens.bin").unlink()
    (home / ".tmp-data-0badcafe").mkdir()
    place.prepare(data)
    assert sorted(p.name for p in home.iterdir()) == ["lock", "ready"]


def test_an_interrupted_build_leaves_nothing_half_made(place: Place) -> None:
    class Stopped(Exception):
        pass

    def stop(share: float) -> None:
        if share > 0:
            raise Stopped

    with pytest.raises(Stopped):
        prepare(place.write({"text": "one"}), place.tokenizer, seq_len=4, cache_dir=place.cache, progress=stop)
    assert sorted(p.name for p in place.cache.glob("*/*")) == ["lock", "portions"]
    assert list(place.cache.glob("*/portions/*")) == []


def test_two_builders_at_once_make_one_cache(place: Place) -> None:
    data = place.write(*({"text": f"step {i} of the rotation"} for i in range(3000)))
    code = ("import sys; from rrd.train.prepare import prepare; sys.stdin.readline();"
            "print(prepare(sys.argv[1], sys.argv[2], seq_len=16, cache_dir=sys.argv[3]))")
    both = [subprocess.Popen([sys.executable, "-c", code, data, place.tokenizer, str(place.cache)], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    outs: list[str] = []
    threads = [threading.Thread(target=lambda p=p: outs.append(p.communicate("go\n", timeout=60)[0])) for p in both]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert outs[0] == outs[1]
    assert "samples=3000" in outs[0]
    assert len(list(place.cache.glob("*/ready"))) == 1


def test_a_file_that_changes_while_it_is_read_is_refused(place: Place) -> None:
    data = place.write({"text": "one"})
    touched = False

    def touch(_: float) -> None:  # called after the digest is taken and before the lines are read
        nonlocal touched
        if not touched:
            touched = True
            place.write({"text": "two"})

    with pytest.raises(BadJob, match="changed while it was being read"):
        prepare(data, place.tokenizer, seq_len=4, cache_dir=place.cache, progress=touch)
    assert place.prepare(data).samples == 1


def test_a_large_files_digest_is_remembered_only_while_untouched(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBER_ABOVE", 0)
    data = place.write({"text": "one"})
    first = data_digest(data, place.cache)
    assert not (place.cache / "digests").exists(), "changed too short a time ago to be trusted"
    monkeypatch.setattr(module, "_SETTLED_NS", -1)
    assert data_digest(data, place.cache) == first
    memo = next((place.cache / "digests").iterdir())
    stamp, _ = json.loads(memo.read_text())
    memo.write_text(json.dumps([stamp, "remembered"]))
    assert data_digest(data, place.cache) == "remembered"
    old = os.stat(data)
    place.write({"text": "two"})
    os.utime(data, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert data_digest(data, place.cache) not in {"remembered", first}, "the change time cannot be set back"
    memo.write_text("rubbish")
    assert len(data_digest(data, place.cache)) == 64


def test_batches_are_worth_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portion, "_BATCH_CHARACTERS", 10)
    found = [Record(i, (Turn("text", "x" * n),)) for i, n in enumerate([4, 4, 4, 30, 1])]
    assert [[r.line for r in b] for b in batches(found)] == [[0, 1, 2], [3], [4]]


def test_data_of_which_nothing_can_be_used_says_why_at_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"foo": "x"}\n' * 20)
    with pytest.raises(BadJob) as e:
        prepare(str(tmp_path / "odd.jsonl"), plain_dir(tmp_path / "m"), seq_len=64, cache_dir=tmp_path / "c")
    assert "none of its 20 lines can be used; line 1: " in e.value.hint
