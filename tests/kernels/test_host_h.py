"""The stand-in for CUDA itself: what it orders, what it gives, and what it does not let pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from host_build import CHECKED, PLAIN, Host, HostFault, build, needs_gxx, poisoned

from rrd.ops.cuda.source import parse

pytestmark = needs_gxx


def run(place: Path, body: str, *, grid: tuple[int, int] = (1, 1), threads: int = 64, n: int = 64,
        flags: Sequence[str] = PLAIN, seed: int = 0) -> torch.Tensor:
    """What a kernel with this body, of float* out, leaves in out [n]."""
    s = parse("try", f'#include "host.h"\nextern "C" __global__ void __launch_bounds__({threads}) rrd_try(float* out) '
                     f"{{ const int i = threadIdx.x; {body} }}\n")
    host = Host({"try": build(s, place, flags)}, seed)
    out = poisoned(n)
    try:
        host.launch(s.kernels["rrd_try"], grid, [out])
    finally:
        host.close()
    return out


def test_what_is_not_written_stays_poisoned(tmp_path: Path) -> None:
    out = run(tmp_path, "if (i != 5) out[i] = i;")
    assert out.isnan().nonzero().tolist() == [[5]] and out[6] == 6


def test_threads_run_in_another_order_each_time(tmp_path: Path) -> None:
    body = "static int next = 0; out[i] = next++;"
    orders = {tuple(run(tmp_path, body, seed=seed).tolist()) for seed in range(8)}
    assert len(orders) >= 7
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_blocks_run_in_another_order_each_time(tmp_path: Path) -> None:
    body = "static int next = 0; if (i == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = next++;"
    orders = {tuple(run(tmp_path, body, grid=(4, 3), n=12, seed=seed).tolist()) for seed in range(8)}
    assert len(orders) >= 7
    assert all(sorted(order) == list(range(12)) for order in orders)


def test_shared_memory_is_spoilt_before_every_block(tmp_path: Path) -> None:
    body = "__shared__ float s[64]; if (s[i] == s[i]) out[0] = i; s[i] = 1.f; __syncthreads(); out[i + 1] = s[63 - i];"
    out = run(tmp_path, body, grid=(3, 1), n=65)
    assert out[0].isnan() and (out[1:] == 1).all()


def test_shuffles_and_atomics_give_what_cuda_gives(tmp_path: Path) -> None:
    out = run(tmp_path, "float x = i; for (int l = 16; l > 0; l /= 2) x += __shfl_xor_sync(0xffffffffu, x, l);"
                        "out[i] = x + 1000 * __shfl_sync(0xffffffffu, i, 3)"
                        "           + 100000 * __shfl_down_sync(0xffffffffu, i, 1);")
    lanes = torch.arange(64)
    down = torch.where(lanes % 32 == 31, lanes, lanes + 1)
    warp = lanes // 32
    assert torch.equal(out.long(), warp * 1024 + 496 + 1000 * (warp * 32 + 3) + 100000 * down)
    assert run(tmp_path, "if (i == 0) out[0] = 0.f; __syncthreads(); atomicAdd(out, 1.f);", n=1).item() == 64


@pytest.mark.parametrize(("body", "said"), [
    ("if (i < 32) __syncthreads(); out[i] = 0.f;", "never come to their barrier"),
    ("if (i & 1) out[i] = __shfl_sync(0xffffffffu, 1.f, 0);", "never come to their barrier"),
    ("if (i & 1) __syncthreads(); else out[i] = __shfl_sync(0xffffffffu, 1.f, 0);", "never come to their barrier"),
    ("if (i & 1) __shfl_sync(0xffffffffu, 1.f, 0); else __shfl_sync(0xffffffffu, 1.0, 0);", "different shuffles"),
    ("out[i] = __shfl_sync(0xffffu, 1.f, 0);", "less than a warp"),
])
def test_what_cuda_leaves_undefined_is_a_fault(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(HostFault, match=said):
        run(tmp_path, body)


@pytest.mark.parametrize(("body", "said"), [
    ("out[i + 1] = 0.f;", "heap-buffer-overflow"),
    ("if (i == 0) out[-1] = 0.f;", "heap-buffer-overflow"),
    ("__shared__ float s[64]; float* p = s; p[i + 1] = 0.f; out[i] = p[0];", "global-buffer-overflow"),
    ("__shared__ float s[2][32]; s[0][i] = 0.f; out[i] = s[1][0];", "out of bounds"),
    ("float r[4] = {}; float* p = r; p[i / 13] = 0.f; __syncthreads(); out[i] = p[1];", "stack-buffer-overflow"),
])
def test_what_lies_outside_is_a_fault(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(HostFault, match=said):
        run(tmp_path, body, flags=CHECKED)
