"""A disk that refuses, and one that gives back other bytes than it was given."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from disks import FaultyDisk
from saves import STATE, TENSORS, commit, expected, load, steps
from table import Row

from rrd import checkpoint, durable
from rrd.durable import Disk, Log
from rrd.errors import Damaged, DiskTrouble
from rrd.ledger import FILE, Ledger, Record
from rrd.states import JobState

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# --- it refuses -------------------------------------------------------------------------------------------------------


def save_on_faulty(job_dir: Path, error: int, *, lasting: bool) -> Row:
    """A save whose n-th call fails, for each n: the checkpoint before stays whole, and the next save goes well."""
    row = Row("save")
    commit(job_dir, 10)
    for nth in itertools.count(1):
        disk = FaultyDisk(nth, error, lasting=lasting)
        trouble = attempt(job_dir, 20, disk)
        if trouble:
            assert "\n" not in trouble.message and trouble.hint and str(job_dir) in trouble.message
            assert lasting or steps(job_dir) == [10]
        else:
            assert load(job_dir / checkpoint.name_of(20)) == expected(20)
        assert load(job_dir / checkpoint.name_of(10)) == expected(10)
        durable.sweep_dirs(job_dir)
        assert {p.name for p in job_dir.iterdir()} <= {checkpoint.name_of(10), checkpoint.name_of(20)}
        assert load(commit(job_dir, 20)) == expected(20)  # the same step again, once the disk is well
        durable.discard_dir(job_dir / checkpoint.name_of(20))
        if not disk.hit:
            assert nth > 20
            return row
        row.trials += 1
    raise AssertionError


def attempt(job_dir: Path, step: int, disk: Disk) -> DiskTrouble | None:
    try:
        commit(job_dir, step, disk)
    except DiskTrouble as e:
        return e
    return None


def ledger_on_faulty(root: Path, error: int, *, lasting: bool) -> Row:
    """The same for the daemon's record: it holds what it held, or what was to be written."""
    row = Row("ledger")
    ledger = Ledger(root)
    for nth in itertools.count(1):
        ledger.save(Record(id="a", state=JobState.RUNNING, announced_step=10), "model = 1\n")
        disk = FaultyDisk(nth, error, lasting=lasting)
        trouble = None
        try:
            Ledger(root, disk=disk).save(Record(id="a", state=JobState.PAUSED, announced_step=20), "model = 2\n")
        except DiskTrouble as e:
            trouble = e
        assert trouble is None or ("\n" not in trouble.message and trouble.hint)
        records, faults = ledger.load()
        assert not faults and records["a"].announced_step in ((10, 20) if trouble else (20,))
        if not disk.hit:
            return row
        row.trials += 1
    raise AssertionError


def log_on_faulty(root: Path, error: int, *, lasting: bool) -> Row:
    """The same for a history: no line is lost, and none stands there twice, once the disk is well again."""
    row, path = Row("history"), root / "history.jsonl"
    for nth in itertools.count(1):
        log = Log(path, 0)
        log.disk = disk = FaultyDisk(nth, error, lasting=lasting)
        synced = 0
        for n in range(3):
            log.append(b"line %d\n" % n)
            try:
                log.sync()
                synced = n + 1
            except DiskTrouble:
                pass
        assert path.read_bytes().startswith(b"".join(b"line %d\n" % n for n in range(synced)))
        log.disk = durable.DISK
        log.append(b"line 3\n")
        log.sync()
        assert path.read_bytes() == b"".join(b"line %d\n" % n for n in range(4))
        log.close()
        path.unlink()
        if not disk.hit:
            return row
        row.trials += 1
    raise AssertionError


