"""NVRTC through ctypes: CUDA source to a cubin, with no GPU, no nvcc and no toolkit.

Every torch with CUDA brings one along, and several may be installed. Which dies one knows depends on its age: sm_37
needs 11.x. A cubin runs under drivers of its own major version or newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrd.errors import RrdError
from rrd.text import one_line

OPTIONS = ("--std=c++17", "--ptxas-options=-v")
"""Besides the architecture. ``-v``: ptxas reports registers, shared memory and spills in the log."""
EM_CUDA = 190


class NoKernels(RrdError):
    """There is no CUDA kernel to be had; the message says why."""


@dataclass(frozen=True)
class Built:
    """A cubin, the PTX it was made of, and what ptxas said."""

    cubin: bytes
    ptx: str
    log: str


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of a kernel: registers a thread; bytes of shared memory a block, and of spills a thread."""

    registers: int
    shared: int
    spills: int


class Nvrtc:
    """One library. Raises NoKernels where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        try:
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))  # some do not look beside themselves for it
            self._library: Any = ctypes.CDLL(str(path))
            self.version = self._version()
            self.archs = self._archs()
        except (OSError, AttributeError) as e:
            raise NoKernels(f"{path} does not load: {one_line(str(e), 200)}") from e
        self.path = path

    def __str__(self) -> str:
        return "NVRTC {}.{}".format(*self.version)

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _archs(self) -> frozenset[str]:
        n = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(n))
        numbers = (ctypes.c_int * n.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return frozenset(f"sm_{number}" for number in numbers)

    def _call(self, function: str, *args: object) -> None:
        with _locale_kept():
            status = getattr(self._library, function)(*args)
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NoKernels(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}")

    def compile(self, file: str, text: str, arch: str) -> Built:
        """The cubin of a source for ``arch``, such as "sm_37". Raises NoKernels with the compiler's words."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), file.encode(), 0, None, None)
        try:
            options = [o.encode() for o in (f"--gpu-architecture={arch}", *OPTIONS)]
            try:
                self._call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
            except NoKernels as e:
                words = one_line(self._text(program, "ProgramLog"), 500)
                raise NoKernels(f"{file} does not compile for {arch} by {self}: {words or e.message}") from e
            return Built(self._bytes(program, "CUBIN"), self._text(program, "PTX"),
                         self._text(program, "ProgramLog"))
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace")


@contextlib.contextmanager
def _locale_kept() -> Iterator[None]:
    """NVRTC leaves this thread in the locale "C", in which Python then opens files as ASCII."""
    libc = ctypes.CDLL(None)
    libc.uselocale.restype, libc.uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = libc.uselocale(None)
    try:
        yield
    finally:
        libc.uselocale(before)


# ---- which one -------------------------------------------------------------------------------------------------------


def find(arch: str, driver: int | None = None, *, paths: Iterable[Path] | None = None) -> Nvrtc:
    """The newest NVRTC here that knows ``arch`` and whose cubins a driver of CUDA ``driver`` (major) takes.

    Raises NoKernels: there is none; the message says what there is.
    """
    libraries = _all() if paths is None else _loaded(paths)
    fitting = [lib for lib in libraries if arch in lib.archs and (driver is None or lib.version[0] <= driver)]
    if not fitting:
        have = ", ".join(str(lib) for lib in libraries) or "none is installed"
        raise NoKernels(f"no NVRTC that makes kernels for {arch}" + (f" under CUDA {driver}" if driver else "")
                        + f" ({have})", hint=_advice(arch))
    return max(fitting, key=lambda lib: lib.version)


def _advice(arch: str) -> str:
    old = int(arch.removeprefix("sm_")) < 75  # what CUDA 13 and 12 left behind
    return f"pip install {'nvidia-cuda-nvrtc-cu11==11.8.89' if old else 'nvidia-cuda-nvrtc'} into rrd's environment"


def _loaded(paths: Iterable[Path]) -> list[Nvrtc]:
    libraries = []
    for path in paths:
        try:
            libraries.append(Nvrtc(path))
        except NoKernels:
            continue
    return libraries


@functools.cache
def _all() -> list[Nvrtc]:
    return _loaded(installed())


def installed() -> list[Path]:
    """Every NVRTC on this machine: of Python packages, of torch's own, of toolkits."""
    real = {path.resolve(): None for place in _places() for path in sorted(place.glob("libnvrtc*.so*"))
            if re.fullmatch(r"libnvrtc(-[0-9a-f]{8})?\.so(\.\d+)*", path.name)}
    return list(real)


def _places() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("*/lib"))
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        yield Path(torch.origin).parent / "lib"
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/opt/cuda"):
        if toolkit:
            yield Path(toolkit) / "lib64"
    yield Path("/usr/lib/x86_64-linux-gnu")


# ---- what came out ---------------------------------------------------------------------------------------------------


def architecture(cubin: bytes) -> str:
    """The architecture a cubin is for, as its ELF header says; "" where it is no cubin."""
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02" or int.from_bytes(cubin[18:20], "little") != EM_CUDA:
        return ""
    flags = int.from_bytes(cubin[48:52], "little")
    newer = cubin[8] >= 8  # the ABI's version: since CUDA 13 the number stands one byte higher
    return f"sm_{flags >> 8 & 0xff if newer else flags & 0xff}"


_USAGE = re.compile(r"entry function '(\w+)' for '\w+'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
                    r".*?Used (\d+) registers([^\n]*)", re.S)


def usage(log: str) -> dict[str, Usage]:
    """Each kernel's, from the log of its source."""
    return {name: Usage(int(registers), int(shared[1]) if (shared := re.search(r"(\d+) bytes smem", rest)) else 0,
                        int(stores) + int(loads))
            for name, stores, loads, registers, rest in _USAGE.findall(log)}
