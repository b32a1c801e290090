"""``rrd bench ops``: the real measurement at tiny shapes, and how it is shown."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from rrd.cli.app import app
from rrd.cli.bench import _markdown, _rows


def rrd(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "ops", *args])


@pytest.fixture(scope="module")
def found() -> dict:
    result = rrd("--small", "--seconds", "0", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_op_of_a_step_is_measured_against_both_ceilings(found: dict) -> None:
    ops = {o["op"] for o in found["ops"]}
    assert {"linear", "int8 linear", "int8 linear dx", "attention", "wkv7", "wkv7 backward", "AdamW",
            "cross-entropy, both ways", "checkpoint copy"} <= ops
    assert found["copy"] > 0
    assert found["gemm"] > 0
    assert all(o["seconds"] > 0 and o["bytes"] > 0 and o["by"] in ("torch", "compiled", "kernel") for o in found["ops"])


def test_the_limit_is_the_larger_share() -> None:
    op = {"op": "x", "shape": "1", "by": "torch", "seconds": 0.001, "bytes": 5e9, "flops": 9e9}
    (row,) = _rows({"copy": 10e9, "gemm": 100e9, "ops": [op]})
    assert row == ("x", "1", "torch", "1.00", "5.0", "9.0", "50%")


def test_it_is_shown_as_a_table_to_paste(found: dict) -> None:
    lines = _markdown(found)
    assert "GEMM" in lines[0]
    assert lines[2].startswith("| OP | SHAPE | BY | MS |")
    assert all(line.count("|") == 8 for line in lines[2:])


@pytest.mark.parametrize("name", ["nonsense", "cuda:", "cpu:0;x", ""])
def test_a_device_that_is_none_is_a_usage_error(name: str) -> None:
    result = rrd("--device", name)
    assert result.exit_code == 2
    assert "a device is cpu, cuda:0" in result.output


def test_a_device_that_is_not_there_is_one_sentence() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA die")
    result = rrd("--device", "cuda:0")
    assert result.exit_code == 1
    assert "cuda:0 cannot be measured" in result.output
    assert "Traceback" not in result.output
