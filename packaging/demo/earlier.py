"""Make way for this demo: ``python packaging/demo/earlier.py .demo``.

Where ``make`` was killed, the ``rrd run`` that it had begun goes on by itself. It is asked to stop, which saves all of
its jobs, so that this demo can go on with them where one sees it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rrd.client import alive, call
from rrd.errors import RrdError

PATIENCE = 120.0
"""Seconds for a step in progress and the checkpoints, on a busy box."""


def stop(run_dir: Path) -> str:
    """End the daemon that answers in ``run_dir``, if one does. Returns what is wrong, or nothing."""
    if not alive(run_dir):
        return ""
    try:
        pid = int(call(run_dir, "status")["pid"])
    except RrdError:
        return ""  # it has just gone
    print(f"an earlier demo is still running here (process {pid}): it saves its jobs, and this one goes on with them",
          flush=True)
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.2)
    return f"process {pid} does not stop; end it, then try again" if os.path.exists(f"/proc/{pid}") else ""


if __name__ == "__main__":
    sys.exit(stop(Path(sys.argv[1]).absolute() / "state/run") or 0)
