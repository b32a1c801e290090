"""``rrd watch``: the status, live. On a terminal a screen that follows, with keys; elsewhere a line for each change."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rrd.cli import panels
from rrd.cli.logs import EVENTS, Tail, line
from rrd.cli.places import Where, where
from rrd.errors import NotRunning, RrdError, TryLater
from rrd.text import one_line

if TYPE_CHECKING:
    from rich.text import Text

    from rrd.snapshot import Snapshot

LOG_LINES = 2000
"""Events of a job that can be scrolled back to."""


def _number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """``value``, which click's range lets through as nan too: that is neither below nor above anything."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is no number of seconds; the range is 0.2<=x<=3600.")
    return value


@click.command()
@click.option("--interval", type=click.FloatRange(0.2, 3600), metavar="SECONDS", callback=_number,
              help="Between two looks; left out: 1, or 10 where stdout is no terminal.")
@where
def watch(interval: float | None, where: Where) -> None:
    """Show status live; keys pause and resume jobs and open their logs; ? lists them, q ends it.

    Where stdout is no terminal, a line is printed for each job that changed.
    """
    run_dir = where.find().run_dir
    with contextlib.suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            on_terminal(run_dir, interval or 1.0)
        else:
            for text in changes(lambda: fetch(run_dir), lambda: time.sleep(interval or 10.0)):
                click.echo(text)


def fetch(run_dir: Path) -> Snapshot:
    """What the daemon says. Raises NotRunning, TryLater."""
    from rrd.client import call
    from rrd.snapshot import Snapshot

    return Snapshot.read(call(run_dir, "status"))


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

    from rrd.cli.screen import Screen

    screen = Screen(Console(highlight=False, markup=False, emoji=False))
    watcher = Watcher(run_dir)
    with screen.open() as keys:
        while not watcher.over:
            width, height = screen.size
            screen.draw(watcher.frame(width, height))
            if key := keys.wait(interval):
                watcher.press(key, height)
            else:
                watcher.look()


class Watcher:
    """The newest snapshot, and what the keys have chosen of it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.snapshot, self.silent, self.choice, self.over = fetch(run_dir), "", panels.Choice(), False
        self._tail: Tail | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)

    def look(self) -> None:
        """Ask the daemon again, unless the screen is held."""
        if self.choice.held:
            return
        try:
            self.snapshot, self.silent = fetch(self._run_dir), ""
        except (NotRunning, TryLater) as e:
            what = "is not running" if isinstance(e, NotRunning) else "does not answer"
            self.silent = f"rrd {what}; waiting for it"

    def frame(self, width: int, height: int) -> Text:
        if self.choice.view == "log":
            self._read_log(width)
        elif self.choice.view == "curve":
            self._draw_curve(width, height)
        return frame(self.snapshot, self.silent, width, height, self.choice)

    # --- keys ---

    def press(self, key: str, height: int) -> None:
        """What ``key`` means in the view that is shown."""
        c = self.choice
        c.message = ""
        if key in ("q", "Q", "escape"):
            self.over, c.view = c.view == "jobs", "jobs"
        elif key == "?":
            c.view = "jobs" if c.view == "help" else "help"
        elif key == "space":
            c.held = not c.held
        elif key in ("up", "k", "down", "j", "page up", "page down", "home", "end"):
            self._move(key, height)
        elif key in ("l", "enter", "c"):
            self._open("curve" if key == "c" else "log")
        elif key in ("p", "r"):
            self._ask("pause" if key == "p" else "resume")

    def _move(self, key: str, height: int) -> None:
        from rrd.cli.views import in_order

        c, page = self.choice, max(1, height // 2)
        stride = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}.get(key)
        if c.view == "log":
            c.back = max(0, min(len(c.log), 0 if key == "end" else len(c.log) if stride is None else c.back - stride))
            return
        ids = [j.id for j in in_order(self.snapshot.jobs)]
        if ids:
            at = ids.index(c.job) if c.job in ids else -1 if stride and stride > 0 else 0
            target = 0 if key == "home" else len(ids) - 1 if stride is None else at + stride
            c.job = ids[max(0, min(len(ids) - 1, target))]

    def _open(self, view: str) -> None:
        c = self.choice
        if not c.job:
            c.message = "choose a job first: ↑ and ↓"
        elif c.view == view:
            c.view = "jobs"
        else:
            c.view, c.back, self._tail = view, 0, None
            self._log.clear()

    def _ask(self, verb: str) -> None:
        from rrd.client import call

        if not self.choice.job:
            self.choice.message = "choose a job first: ↑ and ↓"
            return
        try:
            self.choice.message = str(call(self._run_dir, verb, job=self.choice.job))
        except RrdError as e:
            self.choice.message = str(e)
        self.look()

    # --- one job ---

    def _directory(self) -> Path:
        return Path(self.snapshot.state_dir) / "jobs" / self.choice.job

    def _read_log(self, width: int) -> None:
        try:
            self._tail = self._tail or Tail(self._directory() / EVENTS)
            self._log.extend(line(record) for record in self._tail.new())
            self.choice.log = panels.wrapped(self._log, width)
        except OSError as e:
            self.choice.log = [f"its log cannot be read: {e.strerror}; be a member of the group rrd, or use sudo"]

    def _draw_curve(self, width: int, height: int) -> None:
        from rrd.cli import braille
        from rrd.history import read

        try:
            h = read(self._directory())
        except OSError as e:
            self.choice.curve = [f"its history cannot be read: {e.strerror}"]
            return
        color = sys.stdout.isatty()
        self.choice.curve = braille.losses([h], width, height=max(5, height - 6), color=color) if h.losses() else [
            "no step yet"]


def frame(snapshot: Snapshot, silent: str, width: int, height: int, choice: panels.Choice | None = None) -> Text:
    """One screen: no line longer than ``width`` cells, no more of them than ``height``."""
    from rich.text import Text

    shown = [Text.from_ansi(text) for text in panels.lines(snapshot, choice or panels.Choice(), silent, width, height)]
    for text in shown:
        text.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(shown[:height])
