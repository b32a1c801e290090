"""Commands that ask the daemon to do something: pause, resume, cancel, restart, reload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rrd.cli.app import complain
from rrd.cli.complete import JOB
from rrd.cli.places import Where, where
from rrd.cli.show import say

if TYPE_CHECKING:
    from pathlib import Path


def _ask(verb: str, jobs: tuple[str, ...], run_dir: Path, **args: Any) -> None:
    """Ask ``verb`` for each job; a refusal does not keep the others from being asked. Raises the last one."""
    from rrd.client import call
    from rrd.errors import NotRunning, RrdError, TryLater

    refused: list[RrdError] = []
    for job in dict.fromkeys(jobs):
        try:
            say(str(call(run_dir, verb, job=job, **args)))
        except (NotRunning, TryLater):
            raise
        except RrdError as e:
            refused.append(e)
    for error in refused[:-1]:
        complain(error)
    if refused:
        raise refused[-1]


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB)
@where
def pause(jobs: tuple[str, ...], where: Where) -> None:
    """Let jobs take no turns until they are resumed; no restart of the daemon resumes them."""
    _ask("pause", jobs, where.find().run_dir)


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB)
@where
def resume(jobs: tuple[str, ...], where: Where) -> None:
    """Let paused jobs take turns again."""
    _ask("resume", jobs, where.find().run_dir)


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB)
@where
def cancel(jobs: tuple[str, ...], where: Where) -> None:
    """End jobs before they are done. Their checkpoints are kept."""
    _ask("cancel", jobs, where.find().run_dir)


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB)
@click.option("--fresh", is_flag=True, help="Begin at step 0; the checkpoints are put aside.")
@where
def restart(jobs: tuple[str, ...], fresh: bool, where: Where) -> None:
    """Take over edited job files, or try failed and cancelled jobs again.

    A job goes on from its newest checkpoint, unless a key was changed that decides which numbers come out.
    """
    _ask("restart", jobs, where.find().run_dir, **({"fresh": True} if fresh else {}))


@click.command()
@where
def reload(where: Where) -> None:
    """Have the daemon read rrd.toml and the job files again."""
    from rrd.client import call

    say(str(call(where.find().run_dir, "reload")))
