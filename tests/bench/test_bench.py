"""The benchmarks run: each in its quick form, whose figures mean nothing but are all there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TRAIN = ["--model", "12m", "--seq", "64", "--dtype", "float32", "--method", "lora", "--masked", "0", "--rounds", "1",
         "--steps", "1"]


def run(name: str, *options: str) -> str:
    done = subprocess.run([sys.executable, str(HERE / f"bench_{name}.py"), *options], capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["daemon", "rotation", "aggregate", "tokenize", "gate", "int8"])
def test_quick(name: str) -> None:
    result = json.loads(run(name, "--quick").splitlines()[-1])
    assert result["bench"] == name
    assert all(figure["value"] > 0 or "committed" in what for what, figure in result["figures"].items())


@pytest.mark.slow
def test_train() -> None:
    assert "ratio" in run("train", *TRAIN)
