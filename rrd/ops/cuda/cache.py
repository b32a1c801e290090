"""Cubins, kept: in packages (``kernels/cubins``), or in the cache, made there at first use and shared by all workers.

A cubin's file is named for its op, its architecture, the NVRTC that made it, and a hash of its source and options.
It begins with its SHA-256, so that a damaged one is seen and made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rrd import durable
from rrd.ops.cuda import nvrtc
from rrd.ops.cuda.nvrtc import NoKernels, Nvrtc
from rrd.ops.cuda.source import DIRECTORY, Source

PACKAGED = DIRECTORY / "cubins"
SECONDS = 300.0
"""A build takes one; another's is waited for so long."""

Alive = Callable[[], None]


def cubin(source: Source, arch: str, cache_dir: Path, *, driver: int | None = None, alive: Alive = lambda: None
          ) -> bytes:
    """The cubin of ``source`` for ``arch``; made, and kept below ``cache_dir``, unless there is one.

    Raises:
        NoKernels: it is not there and cannot be made. DiskTrouble, TryLater: the cache cannot be written or is locked.
    """
    found = kept(source, arch, cache_dir, driver=driver)
    return found if found is not None else build(source, arch, place(cache_dir), driver=driver, alive=alive)


def place(cache_dir: Path) -> Path:
    return cache_dir / "kernels" / "cuda"


def kept(source: Source, arch: str, cache_dir: Path, *, driver: int | None = None) -> bytes | None:
    """One that is there and whole: a package's first. Of several, the one that the newest NVRTC made."""
    for directory in (PACKAGED, place(cache_dir)):
        for file in sorted(_files(source, arch, directory, driver), reverse=True):
            if (data := _read(file, arch)) is not None:
                return data
    return None


def build(source: Source, arch: str, directory: Path, *, driver: int | None = None, alive: Alive = lambda: None
          ) -> bytes:
    """Make it and keep it in ``directory``, while others wait. Raises as ``cubin``."""
    compiler = nvrtc.find(arch, driver)
    file = directory / f"{_stem(source, arch)}{_of(compiler)}-{_key(source)}.cubin"
    try:
        durable.make_dir(directory)
    except OSError as e:
        raise durable.trouble(e, directory) from e
    with durable.lock_when_free(directory / "lock", what="the kernels' build", alive=alive, seconds=SECONDS):
        if (data := _read(file, arch)) is not None:
            return data  # by another worker, meanwhile
        data = compiler.compile(source.file, source.text, arch).cubin
        if nvrtc.architecture(data) != arch:
            raise NoKernels(f"{compiler} made of {source.file} no cubin for {arch}")
        durable.replace_file(file, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    return data


def _files(source: Source, arch: str, directory: Path, driver: int | None) -> Iterator[Path]:
    stem = _stem(source, arch)
    for file in directory.glob(f"{stem}*-{_key(source)}.cubin"):
        major = file.name.removeprefix(stem).partition(".")[0]
        if major.isdecimal() and (driver is None or int(major) <= driver):
            yield file


def _stem(source: Source, arch: str) -> str:
    return f"{source.op}-{arch}-nvrtc"


def _of(compiler: Nvrtc) -> str:
    return "{}.{}".format(*compiler.version)


def _key(source: Source) -> str:
    return hashlib.sha256(repr((source.text, nvrtc.OPTIONS)).encode()).hexdigest()[:16]


def _read(file: Path, arch: str) -> bytes | None:
    """The cubin in ``file``; None where it is not there, or not whole."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    digest, _, data = raw.partition(b"\n")
    whole = hashlib.sha256(data).hexdigest().encode() == digest and nvrtc.architecture(data) == arch
    return data if whole else None
