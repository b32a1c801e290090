"""rrd pause, resume, cancel, restart, reload; and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from conftest import Rrd
from fake_daemon import HOSTILE, FakeDaemon, job, snapshot

from rrd.cli.app import app


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "restart"])
def test_each_job_is_asked_for_once(rrd: Rrd, daemon: FakeDaemon, verb: str) -> None:
    daemon.answers[verb] = lambda r: {"ok": True, "result": f"{r['job']} hears\x1b[2J"}
    result = rrd(verb, "a", "b", "a")
    assert result.exit_code == 0
    assert daemon.asked == [{"verb": verb, "job": "a"}, {"verb": verb, "job": "b"}]
    assert result.stdout == ""
    assert result.stderr == "a hears\\u001b[2J\nb hears\\u001b[2J\n"


def test_restart_at_step_0_and_a_die_back_in_use(rrd: Rrd, daemon: FakeDaemon) -> None:
    rrd("restart", "--fresh", "a")
    rrd("dies", "--unfence", "3")
    assert daemon.asked == [{"verb": "restart", "job": "a", "fresh": True}, {"verb": "unfence", "die": "3"}]


def test_reload(rrd: Rrd, daemon: FakeDaemon) -> None:
    daemon.answers["reload"] = {"ok": True, "result": "6 jobs, 1 file not taken"}
    assert rrd("reload").stderr == "6 jobs, 1 file not taken\n"


def test_one_refusal_keeps_no_other_job_from_being_asked(rrd: Rrd, daemon: FakeDaemon) -> None:
    no = {"ok": False, "error": {"message": "there is no job b", "hint": "", "exit_code": 4}}
    daemon.answers["pause"] = lambda r: no if r["job"] == "b" else {"ok": True, "result": f"{r['job']} rests"}
    result = rrd("pause", "a", "b", "c")
    assert result.exit_code == 4
    assert [r["job"] for r in daemon.asked] == ["a", "b", "c"]
    assert "error: there is no job b\n" in result.stderr
    assert "c rests" in result.stderr


# ---- which daemon ------------------------------------------------------------------------------------------------


def test_state_stands_for_all_directories(rrd: Rrd, tmp_path: Path) -> None:
    other = FakeDaemon(tmp_path / "other/run")
    try:
        assert rrd("reload", "--state", tmp_path / "other").exit_code == 0
        assert rrd("reload", "--run-dir", tmp_path / "other/run").exit_code == 0
        assert rrd("reload", env={"RRD_RUN_DIR": str(tmp_path / "other/run")}).exit_code == 0
        config = tmp_path / "rrd.toml"
        config.write_text(f'run_dir = "{tmp_path}/other/run"\n')
        assert rrd("reload", "-c", config, env={"RRD_RUN_DIR": None}).exit_code == 0
        assert len(other.asked) == 4
    finally:
        other.close()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """No option and no variable that says which daemon; root's and one's own places below tmp_path."""
    import rrd.config

    for variable in ("RRD_STATE_DIR", "RRD_CACHE_DIR", "RRD_RUN_DIR", "RRD_JOBS_DIR"):
        monkeypatch.delenv(variable)
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    machine = {"run_dir": str(tmp_path / "machine"), "state_dir": str(tmp_path / "s")}
    own_dirs = rrd.config.default_dirs
    monkeypatch.setattr(rrd.config, "default_dirs", lambda env, service: machine if service else own_dirs(env, service))
    monkeypatch.setattr(rrd.config, "is_service", lambda env: False)
    monkeypatch.setattr(rrd.config, "SYSTEM_CONFIG", tmp_path / "none.toml")
    return {"own": tmp_path / "own/rrd", "machine": tmp_path / "machine"}


def test_ones_own_daemon_comes_first_and_the_machines_next(rrd: Rrd, two: dict[str, Path]) -> None:
    machine = FakeDaemon(two["machine"])
    assert rrd("reload").exit_code == 0
    own = FakeDaemon(two["own"])
    assert rrd("reload").exit_code == 0
    assert (len(machine.asked), len(own.asked)) == (1, 1)
    own.close()
    machine.close()


def test_with_no_daemon_ones_own_last_status_is_shown(rrd: Rrd, two: dict[str, Path]) -> None:
    for directory, name in ((two["own"], "mine"), (two["machine"], "machines")):
        (directory / "status").mkdir(parents=True)
        (directory / "status/snapshot.json").write_text(snapshot(job(name)).model_dump_json())
    assert "mine " in rrd("status").stdout
    (two["own"] / "status/snapshot.json").unlink()
    assert "machines " in rrd("status").stdout


# ---- completion --------------------------------------------------------------------------------------------------


def complete(*args: str, incomplete: str) -> list[str]:
    found = ShellComplete(app, {}, "rrd", "_RRD_COMPLETE").get_completions(list(args), incomplete)
    return [item.value for item in found]


def test_jobs_are_completed_from_status_and_spool(state: Path) -> None:
    assert complete("logs", incomplete="") == []
    (state / "run/status").mkdir(parents=True)
    (state / "jobs.d").mkdir()
    (state / "run/status/snapshot.json").write_text(
        snapshot(job("code-a"), job("code-b"), job(HOSTILE), job("$(reboot)")).model_dump_json())
    for name in ("code-c.toml", "prose.toml", ".code-d.toml.swp", "code-e.toml~"):
        (state / "jobs.d" / name).touch()
    assert complete("logs", incomplete="code") == ["code-a", "code-b", "code-c"]
    assert complete("pause", "code-a", incomplete="") == ["code-b", "code-c", "prose"]
    (state / "run/status/snapshot.json").write_text("{")
    assert complete("status", incomplete="") == ["code-c", "prose"]
    assert complete("status", "--state", str(state / "none"), incomplete="") == []


def test_commands_are_completed() -> None:
    assert complete(incomplete="ch") == ["check", "checkpoints"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(rrd: Rrd, shell: str) -> None:
    script = rrd("completion", shell).stdout
    assert "_RRD_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)


def test_bash_gets_the_jobs(state: Path) -> None:
    (state / "jobs.d").mkdir(parents=True)
    (state / "jobs.d/code-a.toml").touch()
    env = {**os.environ, "_RRD_COMPLETE": "bash_complete", "COMP_WORDS": "rrd logs co", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", "from rrd.cli import main; main()"], env=env, text=True,
                          capture_output=True, timeout=60, check=False)
    assert done.stdout == "plain,code-a\n"
