"""Text from files and people, made safe and short enough to show."""

from __future__ import annotations

import math
import signal
import unicodedata


def one_line(text: str, limit: int = 500) -> str:
    """``text`` on one line: control, format and bidirectional characters escaped, cut at ``limit``.

    A job file, a path or a library's error may carry anything; a terminal or journal must not obey it.
    """
    shown = "".join(_safe(c) for c in text[: limit + 1])
    return shown if len(text) <= limit else shown[:limit] + "…"


def _safe(c: str) -> str:
    if c in "\n\t":
        return " "
    if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return f"\\u{ord(c):04x}"
    return c


def ascii_line(text: str, limit: int = 200) -> str:
    """``text`` as one line of printable ASCII: what the notify protocol can carry safely."""
    return "".join(c if " " <= c <= "~" else "?" for c in one_line(text, limit)).strip()


def signal_name(number: int) -> str:
    """``SIGKILL``; a real-time signal has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def duration(seconds: float) -> str:
    """``47 min``, ``3.2 h``: two digits are enough for a person who waits."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def count(n: int, noun: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def ago(then: float, now: float) -> str:
    return "just now" if now - then < 1 else f"{duration(now - then)} ago"


def number(value: float | None, digits: int = 4) -> str:
    """Three to four digits are enough to see a loss fall; ``-`` when there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def size(n: int | None) -> str:
    """``11.6 MiB``."""
    if n is None:
        return "-"
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
