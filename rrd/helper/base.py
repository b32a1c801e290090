"""What the helper's parts say to each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol


class Refusal(Exception):
    """Why a request is not done, in one sentence. ``later``: nothing is wrong, somebody else is first."""

    lost = False
    """Whether the die that was asked for has fallen off the bus."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.later = reason, later


class BadSetup(Exception):
    """A configuration that cannot be used as it stands: exit status 78, and no restart."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)


class Backend(Protocol):
    """Opens and closes the dies of one group. One call at a time; never two dies open."""

    @property
    def dies(self) -> Sequence[str]:
        """Their names."""

    def start(self) -> None:
        """Make sure that no die is open. Raises BadSetup for what the configuration gets wrong."""

    def open(self, die: str, wanted: Callable[[], bool] = ...) -> None:
        """Give ``die`` the bus. Raises Refusal; ``die`` is then closed, as far as it still answers. One that takes its
        time may give up when it is no longer ``wanted``."""

    def close(self, die: str) -> None:
        """Take the bus from ``die``. Raises Refusal when it does not let go, or when nobody knows."""


ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6


def say(priority: int, text: str) -> None:
    """One line; for the journal, which reads it from there, with the priority in front."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    print(f"<{priority}>{text}" if _to_journal() else text, file=sys.stderr, flush=True)


def _to_journal() -> bool:
    """Whether what we say goes there (JOURNAL_STREAM, systemd.exec(5)), and not to a person."""
    at = os.fstat(2)
    return os.environ.get("JOURNAL_STREAM") == f"{at.st_dev}:{at.st_ino}"
