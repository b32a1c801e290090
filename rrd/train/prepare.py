"""The token cache: a data file tokenized once, into a directory that any number of jobs map and read.

``<cache_dir>/<key>/ready/`` holds ``tokens.bin`` (int32, ``~id`` where a token carries no loss), ``offsets.bin``
(int64: where sample i starts, and one more at the end) and a manifest. The key is a digest of the data's bytes, the
tokenizer and the settings, so nothing in it is ever out of date; all of it may be deleted at any time.

A sample holds up to ``seq_len + 1`` tokens: the model sees all but the last, and each is the target of the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rrd import durable
from rrd.errors import BadJob, Damaged
from rrd.text import count
from rrd.train import sealed
from rrd.train.read import BadLine, BadLines, DataFile, Record, open_regular, records
from rrd.train.tokenize import TokenizerLike, load_tokenizer

KIND = "rrd token cache 1"
_BATCH_CHARACTERS = 1 << 19  # enough for every core to have work, little enough to hold
_BATCH_RECORDS = 4096
_REMEMBER_ABOVE = 64 << 20   # hashing less than this is quicker than being clever
_SETTLED_NS = 2_000_000_000  # a file changed within this before it was hashed may change again within one clock tick

Progress = Callable[[float], None]
TooLong = Literal["truncate", "split"]


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


@dataclass
class Prepared(Counts):
    """Data ready to train on. ``digest`` names its exact tokens: it belongs in a checkpoint's identity."""

    path: Path = Path()
    digest: str = ""
    bad_count: int = 0
    bad_lines: list[tuple[int, str]] = field(default_factory=list)
    """(line, reason) of the first bad lines; ``bad_count`` counts all."""

    def notes(self) -> list[str]:
        """What the job's owner should know, one sentence each."""
        said = [
            (self.bad_count, f"{count(self.bad_count, 'bad line')} left out"
             + "".join(f"; line {line}: {reason}" for line, reason in self.bad_lines[:1])),
            (self.truncated, f"{count(self.truncated, 'record')} longer than seq_len cut off at its end"),
            (self.split, f"{count(self.split, 'record')} longer than seq_len split into several samples"),
            (self.unlabelled, f"{count(self.unlabelled, 'sample')} left out: no token to learn from within seq_len"),
        ]
        return [sentence for n, sentence in said if n]


def prepare(data: str, tokenizer: str, *, seq_len: int, too_long: TooLong = "truncate", max_bad_lines: int = 100,
            cache_dir: str | Path, progress: Progress = lambda _: None) -> Prepared:
    """Tokenize ``data`` with the tokenizer file or directory ``tokenizer``, or find it done.

    ``progress`` gets fractions up to 1.0, often; what it raises ends the work. Threads: RAYON_NUM_THREADS.

    Raises:
        BadJob: the data or the tokenizer cannot be used.
        DiskTrouble: the cache cannot be written.
    """
    cache, tok = Path(cache_dir), load_tokenizer(tokenizer)
    with DataFile(data) as source:
        sha = data_digest(data, cache, progress)
        settings = [KIND, sha, tok.digest, source.is_text, seq_len, too_long]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        builder = _Builder(source, sha, BadLines(data, max_bad_lines), tok, seq_len, too_long, progress)
        prepared = _find_or_build(cache / key[:32], key, builder)
    builder.bad.check(prepared.bad_count, prepared.bad_lines)
    progress(1.0)
    return prepared


def _find_or_build(home: Path, key: str, builder: _Builder) -> Prepared:
    """The cache under ``home``; built if it is not there, or not as it was written."""
    ready = home / "ready"
    if found := _find(ready):
        return found
    try:
        durable.make_dir(home)
        # whoever holds it is making what we need, however long that takes
        with durable.lock_when_free(home / "lock", what="the token cache", alive=lambda: builder.progress(0.0)):
            durable.sweep_dirs(home)  # what a builder that died left behind
            if found := _find(ready):
                return found
            if ready.exists():
                durable.discard_dir(ready)
            with durable.NewDirectory(home, "data") as new:
                facts = builder.write(sealed.Sealing(new), key)
                new.commit("ready")
    except OSError as e:
        raise durable.trouble(e, home) from e
    return Prepared(path=ready, **facts)


def _find(ready: Path) -> Prepared | None:
    """The finished cache, every byte checked; None if it is not there or damaged."""
    try:
        seal = sealed.read_seal(ready, KIND)
        sealed.verify(ready, seal)
    except Damaged:
        return None
    facts = dict(seal.facts)
    facts["bad_lines"] = [(line, reason) for line, reason in facts["bad_lines"]]
    return Prepared(path=ready, **facts)


