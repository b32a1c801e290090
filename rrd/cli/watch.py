"""``rrd watch``: the status, live. On a terminal a table that redraws itself; elsewhere a line for each change."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli.places import Where, where
from rrd.errors import NotRunning, TryLater
from rrd.text import one_line

if TYPE_CHECKING:
    from rich.text import Text

    from rrd.snapshot import Snapshot


@click.command()
@click.option("--interval", type=click.FloatRange(0.2, 3600), metavar="SECONDS",
              help="Between two looks; 1, or 10 where there is no terminal.")
@where
def watch(interval: float | None, where: Where) -> None:
    """Show status live; q or ctrl-c ends it.

    Where stdout is no terminal, a line is printed for each job that changed.
    """
    run_dir = where.find().run_dir
    with contextlib.suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            on_terminal(run_dir, interval or 1.0)
        else:
            for line in changes(lambda: fetch(run_dir), lambda: time.sleep(interval or 10.0)):
                click.echo(line)


def fetch(run_dir: Path) -> Snapshot:
    """What the daemon says. Raises NotRunning, TryLater."""
    from rrd.client import call
    from rrd.snapshot import Snapshot

    return Snapshot.model_validate(call(run_dir, "status"))


def changes(look: Callable[[], Snapshot], pause: Callable[[], object]) -> Iterator[str]:
    """A line for each job that is new or changed since the last look; ends when ``look`` raises."""
    from rrd.cli.views import progress

    before: dict[str, object] = {}
    while True:
        snapshot = look()
        now: dict[str, object] = {j.id: (j.state, j.step, j.why) for j in snapshot.jobs}
        when = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
        yield from (f"{when} {progress(j)}" for j in snapshot.jobs if before.get(j.id) != now[j.id])
        yield from (f"{when} {one_line(gone, 70)}: gone" for gone in before.keys() - now.keys())
        before = now
        pause()


def on_terminal(run_dir: Path, interval: float) -> None:
    """Draw until q is pressed. A daemon that stops answering is said, and waited for."""
    from rich.console import Console
    from rich.live import Live

    console, last, silent = Console(highlight=False, markup=False, emoji=False), fetch(run_dir), ""
    with key_presses() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(last, silent, console.width, console.height), refresh=True)
            if pressed(interval) in {"q", "Q"}:
                return
            try:
                last, silent = fetch(run_dir), ""
            except (NotRunning, TryLater) as e:
                silent = f"rrd {'is not running' if isinstance(e, NotRunning) else 'does not answer'}; waiting for it"


def frame(snapshot: Snapshot, silent: str, width: int, height: int) -> Text:
    """One screen: as many jobs as fit."""
    from rich.text import Text

    from rrd.cli import views

    top, limit = [click.style(one_line(silent), fg="yellow")] if silent else [], min(height, len(snapshot.jobs))
    while True:
        lines = top + views.overview(snapshot, time.time(), width, limit=limit, curves=True)
        if len(lines) <= height or limit <= 3:
            break
        limit = max(3, limit - max(1, (len(lines) - height) // 2))  # half: a job may take two lines or more
    screen = Text.from_ansi("\n".join(lines[:height]))
    screen.no_wrap, screen.overflow = True, "ellipsis"
    return screen


@contextlib.contextmanager
def key_presses() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key for so many seconds; the terminal is as it was when it is over."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)  # keys come singly; ctrl-c still interrupts
    try:
        yield lambda seconds: sys.stdin.read(1) if select.select([fd], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
