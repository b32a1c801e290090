"""The checkpoint on disk, format version 1: names, manifest, commit, verify. Bytes only; no torch here.

A job's directory holds ``ckpt-<step, 12 digits>/`` directories, each with some files and a ``MANIFEST.json`` that
names every file with its size and sha256, and carries a hash of itself. A checkpoint is committed by one rename;
nothing half-written ever has a ``ckpt-`` name, and nothing damaged is ever loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrd import durable
from rrd.durable import DISK, Bytes, Disk
from rrd.errors import Damaged, DiskTrouble

FORMAT = 1
MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"ckpt-(\d{12})")
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
            return Manifest(body["job"], body["step"], body["identity"], files, body["time"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise Damaged(f"{where} is damaged: {e}") from e


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


def commit(job_dir: Path, *, job: str, step: int, identity: str, files: Mapping[str, Iterable[Bytes]],
           expected_bytes: int = 0, disk: Disk = DISK) -> tuple[Path, Manifest]:
    """Write a checkpoint; when this returns it survives any crash, and may be announced.

    Raises:
        DiskTrouble: it was not committed; older checkpoints are untouched and nothing of this one is left.
    """
    try:
        free = disk.free(job_dir)
        if free < expected_bytes * 5 // 4 + RESERVE:
            raise DiskTrouble(
                f"the disk is nearly full: a checkpoint needs {expected_bytes * 5 // 4 + RESERVE >> 20} MiB free at "
                f"{job_dir} and there are {free >> 20} MiB", hint="free space; rrd goes on by itself")
        with durable.NewDirectory(job_dir, f"{step}", disk=disk) as new:
            written = {name: new.add(name, chunks) for name, chunks in files.items()}
            manifest = Manifest(job, step, identity, written, time.time())
            new.add(MANIFEST, [manifest.encode()])
            return new.commit(name_of(step)), manifest
    except OSError as e:
        raise durable.trouble(e, job_dir / name_of(step)) from e


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``, checked against its own hash and the directory's name."""
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as e:
        raise Damaged(f"{path} has no readable manifest: {os.strerror(e.errno or 0).lower()}") from e
    manifest = Manifest.decode(data, path / MANIFEST)
    if path.name != name_of(manifest.step):
        raise Damaged(f"{path} says that it is of step {manifest.step}")
    if present := {p.name for p in path.iterdir()} ^ {MANIFEST, *manifest.files}:
        raise Damaged(f"{path} does not hold exactly its files: {', '.join(sorted(present))}")
    return manifest


def read_file(path: Path, manifest: Manifest, name: str, into: Callable[[int], memoryview]) -> None:
    """Read one file of a checkpoint into the buffer that ``into(size)`` gives, and check every byte.

    Raises Damaged if size or digest differ; the buffer then holds rubbish and must not be used.
    """
    size, digest = manifest.files[name]
    file = path / name
    try:
        with open(file, "rb", buffering=0) as f:
            if os.fstat(f.fileno()).st_size != size:
                raise Damaged(f"{file} has {os.fstat(f.fileno()).st_size} bytes instead of {size}")
            view, at, sha = into(size), 0, hashlib.sha256()
            while at < size:
                n = f.readinto(view[at : at + (1 << 22)])
                if not n:
                    raise Damaged(f"{file} ends early")
                sha.update(view[at : at + n])
                at += n
    except OSError as e:
        raise Damaged(f"{file} cannot be read: {os.strerror(e.errno or 0).lower()}") from e
    if sha.hexdigest() != digest:
        raise Damaged(f"{file} is damaged: its sha256 is not the one in the manifest")


def read_bytes(path: Path, manifest: Manifest, name: str) -> bytes:
    """One small file of a checkpoint, checked."""
    buffer = bytearray(manifest.files[name][0])
    read_file(path, manifest, name, lambda _: memoryview(buffer))
    return bytes(buffer)


def verify(path: Path) -> Manifest:
    """Check every byte of the checkpoint at ``path``. Raises Damaged with the sentence."""
    manifest = read_manifest(path)
    scratch = bytearray()

    def into(size: int) -> memoryview:
        scratch.extend(bytes(max(0, size - len(scratch))))
        return memoryview(scratch)

    for name in manifest.files:
        read_file(path, manifest, name, into)
    return manifest


def quarantine(path: Path, *, disk: Disk = DISK) -> Path:
    """Take a damaged checkpoint out of the way, keeping its bytes for whoever wants to look."""
    bad = path.parent / f".bad-{path.name}-{int(time.time() * 1000):x}"
    disk.rename(path, bad)
    return bad


def collect(job_dir: Path, keep: int, *, disk: Disk = DISK) -> None:
    """Remove all but the ``keep`` newest checkpoints. Call it right after a commit: the newest is then valid."""
    assert keep >= 1
    for _, path in listing(job_dir)[keep:]:
        durable.discard_dir(path, disk=disk)
