"""Small checkpoints whose contents can be told from their step, and what a disk may do to them."""

from __future__ import annotations

from pathlib import Path

from rrd import checkpoint
from rrd.durable import DISK, Disk

TENSORS, STATE = "state.safetensors", "state.json"


def contents(step: int) -> dict[str, list[bytes]]:
    return {TENSORS: [b"header", b"weights of %d" % step], STATE: [b'{"step": %d}' % step]}


def expected(step: int) -> dict[str, bytes]:
    return {name: b"".join(pieces) for name, pieces in contents(step).items()}


def commit(job_dir: Path, step: int, disk: Disk = DISK) -> Path:
    path, manifest = checkpoint.commit(job_dir, job="a", step=step, identity="i", files=contents(step), disk=disk)
    assert (manifest.job, manifest.step, manifest.identity) == ("a", step, "i")
    return path


def steps(job_dir: Path) -> list[int]:
    return [step for step, _ in checkpoint.listing(job_dir)]


def load(path: Path) -> dict[str, bytes]:
    """What a worker would get from the checkpoint at ``path``. Raises Damaged."""
    manifest = checkpoint.verify(path)
    return {name: checkpoint.read_bytes(path, manifest, name) for name in manifest.files}
