"""Records from a data file that nobody has checked yet: JSON lines in many shapes, or plain text.

Text is read in bytes and split on ``b"\\n"`` only (``str.splitlines`` would cut at U+2028). A line that cannot be used
is named with its number and its reason and skipped; more of them than the job allows, and the job is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

from rrd import roots
from rrd.errors import BadJob
from rrd.inputs import kind_of
from rrd.text import one_line
from rrd.train.shapes import BadLine, Record, Turn, turns_of

__all__ = ["BadLine", "BadLines", "DataFile", "Record", "Turn", "kind_of", "open_regular", "parse", "records"]

LINE_LIMIT = 16 << 20
"""Bytes a line may have: a file without line ends must not fill the memory."""

TEXT_PIECE = 1 << 16
"""About how many characters of plain text are handed on (and tokenized) at a time."""

NAMED = 1000
"""So many bad lines are named; beyond them they are only counted."""


@dataclass
class BadLines:
    """The lines that could not be used, up to ``limit`` of them.

    Raises:
        BadJob: from ``add``, at the first one beyond the limit.
    """

    file: str
    limit: int
    count: int = 0
    named: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        if self.count > self.limit:
            raise self._refusal(line, reason)
        if len(self.named) < NAMED:
            self.named.append((line, reason))

    def check(self, count: int, named: list[tuple[int, str]]) -> None:
        """Refuse what an earlier job, which allowed more bad lines, has read."""
        if count > self.limit:
            raise self._refusal(*named[min(self.limit, len(named) - 1)])

    def _refusal(self, line: int, reason: str) -> BadJob:
        more = f"; max_bad_lines = {self.limit} allows no more" if self.limit else ""
        return BadJob(reason + more, file=self.file, line=line,
                      hint="mend the file, or raise max_bad_lines to skip such lines")


class DataFile:
    """An open data file, or a part of one: its lines, how far it is read, and the digest of the bytes read so far.

    A part is whole lines from byte ``begin`` to before ``end``; its lines are counted from 1.
    """

    def __init__(self, path: str, begin: int = 0, end: int | None = None) -> None:
        """Open ``path`` for one pass. Raises BadJob unless it is a regular, readable file of a kind we know."""
        self.path = path
        self.kind = kind_of(path)
        self._file = open_regular(path, what="the data file")
        self.size = os.fstat(self._file.fileno()).st_size
        self.begin = self.position = begin
        self.end = self.size if end is None else end
        self.line = 0
        self._sha = hashlib.sha256()
        self._file.seek(begin)

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Each line as (number from 1, bytes without its end); None instead of bytes beyond LINE_LIMIT."""
        while self.position < self.end and (line := self._read()):
            self.line += 1
            if self.position == len(line):  # the file's first
                _check_start(line, self.path)
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.endswith(b"\n") or len(line) <= LINE_LIMIT:
                yield self.line, line.removesuffix(b"\n").removesuffix(b"\r")
            else:
                self._skip_line()
                yield self.line, None

    def _read(self) -> bytes:
        try:
            line = self._file.readline(LINE_LIMIT + 1)
        except OSError as e:
            raise BadJob(f"cannot be read: {os.strerror(e.errno or 0).lower()}", file=self.path) from e
        self._sha.update(line)
        self.position += len(line)
        return line

    def _skip_line(self) -> None:
        while (part := self._read()) and not part.endswith(b"\n"):
            pass


def open_regular(path: str, *, what: str) -> BinaryIO:
    """Open an untrusted path for reading; a directory, a pipe or a device is refused instead of waited for."""
    hint = "check the path, and that the daemon's user may read it"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as e:
        why = os.strerror(e.errno).lower() if isinstance(e, OSError) and e.errno else str(e)
        raise BadJob(f"{what} cannot be opened: {why}", file=path, hint=hint) from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadJob(f"{what} is not a regular file", file=path, hint=hint)
    roots.check(fd, path, "data" if what == "the data file" else "model")
    return os.fdopen(fd, "rb", buffering=1 << 20)


def _check_start(line: bytes, path: str) -> None:
    """Refuse what is plainly another kind of file with one sentence, instead of with a hundred bad lines."""
    def refuse(what: str, hint: str) -> NoReturn:
        raise BadJob(what, file=path, line=1, hint=hint)

    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        refuse("the file is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8")
    if line.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"PAR1", b"\xfd7zXZ")):
        refuse("the file is compressed or parquet, not text", "unpack it first")
    if line.startswith(b"version https://git-lfs.github.com/"):
        refuse("the file is a Git LFS pointer, not the data", "fetch it: git lfs pull")
    if line.strip() == b"[" or (line.startswith(b"[{") and path.lower().endswith(".json")):
        refuse("the file is one JSON array, not one object a line", "convert it: jq -c '.[]' in.json > out.jsonl")


def records(source: DataFile, bad: BadLines) -> Iterator[Record]:
    """The usable records of ``source`` in order; the others go to ``bad``."""
    return _text(source, bad) if source.kind == "text" else _json_lines(source, bad)


def _json_lines(source: DataFile, bad: BadLines) -> Iterator[Record]:
    for number, line in source.lines():
        if line is not None and not line.strip():
            continue
        try:
            yield Record(number, parse(line))
        except BadLine as e:
            bad.add(number, str(e))


def _text(source: DataFile, bad: BadLines) -> Iterator[Record]:
    """The file as one running text, in pieces that end between paragraphs where they can."""
    piece: list[str] = []
    size, start, continues, blank = 0, 1, source.begin > 0, False
    for number, line in source.lines():
        try:
            words = _decode(line)
        except BadLine as e:
            bad.add(number, str(e))
            continue
        if size >= TEXT_PIECE and ((blank and words[:1].strip()) or size >= 4 * TEXT_PIECE):
            yield Record(start, (Turn("text", "".join(piece)),), continues)
            piece, size, start, continues = [], 0, number, True
        piece.append(words + "\n")
        size += len(words) + 1
        blank = not words.strip()
    if "".join(piece).strip():
        yield Record(start, (Turn("text", "".join(piece)),), continues)


def parse(line: bytes | None) -> tuple[Turn, ...]:
    """The turns of one JSON line. Raises BadLine with the reason."""
    return turns_of(_load(_decode(line)))


def _decode(line: bytes | None) -> str:
    if line is None:
        raise BadLine(f"longer than {LINE_LIMIT >> 20} MiB")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadLine(f"not UTF-8 at byte {e.start + 1}") from e


def _load(line: str) -> dict[str, object]:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as e:
        raise BadLine(f"not JSON: {e.msg} at column {e.colno}") from e
    except (ValueError, RecursionError) as e:
        raise BadLine(f"not JSON we can take: {one_line(str(e), 80)}") from e
    if not isinstance(row, dict):
        raise BadLine("not a JSON object")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
