"""Disks that fail: one that records every call and replays power cuts, one whose n-th call goes wrong, a small one."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rrd.durable import Bytes, Disk

Tree = tuple[tuple[str, bytes | None], ...]
"""What is on a disk: paths below its root in order, a file with its bytes, a directory with None."""


@dataclass(frozen=True)
class Op:
    """One call that changed the disk. It is certain once its ``subject``, a file or directory, was fsynced after it."""

    subject: int


@dataclass(frozen=True)
class Link(Op):
    """In directory ``subject``, ``name`` is now ``node``, and ``old`` is not there any more."""

    name: str
    node: int
    is_file: bool
    old: str = ""


@dataclass(frozen=True)
class Unlink(Op):
    name: str


@dataclass(frozen=True)
class Write(Op):
    at: int
    data: bytes


@dataclass(frozen=True)
class Size(Op):
    size: int
    grow_only: bool = False


@dataclass(frozen=True)
class Sync(Op):
    pass


class Killed(BaseException):
    """The process ends here; nothing of it runs any more, no clean-up either."""


class RecordingDisk(Disk):
    """Works in the directory ``root``, which is empty at first, and remembers what it did.

    ``forgets`` says for which paths an fsync is left out. ``kill_at`` is the number of the operation that is never
    made, and none after it, until ``revive``.
    """

    def __init__(self, root: Path, *, forgets: Callable[[Path], bool] = lambda _: False,
                 kill_at: int | None = None) -> None:
        self.root, self.forgets, self.kill_at = root, forgets, kill_at
        self.ops: list[Op] = []
        self.marks: list[tuple[int, object]] = []
        self._nodes = {root: 0}
        self._fds: dict[int, Path] = {}
        self._at: dict[int, int] = {}

    def mark(self, what: object) -> None:
        """Remember that ``what`` was promised when all operations so far had been made."""
        self.marks.append((len(self.ops), what))

    def revive(self) -> None:
        self.kill_at = None

    def _may(self) -> None:
        if self.kill_at is not None and len(self.ops) >= self.kill_at:
            raise Killed

    def _born(self, path: Path) -> None:
        self._nodes[path] = len(self.ops) + 1
        self.ops.append(Link(self._nodes[path.parent], path.name, self._nodes[path], path.is_file()))

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int:
        self._may()
        new = bool(flags & os.O_CREAT) and not path.exists()
        fd = super().open(path, flags, mode)
        if new:
            self._born(path)
        self._fds[fd], self._at[fd] = path, os.fstat(fd).st_size if flags & os.O_APPEND else 0
        return fd

    def _node(self, fd: int) -> int:
        return self._nodes[self._fds[fd]]

    def allocate(self, fd: int, size: int) -> None:
        self._may()
        super().allocate(fd, size)
        self.ops.append(Size(self._node(fd), size, grow_only=True))

    def write(self, fd: int, data: Bytes) -> int:
        self._may()
        n = super().write(fd, data)
        self.ops.append(Write(self._node(fd), self._at[fd], bytes(data[:n])))
        self._at[fd] += n
        return n

    def truncate(self, fd: int, size: int) -> None:
        self._may()
        super().truncate(fd, size)
        self.ops.append(Size(self._node(fd), size))

    def fsync(self, fd: int) -> None:
        self._may()
        if not self.forgets(self._fds[fd]):
            self.ops.append(Sync(self._node(fd)))

    def close(self, fd: int) -> None:
        super().close(fd)
        self._may()

    def mkdir(self, path: Path) -> None:
        self._may()
        super().mkdir(path)
        self._born(path)

    def rename(self, old: Path, new: Path) -> None:
        self._may()
        assert old.parent == new.parent, "the model knows renames within one directory only"
        super().rename(old, new)
        self.ops.append(Link(self._nodes[old.parent], new.name, self._nodes[old], new.is_file(), old.name))
        self._nodes = {new / p.relative_to(old) if p.is_relative_to(old) else p: n for p, n in self._nodes.items()
                       if p != new}

    def unlink(self, path: Path) -> None:
        self._may()
        super().unlink(path)
        self.ops.append(Unlink(self._nodes[path.parent], path.name))

    def rmdir(self, path: Path) -> None:
        self._may()
        super().rmdir(path)
        self.ops.append(Unlink(self._nodes[path.parent], path.name))

    def symlink(self, target: str, path: Path) -> None:
        raise NotImplementedError

    def power_cuts(self, first: int = 0) -> Iterator[tuple[list[object], set[Tree]]]:
        """After each prefix of the operations, of at least ``first``: what had been promised by then, and all that
        may be on the disk after a power cut there.

        The weakest rule: what was not fsynced may survive or not, each operation for itself.
        """
        for k in range(first, len(self.ops) + 1):
            yield [what for n, what in self.marks if n <= k], _survivors(self.ops[:k])


def _survivors(ops: list[Op]) -> set[Tree]:
    synced = {op.subject: i for i, op in enumerate(ops) if isinstance(op, Sync)}
    choices = [(True,) if isinstance(op, Sync) or synced.get(op.subject, -1) > i else (True, False)
               for i, op in enumerate(ops)]
    return {_replay(itertools.compress(ops, chosen)) for chosen in itertools.product(*choices)}


def _replay(ops: Iterator[Op]) -> Tree:
    names: dict[int, dict[str, int]] = {}
    data: dict[int, bytearray] = {}
    for op in ops:
        match op:
            case Link():
                entries = names.setdefault(op.subject, {})
                entries.pop(op.old, None)
                entries[op.name] = op.node
                if op.is_file:
                    data.setdefault(op.node, bytearray())
            case Unlink():
                names.setdefault(op.subject, {}).pop(op.name, None)
            case Write():
                file = data.setdefault(op.subject, bytearray())
                file.extend(bytes(max(0, op.at - len(file))))
                file[op.at : op.at + len(op.data)] = op.data
            case Size():
                file = data.setdefault(op.subject, bytearray())
                file.extend(bytes(max(0, op.size - len(file))))
                if not op.grow_only:
                    del file[op.size :]
    return tuple(sorted(_walk(0, "", names, data)))


def _walk(node: int, path: str, names: dict[int, dict[str, int]], data: dict[int, bytearray]
          ) -> Iterator[tuple[str, bytes | None]]:
    for name, child in names.get(node, {}).items():
        yield f"{path}{name}", bytes(data[child]) if child in data else None
        yield from _walk(child, f"{path}{name}/", names, data)


def lay_out(tree: Tree, root: Path) -> None:
    """Put ``tree`` below ``root``."""
    root.mkdir(parents=True)
    for name, content in tree:
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


CALLS = ("open", "allocate", "write", "truncate", "fsync", "close", "mkdir", "rename", "symlink", "unlink", "rmdir",
         "free")


class FaultyDisk(Disk):
    """A disk whose ``nth`` call fails with ``error``; with ``lasting`` every later one that changes it, too.

    It holds rrd to never syncing a file again after that failed.
    """

    def __init__(self, nth: int, error: int, *, lasting: bool = False) -> None:
        self.nth, self.error, self.lasting = nth, error, lasting
        self.calls = 0
        self._suspect: set[tuple[int, int]] = set()

    @property
    def hit(self) -> bool:
        return self.calls >= self.nth

    def _goes_wrong(self, name: str) -> bool:
        self.calls += 1
        return self.calls == self.nth or (self.lasting and self.hit and name not in ("close", "free"))

    def _call(self, name: str, *args: object) -> object:
        wrong = self._goes_wrong(name)
        if name == "fsync":
            self._hold_to_the_rule(int(args[0]), wrong)  # type: ignore[call-overload]
        if not wrong or name == "close":
            result = getattr(Disk, name)(self, *args)
        if wrong:
            raise OSError(self.error, os.strerror(self.error))
        return result

    def _hold_to_the_rule(self, fd: int, wrong: bool) -> None:
        s = os.fstat(fd)
        if stat.S_ISREG(s.st_mode):
            assert (s.st_dev, s.st_ino) not in self._suspect, "a file is synced again after that failed"
            if wrong:
                self._suspect.add((s.st_dev, s.st_ino))


def _failing(name: str) -> Callable[..., object]:
    return lambda self, *args: self._call(name, *args)


for _name in CALLS:
    setattr(FaultyDisk, _name, _failing(_name))


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A real file system of ``size``; skips the test where none can be mounted."""
    at.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at)],
                                           capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
