"""A Linux kernel for the machines of these tests. Run as a program, it gets one: Debian's, without installing it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rrd-tests"


def find() -> Path | None:
    """The kernel to boot: the one that ``RRD_TEST_KERNEL`` names, the one got before, or the newest installed."""
    named = os.environ.get("RRD_TEST_KERNEL")
    installed = sorted(Path("/boot").glob("vmlinuz-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    candidates = [Path(named)] if named else [CACHE / "vmlinuz", *installed]
    return next((path for path in candidates if os.access(path, os.R_OK)), None)


def get() -> Path:
    """Download the package that ``linux-image-cloud-amd64`` depends on (27 MB), and keep its kernel."""
    shown = subprocess.run(["apt-cache", "depends", "linux-image-cloud-amd64"], check=True, capture_output=True,
                           text=True)
    package = next(line.split()[-1] for line in shown.stdout.splitlines() if "Depends: linux-image" in line)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        subprocess.run(["apt-get", "download", "-q", package], check=True, cwd=work, stdout=subprocess.DEVNULL)
        deb = next(Path(work).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(deb), f"{work}/x"], check=True)
        next(Path(work, "x", "boot").glob("vmlinuz-*")).rename(CACHE / "vmlinuz")
    return CACHE / "vmlinuz"


if __name__ == "__main__":
    print(find() or get(), file=sys.stderr)
