"""The only code that writes state to disk, and the promise it makes: durable, or not there.

Every write is temp, fsync, rename, fsync of the directory (SQLite's discipline). After a failed fsync the page cache
may lie, so a file is never fsynced twice: the caller throws the attempt away and writes new files from memory.

All system calls go through a :class:`Disk`, so that a test can fail the n-th one, record them, or cut the power.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from rrd.errors import DiskTrouble, TryLater

Bytes = bytes | bytearray | memoryview


class Disk:
    """The operating system's calls, one method each. Tests subclass it; the code below knows no other way to write."""

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def allocate(self, fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # some filesystems cannot
                raise

    def write(self, fd: int, data: Bytes) -> int:
        return os.write(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o750)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def symlink(self, target: str, path: Path) -> None:
        os.symlink(target, path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def free(self, path: Path) -> int:
        """Bytes an unprivileged writer may still use on the filesystem of ``path``."""
        s = os.statvfs(path)
        return s.f_bavail * s.f_frsize


DISK = Disk()
_TROUBLE = {
    errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk reports an input/output error",
}
TMP, TRASH = ".tmp-", ".trash-"
"""First letters of directories in the making and in the unmaking."""
NEW = ".new-"
"""First letters of a file in the making."""


def trouble(e: OSError, path: Path) -> DiskTrouble:
    """The sentence for an operating-system error while writing ``path``."""
    what = _TROUBLE.get(e.errno or 0) or (e.strerror or str(e)).lower()
    hint = "free space or mend the disk; rrd goes on by itself"
    if e.errno == errno.ENOSPC and _without_inodes(path):
        what, hint = "the disk has no inodes left", "remove files (`df -i` counts them); rrd goes on by itself"
    elif e.errno not in _TROUBLE:
        hint = "see to it that rrd's user may write there"
    return DiskTrouble(f"{what}: cannot write {path}", hint=hint)


def _without_inodes(path: Path) -> bool:
    """Whether the filesystem of ``path`` has room for so many files, and not for one more."""
    with contextlib.suppress(OSError):
        s = os.statvfs(next(p for p in path.parents if p.is_dir()))
        return s.f_files > 0 and s.f_favail == 0
    return False


def write_new(path: Path, chunks: Iterable[Bytes], *, size: int = 0, disk: Disk = DISK) -> tuple[int, str]:
    """Write a file that must not exist yet and fsync it. Returns its size and sha256 hex, of the bytes in memory."""
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    digest, written = hashlib.sha256(), 0
    try:
        if size:
            disk.allocate(fd, size)
        for chunk in chunks:
            digest.update(chunk)
            written += _write_all(fd, chunk, disk)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    return written, digest.hexdigest()


def _write_all(fd: int, data: Bytes, disk: Disk) -> int:
    view = memoryview(data).cast("B")
    total = len(view)
    while view:
        n = disk.write(fd, view[: 1 << 26])
        view = view[n:]
    return total


def fsync_dir(path: Path, *, disk: Disk = DISK) -> None:
    fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fsync(fd)
    finally:
        disk.close(fd)


def make_dir(path: Path, *, disk: Disk = DISK) -> None:
    """Make ``path`` and its missing parents, each durable in its parent."""
    if path.is_dir():
        return
    make_dir(path.parent, disk=disk)
    try:
        disk.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    try:
        fsync_dir(path.parent, disk=disk)
    except OSError:
        with contextlib.suppress(OSError):
            disk.rmdir(path)  # or the next call would take it for durable
        raise


def replace_file(path: Path, data: bytes, *, disk: Disk = DISK) -> None:
    """Replace ``path`` so that after any crash it holds the old bytes or the new ones, whole."""
    temp = path.parent / f"{NEW}{path.name}-{secrets.token_hex(4)}"
    try:
        write_new(temp, [data], disk=disk)
        disk.rename(temp, path)
        fsync_dir(path.parent, disk=disk)
    except OSError as e:
        _forget(temp, disk)
        raise trouble(e, path) from e


def replace_volatile(path: Path, data: bytes) -> None:
    """Replace a file that nobody misses after a crash: whole at any moment, never fsynced. Raises OSError."""
    temp = path.parent / f"{NEW}{path.name}"
    temp.write_bytes(data)
    os.replace(temp, path)


def _forget(path: Path, disk: Disk) -> None:
    with contextlib.suppress(OSError):  # it was renamed, was never there, or the sweep at the next start takes it
        disk.unlink(path)


class NewDirectory:
    """A directory written beside its place and put there by one rename: whole, or not there.

    Use as a context manager: ``add`` files, then ``commit``. Leaving without a commit removes the attempt.
    """

    def __init__(self, parent: Path, label: str, *, disk: Disk = DISK) -> None:
        self.disk, self.parent = disk, parent
        self.path = parent / f"{TMP}{label}-{secrets.token_hex(4)}"
        self.committed = False

    def __enter__(self) -> NewDirectory:
        self.disk.mkdir(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.committed:
            remove_tree(self.path, disk=self.disk)

    def add(self, name: str, chunks: Iterable[Bytes], *, size: int = 0) -> tuple[int, str]:
        """Write one file durably. Returns its size and sha256 hex."""
        return write_new(self.path / name, chunks, size=size, disk=self.disk)

    def link(self, name: str, target: str) -> None:
        """A relative symbolic link ``name`` to ``target``, which lies in the same directory."""
        self.disk.symlink(target, self.path / name)

    def commit(self, name: str, *, replace: bool = False) -> Path:
        """Give the directory its name; when this returns, it survives any crash. When it raises OSError, the name is
        what it was, unless the disk takes no renames any more.

        With ``replace`` a directory already there is moved to the trash first; a crash between the two renames leaves
        it there, and the next commit or sweep removes it. Without, the name must be free.
        """
        final = self.parent / name
        fsync_dir(self.path, disk=self.disk)
        with self._stepping_aside(final, replace) as old:
            self.disk.rename(self.path, final)
            try:
                fsync_dir(self.parent, disk=self.disk)
            except OSError:
                self.disk.rename(final, self.path)  # nobody may find under its name what a power cut would take
                raise
        self.committed = True
        if old is not None:
            remove_tree(old, disk=self.disk)
        return final

    @contextlib.contextmanager
    def _stepping_aside(self, final: Path, replace: bool) -> Iterator[Path | None]:
        """Move what is at ``final`` to the trash, and back if the block fails. Yields where it is."""
        if not os.path.lexists(final):
            yield None
            return
        assert replace, f"{final} is there already"
        old = self.parent / f"{TRASH}{final.name}-{secrets.token_hex(4)}"
        self.disk.rename(final, old)
        try:
            yield old
        except OSError:
            self.disk.rename(old, final)
            raise


def discard_dir(path: Path, *, disk: Disk = DISK) -> None:
    """Remove a committed directory, by way of the trash: nobody sees half of it under its name, whatever happens."""
    trash = path.parent / f"{TRASH}{path.name}-{secrets.token_hex(4)}"
    disk.rename(path, trash)
    fsync_dir(path.parent, disk=disk)
    remove_tree(trash, disk=disk)


def remove_tree(path: Path, *, disk: Disk = DISK) -> None:
    """Remove a temp or trash directory; what resists is left for the next sweep."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            disk.unlink(path)  # and nothing of what it leads to
            return
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path), disk=disk)
            else:
                disk.unlink(Path(entry.path))
        disk.rmdir(path)


def sweep_dirs(parent: Path, *, disk: Disk = DISK) -> None:
    """Remove the directories that an interrupted commit left in ``parent``. Only its one writer may call this.

    What is there afterwards is durable, also a directory whose writer was killed between its rename and the fsync.
    Raises DiskTrouble.
    """
    for path in _starting_with((TMP, TRASH), parent):
        remove_tree(path, disk=disk)
    try:
        fsync_dir(parent, disk=disk)
    except OSError as e:
        raise trouble(e, parent) from e


def sweep_files(parent: Path, *, disk: Disk = DISK) -> None:
    """Remove what an interrupted ``replace_file`` left in ``parent``. Only its one writer may call this."""
    for path in _starting_with((NEW,), parent):
        _forget(path, disk)


def _starting_with(prefixes: tuple[str, ...], parent: Path) -> list[Path]:
    return [p for p in parent.iterdir() if p.name.startswith(prefixes)] if parent.is_dir() else []


class Log:
    """An append-only file whose length a checkpoint remembers, so that what came after can be cut off again.

    What was added since the last ``sync`` is also kept in memory: a full disk gets it later, and after a failed fsync
    it goes into a new file. One thread appends; another may ``sync`` meanwhile.
    """

    def __init__(self, path: Path, length: int, *, disk: Disk = DISK) -> None:
        """Open or make ``path``, cut to ``length`` bytes; what is shorter is kept as it is. Raises DiskTrouble."""
        self.path, self.disk = path, disk
        self._changing = threading.Lock()
        self._new, self._written = bytearray(), 0  # since the last sync, and how much of it is in the file
        self._doubtful = False  # an fsync failed: the file may not be synced again
        try:
            self._fd = self._open()
            self.length = self._synced = min(length, os.fstat(self._fd).st_size)
            disk.truncate(self._fd, self.length)
        except OSError as e:
            raise trouble(e, path) from e

    def _open(self) -> int:
        return self.disk.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)

    def append(self, data: bytes) -> None:
        """Add ``data``; not durable before ``sync``, which also says what is wrong with the disk."""
        with self._changing:
            self._new += data
            self.length += len(data)
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        while self._written < len(self._new):
            self._written += self.disk.write(self._fd, self._new[self._written :])

    def sync(self) -> None:
        """Make all that was appended before this call durable. Raises DiskTrouble."""
        try:
            with self._changing:
                if self._doubtful:
                    self._write_anew()
                self._write()
                done = self._written
            self._fsync()  # without the lock: whoever appends does not wait for the disk
        except OSError as e:
            raise trouble(e, self.path) from e
        with self._changing:
            del self._new[:done]
            self._written -= done
            self._synced += done

    def _fsync(self) -> None:
        self._doubtful = True
        self.disk.fsync(self._fd)
        self._doubtful = False

    def _write_anew(self) -> None:
        replace_file(self.path, self.path.read_bytes()[: self._synced] + self._new, disk=self.disk)
        old, self._fd = self._fd, self._open()
        self._synced, self._new, self._written, self._doubtful = self.length, bytearray(), 0, False
        self.disk.close(old)

    def close(self) -> None:
        self.disk.close(self._fd)


def space(path: Path) -> tuple[int, int] | None:
    """(bytes that we may still write, bytes in all) of the file system that holds ``path``; None if it will not say."""
    try:
        s = os.statvfs(path)
    except OSError:
        return None
    return s.f_bavail * s.f_frsize, s.f_blocks * s.f_frsize


def lock(path: Path, *, what: str) -> IO[bytes]:
    """Hold ``path`` exclusively for as long as the returned file is open.

    Raises:
        TryLater: somebody else holds it. ``what`` names the thing in the sentence.
    """
    try:
        file = open(path, "ab")  # noqa: SIM115 (the caller keeps it open: closing it is what releases the lock)
    except OSError as e:
        raise trouble(e, path) from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        raise TryLater(f"{what} is in use by another process", hint="stop the other one, or give this one a directory "
                       "of its own") from e
    return file


def lock_when_free(path: Path, *, what: str, alive: Callable[[], None], seconds: float = float("inf")) -> IO[bytes]:
    """``lock``, after waiting for whoever holds it; ``alive`` is called while waiting.

    Raises:
        TryLater: it was not free within ``seconds``. DiskTrouble: the lock file cannot be made; no wait helps.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return lock(path, what=what)
        except DiskTrouble:
            raise
        except TryLater:
            if time.monotonic() >= end:
                raise
        alive()
        time.sleep(0.05)
