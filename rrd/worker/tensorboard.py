"""TensorBoard's event files, written from a job's history: a copy for its viewer, never the source of anything.

The format is a sequence of records, each framed by its length and checksums (TensorFlow's ``record_writer.h``), each
an ``Event`` message (``event.proto``) of which four fields are used. Written here by hand, because the package that
would do it takes seconds to import into every worker.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rrd import durable
from rrd.errors import DiskTrouble

DIRECTORY = "tensorboard"
"""In a job's state directory: ``tensorboard --logdir /var/lib/rrd/jobs`` shows each job as a run."""
TAGS = {"loss": "train/loss", "lr": "train/learning_rate", "grad_norm": "train/grad_norm", "tokens": "train/tokens",
        "seconds": "train/seconds", "eval_loss": "eval/loss"}
BEAT = 5000
"""Lines of an old history between two signs of life."""


class EventFile:
    """One file, begun anew at each load with all of the history so far: no step is there twice after a resume.

    What cannot be written is left out: the history has it.
    """

    def __init__(self, job_dir: Path, alive: Callable[[], None] = lambda: None) -> None:
        self._fd: int | None = None
        with suppress(OSError, DiskTrouble):
            directory = job_dir / DIRECTORY
            durable.make_dir(directory)
            for old in directory.glob("events.out.tfevents.*"):
                old.unlink()
            name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(directory / name, flags, 0o640)
            self._write(record(_double(1, time.time()) + _bytes(3, b"brain.Event:2")))
            self._begin(job_dir / "history.jsonl", alive)

    def _begin(self, history: Path, alive: Callable[[], None]) -> None:
        for i, line in enumerate(_lines(history)):
            if i % BEAT == BEAT - 1:
                alive()
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """A line of the history."""
        values = [(TAGS[key], float(value)) for key, value in line.items() if key in TAGS and value is not None]
        if values:
            self._write(record(event(line.get("time") or time.time(), int(line["step"]), values)))

    def _write(self, data: bytes) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, data)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError), open(path, "rb") as f:
        for raw in f:
            with suppress(ValueError):
                yield json.loads(raw)


# ---- the format ------------------------------------------------------------------------------------------------------


def event(wall: float, step: int, values: list[tuple[str, float]]) -> bytes:
    """``Event {wall_time, step, summary {value {tag, simple_value}}}``."""
    summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", v)) for tag, v in values)
    return _double(1, wall) + b"\x10" + _varint(step) + _bytes(5, summary)


def record(data: bytes) -> bytes:
    """``data`` in its frame."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _table() -> tuple[int, ...]:
    """CRC-32C, Castagnoli's polynomial, reflected (RFC 3720, appendix B.4)."""
    out = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        out.append(n)
    return tuple(out)


_CRC = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    """As TensorFlow has it: a checksum of data that holds checksums is no good."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
