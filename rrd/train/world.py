"""The tokenizer of RWKV World: a vocabulary file, and always the longest word that fits.

``rwkv_vocab_v20230424.txt`` (BlinkDL/ChatRWKV) has a line ``id literal length`` for each word, the literal being
Python's, of a string or of bytes, and the length that in bytes. 0, which is in no line, ends a text.

A compiled trie does it at 100 MB/s and more; where there is no compiler, a dictionary by length does, at 3.

Dialogues are written as RWKV models are taught: ``User: …``, a blank line, ``Assistant: …``, a blank line, and so on.
The blank line is one word (261 in the published file), by which an answer stops; so there is none within a turn.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rrd.errors import BadJob, RrdError
from rrd.text import one_line
from rrd.train.read import BadLine, Record, Turn
from rrd.train.tokenize import RENDERING, Tokens, read_small, unlearned

MAX_LINE = 4096
"""Characters of an entry: Python's own parser takes hundreds of bytes for each."""
END, STOP = 0, b"\n\n"
SOURCE = Path(__file__).parent.parent / "kernels" / "world.cpp"
_LONGEST = 512  # bytes of a word; the published ones have up to 128


class World:
    """``rrd.train.tokenize.TokenizerLike`` over such a file."""

    eos: int | None = END
    runs_code = False

    def __init__(self, file: Path) -> None:
        """Raises BadJob for a file that is no such vocabulary."""
        data = read_small(file)
        self.ids = _parse(data, file)
        self._trie: Trie | None = None
        self._lengths = _lengths(self.ids)
        self._stop = self.ids.get(STOP)
        if self._stop is None or any(bytes([b]) not in self.ids for b in range(256)):
            raise BadJob("the vocabulary lacks a blank line, or one of the 256 bytes", file=str(file))
        self.digest = hashlib.sha256(json.dumps(["world", RENDERING]).encode() + data).hexdigest()

    def make_ready(self, cache_dir: Path, alive: Callable[[], None]) -> None:
        """Build the trie's code below ``cache_dir`` and use it; without a compiler, go on without."""
        from rrd.ops import native  # brings torch, which those that ``use`` do not need

        try:
            self.use(native.build(cache_dir, alive, source=SOURCE))
        except (RrdError, OSError):
            self._trie = None  # the dictionary gives the same ids, slower

    @property
    def library(self) -> str:
        """The compiled trie in use, for ``use`` in another process; empty where there is none."""
        return "" if self._trie is None else str(self._trie.file)

    def use(self, library: Path) -> None:
        """Find words with the compiled trie in the file ``library``. Raises OSError where it does not load."""
        trie = Trie(library, self.ids)
        probe = "The daemon trains.\n\n日本 🙂"
        if trie.words(probe.encode()) == self.words(probe):  # a miscompiled one is not used
            self._trie = trie

    def encode(self, records: Sequence[Record]) -> list[Tokens | BadLine]:
        return [self._record(r) for r in records]

    def closed(self, tokens: Tokens) -> Tokens:
        """With the end token behind them, unless an answer's stop stands there."""
        if not tokens or tokens[-1] not in (END, self._stop):
            tokens.append(END)
        return tokens

    def _record(self, record: Record) -> Tokens:
        dialogue = not {t.role for t in record.turns} <= {"text", "prompt", "completion"}
        tokens = array("i")
        for turn in record.turns:
            if dialogue:
                self._turn(turn, tokens)
            else:
                words = self.words(turn.text)
                tokens.extend(unlearned(words) if turn.role == "prompt" else words)
        return tokens

    def _turn(self, turn: Turn, tokens: Tokens) -> None:
        said = re.sub(r"\n{2,}", "\n", turn.text.replace("\r\n", "\n")).strip()
        tokens.extend(unlearned(self.words(f"{turn.role.capitalize()}:")))
        assert self._stop is not None
        words = self.words(f" {said}")
        words.append(self._stop)
        tokens.extend(words if turn.learn and turn.role == "assistant" else unlearned(words))

    def words(self, text: str) -> Tokens:
        """The ids of ``text``: from the left, always the longest word there is."""
        data = text.encode()
        return self._by_length(data) if self._trie is None else self._trie.words(data)

    def _by_length(self, data: bytes) -> Tokens:
        """The reference: of each next word only the lengths are tried that some word with its first bytes has."""
        get, lengths, found = self.ids.get, self._lengths, array("i")
        at, end = 0, len(data)
        while at < end:
            for n in lengths.get(data[at : at + _HEAD], _SHORT):
                if (word := get(data[at : at + n])) is not None and n <= end - at:
                    break
            assert word is not None, "every byte is a word"
            found.append(word)
            at += n
        return found


_HEAD = 4
_SHORT = (3, 2, 1)


def _lengths(words: Iterable[bytes]) -> dict[bytes, tuple[int, ...]]:
    """The lengths of the words that begin with four bytes, by these, longest first; shorter ones always count."""
    found: dict[bytes, set[int]] = {}
    for word in words:
        if len(word) >= _HEAD:
            found.setdefault(word[:_HEAD], set()).add(len(word))
    return {head: (*sorted(sizes, reverse=True), *_SHORT) for head, sizes in found.items()}


class Trie:
    """The vocabulary as compiled code searches it (``kernels/world.cpp``)."""

    def __init__(self, file: Path, ids: Mapping[bytes, int]) -> None:
        """Raises OSError where the library does not load."""
        self.file = file
        code = ctypes.CDLL(str(file))
        code.rrd_world_new.restype, code.rrd_world_encode.restype = ctypes.c_void_p, ctypes.c_int64
        offsets = array("q", [0])
        for word in ids:
            offsets.append(offsets[-1] + len(word))
        self._made = ctypes.c_void_p(code.rrd_world_new(
            b"".join(ids), (ctypes.c_int64 * len(offsets)).from_buffer(offsets),
            (ctypes.c_int32 * len(ids))(*ids.values()), ctypes.c_int64(len(ids))))
        if not self._made:
            raise MemoryError
        self._encode = code.rrd_world_encode
        self._out = (ctypes.c_int32 * 0)()

    def words(self, data: bytes) -> Tokens:
        """The ids of ``data``. The trie itself is kept for as long as the process lives."""
        if len(data) > len(self._out):
            self._out = (ctypes.c_int32 * (2 * len(data)))()
        n = self._encode(self._made, data, ctypes.c_int64(len(data)), self._out)
        found = array("i")
        found.frombytes(memoryview(self._out).cast("B")[: 4 * n])
        return found


def _parse(data: bytes, file: Path) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            ids.setdefault(*_entry(line))
        except (ValueError, SyntaxError, RecursionError, MemoryError) as e:
            raise BadJob(f"no entry of an RWKV vocabulary: {one_line(str(e), 100)}", file=str(file), line=number,
                         hint="a line is an id, a Python literal and its length in bytes") from e
    return ids


_PLAIN = re.compile(r"'([^'\\]+)'")


def _entry(line: str) -> tuple[bytes, int]:
    if len(line) > MAX_LINE:
        raise ValueError("far too long")
    number, _, rest = line.strip().partition(" ")
    literal, _, size = rest.rpartition(" ")
    plain = _PLAIN.fullmatch(literal)  # most of them; Python's parser would take a second for all
    word = plain[1] if plain else ast.literal_eval(literal)
    word = word.encode() if isinstance(word, str) else word
    if not isinstance(word, bytes) or not 0 < len(word) == int(size) <= _LONGEST or not 0 < int(number) < 1 << 20:
        raise ValueError("id, literal and length do not fit together")
    return word, int(number)
