"""``rrd checkpoints``, ``verify`` and ``export``: what lies on disk; works with the daemon down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli import show
from rrd.cli.complete import JOB
from rrd.cli.places import Where, job_dir, where
from rrd.errors import Damaged, RrdError
from rrd.text import count, one_line

if TYPE_CHECKING:
    from rrd.config import Config


@click.command()
@click.argument("job", type=JOB)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@where
def checkpoints(job: str, as_json: bool, where: Where) -> None:
    """List a job's checkpoints, newest first.

    Each one's manifest is read; `rrd verify` checks every byte.
    """
    found = list(_look(job_dir(where.find(), job), thorough=False))
    if as_json:
        show.as_json(found)
    elif not found:
        show.say(f"{job} has no checkpoint yet")
    else:
        click.echo("\n".join(_table(found, show.terminal_width())))


@click.command()
@click.argument("job", required=False, type=JOB)
@click.option("--all", "everything", is_flag=True, help="The checkpoints of all jobs.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@where
@click.pass_context
def verify(ctx: click.Context, job: str | None, everything: bool, as_json: bool, where: Where) -> None:
    """Check every byte of the checkpoints of a job, or of all.

    Exit code 65 when one is damaged. Changes nothing: the daemon puts a damaged one aside when it meets it.
    """
    if (job is None) != everything:
        raise click.UsageError("Name a job, or say --all.")
    config = where.find()
    jobs = _all_jobs(config) if job is None else [job_dir(config, job)]
    found = [entry for directory in jobs for entry in _look(directory, thorough=True)]
    if as_json:
        show.as_json(found)
    elif found:
        click.echo("\n".join(_table(found, show.terminal_width())))
    bad = sum(1 for f in found if not f["ok"])
    show.say(f"{count(len(found), 'checkpoint')} checked, " + (f"{bad} damaged" if bad else "all whole"))
    ctx.exit(Damaged.exit_code if bad else 0)


def _all_jobs(config: Config) -> list[Path]:
    from rrd.job import JOB_ID

    root = config.state_dir / "jobs"
    return sorted(p for p in root.iterdir() if JOB_ID.fullmatch(p.name) and p.is_dir()) if root.is_dir() else []


def _look(directory: Path, *, thorough: bool) -> Iterator[dict[str, object]]:
    """What each checkpoint of the job is, newest first."""
    from rrd import checkpoint

    for step, path in checkpoint.listing(directory):
        entry: dict[str, object] = {"job": directory.name, "step": step, "path": str(path)}
        try:
            manifest = checkpoint.verify(path) if thorough else checkpoint.read_manifest(path)
            yield {**entry, "ok": True, "bytes": manifest.size, "time": manifest.time, "message": "", "hint": ""}
        except Damaged as e:
            if path.is_dir():  # else the daemon just removed it, as the newer ones are enough
                yield {**entry, "ok": False, "bytes": None, "time": None, "message": e.message, "hint": e.hint}


def _table(found: list[dict[str, object]], width: int | None) -> list[str]:
    now = time.time()
    columns = (show.Column("JOB"), show.Column("RESULT"), show.Column("STEP", True), show.Column("AGE", True),
               show.Column("SIZE", True))
    return show.table(columns, [_row(f, now) for f in found], width)


def _row(f: dict[str, object], now: float) -> show.Row:
    when, size = f["time"], f["bytes"]
    cells = (one_line(str(f["job"]), 70), "ok" if f["ok"] else "damaged", str(f["step"]),
             show.age(when, now) if isinstance(when, (int, float)) else "-",
             show.size(size) if isinstance(size, int) else "-")
    hint = f" ({f['hint']})" if f["hint"] else ""
    return show.Row(cells, "green" if f["ok"] else "red", f"{f['message']}{hint}")


@click.command()
@click.argument("job", type=JOB)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--merged", is_flag=True, help="The whole model with the adapter merged in.")
@click.option("--format", "form", type=click.Choice(["peft", "rwkv"]), default="peft", show_default=True,
              help="Names of the adapter's tensors: PEFT's, or those of RWKV's own tools.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="From the checkpoint of step N, not the newest.")
@where
@click.pass_context
def export(ctx: click.Context, job: str, directory: str, merged: bool, form: str, step: int | None, where: Where
           ) -> None:
    """Write the adapter of a checkpoint to DIR. The job may be running, finished or removed.

    What is in DIR already is replaced only if it is an earlier export.
    """
    source, out = job_dir(where.find(), job), Path(directory).absolute()
    _has_checkpoint(source, step)
    command = [sys.executable, "-m", "rrd.worker.export", str(source), str(out)]
    command += ["--merged"] if merged else ["--format", form] if form != "peft" else []
    command += ["--step", str(step)] if step is not None else []
    done = subprocess.run(command, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=False, text=True,
                          errors="backslashreplace", capture_output=True)
    _relay(done.stdout, done.stderr)
    if done.returncode < 0:
        raise RrdError(f"the export was ended by signal {-done.returncode}",
                       hint="is there memory for the whole model?")
    ctx.exit(done.returncode)


def _relay(out: str, err: str) -> None:
    """Pass on what the export said, its errors looking like ours."""
    for text in out.splitlines():
        click.echo(one_line(text, 5000))
    for text in err.splitlines():
        is_error = text.startswith("rrd: ")
        show.say(text[5:] if is_error else text, mark=click.style("error: ", fg="red", bold=True) if is_error else "")


def _has_checkpoint(source: Path, step: int | None) -> None:
    from rrd import checkpoint

    steps = [s for s, _ in checkpoint.listing(source)]
    if not steps:
        raise RrdError(f"{source.name} has no checkpoint yet", hint=f"`rrd status {source.name}` says how far it is")
    if step is not None and step not in steps:
        raise RrdError(f"{source.name} has no checkpoint of step {step}",
                       hint="there are those of step " + ", ".join(map(str, steps[:10])))
