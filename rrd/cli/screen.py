"""A terminal to draw on: only lines that changed are sent, keys come one by one, and in the end all is as it was."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_KEYS = {"\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "page up",
         "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end", "\x1b": "escape", "\r": "enter",
         "\n": "enter", " ": "space", "\x03": "q"}
"""What terminals send, and what it is called here; other characters are called what they are."""

_SEQUENCE = re.compile(r"\x1b(\[[0-9;]*[A-Za-z~]|O[A-Za-z])")

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
"""The alternate screen, cleared, without a cursor; and back."""


class Screen:
    """The whole terminal. Over a slow line a second in which nothing happened costs nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[Text] = []
        self._size = (0, 0)

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows), as of now."""
        return self._console.size

    def draw(self, screen: Text) -> None:
        """Show ``screen``, whose lines are no longer than the terminal is wide."""
        if self._size != self.size:
            self.forget()
            self._size = self.size
        lines = list(screen.split("\n"))[: self._size[1]]
        out = []
        for i in range(max(len(lines), len(self._shown))):
            new = lines[i] if i < len(lines) else None
            if i < len(self._shown) and new is not None and new == self._shown[i] and new.spans == self._shown[i].spans:
                continue
            out.append(f"\x1b[{i + 1};1H{self._rendered(new)}\x1b[0m\x1b[K")
        self._shown = lines
        self._write("".join(out))

    def _rendered(self, line: Text | None) -> str:
        if line is None:
            return ""
        with self._console.capture() as caught:
            self._console.print(line, end="", soft_wrap=True)
        return caught.get()

    def forget(self) -> None:
        """Whatever is on the terminal, it is not ours any more: draw all of it next time."""
        self._shown = []
        if self._size != (0, 0):
            self._write("\x1b[2J")

    def _write(self, text: str) -> None:
        if text:
            self._console.file.write(text)
            self._console.file.flush()

    @contextlib.contextmanager
    def open(self) -> Iterator[Keys]:
        """Take the terminal over; ctrl-z gives it back for as long as it lasts, and so does every end but SIGKILL."""
        with raw_keys() as keys, ends_on_signals():
            self._write(_ENTER)

            def pause(number: int, frame: FrameType | None) -> None:
                self._write(_LEAVE)
                keys.restore()
                os.kill(os.getpid(), signal.SIGSTOP)
                keys.take()
                self._write(_ENTER)
                self.forget()

            before = signal.signal(signal.SIGTSTP, pause)
            try:
                yield keys
            finally:
                signal.signal(signal.SIGTSTP, before)
                with contextlib.suppress(OSError):  # there may be no terminal any more
                    self._write(_LEAVE)


@contextlib.contextmanager
def ends_on_signals() -> Iterator[None]:
    """SIGTERM, and the SIGHUP of a line that is cut, unwind the stack, as ctrl-c does."""
    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Keys:
    """Keys from a terminal. ``wait`` is the only place where a program that draws may spend its time."""

    def __init__(self, fd: int | None) -> None:
        self._fd, self._pending = fd, ""
        if fd is not None:
            import termios

            self._before = termios.tcgetattr(fd)
            self.take()

    def take(self) -> None:
        """Keys come singly and are not shown; ctrl-c still interrupts."""
        if self._fd is not None:
            import tty

            tty.setcbreak(self._fd)

    def restore(self) -> None:
        """The terminal as it was."""
        if self._fd is not None:
            import termios

            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The name of the next key, or an empty text after so many seconds."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        if not self._pending and select.select([self._fd], [], [], seconds)[0]:
            data = os.read(self._fd, 1024)
            self._pending = data.decode(errors="replace") if data else "q"  # the terminal is gone
        return self._next()

    def _next(self) -> str:
        if self._pending == "\x1b" and self._fd is not None and select.select([self._fd], [], [], 0.05)[0]:
            self._pending += os.read(self._fd, 1024).decode(errors="replace")  # the rest of a key, over a slow line
        found = _SEQUENCE.match(self._pending)
        key = found[0] if found else self._pending[:1]
        self._pending = self._pending[len(key) :]
        return _KEYS.get(key, "" if found else key)


@contextlib.contextmanager
def raw_keys() -> Iterator[Keys]:
    """Keys of standard input; none ever where that is no terminal."""
    keys = Keys(sys.stdin.fileno() if sys.stdin.isatty() else None)
    try:
        yield keys
    finally:
        keys.restore()
