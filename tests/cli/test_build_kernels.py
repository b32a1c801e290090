"""``rrd build-kernels``: CUDA kernels without a GPU, and what it says where that cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rrd.cli import build_kernels
from rrd.cli.app import app
from rrd.ops.cuda import cache, nvrtc
from rrd.ops.cuda.nvrtc import NoKernels
from rrd.ops.cuda.source import OPS, source


def rrd(*args: str) -> Result:
    return CliRunner().invoke(app, ["build-kernels", *args])


def have(arch: str) -> bool:
    try:
        return bool(nvrtc.find(arch))
    except NoKernels:
        return False


@pytest.mark.skipif(not have("sm_37"), reason="no NVRTC that knows sm_37 (pip install -e '.[kernels]')")
def test_a_k80s_kernels_are_made_into_the_daemons_cache(tmp_path: Path) -> None:
    result = rrd("--arch", "sm_37", "--state", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [m["op"] for m in said["made"]] == list(OPS)
    assert all(m["arch"] == "sm_37" and m["bytes"] > 1000 for m in said["made"])
    for op in OPS:
        assert nvrtc.architecture(cache.kept(source(op), "sm_37", tmp_path / "cache") or b"") == "sm_37"


def test_a_directory_of_ones_own_holds_cubins_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(place: str, archs: list[str]) -> Iterator[dict[str, object]]:
        (Path(place) / "lock").touch()
        yield {"op": "wkv7", "arch": archs[0], "by": "NVRTC 11.8", "bytes": 2048}

    monkeypatch.setattr(build_kernels, "_built", built)
    result = rrd("--arch", "sm_37", "--into", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "wkv7   sm_37      2.0 KiB  by NVRTC 11.8\n")
    assert list(tmp_path.iterdir()) == []


def test_a_die_that_no_compiler_here_knows_is_refused_with_what_to_do(tmp_path: Path) -> None:
    result = rrd("--arch", "sm_11", "--into", str(tmp_path))
    assert result.exit_code == 1
    assert "no NVRTC that makes kernels for sm_11" in result.stderr
    assert "pip install" in result.stderr


@pytest.mark.parametrize("arch", ["k80", "sm_", "sm_37;x", ""])
def test_what_is_no_architecture_is_a_usage_error(arch: str) -> None:
    result = rrd("--arch", arch)
    assert result.exit_code == 2
    assert "a K80 is sm_37" in result.stderr


def test_a_compiler_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 137\n")
    dying.chmod(0o755)
    monkeypatch.setattr(build_kernels.sys, "executable", str(dying))
    result = rrd("--arch", "sm_37", "--into", str(tmp_path))
    assert result.exit_code == 1 and "out of memory" in result.stderr
