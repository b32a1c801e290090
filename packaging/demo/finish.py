"""What the demo brought: ``python packaging/demo/finish.py .demo [--check]``.

Prints a table of losses and adapters, and a snippet that loads one with PEFT. ``--check`` runs that very snippet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import fetch
import jobs
from rich.console import Console
from rich.table import Table

from rrd.errors import Damaged, NotRunning, RrdError

SHOWN_JOB = "jargon-r16"
FEW = 10  # steps averaged at each end: the loss of a single sample says little

SNIPPET = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = "{base}"
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{adapter}")

prompt = tokenizer("The Jargon File on “kluge”:\\n", return_tensors="pt")
def answer():
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(tokens[0][prompt.input_ids.shape[1]:], skip_special_tokens=True).strip()

with model.disable_adapter():
    print("without the adapter:", answer())
print("with the adapter:   ", answer())
"""


class Losses(NamedTuple):
    """Of one job; None where nothing was recorded."""

    steps: int
    first: float | None
    last: float | None
    heldout_first: float | None
    heldout_last: float | None


def losses(lines: Iterable[str]) -> Losses:
    """Read a job's history. A step that was done again after a crash counts once, as it was done last."""
    train: dict[int, float | None] = {}
    heldout: dict[int, float] = {}
    for row in map(_row, lines):
        if "eval_loss" in row:
            heldout[row["step"]] = row["eval_loss"]
        elif "loss" in row:
            train[row["step"]] = row["loss"]
    ordered = [loss for _, loss in sorted(train.items()) if loss is not None]
    held = [loss for _, loss in sorted(heldout.items())]
    ends = _mean(ordered[:FEW]), _mean(ordered[-FEW:])
    return Losses(max(train, default=0), *ends, held[0] if held else None, held[-1] if held else None)


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}  # the last line, cut short by a kill
    return row if isinstance(row, dict) else {}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def history(state: Path, job: str) -> list[str]:
    path = state / "jobs" / job / "history.jsonl"
    return path.read_text(encoding="utf-8").split("\n") if path.exists() else []


def adapter_dir(state: Path, job: str) -> Path:
    return state / "adapters" / job


def table(state: Path) -> Table:
    shown = Table("job", "steps", "training loss", "held-out loss", "result", box=None, pad_edge=False)
    for column in shown.columns[1:4]:
        column.justify, column.no_wrap = "right", True
    for job in jobs.JOBS:
        got = losses(history(state, job))
        there = adapter_dir(state, job)
        place = str(_short(there)) if there.exists() else "none"
        heldout = _fell(got.heldout_first, got.heldout_last)
        shown.add_row(job, str(got.steps), _fell(got.first, got.last), heldout, place)
    return shown


def _fell(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{first:.2f} → {last:.2f}"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def snippet(demo: Path, state: Path) -> str:
    return SNIPPET.format(base=fetch.model_dir(demo), adapter=adapter_dir(state, SHOWN_JOB))


def check(code: str) -> None:
    """Run ``code`` as a reader would who copied it. Raises Damaged when it fails."""
    print("\nRunning it:", flush=True)
    if subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode != 0:
        raise Damaged("the snippet above does not run", hint="its error is printed above")


def main(arguments: list[str]) -> None:
    """Print the table and the snippet; with ``--check``, run the snippet."""
    demo = Path(next(a for a in arguments if not a.startswith("-"))).absolute()
    state = demo / "state"
    if not (state / "jobs").is_dir():
        raise NotRunning(f"nothing was trained in {state} yet", hint="run `make demo`")
    console = Console(soft_wrap=True)
    console.print(f"\nMean loss of the first {FEW} → the last {FEW} steps; held-out loss first → last measured:\n")
    console.print(table(state))
    if not adapter_dir(state, SHOWN_JOB).exists():
        return
    console.print("\nAn adapter loads with PEFT; paste this into .venv/bin/python:\n", markup=False)
    code = snippet(demo, state)
    console.print("\n".join("    " + line if line else "" for line in code.split("\n")), markup=False, highlight=False)
    if "--check" in arguments:
        check(code)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RrdError as error:
        fetch.say(str(error))
        sys.exit(error.exit_code)
