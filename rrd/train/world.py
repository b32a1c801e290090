"""The tokenizer of RWKV World: a vocabulary file, and always the longest word that fits.

``rwkv_vocab_v20230424.txt`` (BlinkDL/ChatRWKV) has a line ``id literal length`` for each word, the literal being
Python's, of a string or of bytes, and the length that in bytes. 0, which is in no line, ends a text.

Dialogues are written as RWKV models are taught: ``User: …``, a blank line, ``Assistant: …``, a blank line, and so on.
The blank line is one word (261 in the published file), by which an answer stops; so there is none within a turn.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rrd.errors import BadJob
from rrd.text import one_line
from rrd.train.read import Record, Turn
from rrd.train.tokenize import RENDERING, read_small

END, STOP = 0, b"\n\n"


class World:
    """``rrd.train.tokenize.TokenizerLike`` over such a file."""

    eos: int | None = END

    def __init__(self, file: Path) -> None:
        """Raises BadJob for a file that is no such vocabulary."""
        data = read_small(file)
        self.ids = _parse(data, file)
        self._longest: dict[bytes, int] = {}
        for word in self.ids:
            self._longest[word[:2]] = max(len(word), self._longest.get(word[:2], 0))
        self._stop = self.ids.get(STOP)
        if self._stop is None or any(bytes([b]) not in self.ids for b in range(256)):
            raise BadJob("the vocabulary lacks a blank line, or one of the 256 bytes", file=str(file))
        self.digest = hashlib.sha256(json.dumps(["world", RENDERING]).encode() + data).hexdigest()

    def encode(self, records: Sequence[Record]) -> list[list[int]]:
        return [self._record(r) for r in records]

    def closed(self, tokens: list[int]) -> list[int]:
        """With the end token behind them, unless an answer's stop stands there."""
        return tokens if tokens[-1:] in ([END], [self._stop]) else [*tokens, END]

    def _record(self, record: Record) -> list[int]:
        if {t.role for t in record.turns} <= {"text", "prompt", "completion"}:
            return [t if turn.role != "prompt" else ~t for turn in record.turns for t in self.words(turn.text)]
        return [t for turn in record.turns for t in self._turn(turn)]

    def _turn(self, turn: Turn) -> Iterable[int]:
        learn = turn.role == "assistant"
        said = re.sub(r"\n{2,}", "\n", turn.text.replace("\r\n", "\n")).strip()
        yield from (~t for t in self.words(f"{turn.role.capitalize()}:"))
        assert self._stop is not None
        for t in [*self.words(f" {said}"), self._stop]:
            yield t if learn else ~t

    def words(self, text: str) -> list[int]:
        """The ids of ``text``: from the left, always the longest word there is."""
        data, ids, longest = text.encode(), self.ids, self._longest
        at, end, found = 0, len(data), []
        while at < end:
            size = longest.get(data[at : at + 2], 1)
            while size > 1 and data[at : at + size] not in ids:
                size -= 1
            found.append(ids[data[at : at + size]])
            at += size
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


def _entry(line: str) -> tuple[bytes, int]:
    number, _, rest = line.strip().partition(" ")
    literal, _, size = rest.rpartition(" ")
    word = ast.literal_eval(literal)
    word = word.encode() if isinstance(word, str) else word
    if not isinstance(word, bytes) or not word or len(word) != int(size) or not 0 < int(number) < 1 << 20:
        raise ValueError("id, literal and length do not fit together")
    return word, int(number)
