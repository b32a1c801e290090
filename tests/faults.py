"""What CUDA raises, raised on a CPU: a mode in which torch's own operations fail as they would on a die.

Every operation that makes a tensor counts as an allocation. An error of the context is sticky, as it is on a card:
after it every operation fails until the process ends.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

POISON = {
    700: "CUDA error: an illegal memory access was encountered",
    719: "CUDA error: unspecified launch failure",
    "lost": "CUDA error: GPU is lost",
    "busy": "CUDA error: all CUDA-capable devices are busy or unavailable",
    "ecc": "CUDA error: uncorrectable ECC error encountered",
}
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
MORE = ("\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
        "be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n")
AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
"""What newer torch calls the errors of a context; older ones raise a plain RuntimeError."""


def out_of_memory(needed: str = "2.00 GiB", free: str = "310.00 MiB") -> torch.cuda.OutOfMemoryError:
    return torch.cuda.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {needed}. GPU 0 has a total capacity of 11.17 GiB of which {free} is "
        "free. Of the allocated memory 10.02 GiB is allocated by PyTorch")


class Faults(TorchDispatchMode):
    """Within it, the n-th allocation fails (``out_of_memory_at``), and every later one up to ``until``; or from the
    ``poison_at``-th operation on all fail with ``poison``; or the first fails for want of a kernel (``no_kernel``).
    ``watch`` collects weak references to every tensor made."""

    def __init__(self, *, out_of_memory_at: int | None = None, until: int = 0, poison_at: int | None = None,
                 poison: int | str = 700, no_kernel: bool = False, watch: list[Any] | None = None) -> None:
        super().__init__()
        self.out_of_memory_at, self.until = out_of_memory_at, until
        self.poison_at, self.poison, self.no_kernel, self.watch = poison_at, poison, no_kernel, watch
        self.operations = self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.no_kernel:
            raise AcceleratorError(NO_KERNEL + MORE)
        if self.poison_at is not None and self.operations >= self.poison_at:
            raise AcceleratorError(POISON[self.poison] + MORE)
        given = {id(t) for t in tree_flatten((args, kwargs or {}))[0] if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and id(t) not in given]
        if made:
            self.allocations += 1
            if self.out_of_memory_at is not None and (
                    self.out_of_memory_at <= self.allocations <= max(self.until, self.out_of_memory_at)):
                raise out_of_memory()
            if self.watch is not None:
                self.watch += [weakref.ref(t) for t in made]
        return result
