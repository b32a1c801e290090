"""What a package is made of: all that pyproject.toml says a wheel takes along is there to be taken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).parent.parent
TOLD = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
WANTED = [(ROOT / "rrd", pattern) for pattern in TOLD["package-data"]["rrd"]]
WANTED += [(ROOT, pattern) for patterns in TOLD["data-files"].values() for pattern in patterns]


def contents(directory: Path, patterns: list[tuple[Path, str]]) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes()
            for base, pattern in patterns for path in base.glob(pattern) if path.is_file()}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_debian_package_is_made_from_all_that_a_wheel_takes_along(tmp_path: Path) -> None:
    """Kernels are a link in the checkout: a copy of ``rrd`` alone has none, and nothing else would say so."""
    subprocess.run(["make", "-s", "deb-tree", f"BUILD={tmp_path}"], cwd=ROOT, check=True)
    tree = tmp_path / "deb" / "rrd"
    here = contents(ROOT, WANTED)
    assert {"rrd/kernels/rwkv7_cpu.cpp", "rrd/kernels/host.h", "rrd/py.typed", "units/rrd.service"} <= set(here)
    assert contents(tree, [(tree / base.relative_to(ROOT), pattern) for base, pattern in WANTED]) == here
