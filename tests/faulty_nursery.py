"""The nursery, whose workers do what the script in RRD_FAULTS says: ``faulty_nursery.py FD``."""

from __future__ import annotations

import os
from pathlib import Path

import faulty_worker
import torch._dynamo  # or the first worker in a mode of ours would import it, and be silent for seconds

from rrd.worker import nursery

assert torch._dynamo
faulty_worker.install(Path(os.environ["RRD_FAULTS"]))
nursery.main()
