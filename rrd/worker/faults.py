"""What went wrong in a worker, in the daemon's words: whose fault it is, and what it lacks. Decides nothing."""

from __future__ import annotations

import errno
import gc
import os
import re
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

from rrd import durable, host_memory
from rrd.errors import DiskTrouble, RrdError, TryLater
from rrd.messages import Failed, LastWords
from rrd.ops.cuda.launch import KernelFailed
from rrd.text import one_line
from rrd.train import loss
from rrd.train.step import NotFinite

_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors of writing."""
_CARD_MEMORY = re.compile("CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY")
"""As it is said where torch's allocator had no part in it."""
_CPU_MEMORY = re.compile(r"DefaultCPUAllocator|can't allocate memory|not enough memory: you tried to allocate")
_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]i?B)", re.IGNORECASE)
_LEFT = re.compile(r"([0-9.]+) ?(bytes|[KMGT]i?B) (?:is )?free", re.IGNORECASE)
_UNITS = {"b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_NO_KERNELS = ("no kernel image is available", "device kernel image is invalid", "unsupported gpu architecture")
_LOST = ("gpu is lost", "device is lost", "fallen off the bus", "unavailable", "no cuda-capable device",
         "uncorrectable ecc", "hardware stack error", "device not ready", "invalid device ordinal")


class GivenUp(Exception):
    """Something more urgent has come than what was being done."""


class Shortage(NamedTuple):
    """A want of memory: bytes asked for in one piece, bytes left; None where nobody said."""

    needed: int | None
    free: int | None


def shortage_of(e: BaseException, device: torch.device) -> Shortage | None:
    """What ``e`` says of memory that could not be had; None if it is about something else."""
    said = str(e)
    on_card = isinstance(e, torch.cuda.OutOfMemoryError) or (_of_cuda(e) and _CARD_MEMORY.search(said))
    on_host = isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and _CPU_MEMORY.search(said))
    if not on_card and not on_host:
        return None
    free = _bytes(_LEFT.search(said))
    if free is None:
        free = _free(device if on_card else torch.device("cpu"))
    return Shortage(_bytes(_ASKED.search(said)), free)


def _bytes(said: re.Match[str] | None) -> int | None:
    return int(float(said[1]) * (1 << _UNITS[said[2][0].lower()])) if said else None


def _free(device: torch.device) -> int | None:
    """Bytes that a new allocation may still have."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    host = host_memory.look()
    return host.available if host else None


def release(device: torch.device) -> None:
    """Let go of all memory that is only kept to be quick, and of what a failed step has left in circles."""
    loss.release()
    gc.collect()
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def poisoned(e: BaseException) -> bool:
    """Whether a CUDA error has made this process's context useless: all of them do, but for want of memory and for
    want of a kernel."""
    return (_of_cuda(e) and not isinstance(e, torch.cuda.OutOfMemoryError) and not _CARD_MEMORY.search(str(e))
            and not _is(e, _NO_KERNELS))


def _of_cuda(e: BaseException) -> bool:
    """Whether CUDA says it: through torch, or to a launch of ours, which may be the first to hear of an error."""
    return isinstance(e, KernelFailed) or (
        isinstance(e, RuntimeError) and ("CUDA error" in str(e) or "CUDA driver error" in str(e)))


def last_words(e: BaseException) -> LastWords:
    """Why the worker ends, and whether its die can be used at all."""
    return LastWords(message=_first_line(e), die_failed=poisoned(e) and _is(e, _LOST))


def failure(job: str, e: Exception) -> Failed:
    """What went wrong, and whose fault it is."""
    if _is(e, _NO_KERNELS):
        return Failed(job=job, blame="die", message=f"torch {torch.__version__} has no kernels for this die: "
                      f"{_first_line(e)}", hint="install a torch that was built for it")
    if isinstance(e, OSError) and e.errno in _OF_A_DISK:  # whoever wrote left it to us
        e = durable.trouble(e, Path(str(e.filename or "a file")))
    if isinstance(e, TryLater):  # nobody's fault, and it passes
        return Failed(job=job, blame="disk" if isinstance(e, DiskTrouble) else "busy", message=e.message, hint=e.hint)
    if isinstance(e, (NotFinite, RrdError)):
        return Failed(job=job, blame="job", message=e.message, hint=e.hint)
    traceback.print_exception(e)  # ours, or the library's: the journal should have the whole of it
    return Failed(job=job, blame="worker", message=f"{type(e).__name__}: {_first_line(e)}",
                  hint="this is a bug of rrd or a library; the journal has the stack")


def _is(e: BaseException, words: tuple[str, ...]) -> bool:
    said = str(e).lower()
    return isinstance(e, (RuntimeError, KernelFailed)) and any(w in said for w in words)


def _first_line(e: BaseException) -> str:
    said = (str(e).strip().splitlines() or [""])[0]
    return one_line(said, 300) or (os.strerror(e.errno or 0) if isinstance(e, OSError) else type(e).__name__)