class _Builder:
    """Reads, tokenizes, cuts and writes, a batch of records at a time."""

    def __init__(self, source: DataFile, sha: str, bad: BadLines, tok: TokenizerLike, seq_len: int, too_long: TooLong,
                 progress: Progress) -> None:
        assert seq_len >= 1
        self.source, self.sha, self.bad, self.tok = source, sha, bad, tok
        self.seq_len, self.too_long, self.progress = seq_len, too_long, progress
        self.counts = Counts()
        self.offsets = array("q", [0])

    def write(self, new: sealed.Sealing, key: str) -> dict[str, Any]:
        """Fill ``new`` and seal it. Returns the facts of the manifest."""
        new.add("tokens.bin", self._chunks())
        new.add("offsets.bin", [self.offsets.tobytes()])
        if self.source.sha256 != self.sha:
            raise BadJob("the data file changed while it was being read", file=self.source.path,
                         hint="rrd tries again when the file or the job changes")
        if not self.counts.samples:
            raise BadJob("the data file holds nothing to learn from", file=self.source.path, hint=self._why_nothing())
        facts = asdict(self.counts) | {"digest": key, "bad_count": self.bad.count, "bad_lines": self.bad.named}
        new.close(KIND, facts)
        return facts

    def _why_nothing(self) -> str:
        c = self.counts
        if c.unlabelled:
            return f"in all of its {c.records} records the prompt fills seq_len = {self.seq_len}: raise it"
        if not self.bad.named:
            return "it is empty"
        line, reason = self.bad.named[0]
        return f"none of its {count(self.bad.count, 'line')} can be used; line {line}: {reason}"

    def _chunks(self) -> Iterator[bytes]:
        cut = self._cut_text if self.source.is_text else self._cut_records
        for tokens in cut(batches(records(self.source, self.bad))):
            yield tokens.tobytes()
            self.progress(min(self.source.position / max(self.source.size, 1), 0.999))

    def _cut_records(self, batches: Iterable[list[Record]]) -> Iterator[array[int]]:
        for batch in batches:
            out = array("i")
            self.counts.records += len(batch)
            for record, tokens in zip(batch, self.tok.encode(batch), strict=True):
                if isinstance(tokens, BadLine):
                    self.bad.add(record.line, str(tokens))
                else:
                    self._cut(self.tok.closed(tokens), self.too_long, out)
            yield out

    def _cut_text(self, batches: Iterable[list[Record]]) -> Iterator[array[int]]:
        """One running text: windows of seq_len over all of it, whatever too_long says."""
        carry: list[int] = []
        self.counts.records = 1
        for batch in batches:
            out = array("i")
            for tokens in self.tok.encode(batch):
                assert not isinstance(tokens, BadLine)
                carry += tokens
            at = 0
            while len(carry) - at > self.seq_len + 1:
                self._keep(carry[at : at + self.seq_len + 1], out)
                at += self.seq_len
            carry = carry[at:]
            yield out
        out = array("i")
        if carry:
            self._cut(self.tok.closed(carry), "split", out)
        yield out

    def _cut(self, tokens: list[int], too_long: TooLong, out: array[int]) -> None:
        """Append the samples of one record: itself, its beginning, or windows that share their border token."""
        T = self.seq_len
        if len(tokens) <= T + 1:
            self._keep(tokens, out)
        elif too_long == "truncate":
            self.counts.truncated += 1
            self._keep(tokens[: T + 1], out)
        else:
            self.counts.split += not self.source.is_text
            for at in range(0, len(tokens) - 1, T):
                self._keep(tokens[at : at + T + 1], out)

    def _keep(self, sample: list[int], out: array[int]) -> None:
        labels = sum(map((0).__le__, sample[1:])) if min(sample, default=0) < 0 else len(sample) - 1
        if labels <= 0:
            self.counts.unlabelled += 1
            return
        out.extend(sample)
        c = self.counts
        c.samples, c.tokens, c.labels = c.samples + 1, c.tokens + len(sample), c.labels + labels
        c.max_id = max(c.max_id, max(sample), ~min(sample))
        self.offsets.append(self.offsets[-1] + len(sample))


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


def data_digest(path: str, cache: Path, progress: Progress = lambda _: None) -> str:
    """The sha256 of a data file. That of a large one is remembered for as long as the file is untouched.

    Untouched means the same device, inode, size, mtime and ctime, and that it had not been changed in the two seconds
    before it was hashed: a later change within the same clock tick would look the same.
    """
    with open_regular(path, what="the data file") as f:
        now, before = time.time_ns(), _stamp(f.fileno())
        memo = cache / "digests" / hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:32]
        large = os.fstat(f.fileno()).st_size >= _REMEMBER_ABOVE
        if large and (known := _recall(memo, before)):
            return known
        sha = hashlib.sha256()
        while part := f.read(1 << 24):
            sha.update(part)
            progress(0.0)
        settled = now - max(before[-2:]) > _SETTLED_NS and _stamp(f.fileno()) == before
    if large and settled:
        durable.make_dir(memo.parent)
        durable.replace_file(memo, json.dumps([before, sha.hexdigest()]).encode())
    return sha.hexdigest()


def _stamp(fd: int) -> list[int]:
    s = os.fstat(fd)
    return [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]


def _recall(memo: Path, stamp: list[int]) -> str | None:
    try:
        known_stamp, sha = json.loads(memo.read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    return sha if known_stamp == stamp and isinstance(sha, str) else None
