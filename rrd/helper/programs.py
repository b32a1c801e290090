"""The backend of two programs, for boxes whose swap is no matter of BARs alone.

Exit status 0: done. 75 (EX_TEMPFAIL): try later. Anything else, or no end in time: refused, with the last line that
the program wrote to standard error as the reason. No shell sees the arguments.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rrd.helper.base import BadSetup, Refusal
from rrd.helper.kept import Kept

TRY_LATER = 75
LOOK_SECONDS = 0.05
"""How often it is looked whether the answer of a program is still wanted."""
KILLED_WITHIN = 1.0
"""Seconds that a killed program has to be gone; one that hangs in the kernel is not waited for longer."""


class Programs:
    """Runs ``acquire`` and ``release``, ``{die}`` replaced by the die's name, within ``timeout`` seconds each.

    What may be open is kept before it is opened, so that after a crash it can be closed.
    """

    def __init__(self, group: str, dies: Sequence[str], acquire: Sequence[str], release: Sequence[str], kept: Kept, *,
                 timeout: float = 2.0) -> None:
        self.dies = dies
        self._group, self._kept, self._timeout = group, kept, timeout
        self._acquire, self._release = acquire, release
        self._open: str | None = None

    def start(self) -> None:
        """See Backend. Nothing was opened by us."""
        for argv in (self._acquire, self._release):
            if not os.access(argv[0], os.X_OK):
                raise BadSetup(f"group {self._group}: {argv[0]} is no program that can be run")

    def open(self, die: str, wanted: Callable[[], bool] = lambda: True) -> None:
        """See Backend."""
        if self._open is not None:  # a release that failed
            self.close(self._open)
        self._kept.to_undo(self._group, _named(self._release, die))
        self._open = die
        try:
            run(_named(self._acquire, die), self._timeout, wanted)
        except Refusal:
            with suppress(Refusal):
                self.close(die)
            raise

    def close(self, die: str) -> None:
        """See Backend."""
        run(_named(self._release, die), self._timeout)
        self._open = None
        self._kept.to_undo(self._group, None)


def _named(argv: Sequence[str], die: str) -> list[str]:
    return [part.replace("{die}", die) for part in argv]


def run(argv: Sequence[str], seconds: float, wanted: Callable[[], bool] = lambda: True) -> None:
    """Run a program to its end; raises Refusal. On the deadline, or when it is no longer ``wanted``, it and all it
    started are killed."""
    from subprocess import DEVNULL, Popen, TimeoutExpired  # 10 ms that the other backend need not pay

    with tempfile.TemporaryFile() as said:  # a pipe would be kept open by whatever it leaves running
        try:
            program = Popen(argv, stdin=DEVNULL, stdout=DEVNULL, stderr=said, start_new_session=True)
        except OSError as e:
            raise Refusal(f"{argv[0]} cannot be run: {e.strerror}") from None
        if not _ended(program.pid, seconds, wanted):
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):
                program.wait(KILLED_WITHIN)
            raise Refusal(f"no answer within {seconds:g} s from {argv[0]}")
        status = program.wait()
        said.seek(0)
        reason = _last_line(said.read(65536))
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        later = status == TRY_LATER
        raise Refusal(reason if later and reason else f"{reason} ({how})" if reason else how, later=later)


def _ended(pid: int, seconds: float, wanted: Callable[[], bool]) -> bool:
    """Whether our child ``pid`` ends in time, while it is wanted."""
    end = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and wanted():
            if poll.poll(1000 * min(left, LOOK_SECONDS)):
                return True
        return False
    finally:
        os.close(end)


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
