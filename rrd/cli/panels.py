"""What ``rrd watch`` shows, from a snapshot and what the person at the keys has chosen. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from rrd.cli import views
from rrd.cli.show import Column, Row, age, ago, number, sparkline, table, wrap
from rrd.snapshot import DieView, JobView, LaneView, Snapshot, VisitView
from rrd.states import JobState
from rrd.text import count, duration, one_line

SHADES = "█▓▒░"
"""Jobs of one die, told apart without colour."""
COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
WINDOWS = (30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)
ROOMY = 110
"""Columns from which on every column of the table has room."""
HELP = "↑↓ choose   p pause   r resume   l log   c curve   ? help   q end"
KEYS = (("↑ ↓  k j", "choose a job; PgUp PgDn Home End in longer strides"), ("p", "pause it"), ("r", "let it carry on"),
        ("l enter", "its log, and back"), ("c", "its curve, and back"), ("space", "stop following; again: follow"),
        ("q esc", "back, or end"))

_COLUMNS = (Column("  JOB"), Column("STATE"), Column("DIE", rank=7), Column("STEP", True), Column("%", True, 8),
            Column("LOSS", True, 1), Column("LOSSES", rank=4), Column("/MIN", True, 5), Column("ETA", True, 2),
            Column("NEXT SAVE", True, 6))


@dataclass
class Choice:
    """What the person has chosen."""

    job: str = ""
    view: str = "jobs"
    """``jobs``, ``log``, ``curve`` or ``help``."""
    message: str = ""
    """What the last key led to."""
    held: bool = False
    """The screen stands still."""
    back: int = 0
    """Lines that the log is scrolled back."""
    log: Sequence[str] = field(default_factory=list)
    """Lines for the view ``log``, as they are to be shown."""
    curve: Sequence[str] = field(default_factory=list)


def lines(s: Snapshot, choice: Choice, silent: str, width: int, height: int) -> list[str]:
    """The screen: at most ``height`` lines."""
    top = [click.style(one_line(silent), fg="yellow")] if silent else []
    foot = _foot(choice, width)
    if choice.view == "help":
        said = [*top, click.style("Keys", bold=True), "", *(f"  {k:<10}{what}" for k, what in KEYS)]
        return said[: height - 1] + foot
    if choice.view in ("log", "curve"):
        return _of_one(s, choice, top, height - 1) + foot
    head = [*top, views.headline(s, time.time()), *views.faults(s)[:3]]
    wrong = _wrong(s, 3 if height < 30 else 6) if height >= 16 else []
    room = height - len(head) - len(wrong) - len(foot)
    dies = _lanes(s, width, room // 2) if height >= 16 else []
    out = head + dies
    return out + _jobs(s, choice, width, height - len(out) - len(wrong) - len(foot)) + wrong + foot


def _wrong(s: Snapshot, most: int) -> list[str]:
    """What a person should know of, wherever in the table it stands: dies, failed jobs, files that are not taken."""
    said = [f"die {d.name}: {d.why}" for d in s.dies if d.why]
    said += [f"{j.id}: {j.why}" + (f" ({j.hint})" if j.hint else "") for j in s.jobs if j.state is JobState.FAILED]
    said += [f"not taken: {r.message}" for r in s.rejected]
    more = f"  and {len(said) - most + 1} more: `rrd status`"
    shown = said if len(said) <= most else [*said[: most - 1], more]
    return [click.style(one_line(text, 400), fg="red") for text in shown]


def _foot(choice: Choice, width: int) -> list[str]:
    held = "  held" if choice.held else ""
    text = one_line(choice.message, 300) if choice.message else HELP
    return [click.style(text[: max(10, width - len(held))], dim=not choice.message) + click.style(held, fg="yellow")]


def _of_one(s: Snapshot, choice: Choice, top: list[str], height: int) -> list[str]:
    """One job's log or curve, below its state."""
    j = s.job(choice.job)
    head = [*top, views.progress(j) if j else f"{one_line(choice.job, 70)}: gone", ""]
    room = max(1, height - len(head))
    if choice.view == "curve":
        return (head + list(choice.curve))[:height]
    end = len(choice.log) - min(choice.back, max(0, len(choice.log) - room))
    return head + list(choice.log[max(0, end - room) : end] or ["nothing yet"])


# ---- lanes and dies --------------------------------------------------------------------------------------------------


def _lanes(s: Snapshot, width: int, room: int) -> list[str]:
    """Each die with what it does now and did in the last while; where there are too many, those that compute."""
    out: list[str] = []
    dies = {lane.name: [d for d in s.dies if d.lane == lane.name] for lane in s.lanes}
    everything = len(s.dies) + len(s.lanes) + 1
    for lane in s.lanes:
        shown = dies[lane.name] if everything <= room else [d for d in dies[lane.name] if d.computing or d.why]
        if everything <= room or shown:
            seconds = _window(dies[lane.name], s.time)
            out += [_lane(lane, seconds, width), *(_die(d, s.time, seconds, width) for d in shown)]
    if everything > room:
        total = f"  {count(len(s.dies), 'die')} in {count(len(s.lanes), 'lane')}; `rrd dies` lists them"
        out = [*out[: room - 1], click.style(total, dim=True)]
    return ["", *out] if out else []


def _lane(lane: LaneView, seconds: int, width: int) -> str:
    busy = f", {lane.busy_seconds / lane.seconds:.1%} training" if lane.seconds > 0 else ""
    gate = f", gate {one_line(lane.gate, 16)}" if lane.gate != "none" else ""
    left = f"lane {one_line(lane.name, 24)}: round {lane.round}{busy}{gate}"
    right = f"last {duration(seconds)}"
    return click.style(f"{left[: width - len(right) - 1]:<{max(0, width - len(right))}}{right}", bold=True)


