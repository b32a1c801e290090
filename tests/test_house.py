"""The house style as tests: lint, types, floors, a daemon without torch, no unsafe loading."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rrd"

FLOORS: dict[str, int] = {
    # floor 0: words, faults, and the only code that writes state
    "errors": 0, "boards": 0, "states": 0, "text": 0, "durable": 0, "roots": 0, "host_memory": 0,
    # floor 1: the language both towers share
    "savings": 1, "stack": 1, "toml": 1, "job_keys": 1, "job": 1, "edits": 1, "config": 1, "messages": 1,
    "checkpoint": 1, "snapshot": 1, "safetensors_header": 1, "adapter": 1, "inputs": 1,
    # floor 2, daemon tower: one thing each
    "ledger": 2, "spool": 2, "watch": 2, "rotation": 2, "placement": 2, "roster": 2, "gate": 2, "metrics": 2,
    "notify": 2, "journal": 2, "client": 2, "page": 2, "history": 2, "figure": 2, "errands": 2, "room": 2,
    # floors 3 to 6, daemon tower
    "handle": 3, "keeper": 3, "herald": 4, "post": 2, "die": 4, "host": 4, "visit": 4, "lane": 4, "preparer": 4,
    "faults": 5, "scheduler": 5, "intake": 5, "verbs": 5,
    "control": 5, "web": 5, "daemon": 5, "cli": 6, "__main__": 6,
    # the privileged helper: on the ground, leaning on nothing
    "helper": 0,
    # worker tower
    "ops": 2, "models": 3, "optim": 3, "lora": 3, "train": 4, "worker": 5,
}
WORKER_TOWER = {"ops", "models", "optim", "lora", "train", "worker"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The part of the package that has a floor: a module of the top level, or a package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> set[str]:
    """What a module imports, as dotted names, ``TYPE_CHECKING`` included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors_and_its_own_tower(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "rrd" or len(parts) < 2 or parts[1] in (room, "__version__"):
            continue
        other = parts[1]
        assert FLOORS[other] < FLOORS[room] or (
            FLOORS[other] == FLOORS[room] and (room in WORKER_TOWER) == (other in WORKER_TOWER)
        ), f"{room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"
        if FLOORS[other] >= 2:
            assert (room in WORKER_TOWER) == (other in WORKER_TOWER), f"{room} reaches into the other tower: {other}"


def test_the_daemon_and_the_command_line_import_no_torch() -> None:
    code = ("import sys, rrd.daemon, rrd.cli, pkgutil, importlib\n"
            "[importlib.import_module(m.name) for m in pkgutil.walk_packages(rrd.cli.__path__, 'rrd.cli.')]\n"
            "assert 'torch' not in sys.modules, 'torch'\nassert 'numpy' not in sys.modules, 'numpy'")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", sorted((PACKAGE / "helper").glob("*.py")), ids=lambda p: p.name)
def test_the_privileged_helper_stands_on_the_standard_library_alone(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path) if not name.startswith("rrd.helper.")}
    assert roots <= set(sys.stdlib_module_names) | {"tomli"}  # tomllib, before Python 3.11


UNSAFE = re.compile(r"torch\.load\(|\bimport pickle|\bfrom pickle|allow_pickle\s*=\s*True|trust_remote_code\s*=\s*True"
                    r"|(?<![.\w])(eval|exec)\(|yaml\.load\(|shell\s*=\s*True")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_loads_or_runs_what_it_was_given(path: Path) -> None:
    text = path.read_text()
    assert not UNSAFE.search(text)


WRITES = re.compile(r"os\.(rename|replace|fsync|unlink)\(|\.write_bytes\(|\.write_text\(|open\([^)]*[\"'][wax]b?[\"']")
MAY_WRITE = {"durable.py", "cli", "control.py", "entry.py", "helper"}
"""durable itself; job files written for the user; the socket's file; /proc; what a privileged helper keeps in /run."""


def test_only_durable_writes_state() -> None:
    guilty = [str(p.relative_to(PACKAGE)) for p in modules()
              if not MAY_WRITE & {p.name, room_of(p)} and WRITES.search(p.read_text())]
    assert guilty == []


def test_ruff_is_content() -> None:
    run = subprocess.run([sys.executable, "-m", "ruff", "check", "rrd", "tests", "packaging"], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_mypy_is_content() -> None:
    run = subprocess.run([sys.executable, "-m", "mypy", "rrd"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_files_and_functions_are_small() -> None:
    """A file over 400 lines or a function over 60 is an idea not found yet."""
    large = []
    for path in modules():
        text = path.read_text()
        if text.count("\n") > 400:
            large.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines")
        for f in ast.walk(ast.parse(text)):
            if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) and (f.end_lineno or 0) - f.lineno > 60:
                large.append(f"{path.relative_to(PACKAGE)}: {f.name}")
    assert large == []
