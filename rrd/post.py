"""POSTs standard input to ``$RRD_URL``: ``python -m rrd.post``. Status 0 where it was taken; else a line says why.

A process of its own, for a name that is looked up for ever and an answer that comes byte by byte know no deadline: who
has waited long enough ends it. Only standard library; no redirect is followed, for that would lose what was posted.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from email.message import Message
from typing import IO

HEADERS = {"Content-Type": "application/json", "User-Agent": "rrd"}
SECONDS = 30.0
"""Without a byte from the other side."""


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message,
                         newurl: str) -> None:
        """Nowhere: a redirected POST becomes a GET, which is answered well and says nothing."""


def post(url: str, data: bytes) -> str:
    """Why ``data`` was not taken; empty if it was."""
    try:
        request = urllib.request.Request(url, data, HEADERS)
        with urllib.request.build_opener(_Stay).open(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as e:
        said, where = f"it answered {e.code} {e.reason}".strip(), e.headers.get("Location", "")
        return said + (f", which leads to {where}: name that URL" if where and e.code < 400 else "")
    except urllib.error.URLError as e:
        return str(e.reason)
    except Exception as e:  # what answers is not ours, and may answer anything
        return f"its answer makes no sense: {type(e).__name__}: {e}"


if __name__ == "__main__":
    trouble = post(os.environ["RRD_URL"], sys.stdin.buffer.read())
    sys.exit(trouble[:1000] or 0)
