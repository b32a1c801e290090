"""Large files in portions: any number of processes, killed as often as you like, and always the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizer import byte_level, metaspace, plain_dir, save

from rrd.errors import BadJob
from rrd.train import crew, portion
from rrd.train.portion import Range, ranges
from rrd.train.prepare import Prepared, prepare
from rrd.train.tokenize import load_tokenizer

SMALL = 4000
"""Bytes a portion in these tests; processes are told by the environment of their own."""


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portion, "SIZE", SMALL)


def lines(path: Path, n: int = 400) -> str:
    def row(i: int) -> dict[str, object]:
        return ({"prompt": f"what is {i}? ", "completion": "a die " * (i % 37)} if i % 3
                else {"text": f"step {i} 日本\n" * (i % 5 + 1)})

    rows = [row(i) for i in range(n)]
    path.write_text("".join(json.dumps(r, ensure_ascii=i % 2 == 0) + "\n" for i, r in enumerate(rows)))
    return str(path)


def text(path: Path, n: int = 300) -> str:
    path.write_text("".join(f"Chapter {i}.\n\nOne chip that trains, {i} times over.\nüber\n\n\n" for i in range(n)))
    return str(path)


def content(done: Prepared) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in done.path.iterdir()}


@pytest.mark.parametrize("make", [lines, text])
def test_portions_are_whole_lines_and_all_of_the_file(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path / ("d.txt" if make is text else "d.jsonl"))
    data, found = Path(path).read_bytes(), ranges(path)
    assert len(found) > 4
    assert [r.number for r in found] == list(range(len(found)))
    assert b"".join(data[r.begin : r.end] for r in found) == data
    assert all(data[: r.begin].endswith(b"\n") for r in found[1:])
    if make is text:
        assert all(data[: r.begin].endswith(b"\n\n") and not data[r.begin :].startswith(b"\n") for r in found[1:])


@pytest.mark.parametrize(("data", "cuts"), [
    (b"", [(0, 0)]), (b"x" * 9000, [(0, 9000)]), (b"a\n" + b"x" * 9000 + b"\nb\n", [(0, 9003), (9003, 9005)]),
    (b"x" * 3999 + b"\n" + b"y" * 10, [(0, 4000), (4000, 4010)]), (b"\n" * 8000, [(0, 4000), (4000, 8000)])])
def test_where_a_line_is_longer_than_a_portion(tmp_path: Path, data: bytes, cuts: list[tuple[int, int]]) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(data)
    assert [(r.begin, r.end) for r in ranges(str(path))] == cuts


@pytest.mark.parametrize(("make", "name"), [(lines, "d.jsonl"), (text, "d.txt")])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, make: Any, name: str) -> None:
    data, tok = make(tmp_path / name), plain_dir(tmp_path / "model")
    found = []
    for n in (1, 2, 3):
        seen: list[float] = []
        done = prepare(data, tok, seq_len=16, cache_dir=tmp_path / str(n), processes=n, progress=seen.append)
        found.append(content(done))
        assert seen == sorted(seen) and len({round(s, 3) for s in seen}) > 5
        assert sorted(p.name for p in done.path.parent.iterdir()) == ["lock", "ready"]
    assert found[0] == found[1] == found[2]


def test_portions_of_lines_are_what_the_whole_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, tok = lines(tmp_path / "d.jsonl"), plain_dir(tmp_path / "model")
    parts = prepare(data, tok, seq_len=16, too_long="split", cache_dir=tmp_path / "a")
    monkeypatch.setattr(portion, "SIZE", 1 << 30)
    whole = prepare(data, tok, seq_len=16, too_long="split", cache_dir=tmp_path / "b")
    assert content(parts) == content(whole)
    assert parts.digest == whole.digest


def test_a_running_text_starts_once(tmp_path: Path) -> None:
    tok = save(metaspace(), tmp_path / "model", bos_token="<s>", eos_token="</s>", add_bos_token=True)
    done = prepare(text(tmp_path / "d.txt"), tok, seq_len=16, cache_dir=tmp_path / "c")
    tokens = array("i")
    tokens.frombytes((done.path / "tokens.bin").read_bytes())
    assert tokens[0] == ~1 and tokens.count(~1) == 1


KILLED = """
import sys
from rrd.train import portion
from rrd.train.prepare import prepare
portion.SIZE = int(sys.argv[4])
prepare(sys.argv[1], sys.argv[2], seq_len=16, cache_dir=sys.argv[3], processes=int(sys.argv[5]),
        progress=lambda share: print(share, flush=True))
