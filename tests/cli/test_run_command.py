"""rrd run and rrd daemon: how jobs get to the daemon in this process, and what its end becomes."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Rrd
from fake_daemon import FakeDaemon
from test_submit import GOOD, LEGACY, here, write

from rrd.config import Config

__all__ = ["here"]


class Ran:
    """What the stand-in for rrd.daemon was called with."""

    config: Config
    until_done: bool
    live: Callable[[str], None] | None
    returns = 0
    lines: tuple[str, ...] = ()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    ran = Ran()

    def run_daemon(config: Config, *, until_done: bool, live: Any, config_file: Path | None,
                   overrides: dict[str, Any]) -> int:
        ran.config, ran.until_done, ran.live = config, until_done, live
        assert Config.load(config_file, overrides) == config  # what a reload will find
        for line in ran.lines:
            live(line)
        return ran.returns

    module = types.ModuleType("rrd.daemon")
    module.run_daemon = run_daemon  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rrd.daemon", module)
    return ran


@pytest.mark.parametrize("code", [0, 1, 78])
def test_the_service(rrd: Rrd, state: Path, ran: Ran, code: int) -> None:
    ran.returns = code
    assert rrd("daemon").exit_code == code
    assert (ran.config.state_dir, ran.config.jobs_dir) == (state, state / "jobs.d")
    assert (ran.until_done, ran.live) == (False, None)


def test_the_older_tools_array_in_a_state_directory_of_its_own(rrd: Rrd, here: Path, ran: Ran) -> None:
    write(here / "jobs.json", json.dumps(LEGACY))
    ran.lines = ("[round 1] die 0 code: step 1/9 loss 2.34", "[round 1] die 1 prose: step 1/9 loss 3.1")
    result = rrd("run", "--config", "jobs.json", "--state", "st")
    assert result.exit_code == 0, result.output
    assert result.stdout == "\n".join(ran.lines) + "\n"
    c = ran.config
    assert (c.state_dir, c.cache_dir, c.run_dir, c.jobs_dir) == tuple(
        here / "st" / d for d in ("", "cache", "run", "jobs.d"))
    assert ran.until_done
    assert sorted(p.name for p in (here / "st/jobs.d").iterdir()) == ["code.toml", "prose.toml"]


def test_job_files_by_name_after_config_or_both(rrd: Rrd, here: Path, state: Path, ran: Ran) -> None:
    for name in "abc":
        write(here / f"{name}.toml", GOOD)
    assert rrd("run", "--config", "a.toml", "b.toml", "--config", "c.toml").exit_code == 0
    assert sorted(p.name for p in (state / "jobs.d").iterdir()) == ["a.toml", "b.toml", "c.toml"]


def test_only_the_jobs_named_run_and_no_other_file_is_lost(rrd: Rrd, here: Path, state: Path, ran: Ran) -> None:
    for name in "abc":
        write(here / f"{name}.toml", GOOD)
    rrd("run", "a.toml", "b.toml")
    inode = (state / "jobs.d/b.toml").stat().st_ino
    result = rrd("run", "b.toml", "c.toml")
    assert result.stderr == "1 other job of this state directory left out: a\n"
    assert sorted(p.name for p in (state / "jobs.d").iterdir()) == ["a.toml.off", "b.toml", "c.toml"]
    assert (state / "jobs.d/b.toml").stat().st_ino == inode  # unchanged: it keeps its place in the queue
    rrd("run", "a.toml")
    assert (state / "jobs.d/a.toml").exists()


def test_a_directory_is_the_spool_itself(rrd: Rrd, here: Path, state: Path, ran: Ran) -> None:
    write(here / "a.toml", GOOD)
    assert rrd("run", "--config", here).exit_code == 0
    assert ran.config.jobs_dir == here
    assert ran.config.state_dir == state
    assert not (state / "jobs.d").exists()


def test_without_jobs_the_spool_runs_as_it_is(rrd: Rrd, here: Path, state: Path, ran: Ran) -> None:
    (state / "jobs.d").mkdir(parents=True)
    write(state / "jobs.d/a.toml", GOOD)
    assert rrd("run").exit_code == 0
    assert ran.config.jobs_dir == state / "jobs.d"


def test_a_bad_job_keeps_everything_from_starting(rrd: Rrd, here: Path, state: Path, ran: Ran) -> None:
    write(here / "a.toml", GOOD)
    write(here / "jobs.json", "[{]")
    for args in (["a.toml", "none.toml"], ["jobs.json"], ["a.toml", str(here)]):
        result = rrd("run", *args)
        assert result.exit_code == 78, result.output
        assert result.stderr.startswith("error: ")
    assert not (state / "jobs.d").exists()
    assert not hasattr(ran, "config")


def test_beside_a_daemon_with_the_same_state_nothing_is_touched(
        rrd: Rrd, here: Path, state: Path, daemon: FakeDaemon, ran: Ran) -> None:
    (state / "jobs.d").mkdir()
    write(state / "jobs.d/a.toml", GOOD)
    write(here / "b.toml", GOOD)
    result = rrd("run", "b.toml")
    assert result.exit_code == 75
    assert "already running" in result.stderr
    assert [p.name for p in (state / "jobs.d").iterdir()] == ["a.toml"]


def test_training_goes_on_when_nobody_reads_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from rrd.cli.run import live

    def broken(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("click.echo", broken)
    live("step 1")
