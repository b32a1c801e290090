"""The units, as systemd itself judges them."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from rrd.config import Config
from rrd.helper import config as helper_config
from rrd.helper import main as helper
from rrd.helper.config import HelperConfig

UNITS = Path(__file__).parent.parent / "units"
SERVICE = UNITS / "rrd.service"
GATE = UNITS / "rrd-gate.service"
WORST_EXPOSURE = 1.5

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (apt-get install systemd)"
)


def directives(unit: Path) -> dict[str, list[str]]:
    """What a unit sets; the values of a directive in their order."""
    found = defaultdict(list)
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", " ")):
            found[name].append(value)
    return found


def analyze(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *args], capture_output=True, text=True, timeout=60, check=False)


def runnable(directory: Path) -> dict[str, Path]:
    """All units, by name, with a program that is there."""
    units = sorted(p for p in UNITS.iterdir() if p.suffix in (".service", ".socket", ".target"))
    for unit in units:
        text = re.sub(r"^(Exec\w+=[-+]?)/usr/\S+", r"\1/bin/true", unit.read_text(), flags=re.M)
        (directory / unit.name).write_text(text)
    return {unit.name: directory / unit.name for unit in units}


@needs_systemd
def test_systemd_understands_every_directive(tmp_path: Path) -> None:
    """``verify`` exits with 0 on directives it does not know: only silence means yes."""
    for unit in runnable(tmp_path).values():
        judged = analyze("verify", "--man=no", "--recursive-errors=no", str(unit))
        assert (judged.returncode, judged.stderr) == (0, ""), unit.name


@needs_systemd
def test_verify_would_see_a_mistake(tmp_path: Path) -> None:
    unit = tmp_path / SERVICE.name
    unit.write_text(SERVICE.read_text().replace("ProtectClock=yes", "ProtectClocks=yes"))
    assert "ProtectClocks" in analyze("verify", "--man=no", "--recursive-errors=no", str(unit)).stderr


@needs_systemd
@pytest.mark.parametrize(("service", "worst"), [(SERVICE, WORST_EXPOSURE), (GATE, WORST_EXPOSURE)], ids=["rrd", "gate"])
def test_exposure_is_at_most_one_and_a_half(service: Path, worst: float) -> None:
    judged = analyze("security", "--offline=true", f"--threshold={worst * 10:.0f}", str(service))
    assert judged.returncode == 0, judged.stdout[-300:] + judged.stderr


@needs_systemd
def test_systemd_makes_the_user_and_the_directories(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for tool, kind in (("systemd-sysusers", "sysusers.d"), ("systemd-tmpfiles", "tmpfiles.d")):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
        create = ["--create"] if kind == "tmpfiles.d" else []
        made = subprocess.run([tool, f"--root={tmp_path}", *create, str(UNITS / kind / "rrd.conf")],
                              capture_output=True, text=True, timeout=60, check=False)
        assert made.returncode == 0, made.stderr
    assert "rrd:x:" in (tmp_path / "etc" / "passwd").read_text()
    spool = (tmp_path / "etc" / "rrd" / "jobs.d").stat()
    assert stat.S_IMODE(spool.st_mode) == 0o3775, "members add files, and change or remove only their own"


def test_the_service_keeps_its_promises() -> None:
    unit = directives(SERVICE)
    assert unit["Type"] == ["notify"]
    assert unit["WatchdogSec"] == ["30"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == ["78"]  # BadConfig.exit_code
    assert unit["KillMode"] == ["mixed"]
    assert unit["ExecStart"] == ["/usr/lib/rrd/venv/bin/rrd daemon"]
    assert unit["User"] == ["rrd"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"], "the last status outlives the daemon"
    assert unit["CapabilityBoundingSet"] == [""]
    assert "MemoryDenyWriteExecute" not in unit, "it breaks torch"
    assert "ProcSubset" not in unit, "it hides /proc/cpuinfo"
    assert unit["SystemCallErrorNumber"] == ["EPERM"], "else a library that pins its threads is killed"


def test_the_service_can_write_where_the_daemon_does_by_default() -> None:
    unit = directives(SERVICE)
    for directive, base, field in (
        ("StateDirectory", "/var/lib", "state_dir"),
        ("CacheDirectory", "/var/cache", "cache_dir"),
        ("RuntimeDirectory", "/run", "run_dir"),
        ("ConfigurationDirectory", "/etc", "jobs_dir"),
    ):
        (name,) = unit[directive]
        assert Config.model_fields[field].default.is_relative_to(Path(base) / name)


def test_the_gate_keeps_its_promises() -> None:
    """Its crash is put back; what it was started with is where it looks; it is root and nothing more."""
    unit, listening = directives(GATE), directives(UNITS / "rrd-gate.socket")
    (program,) = unit["ExecStart"]
    assert unit["ExecStopPost"] == [f"{program} --restore"]
    assert unit["RestartPreventExitStatus"] == [str(helper.BAD_CONFIG)]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"], "else the state that ExecStopPost= could not restore is lost"
    assert [f"/run/{name}/state.json" for name in unit["RuntimeDirectory"]] == [
        helper._arguments().parse_args([]).state]
    assert listening["ConditionPathExists"] == [helper_config.PATH]
    assert (listening["SocketGroup"], listening["SocketMode"], listening["Accept"]) == (["rrd"], ["0660"], ["no"])
    (path,) = listening["ListenStream"]
    assert f'#socket = "{path}"' in (UNITS.parent / "etc" / "rrd.toml").read_text()
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["ReadWritePaths"] == ["/sys/devices"], "where configuration space is"
    assert "ProcSubset" not in unit, "it hides the id of the boot"
    assert int(unit["TimeoutStopSec"][0]) > HelperConfig().grace


@pytest.mark.parametrize("unit", sorted(p.name for p in UNITS.glob("rrd*")))
def test_every_block_of_a_unit_is_explained(unit: str) -> None:
    """Settings stand under a comment that says why, with no blank line between."""
    explained = False
    for line in (UNITS / unit).read_text().splitlines():
        if line.startswith("#"):
            explained = True
        elif not line.strip():
            explained = False
        elif line.startswith("["):
            explained = line in ("[Unit]", "[Install]")
        else:
            assert explained or not line, line
