"""The page for people: a snapshot as HTML, in parts, so that only what has changed is sent again.

Every part is one element whose ``id`` is its key. Everything shown is escaped twice over: control and bidirectional
characters by ``one_line``, HTML by jinja2.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import NamedTuple
from zlib import crc32

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rrd.snapshot import DieView, JobView, LaneView, Snapshot, VisitView
from rrd.states import JobState
from rrd.text import ago, count, duration, number, one_line, size

S = JobState
ORDER = (S.RUNNING, S.EXPORTING, S.LOADING, S.PREPARING, S.FAILED, S.PAUSED, S.WAITING, S.DONE, S.CANCELLED, S.REMOVED)
"""What moves first, what needs the user next, what has ended last."""
HUES = 12
"""Colours that tell jobs apart in the timeline; the style sheet has one for each."""
WINDOWS = (30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)
"""Seconds that a timeline may show."""
FRESH_SECONDS = 0.9
"""So long everybody who looks is shown the same snapshot."""

REMEMBERED = 60
"""What was shown at so many times is remembered: for pages that open their stream, or lost it for a moment."""

ASSETS = {"/page.css": "text/css; charset=utf-8", "/page.js": "text/javascript; charset=utf-8",
          "/icon.svg": "image/svg+xml"}


@cache
def asset(path: str) -> bytes:
    """A file that the page asks for; ``path`` is one of ``ASSETS``."""
    assert path in ASSETS
    return files("rrd").joinpath("templates").joinpath(path[1:]).read_bytes()


class Shown(NamedTuple):
    """What is, or was, on the page: element id to HTML, the parts above the table and then its rows in their order."""

    name: str = ""
    """Who has it tells us by this what need not be sent again."""
    parts: Mapping[str, str] = MappingProxyType({})


class Board:
    """What is on the page, made anew at most once a second however many people look."""

    def __init__(self, snapshot: Callable[[], Snapshot], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._snapshot, self._monotonic = snapshot, monotonic
        self._env = Environment(loader=PackageLoader("rrd"), autoescape=True, undefined=StrictUndefined,
                                trim_blocks=True, lstrip_blocks=True)
        self._env.filters |= {"line": one_line, "prose": prose, "number": number, "size": size, "duration": duration,
                              "hue": self._hue}
        self._parts = self._env.get_template("parts.html").module
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._now = Shown()
        self._known: OrderedDict[str, Shown] = OrderedDict()
        self._boot, self._count = secrets.token_hex(4), 0
        self._rows: dict[str, tuple[JobView, str, str]] = {}
        self._hues: dict[str, int] = {}
        self._host = socket.gethostname()

    def page(self) -> str:
        """The whole page."""
        now = self.now()
        rows = "".join(html for key, html in now.parts.items() if key.startswith("job:"))
        title = f"rrd on {one_line(self._host, 60)}"
        return self._env.get_template("page.html").render(parts=now.parts, rows=rows, name=now.name, title=title)

    def changes(self, seen: Shown) -> tuple[str, Shown]:
        """What somebody who has ``seen`` this lacks, as JSON (empty: nothing), and what they have seen then."""
        now = self.now()
        patch: dict[str, object] = {}
        if html := {key: part for key, part in now.parts.items() if seen.parts.get(key) != part}:
            patch["html"] = html
        jobs = [key for key in now.parts if key.startswith("job:")]
        if jobs != [key for key in seen.parts if key.startswith("job:")]:
            patch["jobs"] = jobs
        return json.dumps(patch) if patch else "", now

    def seen(self, name: str) -> Shown:
        """What has this name; nothing, if that is long ago or another daemon's."""
        with self._lock:
            return self._known.get(name, Shown())

    def now(self) -> Shown:
        """What is on the page; the same for everybody for ``FRESH_SECONDS``."""
        with self._lock:
            if self._monotonic() - self._at >= FRESH_SECONDS:
                self._count += 1
                self._now = Shown(f"{self._boot}-{self._count}", self._render(self._snapshot()))
                self._at = self._monotonic()
                self._known[self._now.name] = self._now
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            return self._now

    def _render(self, s: Snapshot) -> dict[str, str]:
        p = self._parts
        jobs = sorted(s.jobs, key=lambda j: (ORDER.index(j.state), j.id))
        self._hues = hues((j.id for j in jobs), self._hues)
        wrong = faults(s)
        lanes = [lane_facts(lane, s, self._hue) for lane in s.lanes]
        out = {
            "top": str(p.top(s, self._host, len(wrong), facts(s))),  # type: ignore[attr-defined]
            "faults": str(p.faults(wrong)),  # type: ignore[attr-defined]
            "lanes": str(p.lanes(lanes)),  # type: ignore[attr-defined]
            "tally": str(p.tally(tally(s))),  # type: ignore[attr-defined]
        }
        self._rows = {j.id: self._row(j, s.time) for j in jobs}
        return out | {f"job:{one_line(j.id, 70)}": self._rows[j.id][2] for j in jobs}

    def _hue(self, job: str) -> int:
        return self._hues.get(job, hue(job))

    def _row(self, j: JobView, now: float) -> tuple[JobView, str, str]:
        """The job's row; the one of a second ago where nothing about it has changed."""
        saved = ago(j.last_checkpoint_at, now) if j.last_checkpoint_at is not None else ""
        before = self._rows.get(j.id)
        if before is not None and before[1] == saved and before[0] == j:
            return before
        end = finish(j, now)
        return j, saved, str(self._parts.job(j, saved=saved, end=end, curve=curve(j.losses)))  # type: ignore[attr-defined]


