"""A job's curves as a picture. Imported only when one is asked for: it needs matplotlib (the extra ``plot``).

Readable in black and white: jobs differ in their lines' pattern and are named at their ends, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rrd.history import History, smooth, thin
from rrd.text import one_line

POINTS = 4000
"""Of a curve; more cannot be seen."""
PATTERNS = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)), (0, (3, 1)))
COLORS = ("#0b4f8a", "#c2410c", "#2e7d32", "#7b3fa0", "#8a6d00", "#00727a")
"""Dark enough to be told from the paper in grey, and of different darkness."""
STYLE: Any = {
    "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "grid.linewidth": 0.6, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "svg.hashsalt": "rrd", "svg.fonttype": "none", "pdf.fonttype": 42,
}


def draw(histories: Sequence[History], output: Path, *, span: int | None = None, log: bool = False) -> None:
    """Write loss, learning rate and throughput of ``histories`` to ``output``; its suffix is the format."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 7.2), layout="constrained")
        FigureCanvasAgg(figure)
        loss, lr, speed = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1, 1.3])
        for i, h in enumerate(histories):
            _loss(loss, h, i, span, alone=len(histories) == 1)
            _line(lr, [(s.step, s.lr) for s in h.steps], i)
            _line(speed, smooth(h.throughput(), span), i)
        _finish(loss, lr, speed, log)
        _name(loss, histories)
        figure.savefig(output, dpi=150, metadata={} if output.suffix.lower() == ".png" else
                       {"Date": None} if output.suffix.lower() == ".svg" else {"CreationDate": None})


def _loss(ax: Axes, h: History, i: int, span: int | None, *, alone: bool) -> None:
    color = COLORS[i % len(COLORS)]
    raw = h.losses()
    x, y = zip(*thin(raw, POINTS), strict=True)
    ax.plot(x, y, color=color, alpha=0.28 if alone else 0.13, linewidth=0.8)
    _line(ax, smooth(raw, span), i, width=1.9, label=one_line(h.job, 40))
    if h.evals:
        x, y = zip(*h.evals, strict=True)
        ax.plot(x, y, color=color, linestyle="none", marker="os^Dvp"[i % 6], markersize=6, markerfacecolor="white",
                markeredgewidth=1.4, zorder=4, label=f"{one_line(h.job, 40)}, held out")
    _marks(ax, h, i, alone=alone)


def _marks(ax: Axes, h: History, i: int, *, alone: bool) -> None:
    """Checkpoints as ticks along the bottom, restarts as triangles on the top edge, each job on a line of its own."""
    saved = sorted({m.step for m in h.marks if m.kind == "checkpoint"})
    again = sorted({m.step for m in h.marks if m.kind == "resumed"})
    across = ax.get_xaxis_transform()
    color = COLORS[i % len(COLORS)]
    if saved:
        ax.plot(saved, [0.012 + 0.022 * i] * len(saved), "|", color=color, transform=across, markersize=6,
                label="checkpoints" if alone or i == 0 else None)
    if again:
        ax.plot(again, [0.985 - 0.035 * i] * len(again), "v", color=color, transform=across, markersize=7,
                clip_on=False, label="restarts" if alone or i == 0 else None)
        if alone:
            for step in again:
                ax.axvline(step, color="0.5", linewidth=0.8, linestyle=":", zorder=0)


def _line(ax: Axes, points: Sequence[tuple[int, float]], i: int, width: float = 1.4, label: str | None = None) -> None:
    if points:
        x, y = zip(*thin(points, POINTS), strict=True)
        ax.plot(x, y, color=COLORS[i % len(COLORS)], linestyle=PATTERNS[i % len(PATTERNS)], linewidth=width,
                label=label)


def _finish(loss: Axes, lr: Axes, speed: Axes, log: bool) -> None:
    loss.set_title("loss")
    lr.set_title("learning rate")
    speed.set_title("tokens a second, while computing")
    speed.set_xlabel("step")
    if log:
        loss.set_yscale("log")
    lr.set_ylim(bottom=0)
    speed.margins(y=0.15)
    speed.set_ylim(bottom=0)
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    lr.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.1g}" if v else "0"))


def _name(ax: Axes, histories: Sequence[History]) -> None:
    """A legend that keeps out of the way: losses fall, so the upper right is free."""
    ax.legend(loc="upper right", frameon=True, framealpha=0.85, edgecolor="none", handlelength=3.2)
    if len(histories) == 1:
        h = histories[0]
        ax.set_title(f"{one_line(h.job, 60)}: loss, {len(h.steps):,} steps")
