"""``rrd logs``: what happened to a job, read from its directory; works with the daemon down."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rrd.cli import show
from rrd.cli.complete import JOB
from rrd.cli.places import Where, job_dir, where
from rrd.text import one_line

EVENTS, HISTORY = "events.jsonl", "history.jsonl"
_COLOR = {"error": "red", "warning": "yellow"}
_POLL = 0.5


@click.command()
@click.argument("job", type=JOB)
@click.option("-f", "--follow", is_flag=True, help="Go on as more happens; ctrl-c ends it.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the newest N (with -f, 20).")
@click.option("--steps", is_flag=True, help="Every step and held-out loss, too.")
@click.option("--json", "as_json", is_flag=True, help="The records, one JSON object a line.")
@where
def logs(job: str, follow: bool, lines: int | None, steps: bool, as_json: bool, where: Where) -> None:
    """Show what happened to a job."""
    directory = job_dir(where.find(), job)
    tails = [Tail(directory / name) for name in ([EVENTS, HISTORY] if steps else [EVENTS])]
    lines = 20 if lines is None and follow else lines
    records = heapq.merge(*(t.new() for t in tails), key=lambda r: float(r["time"]))
    shape = json.dumps if as_json else line
    for record in records if lines is None else deque(records, maxlen=lines):
        click.echo(shape(record))
    if follow:
        for record in following(tails, lambda: time.sleep(_POLL)):
            click.echo(shape(record))


@dataclass
class Tail:
    """A file of JSON lines that somebody else appends to."""

    path: Path
    at: int = 0
    inode: int = 0
    time: float = 0.0
    """Of the last record: a record without a time of its own happened then."""

    def new(self) -> Iterator[dict[str, Any]]:
        """The whole records since the last call; from the start again when the file was replaced or cut."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as f:
            stat = os.fstat(f.fileno())
            if stat.st_ino != self.inode or stat.st_size < self.at:
                self.at, self.inode = 0, stat.st_ino
            f.seek(self.at)
            for raw in f:
                if not raw.endswith(b"\n"):  # it is being written
                    return
                self.at += len(raw)
                if record := self._record(raw):
                    yield record

    def _record(self, raw: bytes) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(raw)
            self.time = float(record.setdefault("time", self.time))
        except (ValueError, TypeError, AttributeError, RecursionError):  # torn by a crash
            return None
        return record


def following(tails: Iterable[Tail], pause: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """Records as they come, for ever; ``pause`` waits between looks."""
    tails = list(tails)
    while True:
        yield from sorted((r for t in tails for r in t.new()), key=lambda r: float(r["time"]))
        pause()


def line(record: dict[str, Any]) -> str:
    """A record as a line for people."""
    when = click.style(show.clock(float(record["time"])), dim=True)
    if "message" in record:
        return f"{when}  {event_text(record)}"
    return f"{when}  {one_line(_step(record))}"


def event_text(e: dict[str, Any]) -> str:
    """An event in words: level, sentence, hint, and where."""
    level, hint = str(e.get("level", "")), e.get("hint")
    where = [f"{name} {e[name]}" for name in ("die", "step") if e.get(name)]
    text = one_line(str(e.get("message", "?")) + (f" ({hint})" if hint else ""), 2000)
    place = one_line(f"  [{', '.join(where)}]" if where else "", 100)
    word = f"{level}: " if level in _COLOR else ""
    return click.style(word, fg=_COLOR.get(level)) + text + click.style(place, dim=True)


def _step(r: dict[str, Any]) -> str:
    names = {"loss": "loss", "eval_loss": "held-out loss", "lr": "lr", "grad_norm": "gradient", "tokens": "tokens",
             "seconds": "seconds"}
    values = [f"{name} {_value(r[key])}" for key, name in names.items() if r.get(key) is not None]
    die = f"die {r['die']} " if r.get("die") is not None else ""
    skipped = " (not applied)" if r.get("applied") is False else ""
    return f"{die}step {r.get('step', '?')}: {', '.join(values)}{skipped}"


def _value(value: object) -> str:
    return show.number(value) if isinstance(value, float) else str(value)
