"""Where the files of jobs may lie, by ``model_roots``, ``data_roots`` and ``output_root``: asked again of every file,
and of the directory that an output is written to, once it is open.

A path is judged when its job is accepted. Until it is opened, and every time it is, somebody may have put a link in its
place, or in that of a directory above it; an open file cannot be moved any more. What worker processes may open is in
their environment, and so in that of every process that they start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Literal

from rrd.errors import BadJob
from rrd.text import one_line

_VARIABLE = "RRD_WORKER_ROOTS"
_Kind = Literal["model", "data", "output"]


def confine(*, model: Iterable[object], data: Iterable[object], output: Iterable[object] = ()) -> None:
    """From now on files are opened, and outputs written, only below these directories; none given: anywhere."""
    os.environ[_VARIABLE] = json.dumps({kind: [os.path.realpath(str(r)) for r in roots] for kind, roots in
                                        (("model", model), ("data", data), ("output", output))})


def check(fd: int, path: str, kind: _Kind) -> None:
    """Raises BadJob if the open file ``fd``, found by ``path``, lies elsewhere; it is then closed."""
    real, allowed = _lies(fd, kind)
    if allowed:
        os.close(fd)
        raise BadJob(f"the file lies outside {kind}_roots: {one_line(real, 200)}", file=path,
                     hint=f"move it below one of {one_line(', '.join(allowed), 200)}, or have rrd.toml changed")


def check_output(fd: int, output: str, name: str) -> None:
    """Raises BadJob unless the open directory ``fd``, in which ``output`` will be ``name``, lies where it may."""
    real, allowed = _lies(fd, "output")
    if allowed and os.path.join(real, name) not in allowed:
        raise BadJob(f"the output lies outside output_root: {one_line(os.path.join(real, name), 200)}",
                     hint=f"a link stands for a directory above it; {one_line(output, 200)} must lie below "
                          f"{one_line(allowed[0], 200)}")


def _lies(fd: int, kind: _Kind) -> tuple[str, Sequence[str]]:
    """Where the open file ``fd`` is; and the directories below which it should be, if it is not."""
    allowed: Sequence[str] = json.loads(os.environ.get(_VARIABLE, "{}")).get(kind, ())
    real = os.readlink(f"/proc/self/fd/{fd}")
    return real, () if any(os.path.commonpath((real, root)) == root for root in allowed) else allowed
