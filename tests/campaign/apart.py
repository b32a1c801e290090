"""A mount namespace of one's own: what others start meanwhile would else keep a file system mounted that was unmounted
here, and its power could then not be cut."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import traceback
from collections.abc import Callable

from table import Row

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18


def apart(part: Callable[[], Row]) -> Row:
    """Run ``part`` in a process with mounts of its own, which end with it."""
    r, w = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(r)
        answer: dict[str, object] = {}
        try:
            _unshare()
            answer = {"row": dataclasses.asdict(part())}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        finally:
            with open(w, "w") as f:
                json.dump(answer, f)
            os._exit(0)
    os.close(w)
    with open(r) as f:
        answer = json.load(f)
    os.waitpid(pid, 0)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return Row(**answer["row"])


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
