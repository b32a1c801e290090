"""What a job's training looked like, read from its directory: every step that counts, once, and what happened when.

The worker writes ``history.jsonl`` and cuts it back when it resumes, so that no step is there twice; a line torn by a
crash, or a file that somebody else put together, is read all the same. Nothing here needs the daemon.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HISTORY, EVENTS = "history.jsonl", "events.jsonl"


class Step(NamedTuple):
    """One optimizer step, as its worker wrote it down."""

    step: int
    loss: float | None
    """Mean over the step's labels; None where it had none, or was not finite."""
    lr: float
    grad_norm: float | None
    tokens: int
    seconds: float
    """Of computing; waiting for other dies' turns is not in it."""
    die: str
    round: int
    time: float
    """Unix time at its end."""
    applied: bool = True
    """False: it was left out because its gradient was no number."""


class Mark(NamedTuple):
    """Something that happened between two steps: a ``checkpoint``, a ``resumed``, or a ``died``."""

    kind: str
    step: int
    time: float


@dataclass
class History:
    """A job's past. Steps ascend; ``evals`` are (step, held-out loss)."""

    job: str
    steps: list[Step] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def losses(self) -> list[tuple[int, float]]:
        return [(s.step, s.loss) for s in self.steps if s.loss is not None]

    def throughput(self) -> list[tuple[int, float]]:
        """(step, tokens a second of computing)."""
        return [(s.step, s.tokens / s.seconds) for s in self.steps if s.seconds > 0]


def read(directory: Path) -> History:
    """The history in a job's state directory; empty where nothing was trained yet."""
    h = History(directory.name)
    for line in _lines(directory / HISTORY):
        with suppress(KeyError, TypeError, ValueError):
            _take(h, line)
    for event in _lines(directory / EVENTS):
        if mark := _mark(event):
            h.marks.append(mark)
    return h


def newest(directory: Path, upto: int, size: int = 1 << 14) -> History:
    """The last steps and held-out losses up to step ``upto``, from no more than ``size`` bytes: quick for any job."""
    h = History(directory.name)
    with suppress(OSError), open(directory / HISTORY, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        for line in map(_record, file.read(size).split(b"\n")):
            with suppress(KeyError, TypeError, ValueError):
                if line is not None and int(line["step"]) <= upto:
                    _take(h, line)
    return h


def _take(h: History, line: dict[str, Any]) -> None:
    step = int(line["step"])
    if "eval_loss" in line:
        while h.evals and h.evals[-1][0] >= step:
            h.evals.pop()
        h.evals.append((step, float(line["eval_loss"])))
        return
    new = Step(step, _finite(line.get("loss")), float(line["lr"]), _finite(line.get("grad_norm")), int(line["tokens"]),
               float(line["seconds"]), str(line.get("die", "")), int(line.get("round", 0)), float(line.get("time", 0)),
               line.get("applied") is not False)
    while h.steps and h.steps[-1].step >= step:  # run again after a crash: only the last time counts
        h.steps.pop()
    h.steps.append(new)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _mark(event: dict[str, Any]) -> Mark | None:
    step, kind = event.get("step"), event.get("kind")
    if not isinstance(step, int):
        return None
    known = {"checkpoint": "checkpoint", "worker_died": "died",
             "loaded": "resumed" if "resumed" in str(event.get("message")) else None}
    name = known.get(str(kind))
    return Mark(name, step, float(event.get("time") or 0.0)) if name else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a file of JSON lines."""
    with suppress(FileNotFoundError), open(path, "rb") as f:
        for raw in f:
            if (record := _record(raw)) is not None:
                yield record


def _record(raw: bytes) -> dict[str, Any] | None:
    """A whole line; None for a torn one."""
    with suppress(ValueError, RecursionError):
        record = json.loads(raw)
        if isinstance(record, dict):
            return record
    return None


# ---- curves ----------------------------------------------------------------------------------------------------------


def smooth(points: Sequence[tuple[int, float]], span: int | None = None) -> list[tuple[int, float]]:
    """``points`` as an exponential moving average without the bias of its start (as Adam's moments have it).

    ``span``: about how many points it looks back; left out: a fiftieth of them.
    """
    span = span if span is not None else max(1, len(points) // 50)
    beta, mean, weight, out = 1 - 2 / (span + 1), 0.0, 0.0, []
    for x, y in points:
        mean, weight = beta * mean + (1 - beta) * y, beta * weight + (1 - beta)
        out.append((x, mean / weight))
    return out


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most about ``most`` points that look the same: of each stretch its lowest and its highest, in their order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    out: list[tuple[int, float]] = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        out += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return out


def rows(h: History) -> Iterable[dict[str, Any]]:
    """One row a step, with the held-out loss measured after it; a row of its own for one before the first step."""
    held_out = dict(h.evals)
    names = Step._fields
    empty = dict.fromkeys(names)
    for step in sorted(held_out.keys() - {s.step for s in h.steps}):
        yield {**empty, "step": step, "eval_loss": held_out[step]}
    for s in h.steps:
        yield {**s._asdict(), "eval_loss": held_out.get(s.step)}
