"""The list of commands, and the one place where an error becomes a sentence on stderr and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

import click

from rrd import __version__
from rrd.errors import Denied, RrdError
from rrd.text import one_line

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Train jobs in the foreground until all are done."),
    "daemon": ("run", "Be the service (systemd starts this)."),
    "check": ("submit", "Say whether job files are right."),
    "submit": ("submit", "Check jobs, then put them where the daemon takes them up."),
    "status": ("status", "Show all jobs and dies, or everything about one job."),
    "watch": ("watch", "Show status live."),
    "logs": ("logs", "Show what happened to a job."),
    "events": ("events", "Show what happened to all jobs and dies."),
    "history": ("history", "Show a job's steps: loss, learning rate, tokens."),
    "plot": ("history", "Draw the curves of jobs."),
    "pause": ("control", "Let jobs take no turns until they are resumed."),
    "resume": ("control", "Let paused jobs take turns again."),
    "cancel": ("control", "End jobs before they are done; their checkpoints are kept."),
    "restart": ("control", "Take over an edited job file, or try a failed job again."),
    "checkpoints": ("checkpoints", "List a job's checkpoints."),
    "verify": ("checkpoints", "Check every byte of the checkpoints."),
    "export": ("checkpoints", "Write the adapter of a checkpoint to a directory."),
    "dies": ("status", "List lanes and dies."),
    "build-kernels": ("build_kernels", "Compile the CUDA kernels ahead."),
    "bench": ("bench", "Measure this box's dies."),
    "reload": ("control", "Have the daemon read rrd.toml and the job files again."),
    "doctor": ("doctor", "Find what would break this box before it does."),
    "install-service": ("install_service", "Make this installation a systemd service."),
    "completion": ("complete", "Print the completion script of a shell."),
}
"""Command: its module below ``rrd.cli``, and its line in ``rrd --help``, which so imports none of them."""


class Said(click.ClickException):
    """An :class:`RrdError` on its way out: sentence, hint, exit code."""

    def __init__(self, error: RrdError) -> None:
        super().__init__(error.message)
        self.error = error
        self.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        complain(self.error)


def complain(error: RrdError) -> None:
    """Say ``error`` on stderr: the sentence, and below it what to do."""
    color = no_color()  # no context holds it here: the command is over
    click.echo(click.style("error: ", fg="red", bold=True) + one_line(error.message, 2000), err=True, color=color)
    if error.hint:
        click.echo(click.style("hint: ", fg="cyan") + one_line(error.hint, 2000), err=True, color=color)


def no_color() -> bool | None:
    """False where NO_COLOR is set, else None: click finds out. See https://no-color.org."""
    return False if os.environ.get("NO_COLOR") else None


class App(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        command = getattr(importlib.import_module(f"rrd.cli.{module}"), name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0][:64], COMMANDS, n=1)
            ctx.fail(f"No such command '{one_line(args[0], 64)}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (RrdError, OSError) as e:
            if ctx.params["debug"] or isinstance(e, BrokenPipeError):
                raise
            raise Said(_sentence(e)) from e


def _sentence(e: RrdError | OSError) -> RrdError:
    """The operating system's refusals are the user's to mend, too: they get a sentence like our own."""
    if isinstance(e, RrdError):
        return e
    what = os.strerror(e.errno).lower() if e.errno else str(e)
    where = f"{e.filename}: " if e.filename is not None else ""
    if isinstance(e, PermissionError):
        return Denied(f"{where}permission denied", hint="become a member of the group rrd, or use sudo")
    return RrdError(f"{where}{what}")


@click.command(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, envvar="RRD_DEBUG", help="Show where an error comes from.")
@click.version_option(__version__, message="rrd %(version)s")
@click.pass_context
def app(ctx: click.Context, debug: bool) -> None:
    """Train many language-model adapters on one box, in rotation, and lose nothing.

    Most commands ask the running daemon. Exit codes: 0 ok, 1 failed, 2 usage, 3 not running, 4 no such job,
    65 damaged data, 75 try later, 77 permission, 78 bad configuration or job.
    """
    if no_color() is False:
        ctx.color = False
    if not debug:
        sys.excepthook = _bug


def _bug(kind: type[BaseException], e: BaseException, trace: Any) -> None:
    """An exception that is no user's mistake is our own: say so, with the traceback."""
    sys.__excepthook__(kind, e, trace)
    click.echo("This is a bug in rrd, not your mistake. Please report it with the lines above.", err=True)
