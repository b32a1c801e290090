"""A stand-in for libcuda and one for NVRTC: the loader's whole path on a machine without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch
from host_build import COMPILER, HOST_H, PLAIN

from rrd.ops.cuda import nvrtc
from rrd.ops.cuda.driver import Driver
from rrd.ops.cuda.launch import DieKernels
from rrd.ops.cuda.nvrtc import Built, NoKernels
from rrd.ops.cuda.source import Source

HERE = Path(__file__).parent
CPU = torch.device("cpu")
STREAM = 0x5EED


def fake_libcuda(s: Source, place: Path) -> Any:
    """The library, with ``s``'s kernels in it."""
    rows = ", ".join(f'{{"{k.name}", {k.threads}, {len(k.params)}, fake::Run<{k.name}>::call}}'
                     for k in s.kernels.values())
    file, out = place / f"{s.op}.cpp", place / f"fake-{s.op}-{len(list(place.iterdir()))}.so"
    file.write_text(f'#include "{HOST_H}"\n{s.text}\n#define KERNELS {rows}\n#include "{HERE / "fake_cuda.h"}"\n',
                    encoding="utf-8")
    subprocess.run([COMPILER, *PLAIN, "-shared", "-fPIC", "-I", str(HOST_H.parent), "-o", str(out), str(file)],
                   check=True)
    library = ctypes.CDLL(str(out))
    library.fake_stream.restype = ctypes.c_uint64
    return library


class FakeDie(DieKernels):
    """A die whose memory is the CPU's."""

    def __init__(self, library: Any, cache_dir: Path, arch: str = "sm_61") -> None:
        super().__init__(CPU, Driver(library), arch=arch, name="Tesla Fake", cache_dir=cache_dir)

    def _stream(self) -> int:
        return STREAM


def elf(arch: str, payload: bytes = b"code") -> bytes:
    """What looks like a cubin."""
    head = bytearray(64)
    head[:5], head[8], head[18:20] = b"\x7fELF\x02", 7, nvrtc.EM_CUDA.to_bytes(2, "little")
    head[48:52] = int(arch[3:]).to_bytes(4, "little")
    return bytes(head) + payload


class FakeNvrtc:
    """A compiler that counts what it makes."""

    def __init__(self, version: tuple[int, int] = (11, 8), archs: tuple[str, ...] = ("sm_37", "sm_61")) -> None:
        self.version, self.archs = version, frozenset(archs)
        self.made: list[tuple[str, str]] = []
        self.busy = threading.Event()

    def __str__(self) -> str:
        return "NVRTC {}.{}".format(*self.version)

    def compile(self, file: str, text: str, arch: str) -> Built:
        self.made.append((file, arch))
        self.busy.wait(0.05)
        return Built(elf(arch, f"{file} by {self}".encode()), "", "")


def no_nvrtc(arch: str, driver: int | None = None) -> Any:
    raise NoKernels(f"no NVRTC that makes kernels for {arch} (none is installed)")
