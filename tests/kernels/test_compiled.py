"""Every kernel, compiled by NVRTC for every kind of die without one: it is a cubin for it, and spills nothing."""

from __future__ import annotations

import functools
import locale
import re
from pathlib import Path

import pytest

from rrd.ops.cuda import nvrtc
from rrd.ops.cuda.nvrtc import Built, NoKernels, Nvrtc
from rrd.ops.cuda.source import OPS, parse, source

ARCHS = ("sm_37", "sm_61", "sm_70", "sm_80", "sm_90")
DOCS = Path(__file__).parent.parent.parent / "docs" / "kernels.md"
SINCE_61 = {"rrd_int8_y_dp4a", "rrd_int8_dx_dp4a"}
LACKING = re.compile(r"\b(dp4a|dp2a)\.|\.bf16|\.f16|\bmma\.|\bwmma\.|\bcp\.async|\bredux\.|\bldmatrix|\bmatch\."
                     r"|\bactivemask|\batom\.\S*f64")
"""Instructions in PTX that sm_37 has not; ptxas refuses them, too, but a guard that is wrong is better named."""


def compiler() -> Nvrtc | None:
    try:
        return nvrtc.find("sm_37")
    except NoKernels:
        return None


pytestmark = pytest.mark.skipif(compiler() is None, reason="no NVRTC that knows sm_37 (pip install -e '.[kernels]')")


@functools.cache
def built(op: str, arch: str) -> Built:
    made = compiler()
    assert made
    return made.compile(source(op).file, source(op).text, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_it_is_a_cubin_for_the_die_with_all_kernels_and_no_spills(op: str, arch: str) -> None:
    made = built(op, arch)
    assert nvrtc.architecture(made.cubin) == arch
    assert re.search(r"^\.target (\w+)", made.ptx, re.M)[1] == arch  # type: ignore[index]
    used = nvrtc.usage(made.log)
    assert set(used) == set(source(op).kernels) - (SINCE_61 if arch == "sm_37" else set())
    assert all(u.spills == 0 and u.registers <= 255 and u.shared <= 48 << 10 for u in used.values()), used
    assert "warning" not in made.log
    for name, u in used.items():  # a block must fit: registers of a multiprocessor, given out by the warp
        assert u.registers * max(32, source(op).kernels[name].threads) <= 65536, name


@pytest.mark.parametrize("op", OPS)
def test_for_the_oldest_die_there_is_no_instruction_that_it_lacks(op: str) -> None:
    assert not LACKING.search(built(op, "sm_37").ptx)


def test_what_is_newer_than_the_oldest_die_is_refused_there_and_found_by_the_check() -> None:
    """The check can fail: the integer path without its guard."""
    made, s = compiler(), source("int8")
    assert made
    assert LACKING.search(built("int8", "sm_61").ptx)
    unguarded = parse("int8", s.text.replace("__CUDA_ARCH__ >= 610", "__CUDA_ARCH__ >= 370"))
    with pytest.raises(NoKernels, match=r"int8\.cu does not compile for sm_37"):
        made.compile(unguarded.file, unguarded.text, "sm_37")


def test_a_mistake_is_said_with_its_line() -> None:
    made = compiler()
    assert made
    with pytest.raises(NoKernels, match=r"bad\.cu does not compile for sm_61 by NVRTC .*bad\.cu\(2\).*nonsense"):
        made.compile("bad.cu", 'extern "C" __global__ void f() {\n  nonsense;\n}\n', "sm_61")


def table() -> str:
    """docs/kernels.md's table of what every kernel uses."""
    rows = ["| kernel | threads | shared, bytes | " + " | ".join(ARCHS) + " |", "|---|--:|--:|" + "--:|" * len(ARCHS)]
    for op in OPS:
        for name, kernel in source(op).kernels.items():
            used = [nvrtc.usage(built(op, arch).log).get(name) for arch in ARCHS]
            shared = max(u.shared for u in used if u)
            cells = ["-" if u is None else str(u.registers) for u in used]
            rows.append(f"| `{name}` | {kernel.threads} | {shared:,} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def test_the_documented_table_is_what_the_compiler_says() -> None:
    made = compiler()
    assert made
    if made.version != (11, 8):
        pytest.skip(f"the table is of NVRTC 11.8, and this is {made}")
    assert table() in DOCS.read_text(encoding="utf-8")


def test_the_compiler_leaves_the_locale_as_it_was() -> None:
    """NVRTC's own "C" would make Python open every later file as ASCII."""
    before = locale.getpreferredencoding(False)
    nvrtc.find("sm_61").compile("adamw", source("adamw").text, "sm_61")
    assert locale.getpreferredencoding(False) == before
