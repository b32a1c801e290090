"""What a part of the campaign found, and the one table of all parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Row:
    """``trials`` of one kind of fault, and what went wrong in them: a sentence each. ``counts`` says what they were."""

    what: str
    trials: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0
    skipped: str = ""

    def count(self, *names: str, by: int = 1) -> None:
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + by

    def line(self) -> str:
        told = ", ".join(f"{n:,} {name}" for name, n in self.counts.items())
        told = "; ".join(part for part in (told, self.note) if part)
        verdict = f"not run: {self.skipped}" if self.skipped else f"{len(self.wrong)} wrong"
        return f"| {self.what} | {self.trials:,} | {told} | {verdict} | {self.seconds:.0f} s |"


HEAD = "| fault | trials | of which | result | took |\n|---|---|---|---|---|"


def timed(part: Callable[[], Row]) -> Row:
    start = time.monotonic()
    row = part()
    row.seconds = row.seconds or time.monotonic() - start
    return row


def show(rows: Iterable[Row]) -> str:
    return "\n".join([HEAD, *(row.line() for row in rows)])


def at_most(trials: int) -> str:
    """The rule of three: what no failure in so many independent trials says of the chance of one, at 95 %."""
    return f"so at most 1 in {trials // 3:,} goes wrong, at 95 %" if trials >= 3 else ""
