"""Launching kernels on a die's current stream, in torch's own context; and whether a die has them at all."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rrd.errors import RrdError
from rrd.ops.cuda import cache, nvrtc
from rrd.ops.cuda import source as sources
from rrd.ops.cuda.driver import Driver, DriverError
from rrd.ops.cuda.nvrtc import NoKernels
from rrd.ops.cuda.source import Kernel, Param

DTYPES = {"float": torch.float32, "double": torch.float64, "int": torch.int32, "long long": torch.int64,
          "signed char": torch.int8, "unsigned char": torch.uint8}
SCALARS: dict[str, Callable[[Any], Any]] = {
    "float": ctypes.c_float, "double": ctypes.c_double, "int": ctypes.c_int, "long long": ctypes.c_longlong}


class Launcher(Protocol):
    """Runs kernels: ``go(name, grid, *arguments)`` with tensors, numbers and None as the kernel's signature wants.

    A grid with a zero in it runs nothing.
    """

    def __call__(self, name: str, grid: tuple[int, ...], *args: object) -> None: ...


class KernelFailed(RrdError):
    """A launch that the driver refused: op, kernel, shapes, die and the driver's words."""


class DieKernels:
    """One CUDA device's kernels: modules by op, functions by name, each loaded when it is first used."""

    def __init__(self, device: torch.device, driver: Driver, *, arch: str, name: str, cache_dir: Path,
                 alive: Callable[[], None] = lambda: None) -> None:
        self.device, self.arch, self.name = device, arch, name
        self._driver, self._cache_dir, self._alive = driver, cache_dir, alive
        self._modules: dict[str, ctypes.c_void_p] = {}
        self.digests: dict[str, str] = {}
        """Of the cubins that are loaded, by op: what decides the bits that they give."""
        self._functions: dict[str, tuple[Kernel, ctypes.c_void_p]] = {}

    @property
    def dp4a(self) -> bool:
        """Whether the int8 kernels that multiply integers are there."""
        return int(self.arch.removeprefix("sm_")) >= 61

    def load(self, op: str) -> None:
        """Have the kernels of ``op``, built if need be. Raises NoKernels, DiskTrouble, TryLater, DriverError."""
        if op not in self._modules:
            data = cache.cubin(sources.source(op), self.arch, self._cache_dir, driver=self._driver.version(),
                               alive=self._alive)
            self._driver.enter(self._index)
            self._modules[op] = self._driver.load(data)
            self.digests[op] = hashlib.sha256(data).hexdigest()[:12]

    def __call__(self, name: str, grid: tuple[int, ...], *args: object) -> None:
        if 0 in grid:
            return
        try:
            kernel, function = self._functions.get(name) or self._function(name)
            arguments = pack(kernel, args, self.device)
            self._driver.enter(self._index)
            self._driver.launch(function, grid, kernel.threads, self._stream(), arguments)
        except DriverError as e:
            raise KernelFailed(f"{name} on {self.name} ({self.arch}), grid {grid}, of {_described(args)}: {e.message}"
                               ) from e

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def _index(self) -> int:
        return self.device.index or 0

    def _function(self, name: str) -> tuple[Kernel, ctypes.c_void_p]:
        kernel = sources.kernel(name)
        self.load(kernel.op)
        self._functions[name] = kernel, self._driver.function(self._modules[kernel.op], name)
        return self._functions[name]


def pack(kernel: Kernel, args: tuple[object, ...], device: torch.device) -> list[Any]:
    """The arguments as ctypes values, held to the kernel's signature."""
    assert len(args) == len(kernel.params), f"{kernel.name} takes {len(kernel.params)} arguments, not {len(args)}"
    return [_packed(p, a, device) for p, a in zip(kernel.params, args, strict=True)]


def _packed(param: Param, a: object, device: torch.device) -> Any:
    if not param.pointer:
        assert isinstance(a, (int, float)), (param, a)
        return SCALARS[param.type](a)
    if a is None:
        return ctypes.c_void_p(None)
    assert isinstance(a, Tensor) and a.dtype == DTYPES[param.type] and a.device == device, (param, a)
    return ctypes.c_void_p(a.data_ptr())


def _described(args: tuple[object, ...]) -> str:
    return ", ".join("x".join(map(str, a.shape)) or "1" if isinstance(a, Tensor) else str(a) for a in args)


# ---- which dies have them --------------------------------------------------------------------------------------------

_dies: dict[int, DieKernels | NoKernels] = {}
_settings: tuple[Path | None, Callable[[], None]] = (None, lambda: None)


def use(cache_dir: Path, alive: Callable[[], None] = lambda: None) -> None:
    """Say where this process keeps kernels, and what to call while one is built."""
    global _settings
    _settings = (cache_dir, alive)


def launcher(device: torch.device) -> DieKernels | None:
    """What runs kernels on ``device``; None where nothing does (``why_not``). Decided once a process and device."""
    found = _decided(device)
    return found if isinstance(found, DieKernels) else None


def why_not(device: torch.device) -> str:
    """A sentence where ``device`` has no kernels; empty where it has."""
    found = _decided(device)
    return found.message if isinstance(found, NoKernels) else ""


def _decided(device: torch.device) -> DieKernels | NoKernels:
    if device.type != "cuda":
        return NoKernels(f"a {device.type} die has no CUDA kernels")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _dies:
        try:
            _dies[index] = _found(index)
        except NoKernels as e:
            _dies[index] = e
        except RrdError as e:
            _dies[index] = NoKernels(e.message)
    return _dies[index]


def _found(index: int) -> DieKernels:
    """Whether there is a compiler for the die, or cubins of every op. Raises NoKernels. Builds nothing."""
    cache_dir, _ = _settings
    driver, facts = Driver(), torch.cuda.get_device_properties(index)
    arch, cache_dir = f"sm_{facts.major}{facts.minor}", cache_dir or default_cache_dir()
    try:
        nvrtc.find(arch, driver.version())
    except NoKernels:
        missing = [op for op in sources.OPS
                   if cache.kept(sources.source(op), arch, cache_dir, driver=driver.version()) is None]
        if missing:
            raise
    return DieKernels(torch.device("cuda", index), driver, arch=arch, name=facts.name, cache_dir=cache_dir,
               alive=lambda: _settings[1]())  # of the job that is loaded when it builds, not of the first one


def default_cache_dir() -> Path:
    """Where kernels are kept when nobody says: as for the command line."""
    if given := os.environ.get("RRD_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rrd"
