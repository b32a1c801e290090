"""Which dtype a die stores weights in and which it computes in.

Computing in bf16 pays only where the die multiplies bf16 faster: CPUs with AMX and AMD's with AVX512-BF16 do so twice
as fast as fp32, Intel's without AMX half as fast, Kepler and Pascal not at all. Storing in bf16 is always to be had.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from rrd.errors import BadJob

OF_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes a job can name."""

OF_FILE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of safetensors that weights can be read from."""

_WORTH_IT = 1.2


def itemsize(dtype: torch.dtype) -> int:
    """Bytes of one element; torch 2.0 has no ``dtype.itemsize``."""
    return torch.empty((), dtype=dtype).element_size()


def choose(wanted: str, device: torch.device | str, *, trainable: bool = False) -> tuple[torch.dtype, torch.dtype]:
    """(stored, compute) for a job's ``dtype`` key. Both belong to the job's identity: the choice is made once.

    "auto": both what the die is good at. "bfloat16": stored so, and computed so where that is faster. Weights that are
    trained are stored as they are computed.
    """
    fast = torch.bfloat16 if good_at_bf16(str(torch.device(device))) else torch.float32
    if wanted == "auto":
        return fast, fast
    if wanted not in OF_NAME:
        raise BadJob(f"dtype {wanted!r} is none of auto, float32, bfloat16", key="dtype")
    stored = OF_NAME[wanted]
    compute = fast if stored == torch.bfloat16 else stored
    return (compute if trainable else stored), compute


@lru_cache
def good_at_bf16(device: str) -> bool:
    """Whether the die multiplies bf16 clearly faster than fp32. Measured on CPUs (0.1 s), by generation on CUDA."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bf16_speedup() >= _WORTH_IT


def bf16_speedup(n: int = 384) -> float:
    """fp32's time for one product of n x n matrices, over bf16's: the best of a few, taken in turn."""
    times = {torch.float32: [], torch.bfloat16: []}  # type: dict[torch.dtype, list[float]]
    ones = {dtype: torch.ones(n, n, dtype=dtype) for dtype in times}
    for _ in range(6):
        for dtype, x in ones.items():
            start = time.perf_counter()
            torch.mm(x, x)
            times[dtype].append(time.perf_counter() - start)
    return min(times[torch.float32]) / min(times[torch.bfloat16])
