"""Building and loading the compiled kernels: once, by one of many, and what happens where that cannot be."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rrd.ops import native, rwkv7

needs_compiler = pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not decided yet whether it has kernels."""
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(native, "_failed", None)


@needs_compiler
def test_two_processes_build_once_and_both_use_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rrd.ops.native", str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=250)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert said[0] == said[1] != ""
    (built,) = (tmp_path / "kernels").glob("*/rwkv7_cpu.so")
    assert native.Kernels(built).name in said[0]
    (trie,) = (tmp_path / "kernels").glob("*/world.so")
    assert {p.name for p in (tmp_path / "kernels").iterdir()} == {built.parent.name, trie.parent.name, "lock"}


@pytest.mark.parametrize("compiler", [None, "/bin/false"], ids=["gone", "replaced by one that fails"])
@needs_compiler
def test_a_build_outlives_its_compiler(compiler: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       fresh: None) -> None:
    file = native.build(native.default_cache_dir())
    shutil.copytree(file.parent, tmp_path / "kernels" / file.parent.name)
    monkeypatch.setattr(native, "_compiler", lambda: compiler)
    native.use(tmp_path)
    assert native.why_not() == ""
    assert (loaded := native.kernels())
    assert loaded.name == native.Kernels(file).name


@needs_compiler
@pytest.mark.parametrize(("first", "shared"), [("import torch", "1 2 3"), ("", "1 1 1")], ids=["torch", "no torch"])
def test_torchs_own_threads_share_the_work(first: str, shared: str) -> None:
    """Without torch there is no OpenMP, and one thread does all."""
    library = str(native.build(native.default_cache_dir()))
    program = f"import ctypes; {first}\nteam = ctypes.CDLL({library!r}).rrd_team\nprint(team(1), team(2), team(3))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == shared.split(), done.stderr


def built_with(flags: tuple[str, ...], room: Path) -> native.Kernels:
    room.mkdir()
    compiler = native._compiler()
    assert compiler
    subprocess.run([compiler, *native.FLAGS, *flags, "-o", str(room / "x.so"), str(native.SOURCE)], check=True)
    return native.Kernels(room / "x.so")


@pytest.mark.slow
@needs_compiler
def test_the_name_is_of_the_bits_and_not_of_the_build(tmp_path: Path) -> None:
    """What a checkpoint remembers: builds that compute the same share a name, others do not."""
    usual = native.kernels()
    assert usual
    assert built_with(("-fno-tree-vectorize", "-Wl,--build-id=none"), tmp_path / "same").name == usual.name
    other = built_with(("-ffp-contract=off",), tmp_path / "unfused")
    if "fma" in native._processor()[1]:
        assert other.name != usual.name


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's instruction sets")
@needs_compiler
@pytest.mark.parametrize(("flags", "lanes"), [(("-mno-avx512f",), 8), (("-march=x86-64",), 4)], ids=["AVX2", "SSE2"])
def test_processors_with_narrower_vectors_compute_the_same(flags: tuple[str, ...], lanes: int, tmp_path: Path) -> None:
    narrow = built_with(flags, tmp_path / "x")
    assert narrow.lanes == lanes
    native._checked(tmp_path / "x" / "x.so")


def refused(cache: Path) -> str:
    native.use(cache)
    assert native.kernels() is None
    h = torch.randn(2, 64)
    assert torch.equal(rwkv7.relu2(h), torch.relu(h).square())
    return native.why_not()


def test_without_a_compiler_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(native, "_compiler", lambda: None)
    assert refused(tmp_path) == "no C++ compiler is installed"


@pytest.mark.parametrize(("script", "sentence"), [
    ("exit 1", "do not compile: it ended with 1"), ("echo boom; exit 1", "do not compile: boom"),
    ('for o; do [ "$p" = -o ] && echo rubbish > "$o"; p="$o"; done; true', "do not load")])
def test_with_a_bad_compiler_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, script: str,
                                            sentence: str) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "_compiler", lambda: str(compiler))
    assert sentence in refused(tmp_path / "cache")


@needs_compiler
def test_kernels_that_compute_something_else_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
                                                          ) -> None:
    wrong = tmp_path / "wrong.cpp"
    source = native.SOURCE.read_text()
    assert source.count("vi * k[j];") == 1
    wrong.write_text(source.replace("vi * k[j];", "ui * k[j];"))
    monkeypatch.setattr(native, "SOURCE", wrong)
    assert "do not compute what they should" in refused(tmp_path)
    assert not list(tmp_path.glob("kernels/*/*.so"))  # the next compiler may do better


def test_where_the_cache_cannot_be_written_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
                                                          ) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be stored" in refused(tmp_path / "file")
