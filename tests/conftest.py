from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "campaign")]  # toys and boxes for tests in subdirectories; the campaign for all
