"""Packages from npm that a test needs: installed once, and kept in pytest's cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def installed(request: pytest.FixtureRequest, wanted: Path, what: str) -> Path:
    """Where the ``node_modules`` that the ``package.json`` ``wanted`` names are; skips where they cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip(f"node and npm are not installed (apt install nodejs npm): {what} was not checked")
    home: Path = request.config.cache.mkdir(f"npm-{wanted.parent.name}")  # type: ignore[union-attr]
    if not (home / "done").exists() or (home / "done").read_text() != wanted.read_text():
        shutil.copy(wanted, home / "package.json")
        run = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"],
                             cwd=home, capture_output=True, text=True, timeout=240)
        if run.returncode != 0:
            pytest.skip(f"{wanted.parent.name} cannot be had from npm: {run.stderr.strip()[-300:]}")
        (home / "done").write_text(wanted.read_text())
    return home
