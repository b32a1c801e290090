"""The kernels built by g++ with ``kernels/host.h``, and a launcher that runs them on CPU tensors.

Built once a session and source into the temporary directory; a program serves launches over its pipes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rrd.ops.cuda import source
from rrd.ops.cuda.source import Kernel, Param, Source

HOST_H = source.DIRECTORY / "host.h"
COMPILER = shutil.which("g++") or ""
PLAIN = ("-std=c++17", "-O1", "-g", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-U_FORTIFY_SOURCE")
CHECKED = (*PLAIN, "-fsanitize=address,bounds", "-fno-sanitize-recover=all", "-fsanitize-sections=rrd_shared")
needs_gxx = pytest.mark.skipif(not COMPILER, reason="no g++")

DTYPES = {"float": torch.float32, "double": torch.float64, "int": torch.int32, "long long": torch.int64,
          "signed char": torch.int8, "unsigned char": torch.uint8}
FORMATS = {"int": "<i4x", "long long": "<q", "float": "<f4x", "double": "<d"}


class HostFault(AssertionError):
    """The program ended: the sanitizer's report, or what CUDA does not allow."""


class Host:
    """A launcher (``rrd.ops.cuda.launch``) over one or more running programs. ``seed`` orders threads and blocks."""

    def __init__(self, programs: dict[str, Path], seed: int = 0) -> None:
        self.seed, self.name = seed, "the host build"
        self._programs, self._running = programs, dict[str, subprocess.Popen[bytes]]()
        self.launches: list[str] = []
        self.digests: dict[str, str] = {}
        self.barriers = self.shuffles = 0

    def __call__(self, name: str, grid: Sequence[int], *args: object) -> None:
        kernel = source.kernel(name)
        self.launch(kernel, grid, args)

    def launch(self, kernel: Kernel, grid: Sequence[int], args: Sequence[object]) -> None:
        gx, gy = (*grid, 1)[:2]
        if gx * gy == 0:
            return
        self.launches.append(kernel.name)
        self.seed += 1
        assert len(args) == len(kernel.params), kernel.name
        encoded = kernel.name.encode()
        request = [struct.pack("<Q", len(encoded)), encoded, struct.pack("<4Q", self.seed, gx, gy, len(args))]
        request += [_encoded(p, a) for p, a in zip(kernel.params, args, strict=True)]
        process = self._process(kernel.op)
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"".join(request))
            process.stdin.flush()
        head = process.stdout.read(24)
        if len(head) < 24:
            raise self._fault(kernel.op, process)
        _, barriers, shuffles = struct.unpack("<3Q", head)
        self.barriers, self.shuffles = self.barriers + barriers, self.shuffles + shuffles
        for param, a in zip(kernel.params, args, strict=True):
            if isinstance(a, Tensor):
                _fill(a, process.stdout.read(_nbytes(a)), param)

    def _process(self, op: str) -> subprocess.Popen[bytes]:
        if op not in self._running:
            self._running[op] = subprocess.Popen(
                [self._programs[op]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"})
        return self._running[op]

    def _fault(self, op: str, process: subprocess.Popen[bytes]) -> HostFault:
        said = process.communicate()[1].decode(errors="replace")
        del self._running[op]
        return HostFault(said[:3000] or f"the program ended with {process.returncode}")

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.communicate()
        self._running.clear()


def _nbytes(t: Tensor) -> int:
    """Bytes from a tensor's first element to the end of what it spans: strided rows travel with their gaps."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return span * t.element_size()


def _spanned(t: Tensor) -> Tensor:
    """What a tensor spans, as bytes that share its memory."""
    n = _nbytes(t) // t.element_size()
    return t.as_strided((n,), (1,)).view(torch.uint8) if n else torch.empty(0, dtype=torch.uint8)


def _encoded(param: Param, a: object) -> bytes:
    if a is None:
        assert param.pointer
        return struct.pack("<Q", 0)
    if param.pointer:
        assert isinstance(a, Tensor) and a.dtype == DTYPES[param.type], (param, a)
        raw = _spanned(a.detach()).numpy().tobytes()
        return struct.pack("<2Q", 2, len(raw)) + raw
    assert isinstance(a, (int, float)) and not isinstance(a, Tensor), (param, a)
    return struct.pack("<Q", 1) + struct.pack(FORMATS[param.type], a)


def _fill(t: Tensor, raw: bytes, param: Param) -> None:
    if raw and param.reads:
        assert raw == _spanned(t.detach()).numpy().tobytes(), f"{param.name} is only to be read"
    elif raw:
        _spanned(t).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


# ---- building --------------------------------------------------------------------------------------------------------


def program_text(s: Source) -> str:
    """The program of a source: the source itself, and the table of its kernels."""
    rows = ", ".join(f'{{"{k.name}", {k.threads}, host::Caller<{k.name}>::count, host::Caller<{k.name}>::call}}'
                     for k in s.kernels.values())
    return f'{s.text}\nint main() {{\n  const host::Entry table[] = {{{rows}}};\n  return host::serve(table);\n}}\n'


def build(s: Source, place: Path, flags: Sequence[str] = PLAIN) -> Path:
    """The program of ``s`` below ``place``."""
    text = program_text(s)
    key = hashlib.sha256((text + HOST_H.read_text(encoding="utf-8") + repr(flags)).encode()).hexdigest()[:16]
    out = place / f"{s.op}-{key}"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=place) as room:
            file, made = Path(room) / s.file.replace(".cu", ".cpp"), Path(room) / "program"
            file.write_text(text, encoding="utf-8")
            run = subprocess.run([COMPILER, *flags, "-I", str(HOST_H.parent), "-o", str(made), str(file)],
                                 capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[:4000]
            made.rename(out)
    return out


@contextlib.contextmanager
def host_of(ops: Sequence[str], place: Path, flags: Sequence[str] = PLAIN) -> Iterator[Host]:
    """A launcher for ``ops``."""
    host = Host({op: build(source.source(op), place, flags) for op in ops})
    try:
        yield host
    finally:
        host.close()


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output before a kernel has written it: NaNs, or the least integer."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype)
