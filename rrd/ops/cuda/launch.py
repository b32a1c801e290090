"""Launching kernels on a die's current stream."""

from __future__ import annotations

from typing import Protocol


class Launcher(Protocol):
    """Runs kernels: ``go(name, grid, *arguments)`` with tensors, numbers and None as the kernel's signature wants."""

    def __call__(self, name: str, grid: tuple[int, ...], *args: object) -> None: ...
