"""Where the files of jobs may lie, by ``model_roots`` and ``data_roots``: asked again of every file once it is open.

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
_Kind = Literal["model", "data"]


def confine(*, model: Iterable[object], data: Iterable[object]) -> None:
    """From now on files are opened only below these directories; none given: anywhere."""
    os.environ[_VARIABLE] = json.dumps({"model": [os.path.realpath(str(r)) for r in model],
                                        "data": [os.path.realpath(str(r)) for r in data]})


def check(fd: int, path: str, kind: _Kind) -> None:
    """Raises BadJob if the open file ``fd``, found by ``path``, lies elsewhere; it is then closed."""
    allowed: Sequence[str] = json.loads(os.environ.get(_VARIABLE, "{}")).get(kind, ())
    if not allowed:
        return
    real = os.readlink(f"/proc/self/fd/{fd}")
    if not any(os.path.commonpath((real, root)) == root for root in allowed):
        os.close(fd)
        raise BadJob(f"the file lies outside {kind}_roots: {one_line(real, 200)}", file=path,
                     hint=f"move it below one of {one_line(', '.join(allowed), 200)}, or have rrd.toml changed")
