"""The Debian package of this checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from service import ROOT


def build(directory: Path, version: str) -> Path:
    """``make deb`` of this checkout, as ``version``."""
    tree = directory / version
    tree.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "rrd", "kernels", "units", "etc",
                 "docs", "packaging"):
        subprocess.run(["cp", "-a", ROOT / name, tree], check=True)  # links as links, as in a checkout
    init, log = tree / "rrd/__init__.py", tree / "packaging/debian/changelog"
    old = init.read_text().split('"')[-2]
    init.write_text(init.read_text().replace(old, version))
    log.write_text(log.read_text().replace(f"({old})", f"({version})", 1))
    venv = Path(shutil.which("python") or "").parent if not (ROOT / ".venv").exists() else ROOT / ".venv"
    subprocess.run(["make", "-s", "-o", f"{venv}/.done", f"VENV={venv}", "deb"], cwd=tree, check=True,
                   stdout=subprocess.DEVNULL, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(tree)})
    (package,) = (tree / "build").glob("*.deb")
    return package


def marker() -> str:
    """What rrd-setup leaves in an environment like that of these tests: with it there, none is made anew."""
    return json.dumps({"torch": "cpu", "python": sys.version_info[:2]})
