"""No barrier and no bound of the kernels can be taken away without some case failing."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_build import CHECKED, PLAIN, needs_gxx
from kernel_cases import CASES
from mutants import Mutant, barriers, bounds, killed_by

pytestmark = needs_gxx

BARRIERS = [m for op in CASES for m in barriers(op)]
BOUNDS = [m for op in CASES for m in bounds(op)]
SAMPLE = BOUNDS[2::9]


def test_there_are_as_many_as_the_sources_have() -> None:
    assert len(BARRIERS) == 10 and len(BOUNDS) == 35


@pytest.mark.parametrize("mutant", BARRIERS, ids=str)
def test_without_a_barrier_some_case_fails(mutant: Mutant, tmp_path: Path) -> None:
    assert killed_by(mutant, tmp_path, PLAIN)


@pytest.mark.parametrize("mutant", SAMPLE, ids=str)
def test_without_a_bound_some_case_fails(mutant: Mutant, tmp_path: Path) -> None:
    assert killed_by(mutant, tmp_path, CHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in BOUNDS if m not in SAMPLE], ids=str)
def test_without_any_bound_some_case_fails(mutant: Mutant, tmp_path: Path) -> None:
    assert killed_by(mutant, tmp_path, CHECKED)
