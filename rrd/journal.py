"""What happens, told to people: to the system's journal or standard error, and to each job's ``events.jsonl``.

``Journal.event`` only puts the event in a bounded queue; a thread writes. A terminal that is stopped, a journal that is
slow or a disk that is full can thus hold up neither the loop nor training: what cannot be written is lost, and counted.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

from rrd.durable import make_dir
from rrd.text import count, one_line

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
EVENTS_FILE = "events.jsonl"
QUEUED = 10_000
"""Events that may wait to be written."""
DAEMON_EVENTS = 4 << 20
"""Bytes of events that are about no job; a job's own are kept for as long as the job."""
CLOSE_SECONDS = 5.0
"""Longest that the end of the daemon waits for them."""
PRIORITY = {"error": 3, "warning": 4, "notice": 5, "info": 6, "debug": 7}
"""Levels, and what syslog calls them."""


class Kind(Enum):
    """Kinds of events. The value is the journal's MESSAGE_ID: ``journalctl MESSAGE_ID=...``. It never changes."""

    READY = "106f27344a73434e9e6f46e504615fc6"
    """The daemon answers; models load afterwards."""
    STOPPING = "de35b1a6953c41cabe62160cd30f810e"
    """Every job is being saved."""
    STOPPED = "2451e3807ea24a94ba16e4d8b5171d7d"
    """Nothing of ours runs any more."""
    CONFIG = "97fb73c9c22d41b3a8ebd5491a1ce4ab"
    """The configuration was read again, or could not be."""
    CONTROL = "7be6df37263c498593d6b6b9344fd660"
    """Somebody asked for something on the control socket."""
    LEDGER = "11d5195b3bb941e28b8e71bc78c5fc78"
    """The durable record of a job is damaged or could not be written."""
    SPOOL = "16ab3f4b289f419abe6e3e15b5b8b818"
    """The directory of job files cannot be read."""
    WEB = "e60b547c99274c24a093b1734814ac2d"
    """Metrics cannot be served."""
    FILE_REJECTED = "cfa80fce77a94caa9fcd1c402ecc0bc7"
    """A job file cannot be used."""
    JOB_ACCEPTED = "44307089ee4341f8931cd2d93d00edf4"
    """A job file is a job now, or again."""
    JOB_WAITS = "64432354bbd142aaa83bea346f0d4bc8"
    """It is ready, and no die has room for it."""
    JOB_REMOVED = "06f8131848464bea8a2aa4f7fe1454a9"
    """Its job file is gone."""
    JOB_RETRIED = "39ee265731e54f5e85318242c21aeba8"
    """A failed job is tried again because something it needs changed."""
    JOB_RESTARTED = "9becad94a0d842438c6d01fec8b0eb9b"
    """By the user."""
    JOB_LEFT = "812a6110a79b494d81cc0622d6cbe854"
    """Paused or cancelled, and off its die."""
    JOB_NOTE = "d97258de0c264dd9a1b58b9f861b9ef5"
    """Something about a job that its owner should know."""
    EDIT_TAKEN = "5f466454df14440c881e3a75f08f6bf8"
    """Live keys of a job file changed."""
    EDIT_REFUSED = "97986326c80b4ef685d985ce4d2fa58b"
    """A job file changed in a way that a running job cannot follow."""
    LOADED = "2e40a255787047f5aac257a67441d821"
    """A job is resident."""
    CHECKPOINT = "05526feb1de44ab5b53143d5e9e9684e"
    """A checkpoint is durable."""
    CHECKPOINT_FAILED = "23b9aad874014e5886d5da8749a814d2"
    """A checkpoint could not be saved."""
    CHECKPOINT_DAMAGED = "32e884e08426472fb95f3f8aadf9bc52"
    """A checkpoint was quarantined, and an older one used."""
    OUT_OF_MEMORY = "e6d05cfdf0714defa08a4f7e1c3b6f7e"
    """A die's memory did not suffice, and a job is to need less."""
    STEP_SKIPPED = "b8aa57a76ecb4f18b5adf61c89c65796"
    """A step was left out because its loss or gradient was no number."""
    EVALUATED = "27ade54ec7c84376802f83bb6e69cafd"
    """A held-out loss."""
    EXPORTED = "7fbd6ccfdc22461fb9e135ca385060f9"
    """An adapter has been written and checked."""
    DONE = "a5e008be9edc4160989ef3a7fa89f479"
    """A job has ended well."""
    FAILED = "69934e496ac74e278428f3b23e1f2af0"
    """A job has ended badly."""
    HOOK = "32d39a5404594609a7bc72bb637518bc"
    """What should be told when a job ends could not be, or was after all."""
    DISK = "222a5596571b45e9b01ea7a902bb1c61"
    """The disk takes no checkpoints, or takes them again."""
    GATE_REFUSED = "f1357314c6be45f3be3114985b7bcbae"
    """A die was not granted."""
    WORKER_DIED = "d30098ddc9144df09ff897c5fb820578"
    """A worker ended, crashed or hung."""
    WORKER_STACK = "40a27f64bac3462294d27a0b8a67a95d"
    """Where a worker stood when it crashed or was aborted; RRD_STACK has all of it."""
    DIE_FENCED = "f5b4499a8e614900b87d0aa680212329"
    """A die is not used any more, or still not."""
    DIE_RETURNED = "a2aae7715449400e939f37291ccdb6a9"
    """A fenced die computes again."""
    DROPPED = "60f2ef5434374e5ea8cc93237aada15c"
    """Events came faster than they could be written."""


