"""rrd.checkpoint: what was announced survives every power cut and every fault, and nothing damaged is ever loaded."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import damage
import pytest
from apart import apart
from cuts import FORGOTTEN, OPTIONS, Judge, LoopDisk, faults, lives, real, some_commits, why_no_loop, without_digests
from disks import FaultyDisk, RecordingDisk
from saves import STATE, TENSORS, commit, expected, load, steps
from table import Row

from rrd import checkpoint, durable
from rrd.checkpoint import MANIFEST, FutureFormat, Manifest
from rrd.durable import Disk
from rrd.errors import Damaged, DiskTrouble


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    path = tmp_path / "job"
    path.mkdir()
    return path


# --- what is written is what is read ----------------------------------------------------------------------------------


def test_a_checkpoint_is_there_with_its_bytes(job_dir: Path) -> None:
    path = commit(job_dir, 150)
    assert path.name == "ckpt-000000000150"
    assert load(path) == expected(150)
    assert [p.name for p in job_dir.iterdir()] == [path.name]


def test_the_manifest_names_every_file_with_its_size_and_sha256(job_dir: Path) -> None:
    body = json.loads((commit(job_dir, 7) / MANIFEST).read_bytes())
    data = expected(7)[TENSORS]
    assert body["files"][TENSORS] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert body["format"] == 1 and body["step"] == 7 and body["job"] == "a"


def test_a_large_file_is_read_into_the_buffer_it_is_given(job_dir: Path) -> None:
    data = random.Random(0).randbytes((9 << 20) + 5)
    path, manifest = checkpoint.commit(job_dir, job="a", step=1, identity="i", files={"t": [data[:100], data[100:]]})
    buffer = bytearray(len(data) + 64)
    checkpoint.read_file(path, manifest, "t", lambda size: memoryview(buffer)[64:])
    assert buffer[64:] == data
    checkpoint.verify(path)


def test_an_empty_file_and_pieces_of_any_kind(job_dir: Path) -> None:
    pieces = [bytearray(b"ab"), memoryview(b"cdef").cast("H"), b""]
    path, manifest = checkpoint.commit(job_dir, job="a", step=1, identity="i", files={"none": [], "some": pieces})
    assert load(path) == {"none": b"", "some": b"abcdef"}
    assert manifest.size == 6


def test_the_listing_is_newest_first_and_knows_only_committed_names(job_dir: Path) -> None:
    for step in (5, 1_000, 30):
        commit(job_dir, step)
    for name in (".tmp-7-abcd", ".trash-ckpt-000000000001-ab", ".bad-ckpt-000000000002-ab", "ckpt-12", "lock",
                 "ckpt-0000000000001", "ckpt-000000000001.old"):
        (job_dir / name).mkdir()
    assert steps(job_dir) == [1_000, 30, 5]
    assert checkpoint.listing(job_dir / "none") == []


def test_collect_keeps_the_newest(job_dir: Path) -> None:
    for step in (10, 20, 30, 40):
        commit(job_dir, step)
    checkpoint.collect(job_dir, 3)
    assert steps(job_dir) == [40, 30, 20]
    checkpoint.collect(job_dir, 3)
    checkpoint.collect(job_dir, 1)
    assert steps(job_dir) == [40]
    assert [p.name for p in job_dir.iterdir()] == ["ckpt-000000000040"]


def test_what_cannot_be_collected_costs_nothing_and_goes_next_time(job_dir: Path) -> None:
    for nth in itertools.count(1):
        commit(job_dir, 100 + nth)
        disk = FaultyDisk(nth, errno.EIO, lasting=True)
        checkpoint.collect(job_dir, 1, disk=disk)
        load(checkpoint.listing(job_dir)[0][1])
        checkpoint.collect(job_dir, 1)
        assert steps(job_dir) == [100 + nth]
        if nth > 1 and not disk.hit:
            break


# --- power cuts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2])
def test_every_power_cut_leaves_every_announced_checkpoint_whole(job_dir: Path, tmp_path: Path, keep: int) -> None:
    disk = RecordingDisk(job_dir)
    some_commits(job_dir, disk, keep, disk.mark)
    assert list(faults(disk, Judge(tmp_path / "after"), keep)) == []


@pytest.mark.parametrize("what", FORGOTTEN)
def test_without_any_one_fsync_a_power_cut_loses_something(job_dir: Path, tmp_path: Path, what: str) -> None:
    disk = RecordingDisk(job_dir, forgets=FORGOTTEN[what])
    some_commits(job_dir, disk, 2, disk.mark)
    assert any(faults(disk, Judge(tmp_path / "after"), 2))


def test_without_digests_a_power_cut_gets_damage_loaded(job_dir: Path, tmp_path: Path) -> None:
    with without_digests():
        disk = RecordingDisk(job_dir, forgets=FORGOTTEN["tensors"])
        some_commits(job_dir, disk, 2, disk.mark)
        with pytest.raises(AssertionError, match="damaged bytes"):
            list(faults(disk, Judge(tmp_path / "after"), 2))


def test_killed_anywhere_then_carried_on_then_a_power_cut_anywhere(tmp_path: Path) -> None:
    assert list(itertools.chain(*lives(tmp_path, Judge(tmp_path / "after")))) == []


def test_a_sweep_that_forgets_its_fsync_loses_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(parent: Path, *, disk: Disk) -> None:
        for path in parent.glob(".t*"):
            durable.remove_tree(path, disk=disk)

    monkeypatch.setattr(durable, "sweep_dirs", sweep)
    found = itertools.chain.from_iterable(lives(tmp_path, Judge(tmp_path / "after")))
    assert any("lost" in fault for fault in found)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_real_disk_whose_power_is_cut_has_every_announced_checkpoint(tmp_path: Path, options: str) -> None:
    """Some of the calls; all of them in the campaign."""
    if why := why_no_loop(tmp_path):
        pytest.skip(why)
    row = real(tmp_path, options, every=9)
    assert row.trials >= 9 and row.wrong == []


def test_a_real_disk_whose_power_is_cut_shows_a_forgotten_fsync(tmp_path: Path) -> None:
    if why := why_no_loop(tmp_path):
        pytest.skip(why)
    assert real(tmp_path, OPTIONS[-1], every=6, forgets=FORGOTTEN["parent"]).wrong


# --- a disk that refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("error", damage.ERRORS, ids=errno.errorcode.get)
def test_a_fault_at_any_call_costs_only_the_attempt(job_dir: Path, error: int, lasting: bool) -> None:
    assert damage.save_on_faulty(job_dir, error, lasting=lasting).trials > 20


@pytest.mark.parametrize(("error", "sentence"), [
    (errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk quota is used up"),
    (errno.EROFS, "the disk is read-only"), (errno.EIO, "the disk reports an input/output error"),
    (errno.EACCES, "permission denied")])
def test_the_sentence_says_what_is_wrong_with_the_disk(job_dir: Path, error: int, sentence: str) -> None:
    with pytest.raises(DiskTrouble) as e:
        commit(job_dir, 20, FaultyDisk(2, error))
    assert e.value.message == f"{sentence}: cannot write {job_dir}/ckpt-000000000020"


def test_a_disk_that_holds_too_many_files_is_not_called_full(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        found = SimpleNamespace(f_files=20480, f_favail=0, f_bavail=1 << 20, f_frsize=4096)
        m.setattr("os.statvfs", lambda path: found)
        with pytest.raises(DiskTrouble, match="the disk has no inodes left: cannot write") as e:
            commit(job_dir, 20, FaultyDisk(2, errno.ENOSPC))
    assert "`df -i`" in e.value.hint


def test_no_attempt_is_made_when_there_is_no_room(job_dir: Path) -> None:
    class SmallDisk(Disk):
        def free(self, path: Path) -> int:
            return checkpoint.RESERVE + 10

    with pytest.raises(DiskTrouble, match="nearly full: a checkpoint needs 64 MiB free"):
        commit(job_dir, 20, SmallDisk())
    assert list(job_dir.iterdir()) == []
    checkpoint.commit(job_dir, job="a", step=1, identity="i", files={"t": [b"12345678"]}, disk=SmallDisk())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("foresight", ["told", "allocate", "write"])
def test_a_disk_that_is_really_full_costs_only_the_attempt(
        small_disk: Path, monkeypatch: pytest.MonkeyPatch, foresight: str) -> None:
    class Rash(Disk):
        def free(self, path: Path) -> int:
            return super().free(path) if foresight == "told" else 1 << 60

        def allocate(self, fd: int, size: int) -> None:
            if foresight != "write":
                super().allocate(fd, size)

    monkeypatch.setattr(checkpoint, "RESERVE", 0)

    def save(step: int) -> Path:
        files = {TENSORS: [bytes([step]) * 150_000] * 2, STATE: [b"{}"]}
        return checkpoint.commit(small_disk, job="a", step=step, identity="i", files=files, disk=Rash())[0]

    kept = save(10)
    (small_disk / "filler").write_bytes(bytes(500_000))
    for _ in range(3):
        with pytest.raises(DiskTrouble, match=r"the disk is (nearly )?full"):
            save(20)
        checkpoint.verify(kept)
        assert {p.name for p in small_disk.iterdir()} == {kept.name, "filler"}
    (small_disk / "filler").unlink()
    checkpoint.verify(save(20))
    checkpoint.verify(kept)


@pytest.mark.parametrize("what", ["no inodes", "read-only"])
def test_a_real_disk_that_takes_nothing_costs_only_the_attempt(tmp_path: Path, what: str) -> None:
    if why := why_no_loop(tmp_path):
        pytest.skip(why)
    row = apart(lambda: refused_by_a_real_disk(tmp_path / "box", what))
    assert row.note.startswith("the disk has no inodes left" if what == "no inodes" else "the disk is read-only")


def refused_by_a_real_disk(root: Path, what: str) -> Row:
    with LoopDisk(root, inodes=40) as disk:
        (job_dir := disk.at / "job").mkdir()
        kept = commit(job_dir, 10)
        if what == "no inodes":
            with contextlib.suppress(OSError):
                for n in range(10_000):
                    (disk.at / f"ballast{n}").touch()
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk.at], check=True)
        trouble = damage.attempt(job_dir, 20, durable.DISK)
        assert trouble is not None and load(kept) == expected(10)
        assert steps(job_dir) == [10]
        if what == "no inodes":
            for path in disk.at.glob("ballast*"):
                path.unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", disk.at], check=True)
        assert load(commit(job_dir, 20)) == expected(20) and load(kept) == expected(10)
        return Row("", note=trouble.message)


def test_a_fault_of_our_own_leaves_nothing_either(job_dir: Path) -> None:
    class Broken(Disk):
        def write(self, fd: int, data: durable.Bytes) -> int:
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 (ours, above)
        commit(job_dir, 20, Broken())
    assert list(job_dir.iterdir()) == []


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(path: Path) -> str:
    with pytest.raises(Damaged) as e:
        checkpoint.verify(path)
    assert not isinstance(e.value, FutureFormat)
    assert str(path) in e.value.message
    return e.value.message


def test_a_flip_of_any_bit_of_any_manifest_byte_is_seen(job_dir: Path) -> None:
    path = commit(job_dir, 20)
    data = (path / MANIFEST).read_bytes()
    rng = random.Random(1)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        (path / MANIFEST).write_bytes(flipped)
        damaged(path)


def test_a_flip_of_any_data_bit_is_seen(job_dir: Path) -> None:
    path = commit(job_dir, 20)
    for name, data in expected(20).items():
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(flipped)
            assert damaged(path) == f"{path / name} is damaged: its sha256 is not the one in the manifest"
        (path / name).write_bytes(data)
    checkpoint.verify(path)


def test_random_damage_anywhere_is_seen_and_the_one_before_is_whole(job_dir: Path) -> None:
    row = damage.damaged(job_dir, 300)
    assert row.trials == 300 and row.wrong == []


def test_damage_to_a_large_file_is_seen(job_dir: Path) -> None:
    data = random.Random(2).randbytes((9 << 20) + 3)
    path, manifest = checkpoint.commit(job_dir, job="a", step=1, identity="i", files={TENSORS: [data]})
    for size in (0, 1, 4096, len(data) - 1, len(data) + 1):
        (path / TENSORS).write_bytes((data + b"x")[:size])
        assert damaged(path) == f"{path / TENSORS} has {size} bytes instead of {len(data)}"
    for at in (0, 1 << 22, (1 << 22) - 1, len(data) - 1):
        (path / TENSORS).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        damaged(path)
    (path / TENSORS).write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    damaged(path)
    with pytest.raises(Damaged):
        checkpoint.read_bytes(path, manifest, TENSORS)


def test_every_truncation_of_the_manifest_is_seen(job_dir: Path) -> None:
    path = commit(job_dir, 20)
    data = (path / MANIFEST).read_bytes()
    for size in range(len(data)):
        (path / MANIFEST).write_bytes(data[:size])
        damaged(path)
    (path / MANIFEST).write_bytes(data + b"\n")
    damaged(path)


@pytest.mark.parametrize("data", [
    b"", b"\0" * 300, b"{}", b"[]", b"null", b"7", b'"self"', b'{"self": 1}', b"[" * 100_000, b"\xff\xfe", b"NaN",
    b"9" * 5000], ids=repr)
def test_a_manifest_of_something_else_is_seen(job_dir: Path, data: bytes) -> None:
    path = commit(job_dir, 20)
    (path / MANIFEST).write_bytes(data)
    damaged(path)


def test_a_reformatted_manifest_is_not_as_written(job_dir: Path) -> None:
    path = commit(job_dir, 20)
    body = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_text(json.dumps(body, indent=1, sort_keys=True))
    damaged(path)


def _missing(path: Path) -> None:
    (path / TENSORS).unlink()


def _extra(path: Path) -> None:
    (path / "extra").write_bytes(b"")


def _no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def _swapped(path: Path) -> None:
    (path / TENSORS).rename(path / "x")
    (path / STATE).rename(path / TENSORS)
    (path / "x").rename(path / STATE)


def _directory(path: Path) -> None:
    (path / TENSORS).unlink()
    (path / TENSORS).mkdir()


def _file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"a file of that name")


@pytest.mark.parametrize("harm", [_missing, _extra, _no_manifest, _swapped, _directory, _file])
def test_any_other_set_of_files_is_seen(job_dir: Path, harm: Callable[[Path], None]) -> None:
    path = commit(job_dir, 20)
    harm(path)
    damaged(path)


def test_another_checkpoint_under_this_name_is_seen(job_dir: Path) -> None:
    path = commit(job_dir, 20)
    moved = path.rename(job_dir / checkpoint.name_of(30))
    assert damaged(moved) == f"{moved} says that it is of step 20"


def test_files_of_two_checkpoints_mixed_are_seen(job_dir: Path) -> None:
    one, other = commit(job_dir, 20), commit(job_dir, 30)
    shutil.copy(one / TENSORS, other / TENSORS)
    damaged(other)


def test_without_digests_a_flip_is_not_seen(job_dir: Path) -> None:
    """The mutant: it is the digests that see it."""
    with without_digests():
        path = commit(job_dir, 20)
        (path / STATE).write_bytes(b'{"step": 21}')
        checkpoint.verify(path)


def test_a_damaged_one_is_put_aside_with_its_bytes(job_dir: Path) -> None:
    path = commit(job_dir, 20)
    bad = checkpoint.quarantine(path)
    assert bad.name.startswith(".bad-ckpt-000000000020-") and (bad / STATE).read_bytes() == expected(20)[STATE]
    assert steps(job_dir) == []
    checkpoint.quarantine(commit(job_dir, 20))  # a second time, too
    durable.sweep_dirs(job_dir)
    assert len(list(job_dir.iterdir())) == 2
    with pytest.raises(DiskTrouble):
        checkpoint.quarantine(commit(job_dir, 20), disk=FaultyDisk(1, errno.EROFS))


# --- other versions ---------------------------------------------------------------------------------------------------


def test_a_future_format_is_refused_and_not_called_damaged(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    path = commit(job_dir, 20)
    monkeypatch.undo()
    with pytest.raises(FutureFormat) as e:
        checkpoint.verify(path)
    assert e.value.message == f"{path / MANIFEST} has format 2, and this rrd knows 1"
    assert "newer" in e.value.hint


def test_format_1_is_read_for_ever(tmp_path: Path) -> None:
    """The bytes of a manifest as rrd wrote it first; what is on a user's disk does not change when rrd does."""
    path = tmp_path / "ckpt-000000000020"
    path.mkdir()
    (path / STATE).write_bytes(b'{"step": 20}')
    (path / MANIFEST).write_bytes(
        b'{"files":{"state.json":{"bytes":12,"sha256":'
        b'"%s"}},"format":1,"identity":"i","job":"a",'
        b'"self":"%s","step":20,"time":1700000000.5}\n' % (STATE_20, MANIFEST_20))
    assert checkpoint.verify(path) == Manifest("a", 20, "i", {STATE: (12, STATE_20.decode())}, 1700000000.5)


STATE_20 = b"14f20b9a82ff52d6240f57ed600b44de41adc33f00ca4c9b572d40b02045c8ad"
MANIFEST_20 = b"357bbf2947b5df538de0dee11403cf88c305f7537545afbf81d52ae941df663f"
