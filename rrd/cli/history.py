"""``rrd history`` and ``rrd plot``: a job's steps as a table, CSV, JSON, or curves; they work with the daemon down."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli import show
from rrd.cli.app import no_color
from rrd.cli.complete import JOB
from rrd.cli.places import Where, job_dir, where
from rrd.errors import RrdError

if TYPE_CHECKING:
    from rrd.history import History

FORMATS = (".png", ".svg", ".pdf")
COLUMNS = ("step", "loss", "eval_loss", "lr", "grad_norm", "tokens", "seconds", "die", "round", "time", "applied")


@click.command()
@click.argument("job", type=JOB)
@click.option("--csv", "as_csv", is_flag=True, help="Every step, as CSV with a heading.")
@click.option("--json", "as_json", is_flag=True, help="Every step, held-out loss, checkpoint and restart, as JSON.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the newest N steps (20 in a table).")
@where
def history(job: str, as_csv: bool, as_json: bool, lines: int | None, where: Where) -> None:
    """Show a job's steps: loss, learning rate, gradient, tokens, seconds.

    Each step is there once: those that a crash had run again count as they were run last.
    """
    from rrd.history import read, rows

    h = read(job_dir(where.find(), job))
    lines = 20 if lines is None and not (as_csv or as_json) else lines
    if lines is not None:
        h.steps = h.steps[-lines:] if lines else []
        first = h.steps[0].step if h.steps else 0
        h.evals = [e for e in h.evals if e[0] >= first]
    if as_json:
        show.as_json({"job": h.job, "steps": [s._asdict() for s in h.steps],
                      "evals": [{"step": step, "eval_loss": loss} for step, loss in h.evals],
                      "marks": [m._asdict() for m in h.marks]})
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(h))
    else:
        click.echo("\n".join(_table(h)))


def _table(h: History) -> list[str]:
    from rrd.history import rows

    columns = [show.Column(title, True, rank) for title, rank in (
        ("STEP", 0), ("LOSS", 0), ("HELD-OUT", 1), ("LR", 3), ("GRADIENT", 4), ("TOKENS", 5), ("SECONDS", 6),
        ("DIE", 7), ("WHEN", 8))]
    return show.table(columns, [show.Row((
        str(r["step"]), show.number(r["loss"]) + ("" if r["applied"] is not False else "*"),
        "" if r["eval_loss"] is None else show.number(r["eval_loss"]), show.number(r["lr"], 3),
        show.number(r["grad_norm"], 3), str(r["tokens"] or ""), show.number(r["seconds"], 3), str(r["die"] or ""),
        show.clock(r["time"]) if r["time"] else "")) for r in rows(h)], show.terminal_width())


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="A picture: FILE ends in .png, .svg or .pdf. Left out: drawn in the terminal.")
@click.option("--smooth", type=click.IntRange(1, 100_000), metavar="STEPS",
              help="How far the smoothed curve looks back; left out: a fiftieth of the job.")
@click.option("--log", is_flag=True, help="Losses on a logarithmic scale.")
@where
def plot(jobs: tuple[str, ...], output: Path | None, smooth: int | None, log: bool, where: Where) -> None:
    """Draw the curves of jobs, one over the other: loss, learning rate, throughput."""
    from rrd.history import read

    config = where.find()
    histories = [read(job_dir(config, job)) for job in dict.fromkeys(jobs)]
    bare = [h.job for h in histories if not h.losses()]
    if len(bare) == len(histories):
        raise RrdError(f"there is nothing to draw: {', '.join(bare)} made no step yet", hint="`rrd status` says why")
    for job in bare:
        show.warn(f"{job} made no step yet")
    histories = [h for h in histories if h.losses()]
    if output is None:
        from rrd.cli import braille

        color = sys.stdout.isatty() and no_color() is None
        click.echo("\n".join(braille.losses(histories, show.terminal_width() or 80, smooth, color=color)))
    else:
        _draw(histories, output, smooth, log)
        show.say(f"wrote {output}")


def _draw(histories: list[History], output: Path, smooth: int | None, log: bool) -> None:
    """Raises RrdError where there is no matplotlib, or the file's name says no format."""
    if output.suffix.lower() not in FORMATS:
        raise RrdError(f"{output.name} names no format that can be drawn",
                       hint="end it in " + ", ".join(FORMATS[:-1]) + f" or {FORMATS[-1]}")
    try:
        from rrd import figure
    except ImportError:
        raise RrdError("pictures need matplotlib, which is not installed",
                       hint="pip install 'rrd[plot]'; without -o, curves are drawn in the terminal") from None
    figure.draw(histories, output, span=smooth, log=log)