def hue(job: str) -> int:
    """The colour that a job has where it can."""
    return crc32(job.encode()) % HUES


def hues(jobs: Iterable[str], before: Mapping[str, int]) -> dict[str, int]:
    """A colour for each job, its own if no other has it: the first of them differ. Who had one ``before`` keeps it."""
    jobs = list(jobs)
    out = {job: before[job] for job in jobs if job in before}
    used = Counter(out.values())
    for job in jobs:
        if job not in out:
            out[job] = min(range(HUES), key=lambda h: (used[h], (h - hue(job)) % HUES))
            used[out[job]] += 1
    return out


def prose(text: str, most: int) -> Markup:
    """A sentence, escaped, in which what stands in backquotes is set as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(one_line(text, most)))))


def curve(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """The points of an SVG polyline through ``values``, scaled to fill ``width`` by ``height``."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (height - 4) / (high - low) if high > low else 0.0
    dx = width / (len(values) - 1)
    return " ".join(f"{i * dx:.4g},{height - 2 - (v - low) * scale:.4g}" for i, v in enumerate(values))


def finish(j: JobView, now: float) -> str:
    """When the job will be trained, as a weekday and a time, where that is more than an hour away."""
    if j.eta_seconds is None or not 3600 <= j.eta_seconds < 6 * 86400:
        return ""
    return time.strftime("%a %H:%M", time.localtime(now + j.eta_seconds))


def tally(s: Snapshot) -> list[tuple[str, int]]:
    states = Counter(j.state for j in s.jobs)
    return [(state.value, states[state]) for state in ORDER if states[state]]


