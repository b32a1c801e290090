"""One machine with rrd installed as a service, for all tests of this directory that ask for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machine import Machine
from service import INPUTS, VENV, Service, make_inputs, why_no_service, with_rrd


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need a machine: they are marked, and say so where there can be none."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    why = why_no_service() if here else ""
    for item in here:
        item.add_marker(pytest.mark.systemd)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("machines") / "inputs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Service]:
    """``rrd install-service`` has run; ``alice`` is in the group rrd, ``bob`` is not. Off when the module is through:
    other tests want the cores."""
    files, links, binds = with_rrd()
    machine = Machine(tmp_path_factory.mktemp("machine") / "box", files=files, links=links,
                      binds=binds | {inputs: INPUTS})
    try:
        machine.up()
        machine.run(f"{VENV}/bin/rrd", "install-service")
        machine.run("useradd", "-m", "-G", "rrd", "alice")
        machine.run("useradd", "-m", "bob")
        yield Service(machine)
    finally:
        machine.close()


@pytest.fixture
def service(installed: Service) -> Service:
    """The service, running, with no job files and nothing configured; whatever a test did to it before."""
    installed.clean()
    installed.systemctl("start", "rrd")
    return installed