def _window(dies: Sequence[DieView], now: float) -> int:
    begin = min((v.start for d in dies for v in d.visits), default=now)
    return next((w for w in WINDOWS if w >= now - begin), WINDOWS[-1])


def _die(d: DieView, now: float, seconds: float, width: int) -> str:
    what = one_line(d.computing, 70) if d.computing else d.state
    if d.state == "backing off" and d.retry_at is not None:
        what = f"refused, {duration(max(1.0, d.retry_at - now))}"
    color = "green" if d.computing else {"fenced": "red", "backing off": "yellow"}.get(d.state)
    left = f"  {one_line(d.name, 10):<3} {'▶' if d.computing else ' '} {_cut(what, 18):<18} "
    return click.style(left, fg=color) + timeline(d, now, seconds, max(10, width - len(left)))


def timeline(d: DieView, now: float, seconds: float, cells: int) -> str:
    """The last ``seconds`` of a die, one character for each stretch of them; a stretch shows whoever had most of it."""
    visits = [*d.visits]
    if d.computing is not None and d.since is not None:
        visits.append(VisitView(job=d.computing, start=d.since, end=now, steps=1))
    jobs = sorted({v.job for v in visits})
    share: list[dict[str, float]] = [{} for _ in range(cells)]
    for v in visits:
        first = (v.start - now) / seconds * cells + cells
        last = (v.end - now) / seconds * cells + cells
        for i in range(max(0, int(first)), min(cells, int(last) + 1)):
            share[i][v.job] = share[i].get(v.job, 0.0) + min(last, i + 1) - max(first, i)
    out, run, before = "", "", ""
    for cell in [*share, {}]:
        job = max(cell, key=lambda j: cell[j]) if cell and sum(cell.values()) > 0.25 else ""
        if job != before or cell is share[0]:
            out += click.style(run, fg=COLORS[jobs.index(before) % len(COLORS)]) if before else run
            run, before = "", job
        run += SHADES[jobs.index(job) % len(SHADES)] if job else "·"
    return out + (click.style(run[:-1], fg=COLORS[jobs.index(before) % len(COLORS)]) if before else run[:-1])


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _jobs(s: Snapshot, choice: Choice, width: int, room: int) -> list[str]:
    """As many jobs as fit, the chosen one among them."""
    jobs = views.in_order(s.jobs)
    if not jobs:
        return ["", "no jobs: drop a job file into the spool, or `rrd submit` one"][:room]
    chosen = next((i for i, j in enumerate(jobs) if j.id == choice.job), 0)
    size = max(1, room - 2)
    while True:
        start = max(0, min(chosen - size // 2, len(jobs) - size))
        shown = jobs[start : start + size]
        out = ["", *table(_COLUMNS, [_row(j, s.time, j.id == choice.job, width) for j in shown], width)]
        if start or len(shown) < len(jobs):
            out.append(click.style(f"  {start + 1} to {start + len(shown)} of {count(len(jobs), 'job')}; "
                                   f"{count(len(jobs) - len(shown), 'more job')}", dim=True))
        if len(out) <= room or size == 1:
            return out[: max(0, room)]
        size = max(1, size - max(1, (len(out) - room) // 2))


def _row(j: JobView, now: float, chosen: bool, width: int) -> Row:
    preparing = j.state is JobState.PREPARING and j.prepared is not None
    state = f"{j.state} {j.prepared:.0%}" if preparing else str(j.state)
    cells = (("▸ " if chosen else "  ") + one_line(j.id, 70), state, one_line(j.die or "-", 8), views.steps(j),
             views.percent(j), number(j.loss), sparkline(j.losses, 16 if width >= 100 else 10), _rate(j),
             "-" if j.eta_seconds is None else duration(j.eta_seconds), next_save(j, now))
    hint = f" ({j.hint})" if j.hint and j.state is JobState.FAILED else ""
    note = f"{j.why}{hint}" if j.why else _details(j, now) if chosen and width < ROOMY else ""
    return Row(cells, views.color_of(j.state), note)


def _details(j: JobView, now: float) -> str:
    """What the columns of a narrow terminal leave out."""
    place = f"on die {one_line(j.die, 8)}" if j.die is not None else ""
    saved = f"saved {ago(j.last_checkpoint_at, now)}" if j.last_checkpoint_at is not None else ""
    due = next_save(j, now) if j.state is JobState.RUNNING else "-"
    return ", ".join(filter(None, (place, saved, f"next checkpoint: {due}" if due != "-" else "")))


def _rate(j: JobView) -> str:
    return "-" if j.steps_per_minute is None else f"{j.steps_per_minute:.1f}"


def next_save(j: JobView, now: float) -> str:
    """How long until the next checkpoint is due: a duration or a number of steps."""
    if j.state is not JobState.RUNNING:
        return "-" if j.last_checkpoint_at is None else f"saved {age(j.last_checkpoint_at, now)}"
    if j.checkpoint_every_seconds is not None:
        last = max(j.last_checkpoint_at or 0.0, j.loaded_at or 0.0)
        left = last + j.checkpoint_every_seconds - now
        return "-" if not last else "due" if left < 1 else duration(left)
    every = int(j.checkpoint_every) if j.checkpoint_every.isdigit() else 0
    return f"{count(every - j.step % every, 'step')}" if every else "-"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def wrapped(texts: Sequence[str], width: int) -> list[str]:
    """Log lines, broken to the terminal's width, what follows set in."""
    out: list[str] = []
    for text in texts:
        first, *rest = wrap(click.unstyle(text), width - 4) or [""]
        out += [first, *(f"    {part}" for part in rest)]
    return out