def facts(s: Snapshot) -> list[str]:
    """About the box as a whole: version, how long it is up, room on its disk, when all that runs will be trained."""
    found = [one_line(s.version, 40), f"up {duration(max(0.0, s.time - s.started_at))}"]
    if s.disk_free_bytes is not None:
        found.append(f"{size(s.disk_free_bytes)} free")
    last = max((j for j in s.jobs if j.eta_seconds is not None), key=lambda j: j.eta_seconds or 0.0, default=None)
    if last is not None and last.eta_seconds is not None:
        end = finish(last, s.time)
        found.append(f"what runs is trained in {duration(last.eta_seconds)}" + (f", {end}" if end else ""))
    return found


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def faults(s: Snapshot) -> list[tuple[str, str, str]]:
    """(whom it is about, what is wrong, what to do), the gravest first. Jobs that failed long ago stay: they wait."""
    found = [("rrd", text, "") for text in (s.config_error, s.spool_error) if text]
    if not s.spool_watch_healthy:
        found.append(("rrd", "changes of job files are found by looking every few seconds: watching them failed", ""))
    found += [(f"die {d.name}", d.why, _retry(d, s.time)) for d in s.dies if d.why]
    found += [(f"job {j.id}", j.why, j.hint) for j in s.jobs if j.state is S.FAILED]
    found += [(f"job {j.id}", f"{count(j.crashes, 'worker')} died on its visits since its last new step", j.hint)
              for j in s.jobs if j.crashes and j.state is not S.FAILED]
    found += [(f"job {j.id}", j.why, j.hint) for j in s.jobs
              if j.state is S.PAUSED and j.checkpoint_failures and j.why]
    found += [(r.file, r.message.removeprefix(f"{r.file}:"), r.hint) for r in s.rejected]
    return found


def _retry(d: DieView, now: float) -> str:
    if d.state == "fenced":
        return f"`rrd dies --unfence {d.name}` puts it back to use"
    return f"next try in {duration(max(1.0, d.retry_at - now))}" if d.retry_at is not None else ""


# ---- lanes and their timelines ---------------------------------------------------------------------------------------


def lane_facts(lane: LaneView, s: Snapshot, hue: Callable[[str], int] = hue) -> dict[str, object]:
    """A lane with its dies and what they did in the last while."""
    dies = [d for d in s.dies if d.lane == lane.name]
    seconds = window(dies, s.time)
    return {
        "lane": lane, "window": duration(seconds),
        "busy": f"{lane.busy_seconds / lane.seconds:.1%}" if lane.seconds > 0 else "",
        "dies": [{"die": d, "bars": bars(d, s.time, seconds, hue), "said": said(d, s.time)} for d in dies],
    }


def window(dies: Sequence[DieView], now: float) -> int:
    """Seconds that a lane's timeline shows: what its dies remember, rounded up."""
    begin = min((v.start for d in dies for v in d.visits), default=now)
    return next((w for w in WINDOWS if w >= now - begin), WINDOWS[-1])


def bars(d: DieView, now: float, seconds: float,
         hue: Callable[[str], int] = hue) -> list[tuple[float, float, str, str]]:
    """(left, width, class, tooltip) of each visit, in thousandths of the window."""
    visits = list(d.visits)
    if d.computing is not None and d.since is not None:
        visits.append(VisitView(job=d.computing, start=d.since, end=now, steps=-1))
    drawn = []
    for v in visits:
        left = max(0.0, 1000 * (1 - (now - v.start) / seconds))
        right = min(1000.0, 1000 * (1 - (now - v.end) / seconds))
        if right > 0:
            drawn.append((round(left, 1), round(max(1.5, right - left), 1), f"hue{hue(v.job)} {_kind(v)}", _told(v)))
    return drawn


def _kind(v: VisitView) -> str:
    return "now" if v.steps < 0 else "visit" if v.steps else "load"


def _told(v: VisitView) -> str:
    what = "computing" if v.steps < 0 else count(v.steps, "step") if v.steps else "loading, measuring, saving or ending"
    return f"{one_line(v.job, 70)}: {what}, {duration(max(0.0, v.end - v.start))}"


def said(d: DieView, now: float) -> str:
    """The die's timeline in words, for who cannot see it."""
    shares = Counter[str]()
    for v in d.visits:
        shares[v.job] += 1
    past = ", ".join(f"{one_line(job, 70)} {n}" for job, n in shares.most_common())
    return f"newest visits: {past}" if past else "no visits yet"
