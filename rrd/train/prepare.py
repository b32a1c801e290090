"""The token cache: a data file tokenized once, into a directory that any number of jobs map and read.

``<cache_dir>/<key>/ready/`` holds ``tokens.bin`` (int32, ``~id`` where a token carries no loss), ``offsets.bin``
(int64: where sample i starts, and one more at the end) and a manifest. The key is a digest of the data's bytes, the
tokenizer and the settings, so nothing in it is ever out of date; all of it may be deleted at any time.

A file is tokenized in portions (:mod:`rrd.train.portion`), by several processes where it has many. Each portion is
sealed on disk under ``<key>/portions/`` until all are there, so that whoever was killed goes on where it was; what they
are put together to is the same however they came about, and never in memory as a whole.

A sample holds up to ``seq_len + 1`` tokens: the model sees all but the last, and each is the target of the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rrd import durable
from rrd.errors import BadJob, Damaged
from rrd.text import count
from rrd.train import crew, portion, sealed
from rrd.train.portion import Counts, Cutter, Plan, Range, TooLong, place
from rrd.train.read import BadLines, kind_of, open_regular
from rrd.train.sealed import Seal
from rrd.train.tokenize import TokenizerLike, load_tokenizer

KIND = "rrd token cache 1"
_REMEMBER_ABOVE = 64 << 20   # hashing less than this is quicker than being clever
_SETTLED_NS = 2_000_000_000  # a file changed within this before it was hashed may change again within one clock tick

Progress = Callable[[float], None]


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
            cache_dir: str | Path, processes: int = 1, progress: Progress = lambda _: None) -> Prepared:
    """Tokenize ``data`` with the tokenizer file or directory ``tokenizer``, or find it done.

    ``progress`` gets fractions up to 1.0, often; what it raises ends the work. ``processes``: so many at the most work
    side by side; with one, this process does it with the threads that RAYON_NUM_THREADS allows.

    Raises:
        BadJob: the data or the tokenizer cannot be used.
        DiskTrouble: the cache cannot be written.
    """
    cache, tok = Path(cache_dir), load_tokenizer(tokenizer)
    sha = data_digest(data, cache, progress)
    way = [kind_of(data), portion.SIZE] if kind_of(data) == "text" else []  # where text is cut shows in its tokens
    settings = [KIND, sha, tok.digest, kind_of(data) == "text", seq_len, too_long, *way]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    home = cache / key[:32]
    prepared = _find(home / "ready")
    bad = BadLines(data, max_bad_lines)
    if prepared is None:
        tok.make_ready(cache.parent, lambda: progress(0.0))
        plan = Plan(str(home / "portions"), data, tokenizer, tok.library, seq_len, too_long)
        prepared = _build(home, key, _Builder(plan, sha, bad, tok, processes, progress))
    bad.check(prepared.bad_count, prepared.bad_lines)
    progress(1.0)
    return prepared


def _build(home: Path, key: str, builder: _Builder) -> Prepared:
    """The cache under ``home``: built, unless somebody else has built it meanwhile."""
    ready, portions = home / "ready", home / "portions"
    try:
        durable.make_dir(home)
        # whoever holds it is making what we need, however long that takes
        with durable.lock_when_free(home / "lock", what="the token cache", alive=lambda: builder.progress(0.0)) as lock:
            durable.sweep_dirs(home)  # what a builder that died left behind
            if found := _find(ready):
                return found
            if ready.exists():
                durable.discard_dir(ready)
            durable.make_dir(portions)
            try:
                builder.make_portions(lock)
                with durable.NewDirectory(home, "data") as new:
                    facts = builder.write(sealed.Sealing(new), key)
                    new.commit("ready")
            except BadJob:
                durable.discard_dir(portions)  # they will not be wanted as they are
                raise
            durable.discard_dir(portions)
    except OSError as e:
        raise durable.trouble(e, home) from e
    return Prepared(path=ready, **facts)


def _find(ready: Path) -> Prepared | None:
    """The finished cache, every byte checked; None if it is not there or damaged."""
    if (seal := _sealed(ready, KIND)) is None:
        return None
    facts = dict(seal.facts)
    facts["bad_lines"] = [(line, reason) for line, reason in facts["bad_lines"]]
    return Prepared(path=ready, **facts)


def _sealed(path: Path, kind: str) -> Seal | None:
    """The seal of a directory of which every byte holds."""
    try:
        seal = sealed.read_seal(path, kind)
        sealed.verify(path, seal)
    except Damaged:
        return None
    return seal


class _Builder:
    """Has a file's portions made, and puts them together."""

    def __init__(self, plan: Plan, sha: str, bad: BadLines, tok: TokenizerLike, processes: int, progress: Progress
                 ) -> None:
        self.plan, self.sha, self.bad, self.tok, self.processes = plan, sha, bad, tok, processes
        self.progress = progress
        self.home = Path(plan.home)
        self.ranges = portion.ranges(plan.data)
        self.facts: dict[int, Mapping[str, Any]] = {}
        self._taken = self._lines = 0
        self._at: dict[int, int] = {}
        self._units = max(1, self.ranges[-1].end)

    def make_portions(self, lock: IO[bytes]) -> None:
        """Make those that are not there from an earlier try, or not whole. Raises BadJob: too many bad lines."""
        durable.sweep_dirs(self.home)
        missing = []
        for r in self.ranges:
            if seal := _sealed(place(self.home, r), portion.KIND):
                self._done(r, seal)
            else:
                if place(self.home, r).exists():
                    durable.discard_dir(place(self.home, r))
                missing.append(r)
        together = crew.size(self.processes, len(missing))
        if missing and (together > 1 or self.tok.runs_code):
            crew.run(self.plan, missing, count=together, lock=lock, at=self._is_at, done=self._done)
            return
        for r in missing:
            portion.make(self.plan, r, self.tok, lambda n, r=r: self._is_at(r.number, n))  # type: ignore[misc]
            self._done(r)

    def _is_at(self, number: int, units: int) -> None:
        self._at[number] = units
        self.progress(0.97 * sum(self._at.values()) / self._units)

    def _done(self, r: Range, seal: Seal | None = None) -> None:
        self.facts[r.number] = (seal or sealed.read_seal(place(self.home, r), portion.KIND)).facts
        while self._taken in self.facts:  # bad lines are counted in the file's order
            self._take(self.facts[self._taken])
            self._taken += 1
        self._is_at(r.number, r.end - r.begin)

    def _take(self, facts: Mapping[str, Any]) -> None:
        for line, reason in facts["bad_lines"]:
            self.bad.add(self._lines + line, reason)
        self.bad.count += facts["bad_count"] - len(facts["bad_lines"])  # those that were too many to be named
        self.bad.check(self.bad.count, self.bad.named)
        self._lines += facts["lines"]

    def write(self, new: sealed.Sealing, key: str) -> dict[str, Any]:
        """Fill ``new`` from the portions and seal it. Returns the facts of the manifest."""
        self._check_unchanged()
        counts = Counts()
        if kind_of(self.plan.data) == "text":
            cutter = Cutter(self.plan.seq_len, "split")
            new.add("tokens.bin", self._windows(cutter))
            new.add("offsets.bin", [cutter.offsets.tobytes()])
            counts = cutter.counts
        else:
            for facts in self.facts.values():
                counts.add(Counts(**facts["counts"]))
            new.add("tokens.bin", self._each("tokens.bin"))
            new.add("offsets.bin", self._offsets())
        if not counts.samples:
            raise BadJob("the data file holds nothing to learn from", file=self.plan.data, hint=self._why(counts))
        facts = asdict(counts) | {"digest": key, "bad_count": self.bad.count, "bad_lines": self.bad.named}
        new.close(KIND, facts)
        return facts

    def _why(self, c: Counts) -> str:
        if c.unlabelled:
            return f"in all of its {c.records} records the prompt fills seq_len = {self.plan.seq_len}: raise it"
        if not self.bad.named:
            return "it is empty"
        line, reason = self.bad.named[0]
        return f"none of its {count(self.bad.count, 'line')} can be used; line {line}: {reason}"

    def _each(self, name: str) -> Iterator[bytes]:
        """The bytes of one file of all portions, in order."""
        for r in self.ranges:
            yield (place(self.home, r) / name).read_bytes()
            self.progress((0.99 if name == "offsets.bin" else 0.97) + 0.009 * r.end / self._units)

    def _offsets(self) -> Iterator[bytes]:
        before = 0
        yield array("q", [0]).tobytes()
        for data in self._each("offsets.bin"):
            offsets = array("q", data)[1:]
            yield array("q", (before + at for at in offsets)).tobytes()
            before += offsets[-1] if offsets else 0

    def _windows(self, cutter: Cutter) -> Iterator[bytes]:
        """One running text: windows of seq_len over all of it, whatever too_long says."""
        T, carry = self.plan.seq_len, array("i")
        for data in self._each("tokens.bin"):
            carry.frombytes(data)
            out, at = array("i"), 0
            while len(carry) - at > T + 1:
                cutter.keep(carry[at : at + T + 1], out)
                at += T
            carry = carry[at:]
            cutter.note(out)
            yield out.tobytes()
        out = array("i")
        if carry:
            cutter.record(self.tok.closed(carry), out)
        cutter.note(out)
        yield out.tobytes()
        cutter.counts.records, cutter.counts.split = 1, 0

    def _check_unchanged(self) -> None:
        """Whether the file is still what was hashed, and each portion was made of that. Raises BadJob."""
        whole, same = hashlib.sha256(), True
        with open_regular(self.plan.data, what="the data file") as f:
            if kind_of(self.plan.data) != "parquet":
                for r in self.ranges:
                    own = hashlib.sha256()
                    for part in _parts(f, r.end - r.begin):
                        whole.update(part)
                        own.update(part)
                    same = same and own.hexdigest() == self.facts[r.number]["sha256"]
                    self.progress(0.97)
            for part in _parts(f, 1 << 62):
                whole.update(part)
        if whole.hexdigest() != self.sha or not same:
            raise BadJob("the data file changed while it was being read", file=self.plan.data,
                         hint="rrd tries again when the file or the job changes")


def _parts(f: IO[bytes], size: int) -> Iterator[bytes]:
    while size and (part := f.read(min(size, 1 << 20))):
        size -= len(part)
        yield part


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
