"""Sealed directories: files beside a manifest that names each with its size and sha256, and carries its own hash.

The token cache and the exports are such directories. They are written beside their place and committed by one rename
(:mod:`rrd.durable`), so a directory with a valid seal is whole; the digests are for what a disk does to it later.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrd.durable import Bytes, NewDirectory, fsync_dir
from rrd.errors import Damaged

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class Seal:
    """What a sealed directory says of itself. ``files``: name to (bytes, sha256 hex); ``links``: name to target."""

    kind: str
    facts: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    links: Mapping[str, str]


class Sealing:
    """Adds files to a new directory and remembers what its manifest must say."""

    def __init__(self, new: NewDirectory) -> None:
        self._new = new
        self.path = new.path
        self.files: dict[str, tuple[int, str]] = {}
        self.links: dict[str, str] = {}

    def add(self, name: str, chunks: Iterable[Bytes], *, size: int = 0) -> None:
        """Write one file durably. ``name`` may lie in one subdirectory."""
        if "/" in name and not (inner := (self.path / name).parent).is_dir():
            self._new.disk.mkdir(inner)
        self.files[name] = self._new.add(name, chunks, size=size)

    def link(self, name: str, target: str) -> None:
        self._new.link(name, target)
        self.links[name] = target

    def close(self, kind: str, facts: Mapping[str, Any]) -> Seal:
        """Write the manifest, the last file. The same facts and files give the same bytes."""
        for inner in {str(Path(n).parent) for n in self.files} - {"."}:
            fsync_dir(self.path / inner, disk=self._new.disk)
        files = {n: {"bytes": b, "sha256": d} for n, (b, d) in self.files.items()}
        body = {"kind": kind, "facts": dict(facts), "files": files, "links": self.links}
        self._new.add(MANIFEST, [_encode({**body, "self": hashlib.sha256(_encode(body)).hexdigest()})])
        return Seal(kind, facts, self.files, self.links)


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"


def read_seal(path: Path, kind: str) -> Seal:
    """The seal of the directory at ``path``, its files' presence and sizes checked, their contents not.

    Raises:
        Damaged: it is no whole, sealed directory of this kind.
    """
    try:
        body = json.loads((path / MANIFEST).read_bytes())
        digest = body.pop("self")
        if hashlib.sha256(_encode(body)).hexdigest() != digest or body["kind"] != kind:
            raise ValueError("the manifest is not as written")
        files = {n: (f["bytes"], f["sha256"]) for n, f in body["files"].items()}
        for name, (size, _) in files.items():
            if (found := os.lstat(path / name).st_size) != size:
                raise ValueError(f"{name} has {found} bytes instead of {size}")
        return Seal(kind, body["facts"], files, body["links"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise Damaged(f"{path} is damaged or not a {kind}: {e}") from e


def verify(path: Path, seal: Seal) -> None:
    """Check every byte. Raises Damaged."""
    for name, (_, digest) in seal.files.items():
        try:
            with open(path / name, "rb", buffering=0) as f:
                found = file_sha256(f.fileno())
        except OSError as e:
            raise Damaged(f"{path / name} cannot be read: {os.strerror(e.errno or 0).lower()}") from e
        if found != digest:
            raise Damaged(f"{path / name} is damaged: its sha256 is not the one in the manifest")


def file_sha256(fd: int) -> str:
    """The sha256 of an open file from its start, without moving its position."""
    sha, at = hashlib.sha256(), 0
    while part := os.pread(fd, 1 << 20, at):
        sha.update(part)
        at += len(part)
    return sha.hexdigest()
