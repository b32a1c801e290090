"""Debian 13, whose systemd is 257: what it says of the units, and the package's short story on it.

Its files come from a mirror (debootstrap, some minutes), or from the directory that ``RRD_TRIXIE`` names. Its own
Python has no torch here: the environment is made of that of these tests, as ``PYTHON=`` in setup.conf allows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import Machine
from package import build, marker
from service import ENDLESS, INPUTS, PYTHON, SITE, VENV, Service

MIRROR = "http://deb.debian.org/debian"
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,procps"
HOME = "/opt/python"
UNITS = ("rrd.service", "rrd-gate.service", "rrd-gate.socket", "rrd-metrics.socket", "rrd.target")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(shutil.which("dh") is None, reason="needs debhelper (apt-get install debhelper)"),
              pytest.mark.skipif(sys.base_prefix == "/usr", reason="needs a Python apart, such as pyenv's or uv's")]


@pytest.fixture(scope="module")
def trixie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its root directory."""
    if there := os.environ.get("RRD_TRIXIE"):
        return Path(there)
    if shutil.which("debootstrap") is None:
        pytest.skip("needs debootstrap (apt-get install debootstrap), or Debian 13 in the directory RRD_TRIXIE")
    directory = tmp_path_factory.mktemp("trixie")
    fetch = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "trixie", str(directory), MIRROR]
    made = subprocess.run(fetch, capture_output=True, text=True, timeout=1200, check=False)
    if made.returncode != 0:
        pytest.skip(f"needs a mirror of Debian: {made.stdout.strip()[-300:]}")
    return directory


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, trixie: Path, inputs: Path) -> Iterator[Service]:
    package = build(tmp_path_factory.mktemp("package"), "0.1.0")
    files = {f"{VENV}/pyvenv.cfg": (f"home = {HOME}/bin\n", 0o644),
             f"{SITE}/tests.pth": ("/opt/site-packages\n", 0o644),
             f"{VENV}/rrd-setup.json": (marker(), 0o644),
             "/etc/ld.so.conf.d/python.conf": (f"{HOME}/lib\n", 0o644),
             "/etc/rrd/setup.conf": (f"TORCH=cpu\nPYTHON={HOME}/bin/{PYTHON}\n", 0o644)}
    machine = Machine(tmp_path_factory.mktemp("machine") / "trixie", lower=trixie, files=files,
                      links={f"{VENV}/bin/python": f"{HOME}/bin/{PYTHON}"},
                      binds={inputs: INPUTS, package: "/srv/rrd.deb", Path(sys.base_prefix): HOME,
                             Path(sysconfig.get_path("purelib")): "/opt/site-packages"})
    try:
        machine.up()
        machine.run("ldconfig")
        machine.run("dpkg", "-i", "--force-confold", "/srv/rrd.deb", seconds=600)
        yield Service(machine)
    finally:
        machine.close()


def test_the_package_runs_and_its_units_have_nothing_against_them(service: Service) -> None:
    machine = service.machine
    assert machine.run("systemctl", "--version").startswith("systemd 257")
    assert [service.property(n) for n in ("ActiveState", "UnitFileState", "NRestarts")] == ["active", "enabled", "0"]
    for unit in UNITS:
        assert machine.run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit) == ""
    for unit, worst in (("rrd.service", 15), ("rrd-gate.service", 30)):
        machine.run("systemd-analyze", "security", f"--threshold={worst}", unit)
    assert "tmpfiles" not in service.systemctl("--failed")


def test_a_job_goes_on_over_a_reload_a_kill_and_a_reboot(service: Service) -> None:
    machine = service.machine
    machine.run("useradd", "-m", "-G", "rrd", "alice")
    assert "alice" in service.submit("alices", user="alice", max_steps=ENDLESS, checkpoint_every=5)
    service.wait_step("alices", 10)
    service.systemctl("reload", "rrd")
    service.systemctl("kill", "--signal=KILL", "--kill-whom=main", "rrd")
    service.wait_step("alices", 20)
    machine.reboot()
    service.wait_step("alices", 30)
    steps = service.history("alices")
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    service.systemctl("stop", "rrd")
    assert service.property("Result") == "success"


def test_the_gate_serves_under_its_unit(service: Service) -> None:
    """What keeps it from starting is told by the daemon; mended, it goes on by itself."""
    good = '[[group]]\nbackend = "command"\ndies = ["0", "1"]\nacquire = ["/bin/true"]\nrelease = ["/bin/true"]\n'
    service.machine.write("/etc/rrd/gate.toml", good)
    service.configure('[[lane]]\ndies = ["cpu", "cpu"]\n[lane.gate]\nkind = "socket"\nsocket = "/run/rrd-gate.sock"\n')
    service.systemctl("enable", "--now", "rrd-gate.socket")
    service.systemctl("start", "rrd")
    service.wait_step("alices", 40)
    assert service.property("ActiveState", "rrd-gate.service") == "active"
    service.machine.write("/etc/rrd/gate.toml", good.replace("/bin/true", "/no/swap"))
    service.systemctl("restart", "rrd-gate.service", check=False)
    service.machine.wait(lambda: "rrd-gate cannot start: group group[0]: /no/swap is no program that can be run"
                         in service.machine.run("rrd", "dies"), "it does not say why")
    service.machine.write("/etc/rrd/gate.toml", good)
    service.wait_step("alices", service.job("alices")["step"] + 2)
