"""Tests on a real CUDA die. `tests/gpu/run.sh` runs them all and prints what they measured as one table.

``RRD_TEST_DEVICE=cpu`` runs them on a CPU die: that proves the tests, not the die.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

Row = Callable[[str, str, str], None]
"""What was measured, the figure, and what it is held to."""

_ROWS: list[tuple[str, str, str]] = []


@pytest.fixture(scope="session")
def device() -> str:
    name = os.environ.get("RRD_TEST_DEVICE", "cuda:0")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA die here; RRD_TEST_DEVICE=cpu proves the test on a CPU die")
    return name


@pytest.fixture
def row() -> Row:
    def add(what: str, figure: str, wanted: str = "") -> None:
        _ROWS.append((what, figure, wanted))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ROWS:
        terminalreporter.section("measured")
        for cells in [("what", "measured", "wanted"), ("---", "---", "---"), *_ROWS]:
            terminalreporter.write_line("| " + " | ".join(cells) + " |")