@dataclass(frozen=True)
class Event:
    """One thing that happened. ``time`` is seconds since 1970; ``fields`` are further fields for the journal."""

    time: float
    kind: Kind
    level: str
    message: str
    hint: str = ""
    job: str | None = None
    die: str | None = None
    step: int | None = None
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Whom it is about, what, and what to do, on one line."""
        about = f"{self.job}: " if self.job else f"die {self.die}: " if self.die else ""
        return about + self.message + (f" ({self.hint})" if self.hint else "")


class Sink(Protocol):
    """Where events go. ``write`` may block, and may raise anything: it runs on the journal's thread."""

    def write(self, event: Event) -> None: ...


class Journal:
    """Tells events to ``sinks`` from a thread of its own. A context manager: leaving it writes what still waits."""

    def __init__(self, sinks: Sequence[Sink], *, level: str = "info", wall: Callable[[], float] = time.time) -> None:
        self._sinks, self._most, self._wall = list(sinks), PRIORITY[level], wall
        self._queue: queue.Queue[Event | threading.Event | None] = queue.Queue(QUEUED)
        self.dropped = 0
        """Events lost because too many waited to be written."""
        self.failed = 0
        """Events that a sink could not write."""
        self._said = 0
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def for_process(cls, jobs_dir: Path, *, level: str = "info") -> Journal:
        """To the system's journal if it reads our standard error, else to standard error; and to the jobs' files."""
        return cls([standard_sink(sys.stderr), JobFiles(jobs_dir)], level=level)

    def event(self, kind: Kind, level: str, message: str, *, hint: str = "", job: str | None = None,
              die: str | None = None, step: int | None = None, **fields: str) -> None:
        """Tell that something happened; never blocks. ``fields``: upper-case names for the system's journal."""
        if PRIORITY[level] > self._most:
            return
        event = Event(self._wall(), kind, level, one_line(message, 2000), one_line(hint), job, die, step, fields)
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until everything told so far is written; False after ``seconds``."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=seconds)
        except queue.Full:
            return False
        return written.wait(seconds)

    def close(self) -> None:
        """Write what waits, within ``CLOSE_SECONDS``."""
        self.flush(CLOSE_SECONDS)
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return  # stuck: the thread ends with the process
        self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self.dropped > self._said:
                new, self._said = self.dropped - self._said, self.dropped
                self._write(Event(item.time, Kind.DROPPED, "warning", f"{count(new, 'event')} came too fast to tell"))
            self._write(item)

    def _write(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink.write(event)
            except Exception:  # whatever is wrong with a log, training goes on
                self.failed += 1


class Lines:
    """Plain lines on a stream: with the time, or with ``<3>`` priorities for a reader that adds its own time."""

    def __init__(self, stream: TextIO, *, priorities: bool = False) -> None:
        self._stream, self._priorities = stream, priorities

    def write(self, event: Event) -> None:
        if self._priorities:
            head = f"<{PRIORITY[event.level]}>"
        else:
            head = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(event.time))
            head += f"{event.level}: " if event.level in ("error", "warning") else ""
        self._stream.write(f"{head}{event.line}\n")
        self._stream.flush()


class Journald:
    """The native protocol of systemd-journald: structured fields, any text in them.

    https://systemd.io/JOURNAL_NATIVE_PROTOCOL/
    """

    def __init__(self, path: Path = JOURNAL_SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(CLOSE_SECONDS)

    def write(self, event: Event) -> None:
        fields = {
            "MESSAGE": event.line,
            "MESSAGE_ID": event.kind.value,
            "PRIORITY": str(PRIORITY[event.level]),
            "SYSLOG_IDENTIFIER": "rrd",
            "RRD_JOB": event.job,
            "RRD_DIE": event.die,
            "RRD_STEP": None if event.step is None else str(event.step),
            "RRD_HINT": event.hint or None,
            **event.fields,
        }
        data = b"".join(_field(name, value) for name, value in fields.items() if value is not None)
        self._socket.sendto(data, str(self._path))


def _field(name: str, value: str) -> bytes:
    """One field; a value with a newline is sent with its length, because a newline ends a field."""
    data = value.encode(errors="replace")
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"


class JobFiles:
    """``<jobs_dir>/<job>/events.jsonl``: one JSON object a line, for ``rrd logs`` and ``rrd events``. What is about no
    job goes to ``events.jsonl`` beside ``jobs_dir``, which begins anew when it has grown large.

    It is a log, not state: appended to without fsync, and a line cut short by a crash or a full disk stays alone.
    """

    def __init__(self, jobs_dir: Path) -> None:
        self._jobs_dir = jobs_dir

    def write(self, event: Event) -> None:
        directory = self._jobs_dir.parent if event.job is None else self._jobs_dir / event.job
        said = {"time": event.time, "kind": event.kind.name.lower(), "level": event.level, "message": event.message,
                "hint": event.hint, "step": event.step, "die": event.die}
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        make_dir(directory)  # the first event may come before the first record
        fd = os.open(directory / EVENTS_FILE, flags, 0o640)
        try:
            size = os.fstat(fd).st_size
            if event.job is None and size > DAEMON_EVENTS:
                os.ftruncate(fd, size := 0)
            cut = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            line = ("\n" if cut else "") + json.dumps(said, ensure_ascii=False) + "\n"
            data = line.encode(errors="replace")
            if os.write(fd, data) != len(data):
                raise OSError("disk full")
        finally:
            os.close(fd)


def standard_sink(stderr: TextIO) -> Sink:
    """The native journal if ``stderr`` is connected to it (JOURNAL_STREAM, systemd.exec(5)), else lines on it."""
    if not _is_journal(stderr):
        return Lines(stderr)
    return Journald() if JOURNAL_SOCKET.exists() else Lines(stderr, priorities=True)


def _is_journal(stream: TextIO) -> bool:
    try:
        at = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{at.st_dev}:{at.st_ino}"
