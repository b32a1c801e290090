"""``rrd check`` and ``rrd submit``: job files before they are the daemon's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli import show
from rrd.cli.app import complain
from rrd.cli.places import Where, where
from rrd.errors import BadJob, Denied, NotRunning, RrdError
from rrd.text import count, one_line

if TYPE_CHECKING:
    from rrd.cli.intake import Incoming
    from rrd.config import Config

FILE = click.Path(dir_okay=True, path_type=str)


@click.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--json", "as_json", is_flag=True, help="One object for each job or fault.")
@where
@click.pass_context
def check(ctx: click.Context, files: tuple[str, ...], as_json: bool, where: Where) -> None:
    """Say whether job files (or the older tool's JSON arrays) are right. Changes nothing.

    Of the model, the adapter and the data that they name, names and headers are looked at. What is not there yet is
    a warning.
    """
    config = where.find()
    found: list[dict[str, object]] = []
    for file in files:
        found += _check(file, config, quiet=as_json)
    if as_json:
        show.as_json(found)
    ctx.exit(0 if all(f["ok"] for f in found) else BadJob.exit_code)


def _check(file: str, config: Config, *, quiet: bool) -> list[dict[str, object]]:
    from rrd.cli.intake import read

    try:
        jobs = read(file, config)
    except BadJob as e:
        if not quiet:
            complain(e)
        return [{"file": file, "ok": False, "message": e.message, "hint": e.hint, "line": e.line, "key": e.key}]
    for job in jobs if not quiet else ():
        click.echo(f"{one_line(file, 500)}: " + click.style("ok", fg="green") + f", {describe(job)}")
        for sentence in (*job.missing(), *job.warnings):
            show.warn(sentence)
    return [{"file": file, "ok": True, "job": j.id, "missing": j.missing(),
             "warnings": list(j.warnings), "spec": show.plain(j.spec)} for j in jobs]


def describe(job: Incoming) -> str:
    """``job code-a: lora r=32 of /models/small on /data/code.jsonl, 3 epochs``."""
    spec = job.spec
    how = f"lora r={spec.lora_rank}" if spec.method == "lora" else "all weights"
    length = count(spec.max_steps, "step") if spec.max_steps else f"{spec.epochs:g} epoch{'s' * (spec.epochs != 1)}"
    return one_line(f"job {job.id}: {how} of {spec.model} on {spec.data}, {length}", 1000)


@click.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--replace", is_flag=True, help="Take the place of other job files of that name.")
@click.option("--json", "as_json", is_flag=True, help="What was done, as JSON.")
@where
def submit(files: tuple[str, ...], replace: bool, as_json: bool, where: Where) -> None:
    """Check jobs, then put them where the daemon takes them up.

    FILES are job files, or JSON arrays of jobs. Relative paths in them count from the current directory. Nothing is
    written unless all of them are right.
    """
    from rrd.cli import intake

    config = where.find()
    jobs = intake.distinct(j for file in files for j in intake.read(file, config))
    jobs_dir, running = _spool(config, where)
    new = dict(intake.unlike_spool(jobs, jobs_dir)) if jobs_dir.exists() else dict.fromkeys(jobs)
    for job, there in new.items():
        if there is not None and not replace:
            raise RrdError(f"there is another job called {job.id} in {jobs_dir}",
                           hint="rename the file, or use --replace to change that job")
    for job in new:
        intake.put(job, jobs_dir)
    done = {j.id: "already there" if j not in new else "submitted" if new[j] is None else "replaced" for j in jobs}
    if as_json:
        show.as_json([{"job": j.id, "file": str(jobs_dir / j.file), "done": done[j.id]} for j in jobs])
    for job in jobs:
        show.say(f"{job.id}: {done[job.id]}")
        for sentence in (*job.missing(), *job.warnings):
            show.warn(sentence)
    _say_what_next(jobs, jobs_dir, running)


def _spool(config: Config, where: Where) -> tuple[Path, bool]:
    """Where the running daemon looks for jobs, which may not be where the configuration says by now; and whether one
    is running."""
    from rrd.client import call

    try:
        there = Path(call(config.run_dir, "status")["jobs_dir"])
    except NotRunning:
        return config.jobs_dir, False
    except Denied:  # writing will show whether that matters
        return config.jobs_dir, True
    return (config.jobs_dir if where.jobs_dir else there), True


def _say_what_next(jobs: list[Incoming], jobs_dir: Path, running: bool) -> None:
    it = jobs[0].id if len(jobs) == 1 else ""
    if running:
        show.say(f"The daemon takes {'it' if it else 'them'} up within seconds; `rrd status{' ' + it if it else ''}` "
                 "shows how it goes.")
    else:
        show.say(f"rrd is not running; it takes up what lies in {jobs_dir} when it starts.")
