"""``python -m rrd.helper``."""

from __future__ import annotations

import sys

from rrd.helper.main import main

if __name__ == "__main__":
    sys.exit(main())
