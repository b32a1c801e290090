"""The gate that is a pair of programs, such as ``["/usr/sbin/bar-swap", "open", "{die}"]``.

Exit status 0: done. 75 (EX_TEMPFAIL): try later. Anything else, or no end before the deadline: refused, with the last
line that the program wrote to standard error as the reason. No shell sees the arguments. On a deadline the program and
all it started are killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from subprocess import DEVNULL, Popen

from rrd.errors import TryLater
from rrd.gate.base import GateRefused, to_its_end, within
from rrd.text import duration, signal_name

KILLED_WITHIN = 1.0
"""Seconds that a killed program has to be gone; one that hangs in the kernel is not waited for longer."""


class CommandGate:
    """Runs ``acquire`` and ``release`` with ``{die}`` replaced by the die's name; ``timeout`` in seconds each."""

    def __init__(self, acquire: Sequence[str], release: Sequence[str], *, timeout: float = 10.0) -> None:
        self._argv = {"acquire": tuple(acquire), "release": tuple(release)}
        self._timeout = timeout
        self._held: set[str] = set()

    async def acquire(self, die: str) -> None:
        """See Gate."""
        settled = False
        try:
            status, said = await self._run("acquire", die)
            settled = status > 0  # it said no itself, so it holds nothing
            _check("acquire", die, status, said)
            self._held.add(die)
            settled = True
        finally:
            if not settled:
                with suppress(GateRefused):
                    await self.release(die)

    async def release(self, die: str) -> None:
        """See Gate."""
        _check("release", die, *await to_its_end(self._run("release", die)))
        self._held.discard(die)

    async def close(self) -> None:
        """See Gate."""
        for die in sorted(self._held):
            with suppress(GateRefused):
                await self.release(die)

    async def _run(self, verb: str, die: str) -> tuple[int, str]:
        """Exit status (negative: killed by a signal) and last line of standard error."""
        argv = [part.replace("{die}", die) for part in self._argv[verb]]
        try:
            program = _Program(argv)
        except OSError as e:
            hint = f"see gate.{verb} in rrd.toml"
            raise GateRefused(verb, die, f"{argv[0]} cannot be run: {e.strerror}", hint=hint) from e
        async with program:
            if not await program.ended(self._timeout):
                raise GateRefused(verb, die, f"no answer within {duration(self._timeout)}")
            return program.status(), program.last_line()


class _Program:
    """A program in a process group of its own; leaving the ``async with`` block kills the group if it still runs.

    Not asyncio's subprocess: there, a cancelled start loses the process, and a killed one that hangs in the kernel, as
    one that talks to a broken bus may, is awaited for ever.
    """

    def __init__(self, argv: list[str]) -> None:
        # A pipe that is read only after the end: whatever the program leaves running, nothing waits for its output.
        # One that fills the pipe (64 KiB) stops there, and is refused at the deadline.
        self._stderr, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(theirs, True)
            self._popen = Popen(argv, stdin=DEVNULL, stdout=DEVNULL, stderr=theirs, start_new_session=True)
        except BaseException:
            os.close(self._stderr)
            raise
        finally:
            os.close(theirs)
        self._pidfd = os.pidfd_open(self._popen.pid)

    async def __aenter__(self) -> _Program:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            await to_its_end(self.ended(KILLED_WITHIN))
            self._popen.poll()
        os.close(self._stderr)
        os.close(self._pidfd)

    async def ended(self, seconds: float) -> bool:
        """Whether the program ends within ``seconds``."""
        loop = asyncio.get_running_loop()
        end = asyncio.Event()
        loop.add_reader(self._pidfd, end.set)
        try:
            await within(seconds, end.wait())
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        return True

    def status(self) -> int:
        """Exit status of a program that has ended; negative: the signal that killed it."""
        return self._popen.wait()

    def last_line(self) -> str:
        """The last line that is not blank of what it wrote to standard error."""
        text = b""
        with suppress(BlockingIOError):
            text = os.read(self._stderr, 1 << 20)
        lines = text.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _check(verb: str, die: str, status: int, said: str) -> None:
    if status == TryLater.exit_code:
        raise GateRefused(verb, die, said or "try later")
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"killed by {signal_name(-status)}"
        raise GateRefused(verb, die, f"{said} ({how})" if said else how)
