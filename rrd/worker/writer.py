"""The thread that writes checkpoints to disk while other dies have their turns."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable

from rrd import checkpoint
from rrd.errors import DiskTrouble
from rrd.messages import CommitFailed, Committed, Message
from rrd.worker.channel import Closed
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
            except Closed:
                pass  # nobody is there to hear it; the main thread sees that too
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # a worker that cannot save must not train on as if it could
            finally:
                resident.written.set()


def commit(resident: Resident, saved: Saved, keep: int) -> Committed | CommitFailed:
    """Write one checkpoint, then collect the old ones. Only what is durable is reported as committed."""
    start = time.monotonic()
    try:
        resident.history.sync()
        _, manifest = checkpoint.commit(
            resident.dir, job=resident.job, step=saved.step, identity=saved.identity, files=saved.files)
    except DiskTrouble as e:
        return CommitFailed(job=resident.job, step=saved.step, message=e.message, hint=e.hint)
    resident.committed_step = saved.step
    checkpoint.collect(resident.dir, keep)
    return Committed(job=resident.job, step=saved.step, bytes=manifest.size, seconds=time.monotonic() - start)
