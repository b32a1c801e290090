"""``rrd doctor``: what would break this box in the first hour, found before it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rrd.cli import show
from rrd.cli.places import Where, where
from rrd.errors import BadConfig
from rrd.text import count, one_line

if TYPE_CHECKING:
    from rrd.cli.checkup import Finding, Patient

_MARKS = {"ok": click.style("ok   ", fg="green"), "warn": click.style("warn ", fg="yellow"),
          "bad": click.style("bad  ", fg="red", bold=True)}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="All findings, as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Only what is not in order.")
@click.option("--skip", multiple=True, metavar="CHECK", help="Leave a check out; may be repeated.")
@where
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, quiet: bool, skip: tuple[str, ...], where: Where) -> None:
    """Examine this box: chips, driver and torch, configuration, jobs' paths, disk, clock, gates.

    Changes nothing. As root it also finds out what the service's user may read. Exit code 1 if something will not work,
    78 if the configuration is bad, else 0; what is only doubtful does not count.
    """
    from rrd.cli import checkup, hardware

    patient = _patient(where)
    checks = {**checkup.CHECKS, **hardware.CHECKS}
    if unknown := set(skip) - set(checks):
        raise click.UsageError(f"No such check: {', '.join(sorted(unknown))}. There are {', '.join(checks)}.")
    found = list(checkup.examine(patient, {name: c for name, c in checks.items() if name not in skip}))
    if as_json:
        show.as_json(checkup.facts(found))
    else:
        _say(found, quiet)
    bad = any(f.level == "bad" for f in found)
    ctx.exit(BadConfig.exit_code if patient.config_error else int(bad))


def _patient(where: Where) -> Patient:
    from rrd.cli.checkup import Patient, read_jobs
    from rrd.cli.host import Host
    from rrd.config import Config

    try:
        patient = Patient(where.find(), Host())
    except BadConfig as e:  # the rest is examined as if nothing were configured
        patient = Patient(Config(), Host(), config_error=(e.message, e.hint))
    read_jobs(patient)
    return patient


def _say(found: list[Finding], quiet: bool) -> None:
    for f in found:
        if quiet and f.level == "ok":
            continue
        click.echo(_MARKS[f.level] + click.style(f"{f.check}: ", bold=True) + one_line(f.sentence, 1000))
        if f.fix:
            click.echo("     " + click.style("fix: ", fg="cyan") + one_line(f.fix, 1000))
    bad, doubtful = (sum(f.level == level for f in found) for level in ("bad", "warn"))
    if bad or doubtful:
        show.say(", ".join(count(n, what) for n, what in ((bad, "fault"), (doubtful, "doubt")) if n))
    elif not quiet:
        show.say("all is well")
