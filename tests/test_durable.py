"""rrd.durable: every write is there, or not there; checked at every power cut and with every call failing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disks import FaultyDisk, RecordingDisk

from rrd import durable
from rrd.durable import Bytes, Disk, Log, NewDirectory
from rrd.errors import DiskTrouble, TryLater

ERRORS = pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS],
                                 ids=errno.errorcode.get)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()}


def faulty(error: int, *, lasting: bool = False) -> Iterator[FaultyDisk]:
    """Disks whose first, second, … call fails, until one had no more calls to fail."""
    for nth in itertools.count(1):
        yield (disk := FaultyDisk(nth, error, lasting=lasting))
        if not disk.hit:
            assert nth > 1
            return


class ShortDisk(Disk):
    """Writes a few bytes at a time, as the operating system may."""

    def write(self, fd: int, data: Bytes) -> int:
        return super().write(fd, memoryview(data)[:3])


class FullDisk(Disk):
    """Has room for ``room`` more bytes."""

    room = 0

    def write(self, fd: int, data: Bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = super().write(fd, memoryview(data)[: self.room])
        self.room -= n
        return n


# --- new files and replaced files -------------------------------------------------------------------------------------


def test_a_new_file_has_every_byte_and_tells_its_digest(home: Path) -> None:
    size, digest = durable.write_new(home / "f", [b"abcd", memoryview(b"efghij"), bytearray()], disk=ShortDisk())
    assert (home / "f").read_bytes() == b"abcdefghij"
    assert (size, digest[:8]) == (10, "72399361")  # sha256 of abcdefghij
    assert (home / "f").stat().st_mode & 0o007 == 0


def test_a_new_file_takes_its_room_first(home: Path) -> None:
    class Watching(Disk):
        asked: int = 0

        def allocate(self, fd: int, size: int) -> None:
            self.asked = size
            super().allocate(fd, size)
            assert os.fstat(fd).st_size == size

    durable.write_new(home / "f", [b"x" * 5000], size=5000, disk=(disk := Watching()))
    assert disk.asked == 5000 and (home / "f").read_bytes() == b"x" * 5000


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_filesystem_that_cannot_allocate_is_written_all_the_same(
        home: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*_: int) -> None:
        raise OSError(error, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    durable.write_new(home / "f", [b"abc"], size=3)
    assert (home / "f").read_bytes() == b"abc"


def test_a_new_file_never_takes_the_place_of_another_nor_follows_a_link(home: Path) -> None:
    (home / "f").write_bytes(b"old")
    (home / "link").symlink_to("elsewhere")
    for name in ("f", "link"):
        with pytest.raises(FileExistsError):
            durable.write_new(home / name, [b"new"])
    assert (home / "f").read_bytes() == b"old"
    assert not (home / "elsewhere").exists()


def test_a_replaced_file_is_the_old_or_the_new_one_at_every_power_cut(home: Path) -> None:
    disk = RecordingDisk(home)
    durable.replace_file(home / "f", b"old", disk=disk)
    disk.mark(b"old")
    first = len(disk.ops)
    durable.replace_file(home / "f", b"newer", disk=disk)
    disk.mark(b"newer")
    for promised, trees in disk.power_cuts(first):
        found = {dict(tree).get("f") for tree in trees}
        assert found <= {b"old", b"newer"}
        assert promised[-1] == b"old" or found == {b"newer"}


def test_without_any_one_fsync_a_replaced_file_is_not_safe(home: Path, tmp_path: Path) -> None:
    forgotten: list[Callable[[Path], bool]] = [lambda p: p.name.startswith(durable.NEW), lambda p: p.name == "home"]
    for forgets in forgotten:
        disk = RecordingDisk(home, forgets=forgets)
        durable.replace_file(home / "f", b"new", disk=disk)
        disk.mark(b"new")
        assert any(dict(tree).get("f") != b"new" for promised, trees in disk.power_cuts() if promised for tree in trees)
        (home / "f").unlink()


@ERRORS
def test_a_fault_while_replacing_keeps_one_of_the_two(home: Path, error: int) -> None:
    for disk in faulty(error):
        (home / "f").write_bytes(b"old")
        try:
            durable.replace_file(home / "f", b"new", disk=disk)
        except DiskTrouble as e:
            assert disk.hit and e.message.endswith(f": cannot write {home / 'f'}")  # noqa: PT017
        else:
            assert (home / "f").read_bytes() == b"new"
        assert (home / "f").read_bytes() in (b"old", b"new")
        assert names(home) == {"f"}


# --- new directories --------------------------------------------------------------------------------------------------


def write_dir(home: Path, content: bytes, *, replace: bool = False, disk: Disk = durable.DISK) -> Path:
    with NewDirectory(home, "d", disk=disk) as new:
        new.add("file", [content], size=len(content))
        return new.commit("d", replace=replace)


def test_a_new_directory_is_nowhere_until_its_commit(home: Path) -> None:
    with NewDirectory(home, "d") as new:
        new.add("file", [b"x"])
        new.link("link", "file")
        assert names(home) == {new.path.name} and new.path.name.startswith(durable.TMP)
        assert new.commit("d") == home / "d"
    assert names(home) == {"d"} and (home / "d" / "link").read_bytes() == b"x"


def test_leaving_without_a_commit_removes_the_attempt(home: Path) -> None:
    with NewDirectory(home, "d") as new:
        new.add("file", [b"x"])
        new.disk.mkdir(new.path / "sub")
        durable.write_new(new.path / "sub" / "file", [b"y"])
    assert names(home) == set()


def test_replacing_a_directory_leaves_the_new_one_only(home: Path) -> None:
    write_dir(home, b"old")
    assert (write_dir(home, b"new", replace=True) / "file").read_bytes() == b"new"
    assert names(home) == {"d"}
    with pytest.raises(AssertionError):
        write_dir(home, b"newer")
    assert (home / "d" / "file").read_bytes() == b"new"


def test_a_replaced_directory_is_whole_at_every_power_cut(home: Path) -> None:
    """Old or new; between the two renames the old one is in the trash."""
    disk = RecordingDisk(home)
    write_dir(home, b"old", disk=disk)
    first = len(disk.ops)
    write_dir(home, b"new", replace=True, disk=disk)
    disk.mark("new")
    for promised, trees in disk.power_cuts(first):
        for tree in map(dict, trees):
            trash = [n for n in tree if n.startswith(durable.TRASH) and n.endswith("/file")]
            there = tree.get("d/file", "missing" if "d" in tree else tree[trash[0]] if trash else "missing")
            assert there in (b"old", b"new")
            assert not promised or tree["d/file"] == b"new"


@ERRORS
def test_a_fault_while_replacing_a_directory_leaves_the_old_one(home: Path, error: int) -> None:
    for disk in faulty(error):
        (home / "d").mkdir()
        (home / "d" / "file").write_bytes(b"old")
        try:
            write_dir(home, b"new", replace=True, disk=disk)
        except OSError:
            assert disk.hit
            assert (home / "d" / "file").read_bytes() == b"old"
        else:
            assert (home / "d" / "file").read_bytes() == b"new"
        durable.sweep_dirs(home)
        assert names(home) == {"d"}
        durable.discard_dir(home / "d")


def test_a_directory_and_its_parents_are_made_durable(home: Path) -> None:
    disk = RecordingDisk(home)
    durable.make_dir(home / "a" / "b", disk=disk)
    disk.mark("made")
    durable.make_dir(home / "a" / "b", disk=disk)
    for promised, trees in disk.power_cuts():
        assert not promised or all("a/b" in dict(tree) for tree in trees)


def test_a_directory_whose_fsync_failed_is_not_taken_for_made(home: Path) -> None:
    for disk in faulty(errno.EIO):
        try:
            durable.make_dir(home / "a" / "b", disk=disk)
        except OSError:
            assert not (home / "a" / "b").exists()
            again = RecordingDisk(home)
            if not (home / "a").exists():
                durable.make_dir(home / "a" / "b", disk=again)
                again.mark("made")
                assert all("a/b" in dict(tree) for promised, trees in again.power_cuts() if promised for tree in trees)
        for name in ("a/b", "a"):
            if (home / name).exists():
                (home / name).rmdir()


def test_a_file_in_the_way_of_a_directory_is_no_directory(home: Path) -> None:
    (home / "a").write_bytes(b"")
    with pytest.raises(OSError):  # noqa: PT011
        durable.make_dir(home / "a")


# --- what interrupted attempts leave ----------------------------------------------------------------------------------


def test_a_sweep_removes_attempts_and_nothing_else(home: Path) -> None:
    for name in (".tmp-7-ab", ".trash-d-ab", ".bad-d", "d"):
        (home / name / "sub").mkdir(parents=True)
        (home / name / "sub" / "file").write_bytes(b"x")
    (home / ".new-f-ab").write_bytes(b"x")
    (home / ".tmp-7-ab" / "link").symlink_to(home / "d")
    durable.sweep_dirs(home)
    assert names(home) == {".bad-d", "d", ".new-f-ab"}
    durable.sweep_files(home)
    assert names(home) == {".bad-d", "d"} and (home / "d" / "sub" / "file").exists()
    durable.sweep_files(home / "none")


def test_a_disk_that_cannot_be_swept_is_told(home: Path) -> None:
    (home / ".tmp-7-ab").mkdir()
    with pytest.raises(DiskTrouble):
        durable.sweep_dirs(home, disk=FaultyDisk(1, errno.EROFS, lasting=True))
    durable.sweep_dirs(home)
    assert names(home) == set()


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_log_is_cut_to_the_length_it_is_opened_with(home: Path) -> None:
    path = home / "log"
    log = Log(path, 0)
    for line in (b"one\n", b"two\n", b"three\n"):
        log.append(line)
    assert log.length == 14
    log.close()
    log = Log(path, 8)
    assert log.length == 8 and path.read_bytes() == b"one\ntwo\n"
    log.append(b"3\n")
    log.close()
    log = Log(path, 1000)
    assert log.length == 10 and path.read_bytes() == b"one\ntwo\n3\n"
    log.close()
    with pytest.raises(DiskTrouble):
        Log(home, 0)


def test_a_log_is_durable_when_sync_returns(home: Path) -> None:
    disk = RecordingDisk(home)
    log = Log(home / "log", 0, disk=disk)
    durable.fsync_dir(home, disk=disk)
    for line in (b"one\n", b"two\n"):
        log.append(line)
        log.sync()
        disk.mark(line)
    for promised, trees in disk.power_cuts():
        whole = b"".join(promised)  # type: ignore[arg-type]
        assert not promised or all((dict(tree)["log"] or b"").startswith(whole) for tree in trees)
    log.close()


def test_a_full_disk_costs_a_log_no_line_and_no_half_line(home: Path) -> None:
    disk = FullDisk()
    log = Log(home / "log", 0, disk=disk)
    disk.room = 6
    log.append(b"one\n")
    log.append(b"two\n")
    log.append(b"three\n")
    assert (home / "log").read_bytes() == b"one\ntw" and log.length == 14
    with pytest.raises(DiskTrouble, match="the disk is full"):
        log.sync()
    disk.room = 1000
    log.append(b"four\n")
    assert (home / "log").read_bytes() == b"one\ntwo\nthree\nfour\n"
    log.sync()
    assert log.length == 19
    log.close()


@ERRORS
def test_a_log_whose_fsync_failed_goes_on_in_a_new_file(home: Path, error: int) -> None:
    path = home / "log"
    for disk in faulty(error):
        log = Log(path, 0)
        log.append(b"one\n")
        log.sync()
        log.disk = disk  # it sees to it that no file is synced again after that failed
        for line in (b"two\n", b"three\n", b"four\n"):
            log.append(line)
            with contextlib.suppress(DiskTrouble):
                log.sync()
        log.disk = durable.DISK
        log.append(b"five\n")
        log.sync()
        assert path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\n" and log.length == 24
        log.close()
        assert names(home) == {"log"}
        path.unlink()


def test_appending_does_not_wait_for_a_sync(home: Path) -> None:
    class Slow(Disk):
        def __init__(self) -> None:
            self.syncing, self.go_on = threading.Event(), threading.Event()
            self.in_time = True

        def fsync(self, fd: int) -> None:
            self.syncing.set()
            self.in_time = self.go_on.wait(10)

    log = Log(home / "log", 0, disk=(disk := Slow()))
    log.append(b"one\n")
    other = threading.Thread(target=log.sync)
    other.start()
    assert disk.syncing.wait(30)
    log.append(b"two\n")
    disk.go_on.set()
    other.join(30)
    assert disk.in_time
    log.sync()
    assert (home / "log").read_bytes() == b"one\ntwo\n" and log.length == 8
    log.close()


def test_lines_appended_while_another_thread_syncs_come_once_and_in_order(home: Path) -> None:
    class Yielding(ShortDisk):
        def write(self, fd: int, data: Bytes) -> int:
            n = super().write(fd, data)
            os.sched_yield()
            return n

        def fsync(self, fd: int) -> None:
            os.sched_yield()

    log, lines = Log(home / "log", 0, disk=Yielding()), [b"line %d\n" % i for i in range(500)]
    appending = threading.Thread(target=lambda: [log.append(line) for line in lines])
    appending.start()
    while appending.is_alive():
        log.sync()
    log.sync()
    assert (home / "log").read_bytes() == b"".join(lines) and log.length == sum(map(len, lines))
    log.close()


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_has_one_holder(home: Path) -> None:
    held = durable.lock(home / "lock", what="the thing")
    with pytest.raises(TryLater) as e:
        durable.lock(home / "lock", what="the thing")
    assert e.value.message == "the thing is in use by another process" and e.value.hint
    assert not isinstance(e.value, DiskTrouble)
    held.close()
    durable.lock(home / "lock", what="the thing").close()


def test_a_lock_ends_with_its_process(home: Path) -> None:
    code = ("import pathlib, sys; from rrd import durable; held = durable.lock(pathlib.Path(sys.argv[1]), what='x')\n"
            "print(1, flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, str(home / "lock")],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        with pytest.raises(TryLater):
            durable.lock(home / "lock", what="x")
        other.kill()
        other.wait(30)
    durable.lock(home / "lock", what="x").close()


def test_a_lock_that_cannot_be_made_blames_the_disk(home: Path) -> None:
    with pytest.raises(DiskTrouble):
        durable.lock(home / "none" / "lock", what="x")


def test_free_room_is_told(home: Path) -> None:
    assert durable.DISK.free(home) > 0
