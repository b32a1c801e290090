"""A portion of a data file: some megabytes of it, tokenized on their own and sealed on disk.

Where portions begin depends on the file alone, and what becomes of one on nothing else. So any number of processes may
make them in any order, those that are made outlive whoever is killed, and what they are put together to is always the
same. ``python -m rrd.train.portion`` is one such process: it is told portions to make, one a line, and ends when nobody
is there any more to tell it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rrd import durable
from rrd.errors import BadJob, RrdError
from rrd.train import sealed
from rrd.train.parquet import ParquetFile, row_ranges
from rrd.train.read import BadLine, BadLines, DataFile, Record, kind_of, open_regular, records
from rrd.train.tokenize import TokenizerLike, Tokens, load_tokenizer

KIND = "rrd portion 1"
SIZE = 4 << 20
"""About how many bytes of text make a portion: seconds of work, at which a kill takes nothing of note."""
MEMORY = 6 << 30
"""Bytes that a process of its own may have: a chat template is code that is not ours."""

_BATCH_CHARACTERS = 1 << 19  # little enough to hold, and a sign of life often enough
_BATCH_RECORDS = 4096
_PARAGRAPH = re.compile(rb"\n\r?\n(?=\S)")
_LOOK = 1 << 18

TooLong = Literal["truncate", "split"]
At = Callable[[int], None]
"""Called with how far into its portion the work is, in what portions are measured in."""


class Range(NamedTuple):
    """A portion's place: bytes of text, or rows of parquet, from ``begin`` to before ``end``."""

    number: int
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """What all portions of one file have in common. ``home``: the directory they go to."""

    home: str
    data: str
    tokenizer: str
    library: str
    seq_len: int
    too_long: TooLong

    def load(self) -> TokenizerLike:
        tok = load_tokenizer(self.tokenizer)
        if self.library:
            tok.use(Path(self.library))
        return tok


@dataclass
class Counts:
    """What became of the records."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    truncated: int = 0
    """Records longer than seq_len whose rest was cut off."""
    split: int = 0
    """Records longer than seq_len that became several samples."""
    unlabelled: int = 0
    """Samples left out because nothing in them carries loss (a prompt that fills seq_len, say)."""
    max_id: int = 0
    """The highest token id: the model's vocabulary must be larger."""

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, max(self.max_id, value) if name == "max_id" else getattr(self, name) + value)


def place(home: Path, portion: Range) -> Path:
    return home / f"portion-{portion.number:06d}"


# -- where portions begin ------------------------------------------------------------------------------------------


def ranges(path: str) -> list[Range]:
    """The portions of the file at ``path``: at least one."""
    kind = kind_of(path)
    if kind == "parquet":
        return [Range(i, begin, end) for i, (begin, end) in enumerate(row_ranges(path, SIZE))]
    with open_regular(path, what="the data file") as f:
        size = os.fstat(f.fileno()).st_size
        cuts = [0]
        while cuts[-1] + SIZE < size and (cut := _cut(f, cuts[-1] + SIZE, kind == "text")) < size:
            cuts.append(cut)
    return [Range(i, begin, end) for i, (begin, end) in enumerate(zip(cuts, [*cuts[1:], size], strict=True))]


def _cut(f: Any, target: int, text: bool) -> int:
    """The first place from ``target`` on where a line begins; in text rather one where a paragraph does."""
    f.seek(target - 1)
    window = f.read(_LOOK)
    if text and (found := _PARAGRAPH.search(window)):
        return target - 1 + found.end()
    at = target - 1
    while window and (line_end := window.find(b"\n")) < 0:
        at += len(window)
        window = f.read(_LOOK)
    return at + line_end + 1 if window else at


# -- making one ----------------------------------------------------------------------------------------------------


def make(plan: Plan, portion: Range, tok: TokenizerLike, at: At) -> None:
    """Tokenize ``portion`` and seal it at its ``place``: samples as they will be, or, of text, its tokens in a row."""
    home, final = Path(plan.home), place(Path(plan.home), portion)
    try:
        with durable.NewDirectory(home, final.name) as new:
            _Maker(plan, portion, tok, at).write(sealed.Sealing(new))
            new.commit(final.name)
    except OSError as e:
        raise durable.trouble(e, home) from e


