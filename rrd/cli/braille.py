"""Curves in a terminal: a character is two by four dots of Braille."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click

from rrd.cli.show import number
from rrd.history import History, Mark, smooth
from rrd.text import one_line

COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot, row by row: Unicode 2800."""

Points = Sequence[tuple[float, float]]
Curve = tuple[str, Points, bool]
"""Name, points, and whether they are joined."""
RAW, RAW_COLOR = "raw", "bright_black"
CHECKPOINT, RESTART = "╵", "▲"


def losses(histories: Sequence[History], width: int, span: int | None = None, *, height: int = 16,
           color: bool = True) -> list[str]:
    """The losses of jobs, smoothed, over each other. A single job's raw ones stand behind them, where colour tells the
    two apart, its held-out ones before them, and its checkpoints and restarts below."""
    curves: list[Curve] = [(one_line(h.job, 24), smooth(h.losses(), span), True) for h in histories]
    if len(histories) == 1:
        if color:
            curves.insert(0, (RAW, histories[0].losses(), True))
        if len(histories[0].evals) > 1:
            curves.append(("held out", histories[0].evals, False))
    return chart(curves, width, height, x_name="step", marks=histories[0].marks if len(histories) == 1 else ())


def chart(curves: Sequence[Curve], width: int, height: int, *, x_name: str = "",
          marks: Sequence[Mark] = ()) -> list[str]:
    """Lines of at most ``width`` characters: an axis, the curves, their names where they end; a line for ``marks``."""
    xs = [x for _, points, _ in curves for x, _ in points]
    ys = sorted(y for _, points, _ in curves for _, y in points)
    low, high = ys[0], ys[min(len(ys) - 1, math.ceil(0.995 * len(ys)))]  # one spike should not flatten all the rest
    high = high if high > low else low + 1.0
    left = {0: number(high, 3), height // 2: number((low + high) / 2, 3), height - 1: number(low, 3)}
    margin = max(map(len, left.values()))
    named = [f"{name} {number(points[-1][1])}" for name, points, _ in curves]
    columns = max(10, width - margin - 3 - max(map(len, named)) - 2)
    canvas = Canvas(columns, height, (min(xs), max(xs)), (low, high))
    for i, (_, points, joined) in enumerate(curves):
        canvas.draw(points, _color(i, curves), joined)
    right = _ends(canvas, curves, named)
    lines = [f"{left.get(i, ''):>{margin}} {'┤' if i in left else '│'}{row}{right.get(i, '')}".rstrip()
             for i, row in enumerate(canvas.rows())]
    if below := _below(canvas, marks):
        lines.append(f"{'':>{margin}} │{below}")
    last = f"{x_name} {number(max(xs), 6)}"
    return [*lines, f"{'':>{margin}} └{number(min(xs), 6):<{max(1, columns - len(last))}}{last}"]


def _below(canvas: Canvas, marks: Sequence[Mark]) -> str:
    """Checkpoints as ticks and restarts as triangles, where they happened; empty without any."""
    cells = [" "] * canvas.columns
    for kind, sign in (("checkpoint", CHECKPOINT), ("resumed", RESTART)):
        for m in marks:
            if m.kind == kind and canvas.x[0] <= m.step <= canvas.x[1]:
                cells[canvas.place(m.step, canvas.y[0])[0] // 2] = sign
    said = [f"{sign} {what}" for sign, what in ((CHECKPOINT, "saved"), (RESTART, "resumed")) if sign in cells]
    return f"{''.join(cells)}  {' '.join(said)}".rstrip() if said else ""


def _ends(canvas: Canvas, curves: Sequence[Curve], named: Sequence[str]) -> dict[int, str]:
    """Row to name: each beside the end of its curve, or at the nearest free row."""
    out: dict[int, str] = {}
    for i, (_, points, _) in enumerate(curves):
        wanted = canvas.place(*points[-1])[1] // 4
        free = [row for row in range(canvas.height) if row not in out]
        if free:
            row = min(free, key=lambda row: (abs(row - wanted), row))
            out[row] = "  " + click.style(named[i], fg=_color(i, curves))
    return out


def _color(i: int, curves: Sequence[Curve]) -> str | None:
    raw = curves[0][0] == RAW
    return RAW_COLOR if raw and i == 0 else COLORS[(i - raw) % len(COLORS)]


class Canvas:
    """``columns`` by ``height`` characters over the ranges of x and y."""

    def __init__(self, columns: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.columns, self.height, self.x, self.y = columns, height, x, y
        self._bits = [[0] * columns for _ in range(height)]
        self._colors: list[list[str | None]] = [[None] * columns for _ in range(height)]

    def draw(self, points: Points, color: str | None, joined: bool) -> None:
        """What was drawn later has the colour of the whole character."""
        before: tuple[int, int] | None = None
        for x, y in points:
            here = self.place(x, y)
            for dot in _between(before, here) if joined and before else [here]:
                self._set(*dot, color)
            if not joined:
                for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                    self._set(here[0] + dx, here[1] + dy, color)
            before = here

    def place(self, x: float, y: float) -> tuple[int, int]:
        """The dot of a point, from the upper left."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = min(1.0, max(0.0, (y - y0) / (y1 - y0)))
        return round(across * (2 * self.columns - 1)), round((1 - up) * (4 * self.height - 1))

    def _set(self, x: int, y: int, color: str | None) -> None:
        if 0 <= x < 2 * self.columns and 0 <= y < 4 * self.height:
            if self._colors[y // 4][x // 2] == RAW_COLOR != color:
                self._bits[y // 4][x // 2] = 0  # a curve is a line, also within the cloud that it goes through
            self._bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
            self._colors[y // 4][x // 2] = color

    def rows(self) -> list[str]:
        out = []
        for bits, colors in zip(self._bits, self._colors, strict=True):
            line, run = "", 0
            for i in range(1, self.columns + 1):  # one escape sequence for each run of a colour
                if i == self.columns or colors[i] != colors[run]:
                    text = "".join(chr(0x2800 + b) if b else " " for b in bits[run:i])
                    line, run = line + (click.style(text, fg=colors[run]) if colors[run] else text), i
            out.append(line)
        return out


def _between(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    n = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return [(round(a[0] + (b[0] - a[0]) * i / n), round(a[1] + (b[1] - a[1]) * i / n)) for i in range(n + 1)]
