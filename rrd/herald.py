"""Tells the outside world that a job has ended: a program is run, or a URL gets a POST, with the job as JSON.

At least once: the ledger remembers which end was told, so what a crash or a dead receiver left untold is told later.
Never in the way: a process of its own with a deadline; a receiver that fails is asked again, ever more rarely.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urlsplit

from rrd.config import Config
from rrd.journal import Journal, Kind
from rrd.keeper import Keeper
from rrd.roster import Job
from rrd.states import JobState
from rrd.text import duration, one_line

TELL_SECONDS = 30.0
"""How long a receiver may take."""
FIRST_RETRY, LONGEST_RETRY = 10.0, 3600.0
"""Seconds until a receiver that failed is asked again, at first and at most."""
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.05
KILLED_WITHIN = 5.0
"""Seconds that a killed program has to be gone; one that hangs in the kernel is not waited for longer."""
_HAS = {JobState.DONE: "is done", JobState.FAILED: "has failed"}


@dataclass
class _Try:
    count: int = 0
    again_at: float = field(default=float("-inf"))


class Herald:
    """Tells of each of ``jobs()`` that ended, once it has. ``config()`` is asked each time: it may be reloaded."""

    def __init__(self, config: Callable[[], Config], jobs: Callable[[], Iterable[Job]], keeper: Keeper,
                 journal: Journal, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._config, self._jobs, self._keeper, self._journal = config, jobs, keeper, journal
        self._monotonic = monotonic
        self._tries: dict[str, _Try] = {}
        self._telling = asyncio.Lock()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.tell_all()
            await asyncio.sleep(LOOK_SECONDS)

    async def tell_all(self) -> None:
        """Tell every end that is still to be told and whose time has come; a hook that hangs holds up only its own."""
        async with self._telling:
            await asyncio.gather(*(self._tell_those(state) for state in _HAS))

    async def _tell_those(self, state: JobState) -> None:
        for job in [j for j in self._jobs() if j.state is state and untold(j)]:
            hook = self._hook(job)
            if not hook:
                self._told(job)  # nobody wanted to know when it happened
            elif self._tries.setdefault(job.id, _Try()).again_at <= self._monotonic():
                await self._tell(job, hook)

    def _hook(self, job: Job) -> tuple[str, ...]:
        config = self._config()
        return config.on_done if job.state is JobState.DONE else config.on_failed

    async def _tell(self, job: Job, hook: tuple[str, ...]) -> None:
        end, said = job.record.finished_at, message(job)
        trouble = await deliver(hook, said)
        attempt = self._tries.setdefault(job.id, _Try())
        if job.record.finished_at != end:
            return  # meanwhile it was tried again: that end is not this one
        if not trouble:
            if attempt.count:
                self._say(job, "info", f"told that it {_HAS[job.state]}, after all")
            self._told(job)
            return
        wait = min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(attempt.count, 20))
        attempt.count, attempt.again_at = attempt.count + 1, self._monotonic() + wait
        if attempt.count == 1:  # said once, not at every try
            self._say(job, "warning", f"could not tell that it {_HAS[job.state]}: {trouble}; trying again in "
                      f"{duration(wait)}, then ever more rarely")

    def _told(self, job: Job) -> None:
        job.record.told_at = job.record.finished_at
        self._tries.pop(job.id, None)
        self._keeper.save(job)

    def _say(self, job: Job, level: str, text: str) -> None:
        self._journal.event(Kind.HOOK, level, text, job=job.id, step=job.step)


def untold(job: Job) -> bool:
    """Whether the job has ended, well or badly, and nobody was told of this end."""
    r = job.record
    return job.state in (JobState.DONE, JobState.FAILED) and r.finished_at is not None and r.told_at != r.finished_at


def message(job: Job) -> dict[str, Any]:
    """What a receiver gets."""
    v = job.view()
    return {"job": v.id, "state": v.state.value, "why": v.why, "hint": v.hint, "step": v.step, "loss": v.loss,
            "eval_loss": v.eval_loss, "output": v.output, "finished_at": job.record.finished_at,
            "host": socket.gethostname()}


async def deliver(hook: tuple[str, ...], said: dict[str, Any]) -> str:
    """Run the program, or POST to the URL; why that did not work, or an empty text.

    After ``TELL_SECONDS``, and when cancelled, the program and all it started are gone.
    """
    env = {**os.environ, "RRD_JOB": said["job"], "RRD_STATE": said["state"]}
    argv, who = hook, hook[0]
    if hook[0].startswith("http"):  # such a URL may be a secret: no place for it in the list of processes, or a log
        env["RRD_URL"] = hook[0]
        argv, who = (sys.executable, "-m", "rrd.post"), urlsplit(hook[0]).netloc.rpartition("@")[2]
    try:
        process = await asyncio.to_thread(_started, argv, env, json.dumps(said).encode())
    except (OSError, ValueError) as e:
        return one_line(str(e), 300)
    trouble = await _watched(process)
    return f"{one_line(who, 200)}: {trouble}" if trouble else ""


def _started(argv: tuple[str, ...], env: dict[str, str], said: bytes) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as file:  # a pipe would have to be fed, for as long as nobody reads it
        file.write(said)
        file.seek(0)
        return subprocess.Popen(argv, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env,
                                start_new_session=True)


async def _watched(process: subprocess.Popen[bytes]) -> str:
    """How ``process`` ended, where that was badly. What it left running in the background is its own business."""
    assert process.stderr is not None
    end, heard = time.monotonic() + TELL_SECONDS, b""
    with process.stderr as stderr:
        os.set_blocking(stderr.fileno(), False)
        try:
            while (status := process.poll()) is None and time.monotonic() < end:
                heard = _newest(stderr, heard)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _gone(process)
        heard = _newest(stderr, heard)
    if status is None:
        return f"it had not ended after {duration(TELL_SECONDS)}"
    last = one_line(heard.decode(errors="replace").strip().rpartition("\n")[2], 300)
    return "" if status == 0 else last or f"it ended with status {status}"


async def _gone(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of what was killed, without blocking the loop: that end may never come."""
    for _ in range(round(KILLED_WITHIN / POLL_SECONDS)):
        if process.poll() is not None:
            return
        await asyncio.sleep(POLL_SECONDS)


def _newest(stderr: IO[bytes], heard: bytes) -> bytes:
    """The newest of what came there; a program that writes without end waits for the next call."""
    with suppress(OSError):  # nothing there just now
        for _ in range(64):
            heard = (heard + os.read(stderr.fileno(), 65536))[-4000:]
    return heard
