"""What the ``.cu`` files say of their kernels: names, block sizes and parameters, read from the text itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent.parent.parent / "kernels"
OPS = ("wkv7", "int8", "adamw", "xent")

_KERNEL = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((\d+)(?:,\s*\w+)?\)\s+(\w+)\(([^)]*)\)')
_SCALARS = ("int", "long long", "float", "double")


@dataclass(frozen=True)
class Param:
    """One parameter: its C type without const and star, and whether it is a pointer (``reads`` only, or written)."""

    name: str
    type: str
    pointer: bool
    reads: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel: its name, the threads of its block, its parameters, and the op whose file it is in."""

    op: str
    name: str
    threads: int
    params: tuple[Param, ...]


@dataclass(frozen=True)
class Source:
    """One ``.cu`` file."""

    op: str
    text: str
    kernels: Mapping[str, Kernel]

    @property
    def file(self) -> str:
        return f"{self.op}.cu"


def parse(op: str, text: str) -> Source:
    """The source of ``op`` as its text has it."""
    found = (Kernel(op, name, int(threads), tuple(_param(p) for p in params.split(",")))
             for threads, name, params in _KERNEL.findall(text))
    return Source(op, text, {k.name: k for k in found})


def _param(declared: str) -> Param:
    words = declared.replace("*", " * ").split()
    *kind, name = words
    reads, pointer = "const" in kind, "*" in kind
    scalar = " ".join(w for w in kind if w not in ("const", "*", "__restrict__"))
    assert pointer or scalar in _SCALARS, declared
    return Param(name, scalar, pointer, reads)


@functools.cache
def source(op: str) -> Source:
    """The file of ``op``, one of ``OPS``."""
    return parse(op, (DIRECTORY / f"{op}.cu").read_text(encoding="utf-8"))


@functools.cache
def kernel(name: str) -> Kernel:
    """The kernel ``name``, such as "rrd_wkv7_forward"."""
    op = next(op for op in OPS if name.startswith(f"rrd_{op}"))
    return source(op).kernels[name]
