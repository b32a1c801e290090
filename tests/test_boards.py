"""Which chips are there, and which torch is theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rrd import boards
from rrd.boards import FLAVOURS, Board


def bus(root: Path, *chips: tuple[str, int, str], vendor: str = "0x10de") -> Path:
    """A /sys with chips: address, device id, driver."""
    for address, device, driver in chips:
        at = root / "bus/pci/devices" / address
        at.mkdir(parents=True)
        (at / "vendor").write_text(vendor + "\n")
        (at / "class").write_text("0x030200\n")
        (at / "device").write_text(f"0x{device:04x}\n")
        if driver:
            (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (at / "driver").symlink_to(root / "drivers" / driver)
    return root


def test_the_chips_of_a_box_are_listed_by_address(tmp_path: Path) -> None:
    bus(tmp_path, ("0000:84:00.0", 0x102D, "nvidia"), ("0000:05:00.0", 0x102D, "nouveau"))
    bus(tmp_path, ("0000:00:02.0", 0x0102, ""), vendor="0x8086")
    assert boards.boards(tmp_path) == [Board("0000:05:00.0", 0x102D, "Tesla K80", 37, "nouveau"),
                                       Board("0000:84:00.0", 0x102D, "Tesla K80", 37, "nvidia")]
    assert boards.boards(tmp_path / "none") == []


@pytest.mark.parametrize(("device", "name", "sm"), [
    (0x102D, "Tesla K80", 37), (0x1B38, "Tesla P40", 61), (0x1B06, "NVIDIA Pascal chip 1b06", 61),
    (0x1DB9, "NVIDIA Volta chip 1db9", 70), (0x2335, "H200", 90), (0x2B99, "NVIDIA Blackwell chip 2b99", 100),
    (0x0010, "NVIDIA chip 0010", 0)])
def test_an_unknown_chip_is_known_by_its_architecture(device: int, name: str, sm: int) -> None:
    assert boards.identify(device) == (name, sm)


@pytest.mark.parametrize(("chips", "flavour"), [
    ((), "cpu"), ((37, 37), "k80"), ((61,), "p40"), ((70, 90), "p40"), ((75,), "cuda"), ((90, 120), "cuda"),
    ((37, 90), "k80"), ((0,), "cpu"), ((30,), "cpu"), ((35,), "cpu"), ((35, 61), "p40")])
def test_the_oldest_chip_that_can_compute_decides_the_torch(chips: tuple[int, ...], flavour: str) -> None:
    assert boards.flavour_for(Board("", 0, "", sm) for sm in chips) == flavour


@pytest.mark.parametrize(("archs", "sm", "serves"), [
    (["sm_37", "sm_50"], 37, True), (["sm_50", "sm_60"], 37, False), (["sm_50", "sm_60"], 61, True),
    (["sm_61"], 60, False), (["sm_75", "sm_80"], 86, True), (["sm_80"], 90, False), (["compute_80"], 120, True),
    (["sm_90a"], 90, True), ([], 90, False)])
def test_machine_code_serves_its_major_version_and_ptx_everything_later(
        archs: list[str], sm: int, serves: bool) -> None:
    assert boards.serves(archs, sm) is serves


def test_what_pip_is_asked_for() -> None:
    assert boards.pip_arguments("k80") == ["torch==2.0.1", "numpy<2"]
    assert "--extra-index-url" in boards.pip_arguments("cpu")
    assert FLAVOURS["k80"].most_python == (3, 11), "torch 2.0.1 has no wheel for a later one"


def test_a_bare_python_can_ask(tmp_path: Path) -> None:
    """rrd-setup runs the file alone, before there is anything to import."""
    bus(tmp_path, ("0000:05:00.0", 0x1B38, ""))
    code = (f"import runpy, pathlib; b = runpy.run_path({boards.__file__!r}); "
            f"print(b['flavour_for'](b['boards'](pathlib.Path({str(tmp_path)!r}))))")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "p40\n"
