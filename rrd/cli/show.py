"""How things are shown: tables, ages, sizes, sparklines, JSON. Plain text; colours where click lets them through."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from rrd.text import ago as ago
from rrd.text import duration, one_line
from rrd.text import number as number
from rrd.text import size as size

if TYPE_CHECKING:
    from pydantic import BaseModel

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Column:
    """``rank`` says how soon the column is left out where the terminal is narrow: high first, 0 never."""

    title: str
    right: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Row:
    cells: Sequence[str]
    color: str | None = None
    """Of the second cell, which is the state."""
    note: str = ""
    """One sentence: beside the row where there is room, else below it."""


def table(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[str]:
    """``rows`` as lines of at most ``width`` characters; with None nothing is cut, left out or put below."""
    longest = [max((len(r.cells[i]) for r in rows), default=0) for i in range(len(columns))]
    wide = [n and max(n, len(c.title)) for n, c in zip(longest, columns, strict=True)]  # what is empty is left out
    kept = _fit(columns, wide, width)
    title = "  ".join(_pad(columns[i].title, wide[i], columns[i].right) for i in kept)
    lines = [click.style(title.rstrip(), bold=True)]
    for row in rows:
        lines += _lines(row, columns, wide, kept, width)
    return lines


def _fit(columns: Sequence[Column], wide: list[int], width: int | None) -> list[int]:
    """Which columns stay. The first one is cut (in ``wide``) where leaving out others is not enough."""
    kept = [i for i in range(len(columns)) if wide[i]]
    if width is None:
        return kept

    def over() -> int:
        return sum(wide[i] + 2 for i in kept) - 2 - width

    wide[0] = min(wide[0], max(24, wide[0] - over()))
    for i in sorted(kept, key=lambda i: -columns[i].rank):
        if over() > 0 and columns[i].rank:
            kept.remove(i)
    wide[0] = min(wide[0], max(8, wide[0] - over()))
    return kept


def _lines(row: Row, columns: Sequence[Column], wide: list[int], kept: list[int], width: int | None) -> list[str]:
    cells = [_pad(row.cells[i], wide[i], columns[i].right) for i in kept]
    plain = len("  ".join(cells))
    if row.color and 1 in kept:
        cells[kept.index(1)] = click.style(cells[kept.index(1)], fg=row.color)
    line = "  ".join(cells)
    note = one_line(row.note, 2000)
    if not note:
        return [line.rstrip()]
    if width is None or plain + 2 + len(note) <= width:
        return [f"{line}  {click.style(note, dim=True)}"]
    return [line.rstrip(), *(click.style(f"    {part}", dim=True) for part in wrap(note, width - 4))]


def _pad(text: str, width: int, right: bool) -> str:
    text = text if len(text) <= width else text[: width - 1] + "…"
    return text.rjust(width) if right else text.ljust(width)


def wrap(text: str, width: int | None) -> list[str]:
    """``text`` in lines of ``width`` characters, long words cut."""
    return textwrap.wrap(text, max(20, width), break_on_hyphens=False) if width else [text]


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where stdout is none, and lines may be as long as they like."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def say(text: str, *, mark: str = "") -> None:
    """A message to the person at the terminal: on stderr, so that stdout holds data only."""
    click.echo(mark + one_line(text, 2000), err=True)


def warn(text: str) -> None:
    say(text, mark=click.style("warning: ", fg="yellow", bold=True))


def as_json(value: Any) -> None:
    """``value`` on stdout; ASCII only, so that no text from a file reaches the terminal raw."""
    click.echo(json.dumps(value, indent=2))


def plain(model: BaseModel) -> Any:
    """``model`` as JSON knows it; a number that is none becomes null."""
    return json.loads(model.model_dump_json())


def age(then: float | None, now: float) -> str:
    """``2 min``: how long ago ``then`` was."""
    return "-" if then is None else duration(max(0.0, now - then)) if now - then >= 1 else "now"


def clock(when: float) -> str:
    """Local time to the second."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (ValueError, OverflowError, OSError):  # a damaged record
        return "?"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The newest ``width`` values as bars between their least and greatest; what is no number is a gap."""
    shown = list(values)[-width:]
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)

    def bar(v: float) -> str:
        return _BARS[round((v - low) / span * 7) if span > 0 else 3] if math.isfinite(v) else " "

    return "".join(map(bar, shown))
