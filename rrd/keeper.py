"""Blocking disk work for the scheduler, in order, in one thread of its own: a slow disk never stops the loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rrd import checkpoint, durable
from rrd.errors import RrdError
from rrd.job import INPUT_KEYS, JobSpec, to_toml
from rrd.ledger import Ledger
from rrd.roster import Job


class Keeper:
    """Saves records and moves checkpoints aside. ``trouble`` hears, on the loop, what could not be written."""

    def __init__(self, ledger: Ledger, trouble: Callable[[str, RrdError], None]) -> None:
        self.ledger, self._trouble = ledger, trouble
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keeper")
        self.bug: BaseException | None = None
        """What went wrong that is no fault of the disk; the daemon looks, and ends with it."""

    def save(self, job: Job, *, spec: bool = False) -> None:
        """Write the job's record as it is now, and with ``spec`` its job file as accepted. Returns at once."""
        record, text = job.record.model_copy(), to_toml(job.spec) if spec else None
        self._watch(job.id, self._thread.submit(self.ledger.save, record, text))

    def set_aside(self, job: Job, then: Callable[[], None], failed: Callable[[RrdError], None] | None = None) -> None:
        """Take the job's checkpoints out of use; ``then``, or ``failed`` where the disk does not let us, follows."""
        future = self._thread.submit(set_aside, self.ledger.dir(job.id))
        self._watch(job.id, future, then, failed)

    def facts(self, spec: JobSpec, then: Callable[[str], None]) -> None:
        """Call ``then`` on the loop with what the files that ``spec`` names look like now."""
        loop = asyncio.get_running_loop()

        def done(f: Future[str]) -> None:
            self.bug = self.bug or f.exception()
            if not f.exception():
                loop.call_soon_threadsafe(then, f.result())

        self._thread.submit(facts_of, spec).add_done_callback(done)

    def _watch(self, job: str, future: Future[None], then: Callable[[], None] | None = None,
               failed: Callable[[RrdError], None] | None = None) -> None:
        loop = asyncio.get_running_loop()

        def done(f: Future[None]) -> None:
            e = f.exception()
            if isinstance(e, RrdError):
                loop.call_soon_threadsafe(self._trouble, job, e)
                if failed is not None:
                    loop.call_soon_threadsafe(failed, e)
            elif e is not None:
                self.bug = e
            elif then is not None:
                loop.call_soon_threadsafe(then)

        future.add_done_callback(done)

    async def flush(self) -> None:
        """Wait until all that was asked for before has been done."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def set_aside(job_dir: Path) -> None:
    """Rename a job's checkpoints so that it starts at step 0; those set aside before are removed. Interrupted, the
    newest is still in use. Raises DiskTrouble."""
    try:
        saved = checkpoint.listing(job_dir)
        for old in job_dir.glob(".old-*") if saved else ():
            durable.discard_dir(old)
        for _, path in reversed(saved):
            durable.DISK.rename(path, path.with_name(f".old-{path.name}"))
        if saved:
            durable.fsync_dir(job_dir)
    except OSError as e:
        raise durable.trouble(e, job_dir) from e


def facts_of(spec: JobSpec) -> str:
    """Sizes, times and rights of the files a job depends on: when they change, a failed job is worth another try."""
    named = [Path(name) for key in INPUT_KEYS if (name := getattr(spec, key))]
    return "; ".join(_fact(file) for path in named for file in (path, *_inside(path)))[:4000]


def _inside(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _fact(file: Path) -> str:
    try:
        s = os.stat(file)
    except OSError as e:
        return f"{file.name} {e.errno}"
    return f"{file.name} {s.st_size} {s.st_mtime_ns} {s.st_mode:o} {s.st_uid}"
