"""Where results go: a directory that is whole or not there, replaces only what rrd itself wrote, and loses nothing.

A directory is ours if its manifest says so. What somebody else put into one of ours is never deleted: the old
directory then steps aside under another name.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rrd import durable, roots
from rrd.durable import DISK, Disk
from rrd.errors import BadJob
from rrd.text import one_line
from rrd.train.sealed import MANIFEST, Sealing

OURS = "rrd export"
"""How the kind in a manifest of ours begins."""


class Publication(Sealing):
    """A result being written beside ``output``. A context manager: ``add`` files, then ``publish``."""

    def __init__(self, output: Path, *, disk: Disk = DISK) -> None:
        """Raises BadJob if ``output`` is there and not ours; DiskTrouble if its parent cannot be made."""
        self.output = Path(os.path.realpath(output))  # a link to a directory stays a link
        self.disk = disk
        check_output(self.output)
        try:
            durable.make_dir(self.output.parent, disk=disk)
            self._fd = os.open(self.output.parent, os.O_PATH | os.O_DIRECTORY)
        except OSError as e:
            raise durable.trouble(e, self.output) from e
        self._parent = Path(f"/proc/self/fd/{self._fd}")
        """The directory itself, whatever its path leads to meanwhile."""
        self._directory = durable.NewDirectory(self._parent, self.output.name, disk=disk)
        super().__init__(self._directory)

    def __enter__(self) -> Publication:
        try:
            roots.check_output(self._fd, str(self.output), self.output.name)
            self._directory.__enter__()
        except BaseException as e:
            os.close(self._fd)
            if isinstance(e, OSError):
                raise durable.trouble(e, self.output) from e
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._directory.__exit__(kind, error, trace)
        finally:
            os.close(self._fd)
        if isinstance(error, OSError):
            raise durable.trouble(error, self.output) from error

    def publish(self, facts: Mapping[str, Any]) -> list[str]:
        """Give the directory its name, durably. Returns what the owner should know."""
        self.close(f"{OURS} 1", facts)
        notes = self._set_aside()
        self._directory.commit(self.output.name, replace=True)
        self._sweep()
        return notes

    def _set_aside(self) -> list[str]:
        """Rename away what is there, unless it is a directory of ours, and holds only what we wrote."""
        old = self._parent / self.output.name
        if not os.path.lexists(old):
            return []
        if old.is_dir() and not old.is_symlink():
            manifest = _manifest(old) or {}
            known = {str(n).split("/")[0] for key in ("files", "links") for n in manifest.get(key) or ()} | {MANIFEST}
            if {p.name for p in old.iterdir()} <= (known if manifest else set()):
                return []
        aside = f"{self.output.name}.before-{secrets.token_hex(4)}"
        self.disk.rename(old, self._parent / aside)
        return [f"the earlier output held files that are not rrd's; it is kept as {self.output.with_name(aside)}"]

    def _sweep(self) -> None:
        """Remove what an export to this output left when it was interrupted: an output has one writer."""
        left = re.compile(rf"\.(tmp|trash)-{re.escape(self.output.name)}-[0-9a-f]{{8}}")
        for path in self._parent.iterdir():
            if left.fullmatch(path.name):
                durable.remove_tree(path, disk=self.disk)


def check_output(output: Path) -> None:
    """Whether a result may be written to ``output``. Raises BadJob unless it is free, empty or ours, and writable."""
    shown = one_line(str(output), 200)
    above = next(p for p in output.parents if os.path.lexists(p))
    if _read_only(above):
        raise BadJob(f"the output {shown} cannot be written: {above} is read-only to this service", hint=
                     f"`systemctl edit rrd`, two lines: [Service] and ReadWritePaths={one_line(str(above), 200)}; then "
                     f"`systemctl restart rrd`; or name another output")
    if not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
        raise BadJob(f"the output {shown} cannot be written: {above} is not for the daemon's user to write to",
                     hint="name another output, or let that user write there")
    if os.path.lexists(output) and not output.is_dir():
        raise BadJob(f"the output {shown} is there already, and no directory", hint="name another output")
    if output.is_dir() and _manifest(output) is None and any(output.iterdir()):
        raise BadJob(f"the output {shown} holds files that rrd did not write",
                     hint="name another output, or move that directory away")


def _read_only(path: Path) -> bool:
    """Whether what ``path`` lies on is mounted so, as ProtectSystem= of a unit does with all but a few places."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _manifest(output: Path) -> dict[str, Any] | None:
    """The manifest of a directory of ours, even of one whose files were edited since; None if it is none."""
    try:
        body = json.loads((output / MANIFEST).read_bytes())
        return body if str(body["kind"]).startswith(OURS) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
