"""Where a worker stood when it was ended: faulthandler's dump of all its threads, as one line for people."""

from __future__ import annotations

import re

MAX_BYTES = 64 * 1024
"""So much of a dump is kept."""
INNERMOST = 6
"""Frames that are named of each thread."""

_FRAME = re.compile(r'^  File "(?:[^"]*/)?([^"/]*)", line (\d+) in (.*)$')


def summary(dump: str) -> str:
    """``"it stood in _micro_step (step.py:88) < train_step (step.py:95); another thread in …"``; empty for no dump."""
    threads: list[list[str]] = []
    frames: list[str] = []
    for line in dump.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = []
            threads.insert(0 if line.startswith("Current") else len(threads), frames)
        elif (m := _FRAME.match(line)) and len(frames) < INNERMOST:
            frames.append(f"{m[3]} ({m[1]}:{m[2]})")
    said = [" < ".join(frames) for frames in threads if frames]
    return "; another thread in ".join(said) and "it stood in " + "; another thread in ".join(said)
