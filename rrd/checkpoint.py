"""The checkpoint on disk, format version 1: names, manifest, commit, verify. Bytes only; no torch here.

A job's directory holds ``ckpt-<step, 12 digits>/`` directories, each with some files and a ``MANIFEST.json`` that
names every file with its size and sha256, and carries a hash of itself. A checkpoint is committed by one rename;
nothing half-written ever has a ``ckpt-`` name, and nothing damaged is ever loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrd import durable
from rrd.durable import DISK, Bytes, Disk
from rrd.errors import Damaged, DiskTrouble
from rrd.text import one_line

FORMAT = 1
MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"ckpt-(\d{12})")
_PIECE = 1 << 22
RESERVE = 64 << 20
"""Bytes left free on the disk beyond what a checkpoint needs."""


class FutureFormat(Damaged):
    """Written by a newer rrd. Not damaged, so never quarantined; only refused."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. ``files`` maps a name to (bytes, sha256 hex)."""

    job: str
    step: int
    identity: str
    files: dict[str, tuple[int, str]]
    time: float

    @property
    def size(self) -> int:
        return sum(n for n, _ in self.files.values())

    def encode(self) -> bytes:
        body = {
            "format": FORMAT, "job": self.job, "step": self.step, "identity": self.identity, "time": self.time,
            "files": {n: {"bytes": b, "sha256": d} for n, (b, d) in sorted(self.files.items())},
        }
        return _canonical({**body, "self": hashlib.sha256(_canonical(body)).hexdigest()})

    @staticmethod
    def decode(data: bytes, where: Path) -> Manifest:
        """Raises Damaged unless every byte is as written, FutureFormat for a newer version."""
        try:
            body = json.loads(data)
            digest = body.pop("self")
            if hashlib.sha256(_canonical(body)).hexdigest() != digest or _canonical({**body, "self": digest}) != data:
                raise ValueError("its hash does not match")
            if body["format"] != FORMAT:
                raise FutureFormat(f"{where} has format {body['format']}, and this rrd knows {FORMAT}",
                                   hint="install the rrd that wrote it, or a newer one")
            files = {n: (f["bytes"], f["sha256"]) for n, f in body["files"].items()}
            if not _well_formed(body, files):
                raise ValueError("it is no manifest of ours")
            return Manifest(body["job"], body["step"], body["identity"], files, body["time"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise Damaged(f"{where} is damaged: {e}") from e


def _well_formed(body: Any, files: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether everything is of its kind: a hash is right for whoever takes the trouble to compute it."""
    sizes = all(type(size) is int and 0 <= size < 1 << 50 for size, _ in files.values())
    names = all(os.path.basename(name) == name and name.isprintable() for name in files)
    return (sizes and names and all(isinstance(digest, str) for _, digest in files.values())
            and type(body["step"]) is int and 0 <= body["step"] < 10**12 and isinstance(body["time"], float | int)
            and isinstance(body["job"], str) and isinstance(body["identity"], str))


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def name_of(step: int) -> str:
    return f"ckpt-{step:012d}"


def listing(job_dir: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints of a job as (step, path), newest first; nothing is opened."""
    if not job_dir.is_dir():
        return []
    found = [(int(m[1]), p) for p in job_dir.iterdir() if (m := _NAME.fullmatch(p.name))]
    return sorted(found, reverse=True)


def commit(job_dir: Path, *, job: str, step: int, identity: str, files: Mapping[str, Sequence[Bytes]],
           disk: Disk = DISK) -> tuple[Path, Manifest]:
    """Write a checkpoint; when this returns it survives any crash, and may be announced.

    ``files`` maps a name to the pieces that make up its contents.

    Raises:
        DiskTrouble: it was not committed; older checkpoints are untouched and nothing of this one is left.
    """
    sizes = {name: sum(memoryview(piece).nbytes for piece in pieces) for name, pieces in files.items()}
    try:
        _check_room(job_dir, sum(sizes.values()), disk)
        with durable.NewDirectory(job_dir, f"{step}", disk=disk) as new:
            written = {name: new.add(name, pieces, size=sizes[name]) for name, pieces in files.items()}
            manifest = Manifest(job, step, identity, written, time.time())
            new.add(MANIFEST, [manifest.encode()])
            # What may be there under this name is an attempt that could be neither made durable nor taken back.
            return new.commit(name_of(step), replace=True), manifest
    except OSError as e:
        raise durable.trouble(e, job_dir / name_of(step)) from e


def with_spare(size: int) -> int:
    """Bytes that must be free, besides ``RESERVE``, for a checkpoint of ``size`` to be begun."""
    return size * 5 // 4


def _check_room(job_dir: Path, size: int, disk: Disk) -> None:
    needed, free = with_spare(size) + RESERVE, disk.free(job_dir)
    if free < needed:
        raise DiskTrouble(f"the disk is nearly full: a checkpoint needs {needed >> 20} MiB free at {job_dir} and there "
                          f"are {free >> 20} MiB", hint="free space; rrd goes on by itself")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``, checked against its own hash and the directory's name."""
    try:
        data = (path / MANIFEST).read_bytes()
        present = set(os.listdir(path))
    except OSError as e:
        raise Damaged(f"{path} has no readable manifest: {os.strerror(e.errno or 0).lower()}") from e
    manifest = Manifest.decode(data, path / MANIFEST)
    if path.name != name_of(manifest.step):
        raise Damaged(f"{path} says that it is of step {manifest.step}")
    if odd := present ^ {MANIFEST, *manifest.files}:
        names = one_line(", ".join(sorted(odd)), 200)
        raise Damaged(f"{path} does not hold exactly its files: {names}")
    return manifest


def read_file(path: Path, manifest: Manifest, name: str, into: Callable[[int], memoryview]) -> None:
    """Read one file of a checkpoint into the buffer that ``into(size)`` gives, and check every byte.

    Raises Damaged if size or digest differ; the buffer then holds rubbish and must not be used.
    """
    size, _ = manifest.files[name]
    buffer: list[memoryview] = []

    def window(at: int) -> memoryview:
        if not buffer:
            buffer.append(into(size))  # not before the file was seen to have this size
        return buffer[0][at:]

    _check_file(path / name, *manifest.files[name], window)


def _check_file(file: Path, size: int, digest: str, window: Callable[[int], memoryview]) -> None:
    """Read ``file`` piece by piece into ``window(offset)``. Raises Damaged unless it has this size and sha256."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
        with open(fd, "rb", buffering=0) as f:
            if (found := os.fstat(f.fileno()).st_size) != size:
                raise Damaged(f"{file} has {found} bytes instead of {size}")
            at, sha = 0, hashlib.sha256()
            while at < size:
                piece = window(at)[: min(_PIECE, size - at)]
                n = f.readinto(piece)
                if not n:
                    raise Damaged(f"{file} ends early")
                sha.update(piece[:n])
                at += n
    except OSError as e:
        raise Damaged(f"{file} cannot be read: {os.strerror(e.errno or 0).lower()}") from e
    if sha.hexdigest() != digest:
        raise Damaged(f"{file} is damaged: its sha256 is not the one in the manifest")


def read_bytes(path: Path, manifest: Manifest, name: str) -> bytes:
    """One small file of a checkpoint, checked."""
    buffer = bytearray()

    def into(size: int) -> memoryview:
        buffer.extend(bytes(size))
        return memoryview(buffer)

    read_file(path, manifest, name, into)
    return bytes(buffer)


def verify(path: Path) -> Manifest:
    """Check every byte of the checkpoint at ``path``. Raises Damaged with the sentence."""
    manifest = read_manifest(path)
    scratch = memoryview(bytearray(_PIECE))
    for name, (size, digest) in manifest.files.items():
        _check_file(path / name, size, digest, lambda _: scratch)
    return manifest


def quarantine(path: Path, *, disk: Disk = DISK) -> Path:
    """Take a damaged checkpoint out of the way, keeping its bytes for whoever wants to look. Raises DiskTrouble."""
    bad = path.parent / f".bad-{path.name}-{secrets.token_hex(4)}"
    try:
        disk.rename(path, bad)
    except OSError as e:
        raise durable.trouble(e, path) from e
    return bad


def collect(job_dir: Path, keep: int, *, disk: Disk = DISK) -> None:
    """Remove all but the ``keep`` newest checkpoints. Call it right after a commit: the newest is then valid.

    What cannot be removed now is tried again after the next commit.
    """
    assert keep >= 1
    for _, path in listing(job_dir)[keep:]:
        with contextlib.suppress(OSError):
            durable.discard_dir(path, disk=disk)
