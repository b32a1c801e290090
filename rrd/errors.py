"""Every fault that reaches a person: one sentence, a hint, and an exit code that says whom to blame.

A user's mistake raises one of these; our own mistake is an ``assert``.
"""

from __future__ import annotations


class RrdError(Exception):
    """A fault that can be said in one sentence. ``hint`` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class NotRunning(RrdError):
    """Nothing answers on the control socket."""

    exit_code = 3


class NoSuchJob(RrdError):
    exit_code = 4


class Damaged(RrdError):
    """Bytes on disk are not what was written: a digest, a size or a format does not hold."""

    exit_code = 65


class TryLater(RrdError):
    """Refused for now: somebody else holds what is needed."""

    exit_code = 75


class DiskTrouble(TryLater):
    """The disk is full, over quota, read-only or failing. Blames the disk, never the job."""


class Denied(RrdError):
    exit_code = 77


class BadConfig(RrdError):
    """The configuration cannot be used; starting again will not help."""

    exit_code = 78


class BadJob(RrdError):
    """A job, or what it names (model, data, tokenizer), cannot be used as it stands.

    ``file``, ``line`` and ``key`` say where, as far as known; the sentence carries them too.
    """

    exit_code = 78

    def __init__(self, message: str, *, hint: str = "", file: str = "", line: int = 0, key: str = "") -> None:
        where = file + (f":{line}" if line else "")
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.file, self.line, self.key = file, line, key


class NotReadable(BadJob):
    """A file that this user may not open, and another, such as the daemon's, perhaps may."""


class ProtocolError(RrdError):
    """A peer said something that is no message of ours."""
