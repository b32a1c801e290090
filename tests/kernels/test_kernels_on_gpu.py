"""Every kernel's cases on a real die: ``tests/gpu/run.sh`` runs them with all else that needs one."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CASES

from rrd.ops.cuda import launch
from rrd.ops.cuda.launch import DieKernels

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def die() -> DieKernels:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA die here")
    found = launch.launcher(torch.device("cuda", torch.cuda.current_device()))
    if found is None:
        pytest.skip(launch.why_not(torch.device("cuda")))
    return found


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, cases in CASES.items() for name in cases])
def test_it_computes_what_the_reference_does(die: DieKernels, op: str, name: str) -> None:
    CASES[op][name](die, die.device)
    torch.cuda.synchronize(die.device)
