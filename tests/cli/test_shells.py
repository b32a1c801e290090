"""The tab key in the shells themselves, with the scripts as they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toys import write_job

SCRIPTS = Path(__file__).parents[2] / "packaging" / "completion"


def shell(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name} (apt-get install {name})")


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has rrd in the path and two jobs in the spool."""
    (tmp_path / "bin").mkdir()
    rrd = tmp_path / "bin" / "rrd"
    rrd.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from rrd.cli import main; main()' \"$@\"\n")
    rrd.chmod(0o755)
    jobs = tmp_path / "jobs.d"
    jobs.mkdir()
    for name in ("code-a", "code-b", "prose"):
        write_job(jobs, name, model="/m", data="/d")
    return {**os.environ, "PATH": f"{rrd.parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
            "RRD_JOBS_DIR": str(jobs), "RRD_STATE_DIR": str(tmp_path / "state"),
            "RRD_RUN_DIR": str(tmp_path / "run"), "TERM": "dumb"}


def run(world: dict[str, str], *argv: str) -> list[str]:
    done = subprocess.run(argv, env=world, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.split() or [done.stderr]


def test_bash(world: dict[str, str]) -> None:
    script = f"""
source {SCRIPTS}/rrd.bash
press() {{
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _rrd_completion rrd "${{@: -1}}"; echo "${{COMPREPLY[@]}}"
}}
press rrd pau; press rrd pause co; complete -p rrd"""
    found = run(world, "bash", "--norc", "-c", script)
    assert found[:3] == ["pause", "code-a", "code-b"] and found[-1] == "rrd"


@shell("fish")
def test_fish(world: dict[str, str]) -> None:
    script = f"source {SCRIPTS}/rrd.fish; complete -C 'rrd pause co'; complete -C 'rrd subm'"
    found = run(world, "fish", "--no-config", "-c", script)
    assert {"code-a", "code-b", "submit"} <= set(found) and "prose" not in found


@shell("zsh")
def test_zsh(world: dict[str, str]) -> None:
    """What the completion system is told, by stand-ins for its builtins: the real ones want a terminal."""
    script = f"""
fpath=({SCRIPTS} $fpath); autoload -Uz compinit _rrd; compinit -u -D
compadd() {{ print -l -- ${{(P)@[-1]}}; }}; _describe() {{ print -l -- ${{(P)@[-1]}} ${{(P)@[-2]}}; }}
words=(rrd pause co); CURRENT=3; _rrd; print -- $_comps[rrd]"""
    found = run(world, "zsh", "-f", "-c", script)
    assert {"code-a", "code-b"} <= set(found) and "prose" not in found
    assert found[-1] in ("_rrd", "_rrd_completion"), found
