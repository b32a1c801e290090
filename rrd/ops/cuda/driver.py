"""The CUDA driver through ctypes: modules and launches, in the context that torch uses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from rrd.errors import RrdError
from rrd.ops.cuda.nvrtc import NoKernels
from rrd.text import one_line

LIBRARY = "libcuda.so.1"


class DriverError(RrdError):
    """The driver refused; ``name`` is its own, such as CUDA_ERROR_ILLEGAL_ADDRESS."""

    def __init__(self, call: str, name: str, said: str) -> None:
        super().__init__(f"{call}: {name}" + (f" ({said})" if said else ""))
        self.name = name


class Driver:
    """libcuda. ``library`` may stand in for it. Raises NoKernels where there is none."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as e:
            raise NoKernels(f"no CUDA driver: {one_line(str(e), 200)}") from e
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def version(self) -> int:
        """The newest CUDA that the driver takes, its major version."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000

    def enter(self, index: int) -> None:
        """Make the context of device ``index`` this thread's: the primary one, which is torch's."""
        context = self._contexts.get(index)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        now = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(now))
        if now.value != context.value:
            self._call("cuCtxSetCurrent", context)

    def load(self, cubin: bytes) -> ctypes.c_void_p:
        """A module of the current context."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
        return found

    def launch(self, function: ctypes.c_void_p, grid: Sequence[int], threads: int, stream: int,
               arguments: Sequence[Any]) -> None:
        """Put a launch on ``stream``. ``arguments``: ctypes values in the order of the kernel's parameters."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        x, y, z = (*grid, 1, 1)[:3]
        uint = ctypes.c_uint
        self._call("cuLaunchKernel", function, uint(x), uint(y), uint(z), uint(threads), uint(1), uint(1), uint(0),
                   ctypes.c_void_p(stream), pointers, None)

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._library, function)(*args)
        if status:
            raise DriverError(function, self._word("cuGetErrorName", status) or f"error {status}",
                              self._word("cuGetErrorString", status))

    def _word(self, function: str, status: int) -> str:
        text = ctypes.c_char_p()
        if getattr(self._library, function)(ctypes.c_int(status), ctypes.byref(text)) or not text.value:
            return ""
        return text.value.decode(errors="replace")
