"""``rrd events``: the story of all jobs and dies in sentences, from the state directory; works with the daemon down."""

from __future__ import annotations

import heapq
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from rrd.cli import show
from rrd.cli.complete import JOB
from rrd.cli.logs import EVENTS, Tail, event_text
from rrd.cli.places import Where, job_dir, where
from rrd.text import one_line

_POLL = 0.5


@click.command()
@click.argument("jobs", nargs=-1, type=JOB)
@click.option("-f", "--follow", is_flag=True, help="Go on as more happens; ctrl-c ends it.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, metavar="N",
              help="Only the newest N.")
@click.option("--json", "as_json", is_flag=True, help="The records, one JSON object a line.")
@where
def events(jobs: tuple[str, ...], follow: bool, lines: int, as_json: bool, where: Where) -> None:
    """Show what happened: of all jobs, dies and the daemon, or of some jobs.

    `rrd logs JOB` shows one job's, with steps if wanted.
    """
    config = where.find()
    if jobs:
        chosen = [job_dir(config, job) for job in jobs]
        story = Story(lambda: chosen)
    else:
        story = Story(lambda: [config.state_dir, *sorted(p for p in (config.state_dir / "jobs").glob("[!.]*"))])
    shape = json.dumps if as_json else _line
    for record in deque(story.new(), maxlen=lines):
        click.echo(shape(record))
    while follow:
        time.sleep(_POLL)
        for record in story.new():
            click.echo(shape(record))


class Story:
    """The events of several directories as one, by time; directories may appear meanwhile."""

    def __init__(self, directories: Callable[[], list[Path]]) -> None:
        self._directories = directories
        self._tails: dict[Path, Tail] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        """What was not told yet, each with the name of its job, or none."""
        parts = []
        for directory in self._directories():
            tail = self._tails.setdefault(directory, Tail(directory / EVENTS))
            job = directory.name if directory.parent.name == "jobs" else None
            parts.append([{**record, "job": job} for record in tail.new()])
        yield from heapq.merge(*parts, key=lambda r: float(r["time"]))


def _line(record: dict[str, Any]) -> str:
    when = click.style(show.clock(float(record["time"])), dim=True)
    name = record["job"] or (f"die {record['die']}" if record.get("die") else "rrd")
    told = {k: v for k, v in record.items() if k != "die"} if not record["job"] else record
    return f"{when}  {click.style(one_line(name, 70), bold=True)}: {event_text(told)}"
