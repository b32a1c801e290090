"""A snapshot as lines of text. Pure: what is shown depends on nothing but the arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import click

from rrd.cli.show import Column, Row, age, ago, clock, number, size, sparkline, table, wrap
from rrd.snapshot import DieView, JobView, LaneView, RejectedView, Snapshot
from rrd.states import JobState
from rrd.text import count, duration, one_line

S = JobState
ORDER = (S.RUNNING, S.EXPORTING, S.LOADING, S.PREPARING, S.FAILED, S.PAUSED, S.WAITING, S.DONE, S.CANCELLED, S.REMOVED)
"""The order of jobs in the table: what moves first, what needs the user next, what has ended last."""

_COLOR = {S.RUNNING: "green", S.EXPORTING: "green", S.LOADING: "cyan", S.PREPARING: "cyan", S.FAILED: "red",
          S.PAUSED: "yellow", S.DONE: "blue"}
_DIE_COLOR = {"computing": "green", "backing off": "yellow", "fenced": "red"}
_JOBS = (Column("JOB"), Column("STATE"), Column("DIE", rank=3), Column("STEP", True), Column("%", True, 4),
         Column("LOSS", True, 1), Column("/MIN", True, 5), Column("ETA", True, 2), Column("SAVED", True, 6))


# ---- all ---------------------------------------------------------------------------------------------------------


def overview(snapshot: Snapshot, now: float, width: int | None, *, limit: int | None = None,
             curves: bool = False) -> list[str]:
    """Everything at a glance; at most ``limit`` jobs, those that move first; ``curves`` draws the newest losses."""
    lines = [headline(snapshot, now), *faults(snapshot)]
    if snapshot.jobs:
        shown = in_order(snapshot.jobs)[:limit]
        columns = _JOBS + ((Column("LOSSES", rank=7),) if curves else ())
        lines += ["", *table(columns, [_job_row(j, now) for j in shown], width)]
        if len(shown) < len(snapshot.jobs):
            lines.append(f"… and {count(len(snapshot.jobs) - len(shown), 'more job')}")
    lines += ["", *dies(snapshot, now, width)] if snapshot.dies else []
    if snapshot.rejected:
        lines += ["", click.style("not taken:", fg="red")]
        for sentence in map(_rejected, snapshot.rejected):
            first, *rest = wrap(sentence, width - 4 if width else None)
            lines += [f"  {first}", *(f"    {part}" for part in rest)]
    return lines


def color_of(state: JobState) -> str | None:
    return _COLOR.get(state)


def in_order(jobs: Iterable[JobView]) -> list[JobView]:
    return sorted(jobs, key=lambda j: ORDER.index(j.state))


def headline(snapshot: Snapshot, now: float) -> str:
    """``rrd 0.1.0, up 3.2 h: 6 running, 2 waiting``."""
    states = Counter(j.state for j in snapshot.jobs)
    jobs = ", ".join(f"{states[s]} {s}" for s in ORDER if states[s]) or "no jobs"
    head = f"rrd {one_line(snapshot.version, 40)}, up {duration(max(0.0, snapshot.time - snapshot.started_at))}: {jobs}"
    return head + (" (stopping)" if snapshot.stopping else "")


def faults(snapshot: Snapshot) -> list[str]:
    """What is wrong with the daemon as a whole."""
    said = [snapshot.config_error, snapshot.spool_error]
    if not snapshot.spool_watch_healthy:
        said.append("changes of job files are found by looking every few seconds: watching the directory failed")
    return [click.style("warning: ", fg="yellow") + one_line(s) for s in said if s]


def _job_row(j: JobView, now: float) -> Row:
    share = percent(j)
    rate = "-" if j.steps_per_minute is None else f"{j.steps_per_minute:.1f}"
    eta = "-" if j.eta_seconds is None else duration(j.eta_seconds)
    state = f"{j.state} {j.prepared:.0%}" if j.state is S.PREPARING and j.prepared is not None else str(j.state)
    cells = (one_line(j.id, 70), state, one_line(j.die or "-", 8), steps(j), share, number(j.loss), rate, eta,
             age(j.last_checkpoint_at, now), sparkline(j.losses))
    hint = f" ({j.hint})" if j.hint and j.state is S.FAILED else ""
    return Row(cells, _COLOR.get(j.state), f"{j.why}{hint}" if j.why else "")


def steps(j: JobView) -> str:
    return f"{j.step}/{j.target_steps}" if j.target_steps else str(j.step)


def percent(j: JobView) -> str:
    return f"{min(100, 100 * j.step // j.target_steps)}" if j.target_steps else "-"


def _rejected(r: RejectedView) -> str:
    where = f"{r.file}:{r.line}: " if r.line else f"{r.file}: "
    message = r.message if r.message.startswith(r.file) else where + r.message
    return one_line(message + (f" ({r.hint})" if r.hint else ""), 1000)


# ---- dies and lanes ----------------------------------------------------------------------------------------------


def lanes(snapshot: Snapshot, width: int | None) -> list[str]:
    """The lanes as a table."""
    columns = (Column("LANE"), Column("GATE"), Column("DIES"), Column("ROUND", True), Column("BUSY", True),
               Column("COMPUTING"))
    rows = [Row((one_line(v.name, 32), one_line(v.gate, 16), one_line(" ".join(v.dies), 40), str(v.round), _busy(v),
                 one_line(v.computing or "-", 64))) for v in snapshot.lanes]
    return table(columns, rows, width)


def _busy(lane: LaneView) -> str:
    """Share of the time with work that went into steps."""
    return f"{lane.busy_seconds / lane.seconds:.1%}" if lane.seconds > 0 else "-"


def dies(snapshot: Snapshot, now: float, width: int | None, *, full: bool = False) -> list[str]:
    """The dies as a table; ``full`` adds what they are made of and what went wrong."""
    columns = [Column("DIE"), Column("STATE"), Column("LANE", rank=3), Column("DEVICE", rank=2), Column("JOBS")]
    if full:
        columns += [Column("PID", True, 5), Column("MEMORY", True, 6), Column("RESTARTS", True, 7),
                    Column("REFUSED", True, 8), Column("MODEL", rank=4), Column("PCI", rank=9), Column("UUID", rank=10)]
    by_number = sorted(snapshot.dies, key=lambda d: (len(d.name), d.name))
    return table(columns, [_die_row(d, now, full) for d in by_number], width)


def _die_row(d: DieView, now: float, full: bool) -> Row:
    held = [f"*{j}" if j == d.computing else j for j in d.jobs]
    jobs = " ".join(held[:4]) + (f" +{len(held) - 4}" if len(held) > 4 else "")
    cells = [d.name, d.state, d.lane, d.device, jobs or "-"]
    if full:
        cells += [str(d.worker_pid or "-"), _memory(d), str(d.restarts), str(d.refusals), d.model,
                  d.pci_bus_id, d.uuid]
    retry = f"next try in {duration(max(1.0, d.retry_at - now))}" if d.retry_at is not None else ""
    notes = (d.why, retry, d.without_kernels if full else "")
    return Row([one_line(c, 100) for c in cells], _DIE_COLOR.get(d.state), "; ".join(filter(None, notes)))


def _memory(d: DieView) -> str:
    """What its worker holds, of what the die has."""
    held = f"{size(d.memory_used_bytes)} of " if d.memory_used_bytes is not None else ""
    return held + size(d.memory_bytes)


# ---- one job -----------------------------------------------------------------------------------------------------


def job(j: JobView, now: float, width: int | None) -> list[str]:
    """Everything about one job."""
    place = f" on die {one_line(j.die, 20)} (lane {one_line(j.lane or '-', 40)})" if j.die is not None else ""
    name, state = click.style(one_line(j.id, 70), bold=True), click.style(str(j.state), fg=_COLOR.get(j.state))
    lines = [f"{name}  {state}{place}"]
    for label, text in _facts(j, now):
        first, *rest = wrap(one_line(text, 5000), width - 14 if width else None) or [""]
        lines += [f"  {label:<12}{first}", *(" " * 14 + part for part in rest)]
    return lines


def _facts(j: JobView, now: float) -> list[tuple[str, str]]:
    facts = [
        ("why", j.why), ("hint", j.hint), ("next", _next(j)), ("step", _progress(j)),
        ("loss", _losses(j)), ("speed", _speed(j)), ("checkpoint", _checkpoint(j, now)), ("saved", _saved(j)),
        ("crashes", f"{j.crashes} since the last new step" if j.crashes else ""),
        ("skipped", f"{count(j.skipped, 'step')} whose loss or gradient was no number" if j.skipped else ""),
        ("memory", j.savings), ("method", j.method), ("model", j.model), ("output", j.output), ("file", j.file),
        ("weight", f"{j.weight:g}" if j.weight != 1 else ""),
        ("submitted", clock(j.submitted_at) if j.submitted_at else ""),
    ]
    return [(name, text) for name, text in facts if text]


def _next(j: JobView) -> str:
    """What will happen to a job that does not move, or what one may do."""
    name = one_line(j.id, 70)
    if j.state is S.FAILED:
        return f"tried again when its job file or a file that it names changes, or by `rrd restart {name}`"
    if j.state is S.PAUSED and not j.hint:
        if j.why == "paused by its job file":
            return f"take `paused = true` out of {one_line(j.file, 500)}"
        return f"`rrd resume {name}` lets it go on"
    if j.state is S.WAITING and j.why and not j.hint:
        return "begins by itself; `rrd dies` shows what the dies do, and `die` in its job file may be changed meanwhile"
    return ""


def _progress(j: JobView) -> str:
    if j.state is S.PREPARING and j.prepared is not None:
        return f"preparing its data, {j.prepared:.0%} done"
    of = f" of {j.target_steps} ({percent(j)} %)" if j.target_steps else ""
    if j.target_steps and j.step > j.target_steps:  # shortened on its way
        of = f" (its file now asks for {j.target_steps})"
    eta = f", {duration(j.eta_seconds)} left" if j.eta_seconds is not None else ""
    return f"{j.step}{of}, epoch {j.epoch:.2f}{eta}"


def _losses(j: JobView) -> str:
    if j.loss is None:
        return ""
    held_out = f", on held-out data {number(j.eval_loss)}" if j.eval_loss is not None else ""
    return f"{number(j.loss)}{held_out}  {sparkline(j.losses, 32)}".rstrip()


def _speed(j: JobView) -> str:
    rate = f"{j.steps_per_minute:.1f} steps/min, " if j.steps_per_minute is not None else ""
    lr = f", learning rate {j.lr:.3g}" if j.lr is not None else ""
    return f"{rate}{j.tokens:,} tokens so far{lr}" if j.tokens or rate else ""


def _checkpoint(j: JobView, now: float) -> str:
    every = j.checkpoint_every if not j.checkpoint_every.isdigit() else f"{j.checkpoint_every} steps"
    cadence = f"every {every}" if every else ""
    if j.last_checkpoint_step is None:
        return f"none yet{', ' + cadence if cadence else ''}"
    when = f", {ago(j.last_checkpoint_at, now)}" if j.last_checkpoint_at is not None else ""
    return ", ".join(filter(None, (f"step {j.last_checkpoint_step}{when}", size(j.checkpoint_bytes), cadence)))


def _saved(j: JobView) -> str:
    happened = {"time": j.checkpoint_commits, "failure": j.checkpoint_failures, "fallback": j.checkpoint_fallbacks}
    return ", ".join(count(n, word) for word, n in happened.items() if n)


def progress(j: JobView) -> str:
    """A job's state as one plain line, for where there is no terminal."""
    parts = [str(j.state), f"step {steps(j)}" if j.step or j.target_steps else "",
             f"loss {number(j.loss)}" if j.loss is not None else "",
             f"{j.steps_per_minute:.1f} steps/min" if j.steps_per_minute is not None else "",
             f"eta {duration(j.eta_seconds)}" if j.eta_seconds is not None else "", j.why]
    return one_line(f"{j.id}: {', '.join(filter(None, parts))}", 1000)
