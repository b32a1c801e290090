"""``rrd`` whose workers fail as told: ``faulty_daemon.py ARGUMENTS``. RRD_FAULTS names the script (faulty_worker.py).

Nothing of this is in rrd itself: another nursery is started in place of its own, which forks rrd's own workers.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from rrd.handle import Nursery

Nursery.__init__.__defaults__ = ((sys.executable, str(Path(__file__).with_name("faulty_nursery.py"))),)
sys.argv[0] = "rrd"
sys.path.remove(str(Path(__file__).parent))
runpy.run_module("rrd", run_name="__main__")
