"""From a source to a launch: the cache, the choice of a compiler, the driver, arguments, and what errors say."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CPU, STREAM, FakeDie, FakeNvrtc, elf, fake_libcuda, no_nvrtc
from host_build import needs_gxx

from rrd.errors import DiskTrouble
from rrd.ops import choice
from rrd.ops.cuda import build, cache, check, launch, nvrtc, wkv7
from rrd.ops.cuda import source as sources
from rrd.ops.cuda.driver import Driver, DriverError
from rrd.ops.cuda.launch import KernelFailed
from rrd.ops.cuda.nvrtc import NoKernels
from rrd.ops.cuda.source import OPS, parse, source

XENT = source("xent")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    made = FakeNvrtc()
    monkeypatch.setattr(nvrtc, "find", lambda arch, driver=None: made)
    return made


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def of(op: str) -> Any:
        if op not in made:
            made[op] = fake_libcuda(source(op), tmp_path_factory.mktemp(op))
        made[op].fake_set(11040, -1)
        return made[op]
    return of


# ---- what the sources say --------------------------------------------------------------------------------------------


def test_signatures_are_read_from_the_source() -> None:
    k = sources.kernel("rrd_int8_y")
    assert (k.op, k.threads) == ("int8", 128)
    assert [(p.name, p.type, p.pointer, p.reads) for p in k.params[:5]] == [
        ("x", "float", True, True), ("q", "signed char", True, True), ("s", "float", True, True),
        ("y", "float", True, False), ("M", "int", False, False)]
    assert [p.type for p in k.params[5:]] == ["int", "int", "long long", "long long", "int"]


@pytest.mark.parametrize("op", OPS)
def test_every_source_says_what_it_promises(op: str) -> None:
    """The contract at the top of a file, and one block size and signature for each kernel."""
    text = source(op).text
    head = text[: text.index("#ifndef __CUDACC__")]
    assert all(f"// {word}" in head for word in ("Shapes", "Writes", "Exact")), "its contract"
    assert text.count("__global__") == len(source(op).kernels) > 0
    assert all(name.startswith(f"rrd_{op}") for name in source(op).kernels)


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_a_cubin_is_made_once_and_kept(tmp_path: Path, compiler: FakeNvrtc) -> None:
    first = cache.cubin(XENT, "sm_37", tmp_path)
    assert nvrtc.architecture(first) == "sm_37"
    assert cache.cubin(XENT, "sm_37", tmp_path) == first
    assert cache.cubin(XENT, "sm_61", tmp_path) != first
    assert compiler.made == [("xent.cu", "sm_37"), ("xent.cu", "sm_61")]
    names = sorted(p.name for p in (tmp_path / "kernels" / "cuda").iterdir())
    assert [n.rpartition("-")[0] for n in names] == ["", "xent-sm_37-nvrtc11.8", "xent-sm_61-nvrtc11.8"]


def test_another_source_is_another_cubin_and_so_is_another_compilers(tmp_path: Path, compiler: FakeNvrtc) -> None:
    cache.cubin(XENT, "sm_37", tmp_path)
    cache.cubin(parse("xent", XENT.text + "\n"), "sm_37", tmp_path)
    compiler.version = (12, 1)
    cache.build(XENT, "sm_37", cache.place(tmp_path))
    assert len(compiler.made) == 3
    newest = cache.cubin(XENT, "sm_37", tmp_path)
    assert b"NVRTC 12.1" in newest
    assert b"NVRTC 11.8" in cache.cubin(XENT, "sm_37", tmp_path, driver=11), "a driver takes no newer toolkit's"
    assert len(compiler.made) == 3


@pytest.mark.parametrize("damage", [
    lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw[:70] + bytes([raw[70] ^ 1]) + raw[71:],
    lambda raw: raw + b"\0", lambda raw: b"\n", lambda raw: b"x" * len(raw)])
def test_a_damaged_one_is_made_again(tmp_path: Path, compiler: FakeNvrtc, damage: Callable[[bytes], bytes]) -> None:
    good = cache.cubin(XENT, "sm_37", tmp_path)
    (file,) = cache.place(tmp_path).glob("*.cubin")
    file.write_bytes(damage(file.read_bytes()))
    assert cache.cubin(XENT, "sm_37", tmp_path) == good
    assert len(compiler.made) == 2
    assert cache.cubin(XENT, "sm_37", tmp_path) == good
    assert len(compiler.made) == 2


def test_one_for_another_die_is_none(tmp_path: Path, compiler: FakeNvrtc) -> None:
    cache.cubin(XENT, "sm_37", tmp_path)
    (file,) = cache.place(tmp_path).glob("*.cubin")
    other = elf("sm_61")
    file.write_bytes(hashlib.sha256(other).hexdigest().encode() + b"\n" + other)
    assert nvrtc.architecture(cache.cubin(XENT, "sm_37", tmp_path)) == "sm_37"


def test_workers_that_ask_at_once_get_what_one_of_them_makes(tmp_path: Path, compiler: FakeNvrtc) -> None:
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(cache.cubin(XENT, "sm_37", tmp_path))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(got) == 4 and len(set(got)) == 1 and len(compiler.made) == 1


def test_what_a_package_brings_needs_no_compiler(tmp_path: Path, compiler: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    made = cache.build(XENT, "sm_37", tmp_path / "packaged")
    monkeypatch.setattr(cache, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setattr(nvrtc, "find", no_nvrtc)
    assert cache.cubin(XENT, "sm_37", tmp_path / "cache") == made
    with pytest.raises(NoKernels, match="sm_61"):
        cache.cubin(XENT, "sm_61", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, compiler: FakeNvrtc) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTrouble, match="file"):
        cache.cubin(XENT, "sm_37", tmp_path / "file")


# ---- which compiler --------------------------------------------------------------------------------------------------


def libraries(monkeypatch: pytest.MonkeyPatch, *made: FakeNvrtc) -> None:
    monkeypatch.setattr(nvrtc, "_all", lambda: list(made))


def test_the_newest_compiler_that_knows_the_die_and_suits_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    old, middle, new = FakeNvrtc((11, 8)), FakeNvrtc((12, 1), ("sm_61",)), FakeNvrtc((13, 0), ("sm_90",))
    libraries(monkeypatch, new, old, middle)
    assert nvrtc.find("sm_37") is old
    assert nvrtc.find("sm_61") is middle
    assert nvrtc.find("sm_61", driver=11) is old
    with pytest.raises(NoKernels, match=r"for sm_90 under CUDA 12 \(NVRTC 13\.0, NVRTC 11\.8, NVRTC 12\.1\)"):
        nvrtc.find("sm_90", driver=12)


def test_no_compiler_at_all_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch)
    with pytest.raises(NoKernels, match="none is installed") as e:
        nvrtc.find("sm_37")
    assert "pip install nvidia-cuda-nvrtc-cu11" in e.value.hint


def test_what_is_no_library_is_passed_over(tmp_path: Path) -> None:
    bad = tmp_path / "libnvrtc.so.11.2"
    bad.write_bytes(b"nonsense")
    with pytest.raises(NoKernels, match="none is installed"):
        nvrtc.find("sm_37", paths=[bad, tmp_path / "none"])


@pytest.mark.parametrize(("data", "arch"), [
    (elf("sm_37"), "sm_37"), (elf("sm_90"), "sm_90"), (b"", ""), (b"\x7fELF", ""), (b"x" * 100, ""),
    (elf("sm_37")[:18] + b"\x3e\0" + elf("sm_37")[20:], "")])
def test_a_cubins_architecture_stands_in_its_header(data: bytes, arch: str) -> None:
    assert nvrtc.architecture(data) == arch


# ---- launches --------------------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("op", OPS)
def test_the_whole_path_computes_what_the_reference_does(op: str, libcuda: Callable[[str], Any], compiler: FakeNvrtc,
                                                         tmp_path: Path) -> None:
    library = libcuda(op)
    die = FakeDie(library, tmp_path)
    check.check(op, die, CPU)
    assert library.fake_launches() > 0 and library.fake_stream() == STREAM
    assert compiler.made == [(f"{op}.cu", "sm_61")], "made when it was first used, once"


@needs_gxx
def test_gradients_are_launched_from_autograds_threads(libcuda: Callable[[str], Any], compiler: FakeNvrtc,
                                                       tmp_path: Path) -> None:
    """A thread that CUDA does not know yet has no context of its own."""
    die, said = FakeDie(libcuda("wkv7"), tmp_path), list[BaseException]()

    def run() -> None:
        try:
            check.check("wkv7", die, CPU)
        except BaseException as e:
            said.append(e)
    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
    assert said == []
    assert die._driver._library.fake_loads() >= 1


@needs_gxx
def test_a_refused_launch_names_op_shapes_and_die(libcuda: Callable[[str], Any], compiler: FakeNvrtc, tmp_path: Path
                                                  ) -> None:
    library = libcuda("wkv7")
    library.fake_set(11040, library.fake_launches())
    x = torch.zeros(2, 5, 3, 64)
    with pytest.raises(KernelFailed) as e:
        wkv7.wkv7(FakeDie(library, tmp_path), x, x, x, x, x, x)
    for words in ("rrd_wkv7_forward", "Tesla Fake (sm_61)", "grid (3, 2)", "2x5x3x64", "CUDA_ERROR_LAUNCH_FAILED",
                  "as asked for"):
        assert words in e.value.message


@needs_gxx
def test_a_module_that_the_driver_refuses_is_said(libcuda: Callable[[str], Any], compiler: FakeNvrtc, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cubin", lambda *a, **k: b"no image")
    with pytest.raises(DriverError, match="cuModuleLoadData"):
        FakeDie(libcuda("xent"), tmp_path).load("xent")


@needs_gxx
def test_a_grid_of_nothing_is_not_launched(libcuda: Callable[[str], Any], compiler: FakeNvrtc, tmp_path: Path) -> None:
    library = libcuda("wkv7")
    before = library.fake_launches()
    x = torch.zeros(0, 5, 3, 64)
    y, last = wkv7.wkv7(FakeDie(library, tmp_path), x, x, x, x, x, x)
    assert y.shape == x.shape and last.shape == (0, 3, 64, 64) and library.fake_launches() == before


def test_arguments_are_held_to_the_signature() -> None:
    kernel = sources.kernel("rrd_int8_limbs")
    x, s, limbs, u = torch.zeros(2, 3), torch.zeros(2), torch.zeros(3, 2, 1, dtype=torch.int32), torch.zeros(2)
    packed = launch.pack(kernel, (x, s, limbs, u, 2, 3, 3), CPU)
    assert [a.value for a in packed] == [x.data_ptr(), s.data_ptr(), limbs.data_ptr(), u.data_ptr(), 2, 3, 3]
    assert launch.pack(kernel, (x, None, limbs, u, 2, 3, 3), CPU)[1].value is None
    for bad in ((x, s, limbs, u, 2, 3), (x, s, x, u, 2, 3, 3), (x, s, limbs, u, 2, 3, "3"),
                (x, s, limbs, u.to("meta"), 2, 3, 3), (x, s, limbs, 0, 2, 3, 3)):
        with pytest.raises(AssertionError):
            launch.pack(kernel, bad, CPU)


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from rrd.ops.cuda import driver

    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so")
    with pytest.raises(NoKernels, match="no CUDA driver"):
        Driver()


# ---- which dies have them --------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that believes it has a K80."""
    monkeypatch.setattr(choice, "_failed", {})
    monkeypatch.setattr(choice, "_checked", set())
    monkeypatch.setattr(launch, "_dies", {})
    choice._asked.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (3, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


CUDA = torch.device("cuda", 0)


@needs_gxx
def test_a_die_with_kernels_uses_them_where_the_table_says(cuda: None, libcuda: Callable[[str], Any],
                                                           compiler: FakeNvrtc, tmp_path: Path) -> None:
    launch._dies[0] = die = FakeDie(libcuda("adamw"), tmp_path)
    assert choice.choose("adamw", CUDA) == "kernel" and choice.launcher("adamw", CUDA) is die
    assert choice.why_not("adamw", CUDA) == ""
    assert choice.choose("adamw", CPU) == "torch" and choice.launcher("adamw", CPU) is None


@needs_gxx
def test_kernels_that_compute_something_else_are_not_used(cuda: None, compiler: FakeNvrtc, tmp_path: Path,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    wrong = parse("adamw", source("adamw").text.replace("* (gi - m[i])", "* (gi + m[i])"))
    launch._dies[0] = FakeDie(fake_libcuda(wrong, tmp_path), tmp_path)
    assert choice.choose("adamw", CUDA) == "torch"
    assert "do not compute what they should" in choice.why_not("adamw", CUDA)


@needs_gxx
def test_a_build_that_was_given_up_counts_for_nothing(cuda: None, libcuda: Callable[[str], Any], compiler: FakeNvrtc,
                                                      tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its job leaves meanwhile; the worker lives on for other jobs."""
    launch._dies[0] = die = FakeDie(libcuda("adamw"), tmp_path)
    with monkeypatch.context() as urgent:
        urgent.setattr(die, "load", lambda op: pytest.fail("something more urgent"))
        with pytest.raises(pytest.fail.Exception):
            choice.launcher("adamw", CUDA)
    assert choice.launcher("adamw", CUDA) is die and choice.identity(CUDA) == {"adamw": die.digests["adamw"]}


def test_a_die_without_a_compiler_uses_torch_and_says_why(cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                          ) -> None:
    class Facts:
        major, minor, name = 3, 7, "Tesla K80"

    class NoLibrary:
        @staticmethod
        def cuDriverGetVersion(number: Any) -> int:
            number._obj.value = 11040
            return 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Facts)
    monkeypatch.setattr(launch, "Driver", lambda: Driver(NoLibrary))
    monkeypatch.setattr(nvrtc, "find", no_nvrtc)
    launch.use(tmp_path)
    assert choice.choose("wkv7", CUDA) == "torch" and choice.launcher("wkv7", CUDA) is None
    assert "no NVRTC that makes kernels for sm_37" in choice.why_not("wkv7", CUDA)


@needs_gxx
def test_what_a_job_is_told_and_its_checkpoints_remember(cuda: None, libcuda: Callable[[str], Any],
                                                         compiler: FakeNvrtc, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a die whose driver has the kernels of one op only."""
    launch._dies[0] = die = FakeDie(libcuda("xent"), tmp_path)
    said = choice.make_ready(CUDA, tmp_path, lambda: None)
    for op in ("wkv7", "int8", "adamw"):
        assert f"torch computes {op}: rrd_{op}" in said and "on Tesla Fake (sm_61)" in said
    assert "torch computes xent" not in said
    assert choice.identity(CUDA) == {"xent": die.digests["xent"]} and len(die.digests["xent"]) == 12
    assert choice.make_ready(CPU, tmp_path, lambda: None) == "" and choice.identity(CPU) == {}
    monkeypatch.setenv("RRD_OPS", "xent=torch,wkv7=reference")
    choice._asked.cache_clear()
    assert choice.identity(CUDA) == {"wkv7": "reference"}
    choice._asked.cache_clear()


def test_newer_dies_multiply_int8_by_torch(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.wished("int8", CUDA) == "kernel"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choice.wished("int8", CUDA) == "torch" and choice.wished("wkv7", CUDA) == "kernel"


def test_the_table_can_be_overruled(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RRD_OPS", "wkv7=reference,int8=torch")
    assert choice.choose("wkv7", CUDA) == choice.choose("wkv7", CPU) == "reference"
    assert choice.choose("int8", CUDA) == "torch"
    for nonsense in ("wkv=torch", "wkv7=fast", "wkv7"):
        monkeypatch.setenv("RRD_OPS", nonsense)
        choice._asked.cache_clear()
        with pytest.raises(Exception, match="is no op and choice"):
            choice.choose("wkv7", CPU)
    choice._asked.cache_clear()


# ---- built ahead -----------------------------------------------------------------------------------------------------


def test_building_ahead_makes_what_the_loader_finds(tmp_path: Path, compiler: FakeNvrtc,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main([str(cache.place(tmp_path)), "sm_37", "sm_61"]) == 0
    assert len(compiler.made) == 2 * len(OPS) == len(capsys.readouterr().out.splitlines())
    for op in OPS:
        cache.cubin(source(op), "sm_37", tmp_path)
    assert len(compiler.made) == 2 * len(OPS)
