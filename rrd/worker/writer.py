"""The thread that writes checkpoints to disk while other dies have their turns."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from rrd import checkpoint
from rrd.errors import RrdError
from rrd.messages import CommitFailed, Committed, Message
from rrd.worker.resident import Resident, Saved


class Writer:
    """Commits what was copied aside, one checkpoint after another, and reports each when it is durable."""

    def __init__(self, report: Callable[[Message], None]) -> None:
        self._report = report
        self._queue: queue.Queue[tuple[Resident, Saved, int] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def submit(self, resident: Resident, saved: Saved, keep: int) -> None:
        """Write ``saved`` of ``resident``, whose staging buffer is in use until it is done."""
        resident.written.clear()
        self._queue.put((resident, saved, keep))

    def finish(self) -> None:
        """Wait for all that was submitted."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while item := self._queue.get():
            resident, saved, keep = item
            try:
                self._report(commit(resident, saved, keep))
            finally:
                resident.written.set()


def commit(resident: Resident, saved: Saved, keep: int) -> Committed | CommitFailed:
    """Write one checkpoint, then collect the old ones. Only what is durable is reported as committed."""
    start = time.monotonic()
    try:
        resident.history.sync()
        _, manifest = checkpoint.commit(
            resident.dir, job=resident.job, step=saved.step, identity=saved.identity, files=saved.files,
            expected_bytes=saved.size)
    except RrdError as e:
        return CommitFailed(job=resident.job, step=saved.step, message=e.message, hint=e.hint)
    except OSError as e:
        return CommitFailed(job=resident.job, step=saved.step, message=str(e))
    resident.committed_step = saved.step
    checkpoint.collect(resident.dir, keep)
    return Committed(job=resident.job, step=saved.step, bytes=manifest.size, seconds=time.monotonic() - start)
