"""``rrd status`` and ``rrd dies``: one snapshot of the daemon, as tables, as one job, or as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli import show
from rrd.cli.complete import JOB
from rrd.cli.places import STATUS, Where, no_such_job, where
from rrd.errors import NotRunning
from rrd.states import JobState

if TYPE_CHECKING:
    from rrd.snapshot import Snapshot


def ask(run_dir: Path) -> tuple[Snapshot, bool]:
    """What the daemon says, and True; else what it last wrote, and False. Raises NotRunning when there is neither,
    Damaged when it is a newer rrd's."""
    from rrd.client import call
    from rrd.snapshot import Snapshot

    try:
        return Snapshot.read(call(run_dir, "status")), True
    except NotRunning as down:
        try:
            last = Snapshot.read(json.loads((run_dir / STATUS).read_bytes()))
            return last.model_copy(update={"spool_watch_healthy": True, "stopping": False}), False  # it has ended
        except (OSError, ValueError, RecursionError):
            raise down from None


def say_if_down(snapshot: Snapshot, running: bool) -> None:
    if not running:
        show.warn(f"rrd is not running; this is from {show.ago(snapshot.time, time.time())}, when it last wrote")


@click.command()
@click.argument("job", required=False, type=JOB)
@click.option("--only", "states", multiple=True, type=click.Choice([s.value for s in JobState]),
              help="Only jobs in this state; may be repeated.", metavar="STATE")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@where
def status(job: str | None, states: tuple[str, ...], as_json: bool, where: Where) -> None:
    """Show all jobs and dies, or everything about one job.

    With the daemon down, what it last wrote is shown; exit code 3 if there is nothing.
    """
    from rrd.cli import views

    snapshot, running = ask(where.find().run_dir)
    chosen = snapshot.job(job) if job is not None else None
    if job is not None and chosen is None:
        raise no_such_job(job, (j.id for j in snapshot.jobs))
    if states:
        snapshot = snapshot.model_copy(update={"jobs": [j for j in snapshot.jobs if j.state.value in states]})
    say_if_down(snapshot, running)
    if as_json:
        show.as_json({"running": running, **show.plain(chosen or snapshot)})
        return
    now, width = time.time(), show.terminal_width()
    lines = views.job(chosen, now, width) if chosen else views.overview(snapshot, now, width)
    click.echo("\n".join(lines))


@click.command()
@click.option("--unfence", metavar="DIE", help="Put a die back to use that was fenced: taken out after faults.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@where
def dies(unfence: str | None, as_json: bool, where: Where) -> None:
    """List lanes and dies: what each is, does and holds; * marks the job that computes."""
    from rrd.cli import views
    from rrd.client import call

    if unfence is not None:
        show.say(str(call(where.find().run_dir, "unfence", die=unfence)))
        return
    snapshot, running = ask(where.find().run_dir)
    say_if_down(snapshot, running)
    if as_json:
        all_of_it = show.plain(snapshot)
        show.as_json({"running": running, "lanes": all_of_it["lanes"], "dies": all_of_it["dies"]})
        return
    now, width = time.time(), show.terminal_width()
    click.echo("\n".join([*views.lanes(snapshot, width), "", *views.dies(snapshot, now, width, full=True)]))
