"""``rrd daemon`` and ``rrd run``: the same daemon, as a service or in the foreground."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli import show
from rrd.cli.places import Where, where_all
from rrd.errors import TryLater
from rrd.text import count

if TYPE_CHECKING:
    from rrd.config import Config


@click.command()
@where_all
@click.pass_context
def daemon(ctx: click.Context, where: Where) -> None:
    """Be the service: train what lies in the jobs directory until stopped.

    Exit code 78 means that the configuration is bad, and starting again will not help.
    """
    from rrd.daemon import run_daemon

    config = where.load()
    ctx.exit(run_daemon(config, until_done=False, live=None, config_file=where.file, overrides=where.overrides()))


@click.command()
@click.option("--config", "first", metavar="JOBS", multiple=True, help="The same as naming JOBS.")
@click.argument("jobs", nargs=-1, type=click.Path(exists=False, path_type=str))
@where_all
@click.pass_context
def run(ctx: click.Context, first: tuple[str, ...], jobs: tuple[str, ...], where: Where) -> None:
    """Train jobs in the foreground, as any user, until all are done.

    JOBS are job files, one JSON array of jobs (jobs.json), or one directory of job files, which is then watched for
    changes. Relative paths in files count from the current directory. What was interrupted goes on where it was.
    The exit code says whether all jobs succeeded.
    """
    config = prepare(where, [*first, *jobs])
    from rrd.daemon import run_daemon

    places = {key: str(getattr(config, key)) for key in ("state_dir", "cache_dir", "run_dir", "jobs_dir")}
    ctx.exit(run_daemon(config, until_done=True, live=live, config_file=where.file, overrides=places))


def live(line: str) -> None:
    """Print a line now. Training goes on when nobody reads it any more."""
    with contextlib.suppress(OSError):
        click.echo(line)


def prepare(where: Where, jobs: list[str]) -> Config:
    """Put ``jobs`` into a spool of their own; the configuration to run them with."""
    config = where.load(service=False)
    _nobody_else(config)
    if len(jobs) == 1 and os.path.isdir(jobs[0]):
        return where.load(service=False, jobs_dir=jobs[0])
    if not jobs:
        if not any(Path(config.jobs_dir).glob("*.toml")):
            raise click.UsageError(f"Name the jobs to run: there are none in {config.jobs_dir}.")
        return config
    if not where.jobs_dir:
        config = where.load(service=False, jobs_dir=str(config.state_dir / "jobs.d"))
    fill(config, jobs)
    return config


def _nobody_else(config: Config) -> None:
    from rrd.client import alive

    if alive(config.run_dir):
        raise TryLater(f"rrd is already running with the state in {config.state_dir}",
                       hint="give it jobs with `rrd submit`, or name another state directory with --state")


def fill(config: Config, files: list[str]) -> None:
    """Make the spool hold exactly the jobs in ``files``. A job file that is none of them is set aside, not removed."""
    from rrd.cli import intake
    from rrd.job import id_of

    jobs = intake.distinct(j for file in files for j in intake.read(file, config))
    spool = config.jobs_dir
    for job, _ in list(intake.unlike_spool(jobs, spool)):
        intake.put(job, spool)
    wanted = {job.file for job in jobs}
    others = sorted(p for p in spool.iterdir() if id_of(p.name) and p.name not in wanted)
    for path in others:
        path.rename(path.with_name(path.name + ".off"))
    if others:
        show.say(f"{count(len(others), 'other job')} of this state directory left out: "
                 + ", ".join(p.stem for p in others[:5]) + (", …" if len(others) > 5 else ""))
    for sentence in (s for job in jobs for s in (*job.missing(), *job.warnings)):
        show.warn(sentence)
