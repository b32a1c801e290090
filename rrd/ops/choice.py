"""Which implementation of an op a die uses: one table, and what stands in the way of its choice.

"kernel" is ``kernels/*.cu`` (``rrd.ops.cuda``), "dp4a" those of int8 that multiply integers, "torch" torch's operations
and, on CPU dies, our compiled ones, "reference" the plain form of ``rrd.ops.reference``. All give the same numbers to
rounding, and the same checkpoints.

``RRD_OPS``, such as ``wkv7=reference,int8=torch``, overrules the table in this process: to find out which op is wrong.
Only ``wkv7`` has a reference of its own here; for others it means torch, as "dp4a" means "kernel" but for int8.

The choice is a process's, but a job's checkpoint says what it was computed with: see ``begun_without``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from rrd.errors import RrdError, TryLater
from rrd.ops.cuda import check, launch
from rrd.ops.cuda.launch import DieKernels

Choice = Literal["reference", "torch", "kernel", "dp4a"]


class Row(NamedTuple):
    """What an op uses: on CPUs; on dies before Volta (sm_37, sm_61), whose products are fp32; on Volta and newer."""

    cpu: Choice
    old: Choice
    new: Choice


TABLE: dict[str, Row] = {
    "wkv7": Row("torch", "kernel", "kernel"),
    "int8": Row("torch", "kernel", "torch"),  # tensor cores, and a BLAS that is made for these dies
    "adamw": Row("torch", "kernel", "kernel"),
    "xent": Row("torch", "kernel", "kernel"),
}
VOLTA = 70
KERNELS = ("kernel", "dp4a")

_failed: dict[tuple[str, int], str] = {}
_checked: set[tuple[str, int]] = set()


def choose(op: str, device: torch.device) -> Choice:
    """What ``op`` uses on ``device``: the table's choice, or torch where that cannot be had (``why_not``)."""
    wanted = wished(op, device)
    return "torch" if wanted in KERNELS and launcher(op, device) is None else wanted


def wished(op: str, device: torch.device) -> Choice:
    """What the table says, or ``RRD_OPS``, whether it can be had or not."""
    if (asked := _asked().get(op)) is not None:
        return asked
    row = TABLE[op]
    if device.type != "cuda":
        return row.cpu
    major, minor = torch.cuda.get_device_capability(device)
    return row.old if 10 * major + minor < VOLTA else row.new


def launcher(op: str, device: torch.device) -> DieKernels | None:
    """What runs ``op``'s kernels on ``device``; None where torch's ops do: by the table, or because of ``why_not``.

    The first to ask waits for the build and for a small check against the reference: kernels that do not compute what
    they should are not used.
    """
    if device.type != "cuda" or (by := wished(op, device)) not in KERNELS:
        return None
    die = launch.launcher(device)
    if die is None or (by == "dp4a" and not die.dp4a):
        return None
    key = op, die.device.index or 0
    if key not in _checked:
        try:
            die.load(op)
            check.check(op, die, die.device)
        except TryLater:
            raise  # a full cache or somebody else's build: it passes, and is no reason to compute other bits
        except RrdError as e:
            _failed[key] = e.message
        _checked.add(key)  # not before: what is more urgent may end a build, and then nothing is known of it
    return None if key in _failed else die


def why_not(op: str, device: torch.device) -> str:
    """Why ``op`` has no kernel on ``device`` though the table says so; empty where it has."""
    if device.type != "cuda" or wished(op, device) not in KERNELS or launcher(op, device) is not None:
        return ""
    die = launch.launcher(device)
    if die is None:
        return launch.why_not(device)
    return _failed.get((op, die.device.index or 0), f"{die.arch} has no dp4a")


def make_ready(device: torch.device, cache_dir: Path, alive: Callable[[], None]) -> str:
    """Have every kernel that the table wants for ``device``, built below ``cache_dir`` if need be.

    Returns a sentence where torch computes what there is a kernel for. May take a minute, in which ``alive`` is called.
    """
    if device.type != "cuda":
        return ""
    launch.use(cache_dir, alive)
    missing: dict[str, list[str]] = {}
    for op in TABLE:
        if why := why_not(op, device):
            missing.setdefault(why, []).append(op)
    return "; ".join(f"torch computes {', '.join(ops)}: {why}" for why, ops in missing.items())


def identity(device: torch.device) -> dict[str, str]:
    """What decides the bits beside torch: the ops that do not go by torch here, with the digests of their kernels."""
    found = {}
    for op in TABLE:
        if (die := launcher(op, device)) is not None:
            found[op] = die.digests[op] + "-dp4a" * (op == "int8" and wished(op, device) == "dp4a")
        elif wished(op, device) == "reference":
            found[op] = "reference"
    return found


def begun_without(saved: Mapping[str, str], device: torch.device) -> tuple[str, ...]:
    """The ops with kernels on ``device`` that were not used where ``identity`` said ``saved``: a job that began so goes
    on so (``by_torch``), though there are kernels by now."""
    return tuple(op for op in TABLE if op not in saved and launcher(op, device) is not None)


@contextlib.contextmanager
def by_torch(ops: Iterable[str]) -> Iterator[None]:
    """Have ``ops`` go by torch for a while: as long as a job computes that began without their kernels."""
    with contextlib.ExitStack() as stack:
        for op in ops:
            stack.enter_context(overruled(op, "torch"))
        yield


@contextlib.contextmanager
def overruled(op: str, by: Choice) -> Iterator[None]:
    """Have ``op`` go ``by`` this for a while, whatever the table says: for comparisons."""
    asked = _asked()
    before = asked.get(op)
    asked[op] = by
    try:
        yield
    finally:
        asked.pop(op)
        if before is not None:
            asked[op] = before


@functools.cache
def _asked() -> dict[str, Choice]:
    asked: dict[str, Choice] = {}
    for part in filter(None, os.environ.get("RRD_OPS", "").split(",")):
        op, _, choice = part.partition("=")
        if op not in TABLE or choice not in get_args(Choice):
            raise RrdError(f"RRD_OPS: {part!r} is no op and choice",
                           hint=f"ops: {', '.join(TABLE)}; choices: {', '.join(get_args(Choice))}")
        asked[op] = choice  # type: ignore[assignment]  # one of them, as was just seen
    return asked
