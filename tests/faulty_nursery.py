"""The nursery, whose workers do what the script in RRD_FAULTS says: ``faulty_nursery.py FD``."""

from __future__ import annotations

import os
from pathlib import Path

import faulty_worker

from rrd.worker import nursery

faulty_worker.install(Path(os.environ["RRD_FAULTS"]))
nursery.main()
