"""The command ``rrd``. Each command lives in the module of its topic, imported when it is used."""

from __future__ import annotations

import os
import sys

from rrd.cli.app import app


def main() -> None:
    """The console script. Exit codes: see :mod:`rrd.errors`; 2 is a usage error, 130 an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a command
    try:
        app(prog_name="rrd")
    except BrokenPipeError:  # `rrd status | head`: nobody reads on, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
