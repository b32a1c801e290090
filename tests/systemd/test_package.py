"""The Debian package, built and used: installed, upgraded while a job trains, removed, purged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machine import Machine
from package import build, marker
from service import ADAPTERS, ENDLESS, INPUTS, JOBS, SITE, VENV, Service, environment

MINUTES_10 = 600.0
"""Seconds that pip may take: without a network it tries again for half a minute, and unpacking torch takes two where
others train, too."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * MINUTES_10), pytest.mark.skipif(shutil.which("dh") is None,
                                                   reason="needs debhelper (apt-get install debhelper)")]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An older and a newer one."""
    directory = tmp_path_factory.mktemp("packages")
    return build(directory, "0.1.0"), build(directory, "0.2.0")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, packages: tuple[Path, Path], inputs: Path) -> Iterator[Service]:
    """A machine that has an environment with torch, as if the package had been there before, and no network."""
    files, links, binds = environment()
    files[f"{VENV}/rrd-setup.json"] = (marker(), 0o644)
    binds |= {inputs: INPUTS, packages[0]: "/srv/old.deb", packages[1]: "/srv/new.deb"}
    machine = Machine(tmp_path_factory.mktemp("machine") / "package", files=files, links=links, binds=binds)
    try:
        machine.up()
        yield Service(machine)
    finally:
        machine.close()


def test_lintian_has_nothing_to_say(packages: tuple[Path, Path]) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("needs lintian (apt-get install lintian)")
    said = subprocess.run(["lintian", "--allow-root", "--fail-on", "warning,error", str(packages[0])],
                          capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "")


def test_installed_it_runs_and_trains(service: Service) -> None:
    said = service.machine.run("dpkg", "-i", "/srv/old.deb")
    assert "no NVIDIA chips: torch for cpu" in said
    if service.machine.attempt("sh", "-c", "command -v g++").returncode == 0:
        assert "rrd-setup: kernels for CPU dies: " in said and "in /var/cache/rrd" in said
        owners = service.machine.run("stat", "-c", "%U", "/var/cache/rrd", "/var/cache/rrd/kernels")
        assert owners.split() == ["rrd", "rrd"]
    assert [service.property(name) for name in ("ActiveState", "UnitFileState")] == ["active", "enabled"]
    assert service.property("FragmentPath") == "/lib/systemd/system/rrd.service"
    service.drop("first", max_steps=20)
    service.wait_done("first")
    assert service.machine.run("rrd", "--version") == "rrd 0.1.0"
    assert service.machine.run("ls", f"{VENV}/share/rrd/units/rrd.service"), "for install-service, where no package is"
    assert service.machine.run("ls", f"{SITE}/rrd/kernels/rwkv7_cpu.cpp"), "a link in the checkout"
    assert "rrd" in service.machine.run("man", "-w", "rrd", "rrd.toml", "rrd-job", "rrd-gate", "rrd-setup")


def test_an_upgrade_saves_every_job_and_goes_on(service: Service) -> None:
    machine = service.machine
    machine.write("/etc/rrd/gate.toml", '[[group]]\nbackend = "command"\ndies = ["0"]\nacquire = ["/bin/true"]\n'
                                        'release = ["/bin/true"]\n')
    service.systemctl("enable", "--now", "rrd-gate.socket")
    service.drop("second", max_steps=ENDLESS, checkpoint_every=1000)
    service.wait_step("second", 10)
    since = service.now()
    machine.run("dpkg", "-i", "/srv/new.deb")
    assert service.said("saving every job", since)
    assert machine.run("rrd", "--version") == "rrd 0.2.0"
    steps = service.history("second")
    service.wait_step("second", steps[-1] + 2)
    service.wait_said("resumed from step", since)
    again = service.history("second")
    assert again == list(range(1, len(again) + 1)), "each step once"
    assert service.property("NRestarts") == "0"
    assert service.property("ActiveState", "rrd-gate.socket") == "active"
    machine.run("rm", "/etc/rrd/gate.toml")


def test_removed_and_purged_it_leaves_what_is_somebodys_work(service: Service) -> None:
    machine = service.machine
    adapter = service.adapter("first")
    machine.run("dpkg", "--remove", "rrd")
    assert service.property("ActiveState") == "inactive"
    assert machine.run("ls", "/etc/rrd/rrd.toml")
    said = machine.run("sh", "-c", "DEBIAN_FRONTEND=teletype dpkg --purge rrd </dev/null")
    assert "/var/lib/rrd stays, with adapters and checkpoints" in said
    assert service.adapter("first") == adapter
    gone = "/usr/lib/rrd /usr/share/rrd /var/cache/rrd /run/rrd"
    left = machine.run("sh", "-c", f"ls -d /etc/rrd/* {gone} 2>/dev/null || :")
    assert left.split() == ["/etc/rrd/jobs.d"], "with the job files that are somebody's"
    assert machine.run("ls", ADAPTERS) == "first" and "second" in machine.run("ls", JOBS)
    assert "rrd.service" not in machine.run("systemctl", "list-unit-files", "rrd*", check=False)


def test_installed_again_it_goes_on(service: Service) -> None:
    machine = service.machine
    machine.run("mkdir", "-p", f"{SITE}", f"{VENV}/bin")
    files, links, _ = environment()
    for path, (text, mode) in files.items():
        machine.write(path, text, mode)
    for path, target in links.items():
        machine.run("ln", "-sf", target, path)
    machine.write(f"{VENV}/rrd-setup.json", marker())
    before = service.history("second")
    machine.run("dpkg", "-i", "/srv/new.deb")
    service.wait_step("second", before[-1] + 2)


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory, packages: tuple[Path, Path]) -> Path:
    """All wheels that rrd needs, the torch of these tests among them, from wherever pip is set up to take them."""
    directory = tmp_path_factory.mktemp("wheelhouse")
    wheel = next((packages[0].parent / "deb").glob("rrd/wheel/*.whl"))
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "-d", str(directory), "--timeout", "20"]
    fetched = subprocess.run([*fetch, str(wheel), f"torch=={torch.__version__}"], capture_output=True, text=True,
                             timeout=MINUTES_10, check=False)
    if fetched.returncode != 0:
        pytest.skip(f"needs an index to fetch torch from: {fetched.stderr.strip()[-300:]}")
    return directory


def test_without_a_network_an_environment_is_made_from_a_directory_of_wheels(
        tmp_path_factory: pytest.TempPathFactory, packages: tuple[Path, Path], wheelhouse: Path, inputs: Path) -> None:
    """From nothing but the system's Python."""
    machine = Machine(tmp_path_factory.mktemp("machine") / "offline", binds={
        inputs: INPUTS, packages[0]: "/srv/rrd.deb", wheelhouse: "/srv/wheels"})
    service = Service(machine)
    try:
        machine.up()
        said = machine.run("dpkg", "-i", "/srv/rrd.deb", seconds=MINUTES_10)
        assert "pip could not install what rrd needs" in said and "its Python environment is not" in said
        assert "hint: sudo rrd-setup makes it" in machine.attempt("rrd", "status").stdout
        assert "ConditionFileIsExecutable" in machine.run("systemctl", "status", "rrd", check=False)
        machine.write("/etc/rrd/setup.conf", "TORCH=cpu\nWHEELHOUSE=/srv/wheels\n")
        machine.run("rrd-setup", seconds=MINUTES_10)
        machine.run("systemctl", "start", "rrd")
        service.drop("first", max_steps=10)
        service.wait_done("first")
    finally:
        machine.close()
