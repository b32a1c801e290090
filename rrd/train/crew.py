"""Processes that make portions of a data file side by side (:mod:`rrd.train.portion`).

They hold the cache's lock together with who started them: it is free only when all of them are gone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO

from rrd import errors
from rrd.errors import BadJob, RrdError
from rrd.text import signal_name
from rrd.train.portion import Plan, Range

MEMORY_EACH = 1 << 30
"""Bytes of free memory that each process is counted with: its tokenizer, and what it holds of the text."""

At = Callable[[int, int], None]
"""Called with a portion's number and how far into it the work is."""


def size(most: int, portions: int) -> int:
    """How many processes: as many as there is work and memory for, up to ``most``."""
    return max(1, min(most, portions, _free_memory() // MEMORY_EACH))


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return MEMORY_EACH


def run(plan: Plan, portions: Sequence[Range], *, count: int, lock: IO[bytes], at: At,
        done: Callable[[Range], None]) -> None:
    """Make ``portions`` with ``count`` processes; ``at`` is called as they go on, ``done`` after each.

    Raises:
        BadJob: data or tokenizer cannot be used, or killed who read them. DiskTrouble: a portion cannot be written.
    """
    waiting, by_number = list(reversed(portions)), {p.number: p for p in portions}
    with _started(plan, count, lock) as crew, selectors.DefaultSelector() as ready:
        for member in crew[: len(portions)]:
            assert member.process.stdout
            ready.register(member.process.stdout, selectors.EVENT_READ, member)
            member.make(waiting.pop())
        busy = min(len(crew), len(portions))
        while busy:
            for key, _ in ready.select():
                member = key.data
                for what, value in member.heard():
                    if what == "at":
                        at(member.portion.number, value)
                        continue
                    done(by_number[value])
                    if waiting:
                        member.make(waiting.pop())
                    else:
                        busy -= 1


class _Member:
    """One process, and the portion it is at."""

    def __init__(self, plan: Plan, lock: IO[bytes]) -> None:
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", "rrd.train.portion"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=env, pass_fds=[lock.fileno()])
        self.plan, self.portion = plan, Range(0, 0, 0)
        self._rest = b""
        self._tell(asdict(plan))

    def make(self, portion: Range) -> None:
        self.portion = portion
        self._tell(portion)

    def _tell(self, what: object) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it is gone, which ``heard`` will say
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()

    def heard(self) -> Iterator[tuple[str, int]]:
        """What it says: "at" or "done", and a number. Raises what went wrong there."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise self._end()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, value = json.loads(line)
            if what == "fault":
                raise _fault(value)
            yield what, value

    def _end(self) -> Exception:
        status = self.process.wait()
        if status == -signal.SIGKILL:
            return MemoryError("a process that tokenizes was killed")
        if status < 0:
            return BadJob(f"reading it with {self.plan.tokenizer} ends in a crash ({signal_name(-status)})",
                          file=self.plan.data, hint="one of the two is damaged, or the tokenizers library has a fault")
        return RuntimeError(f"a process that tokenizes ended with {status}")


def _fault(said: dict[str, object]) -> Exception:
    kind = str(said.pop("kind"))
    if kind == "MemoryError":
        return MemoryError("tokenizing took too much memory")
    message = str(said.pop("message"))
    if kind != "BadJob":
        known: type[RrdError] = getattr(errors, kind, RrdError)
        return known(message, hint=str(said["hint"]))
    fault = BadJob(message, hint=str(said["hint"]))  # the sentence has its place already
    fault.file, fault.line, fault.key = str(said["file"]), int(str(said["line"])), str(said["key"])
    return fault


@contextmanager
def _started(plan: Plan, count: int, lock: IO[bytes]) -> Iterator[list[_Member]]:
    crew: list[_Member] = []
    try:
        for _ in range(count):
            crew.append(_Member(plan, lock))
        yield crew
        for m in crew:
            assert m.process.stdin
            m.process.stdin.close()
            m.process.wait(60)
    finally:
        for m in crew:
            m.process.kill()
            m.process.wait()
            for pipe in (m.process.stdin, m.process.stdout):
                with suppress(BrokenPipeError):  # what it was not told any more
                    pipe.close()  # type: ignore[union-attr]
