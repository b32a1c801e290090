"""One copy of a model's weights for all processes of the box: a file of the cache, mapped read-only.

Six CPU dies that train on one model would hold it six times. Instead the first to need it writes the weights, in the
dtype they are stored in and 64-byte aligned, under the cache directory, and everybody maps that file: the page cache
holds it once, and each checks it against its digest before. The cache may be deleted at any time; a mapped file lives
on until its last process ends. Whoever writes an entry removes those that nobody has asked for in ``UNUSED_SECONDS``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rrd import durable
from rrd.models.files import Progress, Stream
from rrd.models.int8 import Int8Stream
from rrd.models.layout import Layout

FORMAT = 1
UNUSED_SECONDS = 30 * 24 * 3600.0
_WEIGHTS, _META = "weights", "meta.json"
_PIECE = 1 << 22


def shared(layout: Layout, store_dir: Path, progress: Progress | None) -> tuple[dict[str, Tensor], str]:
    """The model's tensors, read-only, and its digest; written to the store first where they are not there yet.

    Raises:
        BadJob: the model's files are damaged. DiskTrouble: the store cannot be written.
    """
    try:
        durable.make_dir(store_dir)
    except OSError as e:
        raise durable.trouble(e, store_dir) from e
    alive = (lambda: progress(0, 1)) if progress else (lambda: None)  # waiting for who writes it now is no hang
    place = store_dir / _stamp(layout)
    while True:
        with contextlib.suppress(OSError):
            os.utime(place / _META)  # it is in use
        digest = _digest(place, layout.size, alive)
        if digest is None:
            with durable.lock_when_free(store_dir / f"{place.name}.lock", what="the store's entry", alive=alive):
                digest = _digest(place, layout.size, alive) or _write(place, layout, progress)
            _collect(store_dir)
        with contextlib.suppress(FileNotFoundError):  # another process took it for unused a moment ago: again
            return dict(layout.views(_map(place / _WEIGHTS, layout.size))), digest


def _collect(store_dir: Path) -> None:
    """Remove what nobody has used for long. Processes that have it mapped keep it; the next one writes it anew."""
    for meta in store_dir.glob(f"*/{_META}"):
        with contextlib.suppress(OSError):
            if time.time() - meta.stat().st_mtime > UNUSED_SECONDS:
                durable.discard_dir(meta.parent)


def _stamp(layout: Layout) -> str:
    """A name for these files as they are now: it changes whenever one of them is written."""
    files = layout.files
    paths = sorted({at.path for n in files.wanted for at in files.parts(n)})
    stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for p in paths for s in [p.stat()]]
    facts = [FORMAT, str(layout.dtype), files.raw_config, stats, list(files.wanted.items()), sorted(layout.int8)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def _digest(place: Path, nbytes: int, alive: Callable[[], None]) -> str | None:
    """The digest of the model stored at ``place``, every byte checked; None where none is, or not as it was written."""
    try:
        meta: dict[str, Any] = json.loads((place / _META).read_bytes())
        with open(place / _WEIGHTS, "rb", buffering=0) as f:
            if os.fstat(f.fileno()).st_size != nbytes or _sha256(f, alive) != meta["weights"]:
                return None
        return str(meta["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sha256(file: IO[bytes], alive: Callable[[], None]) -> str:
    sha, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    while n := file.readinto(piece):  # type: ignore[attr-defined]
        sha.update(piece[:n])
        alive()
    return sha.hexdigest()


def _write(place: Path, layout: Layout, progress: Progress | None) -> str:
    stream = layout.stream(progress)
    try:
        with durable.NewDirectory(place.parent, place.name) as new:
            _, written = new.add(_WEIGHTS, _bytes(stream, layout), size=layout.size)
            meta = {"digest": stream.digest, "weights": written, "model": str(layout.files.path)}
            new.add(_META, [json.dumps(meta).encode()])
            new.commit(place.name, replace=True)
    except OSError as e:
        raise durable.trouble(e, place) from e
    return stream.digest


def _bytes(stream: Stream | Int8Stream, layout: Layout) -> Iterator[bytearray]:
    """The store's file: every tensor's elements at its slot, zeros between."""
    at = 0
    for name, first, piece in stream:
        start = layout.slots[name].offset + first * piece.element_size()
        yield bytearray(start - at)
        raw = bytearray(piece.numel() * piece.element_size())
        torch.frombuffer(raw, dtype=piece.dtype).copy_(piece)
        yield raw
        at = start + len(raw)
    yield bytearray(layout.size - at)


def _map(path: Path, size: int) -> Tensor:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # that is what it is for
        return torch.frombuffer(mapped, dtype=torch.uint8, count=size)
