"""Every kernel, built by g++ with the address sanitizer, against the reference: order of threads drawn at random."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from host_build import CHECKED, Host, host_of, needs_gxx
from kernel_cases import CASES

pytestmark = needs_gxx


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host_of(list(CASES), tmp_path_factory.mktemp("kernels"), CHECKED) as made:
        yield made


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, cases in CASES.items() for name in cases])
def test_it_computes_what_the_reference_does(host: Host, op: str, name: str) -> None:
    CASES[op][name](host, torch.device("cpu"))
