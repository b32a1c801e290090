"""Running ``rrd`` in a test, against a fake daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_daemon import FakeDaemon

from rrd.cli.app import app

Rrd = Callable[..., Result]


@pytest.fixture
def daemon(state: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(state / "run")
    yield fake
    fake.close()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory, which every command of the test means by default."""
    for variable in ("NO_COLOR", "COLUMNS", "RRD_CONFIG", "RRD_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    state = tmp_path / "state"
    for name, below in (("STATE", ""), ("CACHE", "cache"), ("RUN", "run"), ("JOBS", "jobs.d")):
        monkeypatch.setenv(f"RRD_{name}_DIR", str(state / below))
    monkeypatch.setenv("HOME", str(tmp_path))
    return state


@pytest.fixture
def rrd(state: Path) -> Rrd:
    """Run ``rrd`` with these arguments."""
    def run(*args: str | Path, **more: Any) -> Result:
        return CliRunner().invoke(app, [str(a) for a in args], prog_name="rrd", **more)
    return run
