"""``python -m rrd.helper``."""

from __future__ import annotations

import sys

from rrd.helper.main import main

sys.exit(main())
