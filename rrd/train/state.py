"""What a checkpoint holds of a job, and how it gets there and back without a second copy on the die.

The trainable state is the optimizer's three flat fp32 buffers. ``Staging`` keeps one host buffer that *is* the file
``state.safetensors``, header and all: saving is one copy into kept memory within the visit (no allocation, no
serialization), and the writer thread later writes that memory as it stands. Tensors are stored by name, so that a
checkpoint outlives any change of their order.
"""

from __future__ import annotations

import ctypes
import json
import platform
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from rrd.errors import BadJob, Damaged
from rrd.ops import choice
from rrd.optim import AdamW

TENSORS, STATE = "state.safetensors", "state.json"
KINDS = ("param", "exp_avg", "exp_avg_sq")
FORMAT = 1

ANOTHER = "it was saved by another rrd or for another model; `rrd restart --fresh` begins again at step 0"

NUMERICS = 1
"""Counted up when a change to rrd alters the bits that training gives; part of a checkpoint's identity."""


class Staging:
    """The kept host buffer of one job. It has one user at a time: do not fill it while a commit reads it."""

    def __init__(self, optimizer: AdamW) -> None:
        header = _header(optimizer)
        assert tuple(optimizer.flat) == KINDS
        self.buffer = torch.empty(len(header) + 4 * optimizer.state.numel(), dtype=torch.uint8,
                                  pin_memory=optimizer.state.is_cuda)
        as_memory(self.buffer)[: len(header)] = header
        self.tensors = self.buffer[len(header) :].view(torch.float32)

    def fill(self, optimizer: AdamW) -> None:
        """Copy the state aside; when this returns, the die is done with it."""
        self.tensors.copy_(optimizer.state, non_blocking=True)
        if optimizer.state.is_cuda:
            torch.cuda.synchronize(optimizer.state.device)

    def chunk(self) -> memoryview:
        """The whole file, without a copy."""
        return as_memory(self.buffer)

    def room(self, size: int) -> memoryview:
        """Where to read a file of ``size`` bytes: the kept buffer if it is one of ours, fresh memory otherwise."""
        return self.chunk() if size == len(self.buffer) else memoryview(bytearray(size))


def as_memory(t: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it. Valid only while the tensor lives."""
    assert t.is_contiguous() and not t.is_cuda
    return memoryview((ctypes.c_ubyte * (t.numel() * t.element_size())).from_address(t.data_ptr())).cast("B")


def _header(optimizer: AdamW) -> bytes:
    """The safetensors header: 8 bytes of length, JSON, spaces up to a multiple of 64 so that the data is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "rrd": str(FORMAT)}}
    start = 0
    for kind in KINDS:
        for name, shape, offset, numel in optimizer.layout:
            at = start + 4 * offset
            entries[f"{kind}/{name}"] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * numel]}
        start += 4 * optimizer.flat[kind].numel()
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def restore(optimizer: AdamW, data: memoryview, where: str) -> None:
    """Put a saved state back, tensor by tensor and by name. ``data`` has been checked against its digest.

    Raises BadJob when it is not exactly this job's state.
    """
    entries = _entries(data, where)
    wanted = {f"{kind}/{name}" for kind in KINDS for name in optimizer.names}
    if odd := sorted(set(entries) ^ wanted):
        raise BadJob(f"{where} does not hold exactly this job's tensors: {', '.join(odd[:5])}", hint=ANOTHER)
    for kind in KINDS:
        for name, shape, offset, numel in optimizer.layout:
            saved = _tensor(data, entries[f"{kind}/{name}"])
            if saved.shape != shape:
                raise BadJob(f"{where}: {kind}/{name} is {list(saved.shape)}, not {list(shape)}", hint=ANOTHER)
            optimizer.flat[kind][offset : offset + numel].copy_(saved.view(-1))
    optimizer.refresh()


def named_parameters(data: memoryview, where: str) -> dict[str, Tensor]:
    """The trained tensors of a saved state by name, sharing ``data``. Raises Damaged."""
    found = {name: entry for name, entry in _entries(data, where).items() if name.startswith("param/")}
    return {name.removeprefix("param/"): _tensor(data, entry) for name, entry in found.items()}


def _entries(data: memoryview, where: str) -> dict[str, Any]:
    """The header's entries, offsets counted from the start of the file. Its bytes are as we once wrote them."""
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(bytes(data[8:start]))
        entries.pop("__metadata__", None)
        return {name: {**e, "start": start + e["data_offsets"][0]} for name, e in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Damaged(f"{where} is no safetensors file of ours") from e


def _tensor(data: memoryview, entry: dict[str, Any]) -> Tensor:
    assert entry["dtype"] == "F32"
    count = prod(entry["shape"])
    if count == 0:
        return torch.empty(entry["shape"])
    return torch.frombuffer(data, dtype=torch.float32, count=count, offset=entry["start"]).view(entry["shape"])


def machine_facts(device: torch.device, threads: int) -> dict[str, Any]:
    """What can change the bits of a computation and is not of the job: part of a checkpoint's identity."""
    facts = {
        "numerics": NUMERICS, "torch": torch.__version__, "threads": threads, "device": device.type,
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
    }
    if ops := choice.identity(device):
        facts["ops"] = ops
    if device.type == "cuda":
        return {**facts, "model": torch.cuda.get_device_name(device), "cuda": torch.version.cuda,
                "deterministic": torch.are_deterministic_algorithms_enabled()}
    return {**facts, "model": cpu_model(), "cpu": str(_capability())}


def _capability() -> str:
    get: Callable[[], str] | None = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", None)
    return get() if get else ""


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # hidden from a hardened service: the machine's kind must do
    return platform.machine()


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between the identity a checkpoint carries and this process's, as half sentences."""
    return [f"{key} was {saved.get(key)!r} and is {now.get(key)!r}" for key in sorted(saved.keys() | now.keys())
            if saved.get(key) != now.get(key)]
