"""What ``rrd install-service`` would put where; the real thing on a real systemd is in tests/systemd."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import Rrd

from rrd.cli import install_service

UNITS = Path(__file__).parents[2] / "units"


def test_everything_a_package_would_bring_lies_below_the_root(rrd: Rrd, tmp_path: Path) -> None:
    done = rrd("install-service", "--root", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    units = tmp_path / "etc/systemd/system"
    assert {p.name for p in units.iterdir()} == {p.name for p in UNITS.glob("rrd*")}
    text = (units / "rrd.service").read_text()
    assert f"ExecStart={sys.prefix}/bin/rrd daemon" in text and "/usr/lib/rrd/venv" not in text
    for path in ("etc/sysusers.d/rrd.conf", "etc/tmpfiles.d/rrd.conf", "etc/rrd/rrd.toml",
                 "usr/local/share/man/man1/rrd.1", "usr/local/share/bash-completion/completions/rrd"):
        assert (tmp_path / path).stat().st_mode & 0o777 == 0o644
    assert os.readlink(tmp_path / "usr/local/bin/rrd") == f"{sys.prefix}/bin/rrd"


def test_a_configuration_is_never_replaced_or_removed(rrd: Rrd, tmp_path: Path) -> None:
    config = tmp_path / "etc/rrd/rrd.toml"
    config.parent.mkdir(parents=True)
    config.write_text("cpu_dies = 3\n")
    rrd("install-service", "--root", str(tmp_path))
    rrd("install-service", "--root", str(tmp_path), "--remove")
    assert config.read_text() == "cpu_dies = 3\n"
    assert [p for p in tmp_path.rglob("*") if p.is_file() or p.is_symlink()] == [config]


def test_a_dry_run_only_talks(rrd: Rrd, tmp_path: Path) -> None:
    done = rrd("install-service", "--root", str(tmp_path), "--dry-run")
    assert f"{tmp_path}/etc/systemd/system/rrd.service" in done.stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_services_cannot_see_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "venv").mkdir(parents=True)
    closed.chmod(0o700)
    assert install_service._unreachable(closed / "venv") == f"{closed} is closed to other users"
    assert install_service._unreachable(Path("/root/venv")) == "services see nothing below /root"
    assert install_service._unreachable(Path("/usr/bin")) == ""


def test_the_command_of_pipx_is_left_to_pipx(rrd: Rrd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_service, "_of_pipx", lambda: True)
    rrd("install-service", "--root", str(tmp_path))
    command = tmp_path / install_service.COMMAND
    assert not os.path.lexists(command)
    command.parent.mkdir(parents=True, exist_ok=True)
    command.symlink_to(f"{sys.prefix}/bin/rrd")
    rrd("install-service", "--root", str(tmp_path), "--remove")
    assert command.is_symlink()
