"""rrd.ledger: records survive, and whatever a disk made of one costs that job's record at most, in one sentence."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from pathlib import Path

import damage
import pytest
from disks import FaultyDisk, RecordingDisk

from rrd.errors import DiskTrouble
from rrd.ledger import FILE, JOB_FILE, Ledger, Record
from rrd.states import JobState


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "jobs").mkdir()
    return Ledger(tmp_path / "jobs")


def full_record(job: str = "a") -> Record:
    return Record(id=job, state=JobState.REMOVED, why="its file is gone “ü”", hint="put it back",
                  submitted_at=1.7e9 + 0.1, announced_step=150, announced_at=1.7e9 + 1 / 3, crashes=2, best_step=155,
                  user_paused=True, outcome=JobState.DONE, samples=10**7, finished_at=1.7e9,
                  failed_facts="data.jsonl 5 6")


def test_what_is_saved_is_what_is_loaded(ledger: Ledger) -> None:
    records = {"a": full_record(), "b": Record(id="b")}
    for record in records.values():
        ledger.save(record)
    assert ledger.load() == (records, [])


def test_the_job_file_is_kept_as_accepted(ledger: Ledger) -> None:
    assert ledger.job_toml("a") is None
    ledger.save(full_record(), 'model = "/m"\n')
    assert ledger.job_toml("a") == b'model = "/m"\n'
    ledger.save(full_record())
    assert ledger.job_toml("a") == b'model = "/m"\n'


def test_no_ledger_yet(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state" / "jobs")
    assert ledger.load() == ({}, [])
    ledger.save(full_record())
    assert ledger.load()[0] == {"a": full_record()}


def test_what_else_lies_there_is_left_alone(ledger: Ledger) -> None:
    ledger.save(Record(id="a"))
    (ledger.root / "lost+found").mkdir()
    (ledger.root / ".hidden").mkdir()
    (ledger.root / "file").write_bytes(b"x")
    (ledger.root / "made-but-not-saved").mkdir()
    (ledger.root / "a" / ".new-ledger.json-1234").write_bytes(b"half")
    assert ledger.load() == ({"a": Record(id="a")}, [])
    assert {p.name for p in (ledger.root / "a").iterdir()} == {FILE}


@pytest.mark.parametrize("job", ["", "../b", "a/b", ".a", "a" * 64, "a\n"])
def test_a_name_that_is_no_job_is_our_own_mistake(ledger: Ledger, job: str) -> None:
    with pytest.raises(AssertionError):
        ledger.dir(job)


WHOLE = full_record("b").model_dump_json(indent=1).encode()


@pytest.mark.parametrize(("data", "said"), [
    (b"\0" * len(WHOLE), "is damaged"),
    (b"", "is damaged"),
    (WHOLE[: len(WHOLE) // 2], "is damaged"),
    (b"{}", "is damaged: Field required"),
    (b'{"self": 5}', "is damaged: its digest is not '5'"),
    (b"[]", "is damaged"),
    (b"null", "is damaged"),
    (b"\xff\xfe\0", "is damaged"),
    (b"[" * 100_000, "is damaged"),
    (WHOLE.replace(b'"removed"', b'"dreaming"'), "is damaged"),
    (WHOLE.replace(b'"id": "b"', b'"id": "a"'), "is of another job, 'a'"),
    (WHOLE.replace(b'"id": "b"', b'"id": "\\u202e\\n%s"' % (b"x" * 999)), "is of another job"),
    (WHOLE.replace(b'"format": 1', b'"format": 2'), "is of format 2, and this rrd knows 1"),
    (b'{"format": 99, "entirely": "different"}', "is of format 99, and this rrd knows 1"),
], ids=["NULs", "empty", "half", "no fields", "odd digest", "list", "null", "no text", "deep", "state", "other", "odd",
        "next", "far"])
def test_a_bad_record_costs_one_sentence(ledger: Ledger, data: bytes, said: str) -> None:
    for job in ("a", "b", "c"):
        ledger.save(Record(id=job))
    (ledger.dir("b") / FILE).write_bytes(data)
    records, (fault,) = ledger.load()
    assert list(records) == ["a", "c"]
    assert fault.isprintable() and len(fault) < 500
    assert said in fault
    (bad,) = ledger.root.glob("*/.bad-*")
    assert bad.read_bytes() == data and fault.endswith(f"; it was set aside as {bad.name}")
    assert ledger.load() == (records, [])


def test_a_record_that_cannot_be_read_costs_one_sentence(ledger: Ledger) -> None:
    for job in ("a", "b", "c"):
        ledger.save(Record(id=job))
    (ledger.dir("b") / FILE).unlink()
    (ledger.dir("b") / FILE).symlink_to(FILE)
    (ledger.dir("c") / FILE).unlink()
    (ledger.dir("c") / FILE).mkdir()
    records, (b, c) = ledger.load()
    assert list(records) == ["a"]
    assert b.endswith("cannot be read: too many levels of symbolic links")
    assert c.endswith("cannot be read: is a directory")


def test_a_read_only_disk_does_not_keep_the_rest_from_loading(ledger: Ledger) -> None:
    for job in ("a", "b"):
        ledger.save(Record(id=job))
    (ledger.dir("b") / FILE).write_bytes(b"")
    records, faults = Ledger(ledger.root, disk=FaultyDisk(1, errno.EROFS, lasting=True)).load()
    assert list(records) == ["a"]
    assert faults[0].endswith("; it could not be set aside: read-only file system")


def test_a_newer_rrds_extra_fields_of_this_format_do_not_matter(ledger: Ledger) -> None:
    ledger.save(full_record())
    path = ledger.dir("a") / FILE
    body = {**json.loads(path.read_bytes()), "new": [1]}
    del body["self"]
    path.write_text(json.dumps({**body, "self": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}))
    assert ledger.load() == ({"a": full_record()}, [])


def test_a_record_that_says_something_else_than_was_written_is_damaged(ledger: Ledger) -> None:
    ledger.save(full_record())
    path = ledger.dir("a") / FILE
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"best_step": ', b'"best_step": 1'))
    records, (fault,) = ledger.load()
    assert records == {} and "is damaged: its digest is not" in fault


def test_whatever_becomes_of_a_record_the_others_are_known_and_it_is_said(tmp_path: Path) -> None:
    row = damage.records(tmp_path, 100)
    assert row.trials > 400 and row.wrong == []


def test_format_1_is_read_for_ever(ledger: Ledger) -> None:
    ledger.dir("a").mkdir()
    (ledger.dir("a") / FILE).write_text(
        '{"format": 1, "id": "a", "state": "paused", "why": "by the user", "hint": "", "submitted_at": 1700000000.25,'
        ' "announced_step": 150, "announced_at": 1700000009.5, "crashes": 0, "best_step": 155, "user_paused": true,'
        ' "outcome": null, "samples": 24, "finished_at": null, "failed_facts": ""}\n')
    assert ledger.load() == ({"a": Record(
        id="a", state=JobState.PAUSED, why="by the user", submitted_at=1700000000.25, announced_step=150,
        announced_at=1700000009.5, best_step=155, user_paused=True, samples=24)}, [])


def test_a_saved_record_survives_every_power_cut(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    ledger = Ledger(tmp_path / "jobs", disk=disk)
    saved: dict[int, bytes] = {}
    for step in (1, 2):
        ledger.save(Record(id="a", announced_step=step), f"max_steps = {step}\n")
        saved[step] = (ledger.dir("a") / FILE).read_bytes()
        disk.mark(step)
    for promised, trees in disk.power_cuts():
        for tree in map(dict, trees):
            assert tree.get(f"jobs/a/{FILE}") in {None, *saved.values()}
            assert not promised or tree[f"jobs/a/{FILE}"] in list(saved.values())[len(promised) - 1 :]
            assert not promised or tree[f"jobs/a/{JOB_FILE}"]


def test_a_fault_while_saving_is_the_disks_and_keeps_the_old_record(ledger: Ledger) -> None:
    ledger.save(Record(id="a"), "old")
    for nth in itertools.count(1):
        disk = FaultyDisk(nth, errno.ENOSPC)
        try:
            Ledger(ledger.root, disk=disk).save(full_record(), "new")
        except DiskTrouble:
            records, faults = ledger.load()
            assert faults == [] and records["a"] in (Record(id="a"), full_record())
            continue
        assert not disk.hit or nth > 1
        break
    with pytest.raises(DiskTrouble, match=r"the disk is full: cannot write .*/jobs/b"):
        Ledger(ledger.root, disk=FaultyDisk(1, errno.ENOSPC)).save(Record(id="b"))