def refusing(root: Path) -> Row:
    """Every call of a save, of the ledger and of a history fails once, and from then on, with each error."""
    row = Row("EIO, ENOSPC, EDQUOT, EROFS at the n-th call, for each n; once and lasting")
    for i, (error, lasting) in enumerate(itertools.product(ERRORS, (False, True))):
        parts: tuple[Callable[..., Row], ...] = (save_on_faulty, ledger_on_faulty, log_on_faulty)
        for part in parts:
            (at := root / part.__name__ / str(i)).mkdir(parents=True)
            try:
                done = part(at, error, lasting=lasting)
            except AssertionError as e:
                row.wrong.append(f"{part.__name__}, {errno.errorcode[error]}, lasting {lasting}: {e}")
            else:
                row.trials += done.trials
                row.count(f"calls of a {done.what}", by=done.trials)
    return row


# --- it forgets -------------------------------------------------------------------------------------------------------


def harm(data: bytes, chance: random.Random) -> bytes:
    """``data``, and never as it was: a bit flipped, cut short, its end zeroed, a byte lost, a byte too many."""
    at = chance.randrange(len(data))
    kinds = [data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :], data[:at],
             data[:at] + bytes(len(data) - at), data[:at] + data[at + 1 :], data[:at] + b"?" + data[at:]]
    harmed = chance.choice(kinds)
    return harmed if harmed != data else data + b"?"


def damaged(job_dir: Path, times: int, seed: int = 1) -> Row:
    """``times`` times something happens to a byte of a checkpoint: seen each time, and the one before is whole."""
    row, chance = Row("a flip, a loss, a truncation anywhere in a checkpoint"), random.Random(seed)
    before = commit(job_dir, 10)
    files = {TENSORS: [chance.randbytes(20_000)], STATE: [chance.randbytes(500)]}
    path, _ = checkpoint.commit(job_dir, job="a", step=20, identity="i", files=files)
    for _ in range(times):
        victim = path / chance.choice([TENSORS, STATE, checkpoint.MANIFEST])
        data = victim.read_bytes()
        victim.write_bytes(harm(data, chance))
        row.trials += 1
        row.count(f"of {victim.name}")
        try:
            checkpoint.verify(path)
            row.wrong.append(f"damage to {victim.name} was not seen")
        except Damaged:
            pass
        victim.write_bytes(data)
    checkpoint.verify(path)
    assert load(before) == expected(10)
    row.note = "each seen; the one before is used"
    return row


def records(root: Path, times: int, seed: int = 2) -> Row:
    """The daemon's record of a job as NULs, empty, cut short at each length, with a byte changed, from the future: it
    starts, says so in a sentence, knows the other jobs, and keeps the bytes aside."""
    row, chance = Row("state files of NULs, empty, half-written, changed, from the future"), random.Random(seed)
    ledger = Ledger(root)
    for job in ("a", "b"):
        ledger.save(Record(id=job, state=JobState.RUNNING, announced_step=10))
    whole = (root / "a" / FILE).read_bytes()
    future = whole.replace(b'"format": 1', b'"format": 2')
    assert future != whole
    kinds = {"from the future": [future], "of NULs": [bytes(len(whole)), b"\0"], "empty": [b""],
             "half-written": [whole[:n] for n in range(1, len(whole) - 1)],
             "changed": [harm(whole, chance) for _ in range(times)]}
    for kind, all_data in kinds.items():
        for data in all_data:
            (root / "a" / FILE).write_bytes(data)
            row.trials += 1
            row.count(kind)
            known, faults = ledger.load()
            row.wrong += _judge_record(kind, known, faults)
            for aside in (root / "a").glob(".bad-*"):
                row.wrong += [] if aside.read_bytes() == data else [f"{kind}: its bytes were not kept"]
                aside.unlink()
    shutil.rmtree(root / "a")
    return row


def _judge_record(kind: str, known: dict[str, Record], faults: list[str]) -> list[str]:
    if "b" not in known or known["b"].announced_step != 10:
        return [f"{kind}: the other job is lost"]
    if not faults and kind == "changed" and known["a"] == Record(id="a", state=JobState.RUNNING, announced_step=10):
        return []  # spaces, or the digest's name: it says what it said
    if "a" in known or len(faults) != 1 or "\n" in faults[0] or "/a/" not in faults[0]:
        return [f"{kind}: {faults}"]
    return []
