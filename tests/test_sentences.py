"""docs/operations.md has every state and sentence of a job, and none that the code does not say."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from rrd.states import JobState

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "docs/operations.md").read_text().split("## What a job can say\n")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines()
        if line.startswith("| ") and not line.startswith("| state")]
SENTENCES = [said for row in ROWS if "such as" not in row[1] for said in re.findall(r"`([^`]+)`", row[1])]

SAY = {"Leave", "set"}
"""Calls that give a job its sentence; and attributes and functions that hold or return one."""
ATTRIBUTES = {"why", "refusal"}
FUNCTIONS = {"_why", "_no_such_die", "_of_another_kind"}
WORKERS = ("inputs.py", "preparer.py", "room.py", "worker/resident.py", "worker/loop.py", "train/export.py",
           "train/publish.py", "train/step.py", "train/trainer.py")
"""Where what befalls a job on its way is found: errors raised there, and what is put together for them, become its
sentence as they are. What is wrong with a file that it names is found elsewhere; the row of those has the file."""
OF_A_COMMAND = {"models have no format of RWKV's"}
"""Said by `rrd export`, to no job."""
ERRORS = {"BadJob", "Damaged", "FutureFormat", "RrdError", "NotFinite", "_not_finite", "no_pieces"}


def texts(node: ast.AST) -> Iterator[str]:
    """The fixed parts of the strings in ``node``, formatted ones in pieces."""
    for n in ast.walk(node):
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            yield n.value


@cache
def trees() -> list[ast.Module]:
    """The daemon's tower."""
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "rrd").glob("*.py"))]


@cache
def code() -> str:
    """All text of it and of the workers' on one line."""
    others = [ast.parse((ROOT / "rrd" / path).read_text()) for path in WORKERS]
    return " ".join("|".join(" ".join(texts(tree)) for tree in [*trees(), *others]).split())


def said_by_the_code() -> Iterator[str]:
    """Fixed parts of what becomes a job's ``why``. Hints, which come third, are not sentences."""
    for tree in trees():
        for n in ast.walk(tree):
            name = getattr(n.func, "id", getattr(n.func, "attr", "")) if isinstance(n, ast.Call) else ""
            if isinstance(n, ast.Call) and name in SAY:
                at = 1 if name == "Leave" else 2
                for argument in n.args[at : at + 1]:
                    yield from texts(argument)
            elif isinstance(n, ast.Assign) and any(getattr(t, "attr", "") in ATTRIBUTES for t in n.targets):
                yield from texts(n.value)
            elif isinstance(n, ast.FunctionDef) and n.name in FUNCTIONS:
                for inner in ast.walk(n):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield from texts(inner.value)


def said_by_workers() -> Iterator[str]:
    """The same, of what its worker reports."""
    for path in WORKERS:
        for n in ast.walk(ast.parse((ROOT / "rrd" / path).read_text())):
            name = getattr(n.func, "id", getattr(n.func, "attr", "")) if isinstance(n, ast.Call) else ""
            if isinstance(n, ast.Call) and name in ERRORS:
                yield from (text for argument in n.args[:1] for text in texts(argument))
            elif isinstance(n, ast.Call) and name == "Failed":
                yield from (text for word in n.keywords if word.arg == "message" for text in texts(word.value))
            elif isinstance(n, ast.Assign) and any(getattr(t, "id", "") in {"what", "why", "said"} for t in n.targets):
                yield from texts(n.value)


def test_every_state_is_there() -> None:
    assert {row[0].strip("`") for row in ROWS} - {"any of these"} == {state.value for state in JobState}


@pytest.mark.parametrize(("said", "least"), [(said_by_the_code, 15), (said_by_workers, 25)])
def test_every_sentence_of_the_code_is_there(said: Callable[[], Iterator[str]], least: int) -> None:
    known = " ".join(SECTION.split()).replace("`", "")
    parts = {part.strip(" ;,:(") for text in said() for part in re.split(r"[`(){}]", text)}
    assert len(parts) > least, "where are the sentences?"
    assert [p for p in sorted(parts) if len(p) >= 12 and p not in known and p not in OF_A_COMMAND] == []


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence_there_is_said_by_the_code(sentence: str) -> None:
    for part in re.split(r"…|: |; |\(|\)", sentence):
        fixed = part.strip(" ,;:")
        assert len(fixed) < 9 or fixed in code(), f"nothing says {fixed!r}"
