"""Tells the outside world that a job has ended: a program is run, or a URL gets a POST, with the job as JSON.

At least once: the ledger remembers which end was told, so what a crash or a dead receiver left untold is told later.
Never in the way: one at a time, in a thread, with a deadline; a receiver that fails is asked again, ever more rarely.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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
        """Tell every end that is still to be told and whose time has come."""
        async with self._telling:
            for job in [j for j in self._jobs() if untold(j)]:
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
        trouble = await asyncio.to_thread(deliver, hook, said)
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


def deliver(hook: tuple[str, ...], said: dict[str, Any]) -> str:
    """Run the program, or POST to the URL; why that did not work, or an empty text. Blocks up to ``TELL_SECONDS``."""
    data = json.dumps(said).encode()
    try:
        return _post(hook[0], data) if hook[0].startswith("http") else _run(hook, said, data)
    except Exception as e:  # what answers is not ours, and may answer anything; a daemon has no business dying of it
        return one_line(str(e), 300) or type(e).__name__


def _post(url: str, data: bytes) -> str:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", "User-Agent": "rrd"})
    with urllib.request.urlopen(request, timeout=TELL_SECONDS) as answer:
        return "" if answer.status < 300 else f"{url} answered {answer.status}"


def _run(argv: tuple[str, ...], said: dict[str, Any], data: bytes) -> str:
    """No shell sees the arguments; the program and all it started are gone at the deadline."""
    env = {**os.environ, "RRD_JOB": said["job"], "RRD_STATE": said["state"]}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env,
                               start_new_session=True)
    try:
        _, errors = process.communicate(data, timeout=TELL_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{argv[0]} had not ended after {duration(TELL_SECONDS)}"
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode == 0:
        return ""
    return f"{argv[0]} ended with status {process.returncode}" + (f": {last}" if last else "")
