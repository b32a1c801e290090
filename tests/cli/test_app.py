"""The command as a whole: help, exit codes, sentences for users' mistakes, tracebacks for ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Rrd
from fake_daemon import FakeDaemon

from rrd.cli.app import COMMANDS, app


def test_help_names_every_command_and_each_has_its_own(rrd: Rrd) -> None:
    text = rrd("--help").stdout
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in text
        assert line.split(".")[0] in text
        own = rrd(name, "--help")
        assert own.exit_code == 0, name
        assert own.stdout.startswith(f"Usage: rrd {name}")
        assert ("--config-file" in own.stdout) is (name not in ("completion", "install-service", "bench")), name
    assert app.list_commands(None) == list(COMMANDS)


def test_help_is_quick_and_no_command_needs_torch() -> None:
    code = ("import sys; from rrd.cli.app import app, COMMANDS\n"
            "app(['--help'], standalone_mode=False)\n"
            "assert not {'pydantic', 'rich', 'torch', 'asyncio'} & set(sys.modules)\n"
            "for name in COMMANDS: app([name, '--help'], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules")
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert time.perf_counter() - start < 5


def test_a_mistyped_command_is_guessed(rrd: Rrd) -> None:
    result = rrd("statsu")
    assert result.exit_code == 2
    assert "Did you mean 'status'?" in result.stderr


@pytest.mark.parametrize("args", [
    ["pause"], ["status", "--nope"], ["verify"], ["verify", "a", "--all"], ["submit"], ["export", "a"], ["logs"],
    ["completion", "tcsh"], ["watch", "--interval", "0"], ["run"]])
def test_usage_errors(rrd: Rrd, args: list[str]) -> None:
    result = rrd(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: rrd")
    assert result.stdout == ""


def test_a_bad_configuration_is_one_sentence(rrd: Rrd, tmp_path: Path) -> None:
    bad = tmp_path / "rrd.toml"
    bad.write_text("jobs_per_dye = 3\n")
    result = rrd("status", "-c", bad)
    assert result.exit_code == 78
    assert result.stderr.splitlines()[0].startswith("error: ")
    assert "rrd.toml:1: unknown key `jobs_per_dye`" in result.stderr
    assert "hint: did you mean `jobs_per_die`?" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_daemons_refusals_keep_their_sentence_and_code(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.refuse("reload", "/etc/rrd/rrd.toml:3: no\x1b[2J", 78, "yes")
    result = rrd("reload")
    assert (result.exit_code, result.stderr) == (78, "error: /etc/rrd/rrd.toml:3: no\\u001b[2J\nhint: yes\n")


def test_debug_shows_where_it_comes_from(rrd: Rrd) -> None:
    result = rrd("--debug", "status")
    assert type(result.exception).__name__ == "NotRunning"


def _rrd(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rrd", *args], env={**os.environ, **env}, text=True,
                          capture_output=True, timeout=60, check=False)


def test_our_own_bug_gives_a_traceback_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import rrd.client\nrrd.client.call = None\n")
    result = _rrd("reload", "--state", str(tmp_path), PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("This is a bug in rrd, not your mistake. Please report it with the lines above.\n")


def test_on_a_real_terminal(tmp_path: Path) -> None:
    plain = on_terminal(tmp_path, NO_COLOR="1")
    assert plain.startswith(b"error: rrd is not running")
    assert b"\x1b" not in plain
    assert b"\x1b[31m" in on_terminal(tmp_path)


def on_terminal(state: Path, **env: str) -> bytes:
    """What `rrd status` writes to a terminal, with no daemon there."""
    leader, follower = os.openpty()
    clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    subprocess.run([sys.executable, "-m", "rrd", "status", "--state", str(state)], env={**clean, **env}, timeout=60,
                   stdin=follower, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    said = os.read(leader, 65536)
    os.close(leader)
    return said


def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(f"{sys.executable} -m rrd --help | head -c 1; echo ${{PIPESTATUS[0]}}", shell=True,
                          executable="/bin/bash", text=True, capture_output=True, timeout=60, check=False)
    assert done.stdout.endswith("0\n")
    assert done.stderr == ""


def test_a_terminal_without_utf8_ends_no_command(tmp_path: Path) -> None:
    job = tmp_path / "a.toml"
    job.write_text('model = "/models/日本"\ndata = "/d.txt"\n')
    result = _rrd("check", str(job), "--state", str(tmp_path / "s"), PYTHONIOENCODING="latin-1")
    assert result.returncode == 0, result.stderr
    assert "\\u65e5\\u672c" in result.stdout


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path) -> None:
    result = _rrd("status", "--state", "")
    assert result.returncode == 2
    assert "a variable that is not set?" in result.stderr