"""


@pytest.mark.parametrize("processes", [1, 3])
def test_killed_again_and_again_it_goes_on_and_gives_the_same_bytes(tmp_path: Path, processes: int,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    data, tok, cache = lines(tmp_path / "d.jsonl", 2000), plain_dir(tmp_path / "model"), tmp_path / "cache"
    straight = prepare(data, tok, seq_len=16, cache_dir=tmp_path / "straight")
    made: list[int] = []
    for kill in range(5):
        process = subprocess.Popen([sys.executable, "-c", KILLED, data, tok, str(cache), str(SMALL), str(processes)],
                                   stdout=subprocess.PIPE, text=True)
        assert process.stdout
        start = len(made) and len(list(cache.glob("*/portions/portion-*")))
        for line in process.stdout:
            share = float(line)
            if share > 0.03 * (kill + 1) + 0.97 * start / len(ranges(data)):
                break
        process.kill()
        process.wait()
        process.stdout.close()
        assert not list(cache.glob("*/ready")), "there was something left to kill"
        made.append(len(list(cache.glob("*/portions/portion-*"))))
    assert made == sorted(made) and made[-1] > made[0] >= 0
    anew: list[Range] = []
    make = portion.make
    monkeypatch.setattr(portion, "make", lambda plan, r, *rest: (anew.append(r), make(plan, r, *rest)))
    done = prepare(data, tok, seq_len=16, cache_dir=cache)
    assert content(done) == content(straight)
    assert len(anew) == len(ranges(data)) - made[-1], "what was made is not made again"
    deadline = time.monotonic() + 20
    while workers_of(cache) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers_of(cache), "whoever worked for one that was killed is gone as well"


def workers_of(cache: Path) -> list[str]:
    """Processes that hold the cache's lock."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(fd).startswith(str(cache)) and fd.parts[2] != str(os.getpid()):
                found.append(fd.parts[2])
        except OSError:
            continue
    return found


def test_a_damaged_portion_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, tok = lines(tmp_path / "d.jsonl"), plain_dir(tmp_path / "model")

    class Stop(Exception):
        pass

    def stop(share: float) -> None:
        if share > 0.5:
            raise Stop

    with pytest.raises(Stop):
        prepare(data, tok, seq_len=16, cache_dir=tmp_path / "c", progress=stop)
    made = sorted((tmp_path / "c").glob("*/portions/portion-*"))
    assert len(made) > 2
    good = (made[0] / "tokens.bin").read_bytes()
    (made[0] / "tokens.bin").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (made[1] / "MANIFEST.json").unlink()
    done = prepare(data, tok, seq_len=16, cache_dir=tmp_path / "c")
    assert content(done) == content(prepare(data, tok, seq_len=16, cache_dir=tmp_path / "d"))


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_lines_are_counted_through_all_portions(tmp_path: Path, processes: int) -> None:
    data, tok = Path(lines(tmp_path / "d.jsonl")), plain_dir(tmp_path / "model")
    rows = data.read_text().split("\n")
    bad = (3, 200, 201, 390)
    data.write_text("\n".join("rubbish" if i + 1 in bad else row for i, row in enumerate(rows)))
    no_completion = {i + 1 for i in range(400) if i % 37 == 0 and i % 3}
    expected = sorted({*bad, *no_completion})
    done = prepare(str(data), tok, seq_len=16, cache_dir=tmp_path / "c", processes=processes)
    assert [line for line, _ in done.bad_lines] == expected
    assert done.bad_count == len(expected)
    for cache in ("c", "fresh"):
        with pytest.raises(BadJob, match=rf"d\.jsonl:{expected[2]}: .*max_bad_lines = 2 allows no more") as e:
            prepare(str(data), tok, seq_len=16, max_bad_lines=2, cache_dir=tmp_path / cache, processes=processes)
        assert e.value.line == expected[2]
    assert not list((tmp_path / "fresh").glob("*/portions*"))


def test_a_process_that_crashes_or_runs_out_of_memory_is_told_apart(tmp_path: Path) -> None:
    data, tok = lines(tmp_path / "d.jsonl"), plain_dir(tmp_path / "model")

    def kill(with_signal: int) -> None:
        def progress(share: float) -> None:
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                if b"rrd.train.portion" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), with_signal)

        prepare(data, tok, seq_len=16, cache_dir=tmp_path / "c", processes=2, progress=progress)

    with pytest.raises(BadJob, match=r"d\.jsonl: reading it with .*model ends in a crash \(SIGSEGV\)"):
        kill(signal.SIGSEGV)
    with pytest.raises(MemoryError):
        kill(signal.SIGKILL)


def test_templates_run_in_a_process_of_their_own_with_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = ("{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
            "{{ ns.x }}")
    tok = save(byte_level(["<eos>"]), tmp_path / "model", eos_token="<eos>", chat_template=bomb)
    (tmp_path / "d.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    monkeypatch.setattr(crew, "_Member", Bounded)
    with pytest.raises(BadJob, match="nothing to learn from") as e:
        prepare(str(tmp_path / "d.jsonl"), tok, seq_len=16, cache_dir=tmp_path / "c")
    assert "the chat template fails: MemoryError" in e.value.hint
    assert load_tokenizer(tok).runs_code


class Bounded(crew._Member):
    """With less memory than usual, so that the test does not take what it is about."""

    def __init__(self, *args: Any) -> None:
        import resource

        super().__init__(*args)
        resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (600 << 20, 600 << 20))


def test_what_a_portion_is_depends_on_nothing_else(tmp_path: Path) -> None:
    assert portion.place(tmp_path, Range(7, 1, 2)).name == "portion-000007"