class _Maker:
    """Reads, tokenizes, cuts and writes, a batch of records at a time."""

    def __init__(self, plan: Plan, portion: Range, tok: TokenizerLike, at: At) -> None:
        self.plan, self.portion, self.tok, self.at = plan, portion, tok, at
        self.bad = BadLines(plan.data, sys.maxsize)  # what they are too many of is for all portions together
        self.cutter = Cutter(plan.seq_len, plan.too_long)

    def write(self, new: sealed.Sealing) -> None:
        is_parquet = kind_of(self.plan.data) == "parquet"
        with (ParquetFile if is_parquet else DataFile)(self.plan.data, self.portion.begin, self.portion.end) as source:
            found = source.records(self.bad) if isinstance(source, ParquetFile) else records(source, self.bad)
            new.add("tokens.bin", self._chunks(source, found))
            lines, sha256 = source.line, source.sha256
        new.add("offsets.bin", [self.cutter.offsets.tobytes()])
        new.close(KIND, {"counts": asdict(self.cutter.counts), "bad_count": self.bad.count,
                         "bad_lines": self.bad.named, "lines": lines, "sha256": sha256})

    def _chunks(self, source: DataFile | ParquetFile, found: Iterable[Record]) -> Iterator[bytes]:
        for batch in batches(found):
            out = array("i")
            for record, tokens in zip(batch, self.tok.encode(batch), strict=True):
                if isinstance(tokens, BadLine):
                    self.bad.add(record.line, str(tokens))
                elif source.kind == "text":
                    out.extend(tokens)
                else:
                    self.cutter.record(self.tok.closed(tokens), out)
            self.cutter.note(out)
            yield out.tobytes()
            self.at(source.position - self.portion.begin)


def batches(found: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in lists that are worth one call of the tokenizer."""
    batch: list[Record] = []
    size = 0
    for record in found:
        batch.append(record)
        size += sum(len(t.text) for t in record.turns)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Cutter:
    """Cuts records into samples of up to ``seq_len + 1`` tokens, and counts."""

    def __init__(self, seq_len: int, too_long: TooLong) -> None:
        assert seq_len >= 1
        self.seq_len, self.too_long = seq_len, too_long
        self.counts = Counts()
        self.offsets = array("q", [0])

    def record(self, tokens: Tokens, out: Tokens) -> None:
        """Append the samples of one record: itself, its beginning, or windows that share their border token."""
        self.counts.records += 1
        T = self.seq_len
        if len(tokens) <= T + 1:
            self.keep(tokens, out)
        elif self.too_long == "truncate":
            self.counts.truncated += 1
            self.keep(tokens[: T + 1], out)
        else:
            self.counts.split += 1
            for at in range(0, len(tokens) - 1, T):
                self.keep(tokens[at : at + T + 1], out)

    def keep(self, sample: Tokens, out: Tokens) -> None:
        """Append one sample, unless nothing in it carries loss."""
        labels = sample.tobytes()[7::4].count(0)  # the high byte of an id, but the first's: 255 where there is no loss
        if labels == 0:
            self.counts.unlabelled += 1
            return
        out.extend(sample)
        c = self.counts
        c.samples, c.tokens, c.labels = c.samples + 1, c.tokens + len(sample), c.labels + labels
        self.offsets.append(self.offsets[-1] + len(sample))

    def note(self, out: Tokens) -> None:
        """Look at what was appended: all samples of a batch at once."""
        if out:
            self.counts.max_id = max(self.counts.max_id, max(out), ~min(out))


# -- as a process --------------------------------------------------------------------------------------------------


def main() -> int:
    """The plan in the first line of stdin, then a portion a line. Answers, one a line: at, done, fault."""
    _set_up_process()
    plan, tok = Plan(**json.loads(sys.stdin.readline())), None
    for line in sys.stdin:
        portion = Range(*json.loads(line))
        try:
            tok = tok or plan.load()
            make(plan, portion, tok, lambda n: _say("at", n))
            _say("done", portion.number)
        except RrdError as e:
            where = {"file": e.file, "line": e.line, "key": e.key} if isinstance(e, BadJob) else {}
            _say("fault", {"kind": type(e).__name__, "message": e.message, "hint": e.hint, **where})
        except MemoryError:
            _say("fault", {"kind": "MemoryError"})
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _say(what: str, value: object) -> None:
    try:
        print(json.dumps([what, value]), flush=True)
    except BrokenPipeError:
        os._exit(0)  # nobody is there any more; what is half-made is swept away by the next to come


def _set_up_process() -> None:
    """Gone with whoever started it, and bounded in memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the daemon's to handle
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
