"""A job's curves as a picture. Imported only when one is asked for: it needs matplotlib (the extra ``plot``).

Readable in black and white: jobs differ in their lines' pattern and the shape of their marks, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from rrd.history import History, smooth, thin
from rrd.text import one_line

POINTS = 4000
"""Of a curve; more cannot be seen."""
PATTERNS: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)), (0, (3, 1)))
MARKERS = "os^Dvp"
COLORS = ("#0b4f8a", "#c2410c", "#2e7d32", "#7b3fa0", "#8a6d00", "#00727a")
"""Dark enough to be told from the paper in grey, and of different darkness."""
STYLE: Any = {
    "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "grid.linewidth": 0.6, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "svg.hashsalt": "rrd", "svg.fonttype": "none", "pdf.fonttype": 42,
}


def draw(histories: Sequence[History], output: Path, *, span: int | None = None, log: bool = False) -> None:
    """Write loss, learning rate and throughput of ``histories`` to ``output``; its suffix is the format."""
    several = len(histories) > 1
    strip = 0.16 + 0.17 * len(histories)  # inches, or so, for checkpoints and restarts, a line for each job
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0 if several else 9.5, 6.6 + strip), layout="constrained")
        FigureCanvasAgg(figure)
        loss, marks, lr, speed = figure.subplots(4, 1, sharex=True, height_ratios=[4, strip, 1, 1.3])
        for i, h in enumerate(histories):
            _loss(loss, h, i, span, alone=not several)
            _marks(marks, h, i)
            _line(lr, [(s.step, s.lr) for s in h.steps], i)
            _line(speed, smooth(h.throughput(), span), i)
        if not several:
            _dotted_restarts(loss, histories[0])
        _finish(loss, marks, lr, speed, log)
        _name(figure, loss, marks, histories)
        figure.savefig(output, dpi=150, metadata={} if output.suffix.lower() == ".png" else
                       {"Date": None} if output.suffix.lower() == ".svg" else {"CreationDate": None})


def _loss(ax: Axes, h: History, i: int, span: int | None, *, alone: bool) -> None:
    color = COLORS[i % len(COLORS)]
    raw = h.losses()
    x, y = zip(*thin(raw, POINTS), strict=True)
    ax.plot(x, y, color=color, alpha=0.28 if alone else 0.13, linewidth=0.8)
    _line(ax, smooth(raw, span), i, width=1.9)
    if h.evals:
        x, y = zip(*h.evals, strict=True)
        ax.plot(x, y, color=color, linestyle="none", zorder=4, **_marker(i))


def _marker(i: int) -> dict[str, Any]:
    """Of held-out losses: hollow, and of another shape for each job."""
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 6, "markerfacecolor": "white", "markeredgewidth": 1.4}


def _marks(ax: Axes, h: History, i: int) -> None:
    """Checkpoints as ticks, restarts as triangles; each job on a line of its own, the first at the top."""
    for kind, marker, size in (("checkpoint", "|", 8.0), ("resumed", "v", 6.5)):
        steps = sorted({m.step for m in h.marks if m.kind == kind})
        ax.plot(steps, [-i] * len(steps), color=COLORS[i % len(COLORS)], linestyle="none", marker=marker,
                markersize=size)


def _dotted_restarts(ax: Axes, h: History) -> None:
    for step in sorted({m.step for m in h.marks if m.kind == "resumed"}):
        ax.axvline(step, color="0.5", linewidth=0.8, linestyle=":", zorder=0)


def _line(ax: Axes, points: Sequence[tuple[int, float]], i: int, width: float = 1.4) -> None:
    if points:
        x, y = zip(*thin(points, POINTS), strict=True)
        ax.plot(x, y, color=COLORS[i % len(COLORS)], linestyle=PATTERNS[i % len(PATTERNS)], linewidth=width,
                marker="." if len(x) == 1 else "")  # a line needs two


def _finish(loss: Axes, marks: Axes, lr: Axes, speed: Axes, log: bool) -> None:
    loss.set_title("loss")
    marks.set_title("checkpoints | and restarts \N{BLACK DOWN-POINTING TRIANGLE}")
    lr.set_title("learning rate")
    speed.set_title("tokens a second, while computing")
    speed.set_xlabel("step")
    if log:
        loss.set_yscale("log")
        loss.grid(True, which="minor", axis="y")
        loss.yaxis.set_major_formatter(LogFormatter())
        loss.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    loss.margins(x=0.02)
    marks.grid(False)
    marks.tick_params(left=False, bottom=False)
    marks.spines["left"].set_visible(False)
    lr.set_ylim(bottom=0)
    speed.set_ylim(0, 1.12 * speed.dataLim.ymax if speed.lines else 1.0)
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (speed.xaxis, speed.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    lr.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.1g}" if v else "0"))


def _name(figure: Figure, loss: Axes, marks: Axes, histories: Sequence[History]) -> None:
    """Who is who, beside the curves and beside the marks; a single job is named above them."""
    marks.set_ylim(0.2 - len(histories), 0.8)
    names = [_cut(one_line(h.job, 70)) for h in histories]
    if len(histories) == 1:
        h = histories[0]
        loss.set_title(f"{one_line(h.job, 60)}: loss, {len(h.steps):,} step{'s' * (len(h.steps) != 1)}")
        marks.set_yticks([])
        raw = Line2D([], [], color=COLORS[0], alpha=0.4, linewidth=0.8, label="raw")
        shown = [_sample(0, "smoothed", line=True), raw, *([_sample(0, "held out", marker=True)] if h.evals else [])]
        loss.legend(handles=shown, loc="upper right", framealpha=0.85, edgecolor="none", handlelength=3.2)
        return
    marks.yaxis.tick_right()
    marks.tick_params(right=False)
    marks.set_yticks([-i for i in range(len(names))], names, fontsize=8)
    shown = [_sample(i, names[i], line=True, marker=bool(h.evals)) for i, h in enumerate(histories)]
    if any(h.evals for h in histories):
        shown.append(Line2D([], [], color="0.3", linestyle="none", label="held out", **_marker(0)))
    figure.legend(handles=shown, loc="outside right upper", frameon=False, handlelength=4.5)


def _sample(i: int, name: str, *, line: bool = False, marker: bool = False) -> Line2D:
    """An entry of a legend."""
    return Line2D([], [], color=COLORS[i % len(COLORS)], linestyle=PATTERNS[i % len(PATTERNS)] if line else "none",
                  linewidth=1.9, label=name, **(_marker(i) if marker else {}))


def _cut(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:18]}\N{HORIZONTAL ELLIPSIS}{name[-9:]}"
