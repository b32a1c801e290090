"""What the demo brought: ``python packaging/demo/finish.py .demo [--check]``.

Prints a table of losses and adapters, and a script that loads one with PEFT. ``--check`` runs that very script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fetch
import jobs

from rrd.errors import Damaged, NotRunning, RrdError

SHOWN_JOB = "jargon-r16"
FEW = 10  # steps averaged at each end: the loss of a single sample says little

SCRIPT = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = "{base}"
tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{adapter}")

prompt = tokenizer("The Jargon File on “kluge”:\\n", return_tensors="pt")
def answer():
    tokens = model.generate(**prompt, max_new_tokens=30, do_sample=False, repetition_penalty=1.2)
    return tokenizer.decode(tokens[0][prompt.input_ids.shape[1]:], skip_special_tokens=True).strip()

with model.disable_adapter():
    print("without the adapter:", answer())

print("with the adapter:   ", answer())
"""


RWKV_SCRIPT = """\
import torch
from tokenizers import Tokenizer

from rrd.models import build, load_base

@torch.no_grad()
def expects(path, text):
    tokenizer, model = Tokenizer.from_file(path + "/tokenizer.json"), build(load_base(path))
    hidden = model.hidden(torch.tensor([tokenizer.encode(text).ids]))
    likely = (hidden[0, -1] @ model.head_weight.t()).topk(8).indices
    return " ".join(repr(tokenizer.decode([int(i)])) for i in likely)

text = "def get(self, name):\\n    return"
print("after `return`, the RWKV-7 from scratch expects:", expects("{base}", text))
print("and with the adapter, merged:                   ", expects("{merged}", text))
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
    few = max(1, min(FEW, len(ordered) // 2))
    ends = _mean(ordered[:few]), _mean(ordered[-few:])
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


def table(state: Path) -> Iterator[str]:
    """The lines of the table, its head first."""
    yield _line("job", "steps", "training loss", "held-out loss", "result")
    for job in jobs.JOBS | jobs.THEN:
        got, there = losses(history(state, job)), adapter_dir(state, job)
        heldout = _fell(got.heldout_first, got.heldout_last)
        result = str(_short(there)) if there.exists() else "none"
        yield _line(job, str(got.steps), _fell(got.first, got.last), heldout, result)


def _line(job: str, steps: str, train: str, heldout: str, result: str) -> str:
    return f"{job:<16} {steps:>5}  {train:>13}  {heldout:>13}  {result}"


def _fell(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{first:.2f} → {last:.2f}"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write_script(demo: Path, state: Path) -> Path:
    """The script beside the models, for a reader to run, to paste and to change."""
    path = demo / "load_adapter.py"
    text = SCRIPT.format(base=fetch.model_dir(demo), adapter=adapter_dir(state, SHOWN_JOB))
    path.write_text(text, encoding="utf-8")
    return path


def write_rwkv_script(demo: Path, state: Path) -> Path | None:
    """The same for the RWKV-7, by rrd's own code; None where its adapter is not there."""
    base, merged = adapter_dir(state, "rwkv-new"), adapter_dir(state, "rwkv-lora") / "merged"
    if not (base.exists() and merged.exists()):
        return None
    path = demo / "ask_rwkv.py"
    path.write_text(RWKV_SCRIPT.format(base=base, merged=merged), encoding="utf-8")
    return path


def check(script: Path) -> None:
    """Run ``script`` as a reader would. Raises Damaged when it fails."""
    quiet = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1",
             "OMP_NUM_THREADS": "1"}  # on a busy machine two threads wait for each other for minutes
    if subprocess.run([sys.executable, "-W", "ignore", str(script)], env=quiet).returncode != 0:
        raise Damaged(f"{_short(script)} does not run", hint="its error is printed above")


def main(arguments: list[str]) -> None:
    """Print the table and the script; with ``--check``, run it."""
    demo = Path(next(a for a in arguments if not a.startswith("-"))).absolute()
    state = demo / "state"
    if not (state / "jobs").is_dir():
        raise NotRunning(f"nothing was trained in {state} yet", hint="run `make demo`")
    print(f"\nMean loss of the first {FEW} → the last {FEW} steps; held-out loss at the start → at the end:\n")
    print("\n".join(table(state)))
    if not adapter_dir(state, SHOWN_JOB).exists():
        return
    script, rwkv = write_script(demo, state), write_rwkv_script(demo, state)
    print(f"\nAn adapter loads with PEFT. Run {_short(Path(sys.executable))} {_short(script)}, or paste:\n")
    print(script.read_text(encoding="utf-8"), flush=True)
    if "--check" in arguments:
        check(script)
        if rwkv is not None:
            check(rwkv)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RrdError as error:
        fetch.say(str(error))
        sys.exit(error.exit_code)
