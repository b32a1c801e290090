"""The page: what is in its parts, what is sent again, and how it looks and behaves in a real Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, browser, needs_chromium
from npm import installed
from stage import HOSTILE, Stage, a_busy_box, job, snapshot, stage

from rrd import web
from rrd.page import Board, Shown, bars, curve, faults, finish, hue, hues, window
from rrd.snapshot import DieView, JobView, LaneView, RejectedView, Snapshot, VisitView
from rrd.states import JobState

NASTY = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{1234*4321}}\u202e\x1b[2J\'&'
S = JobState


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def board(*snapshots: Snapshot) -> Board:
    """A board to which each of these is shown in turn."""
    shown = iter(snapshots)
    return Board(lambda: next(shown), monotonic=Clock())


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_all_that_a_person_looks_for_is_there() -> None:
    page = board(a_busy_box()).page()
    for text in ("code-a", "12,000", "Lane 0", "die 5", "98.5%", "no room: 4 jobs are resident", "held out 2.41",
                 "the model directory /models/gone is missing", "put it there, or change", "key <code>lrr</code>",
                 "the gate refused it", "step 120", "212 GiB free", "what runs is trained in 30.0 h"):
        assert text in re.sub(r"&#\d+;", "'", page), text


def test_jobs_come_in_the_order_of_who_moves() -> None:
    page = board(snapshot(job("a-done", S.DONE), job("failed", S.FAILED), job("b"), job("a"))).page()
    assert re.findall(r'id="job:([^"]+)"', page) == ["a", "b", "failed", "a-done"]


def test_only_what_has_changed_is_sent_again() -> None:
    one, two = snapshot(job("a"), job("b")), snapshot(job("a"), job("b"))
    two.jobs[0].step += 1
    b = board(one, one, two)
    first, seen = b.changes(Shown())
    assert set(json.loads(first)["html"]) == {"top", "faults", "lanes", "tally", "job:a", "job:b"}
    nothing, seen = b.changes(seen)
    assert nothing == ""
    third, seen = b.changes(seen)
    assert set(json.loads(third)["html"]) <= {"job:a", "top"} and "jobs" not in json.loads(third)


def test_a_job_that_is_gone_or_moves_up_is_said_by_the_order_alone() -> None:
    b = board(snapshot(job("a"), job("b"), job("c", S.WAITING)), snapshot(job("b"), job("c")))
    _, seen = b.changes(Shown())
    patch = json.loads(b.changes(seen)[0])
    assert patch["jobs"] == ["job:b", "job:c"] and "job:c" in patch["html"] and "job:b" not in patch["html"]


def test_a_page_that_opens_its_stream_is_not_sent_again_what_it_has() -> None:
    jobs = [job(f"job-{i}") for i in range(50)]
    with stage(snapshot(*jobs)) as s:
        name = re.search('data-seen="([^"]+)"', s.get())
        assert name
        s.snapshot = snapshot(job("job-0", step=151), *jobs[1:])

        def first_patch(query: str, **headers: str) -> dict[str, object]:
            request = urllib.request.Request(s.url + "events?" + query, headers=headers)
            with urllib.request.urlopen(request, timeout=20) as stream:
                while not (line := stream.readline()).startswith(b"data: "):
                    pass
                patch: dict[str, dict[str, object]] = json.loads(line[6:])
                return patch["html"]

        time.sleep(1.0)  # what is shown is kept for that long
        assert set(first_patch(name[1])) <= {"job:job-0", "top"}
        assert set(first_patch("", **{"Last-Event-ID": name[1]})) <= {"job:job-0", "top"}
        assert len(first_patch("another-daemon-s")) == 54


def test_many_who_look_at_once_cost_one_snapshot() -> None:
    taken: list[int] = []

    def take() -> Snapshot:
        taken.append(1)
        return snapshot(job("a"))

    b = Board(take, monotonic=lambda: 5.0)
    for _ in range(20):
        b.changes(Shown())
    assert len(taken) == 1


def nasty() -> Snapshot:
    """Text from files and libraries in every place that has text."""
    return Snapshot(
        version=NASTY, pid=1, time=time.time(), started_at=0.0, state_dir=NASTY, jobs_dir=NASTY, config_error=NASTY,
        spool_error=NASTY, disk_free_bytes=1, disk_size_bytes=2,
        jobs=[JobView(id=NASTY, state=S.FAILED, why=NASTY, hint=NASTY, die=NASTY, target_steps=5, losses=[1.0, 2.0],
                      last_checkpoint_at=1.0, last_checkpoint_step=2, loss=float("nan"), eval_loss=float("inf"))],
        dies=[DieView(name=NASTY, lane=NASTY, device=NASTY, state=NASTY, why=NASTY, computing=NASTY, since=1.0,
                      visits=[VisitView(job=NASTY, start=time.time() - 9, end=time.time(), steps=3)])],
        lanes=[LaneView(name=NASTY, gate=NASTY, dies=[NASTY], computing=NASTY, seconds=1.0)],
        rejected=[RejectedView(file=HOSTILE, line=1, message=NASTY, hint=NASTY)])


def test_nothing_hostile_is_shown_as_it_is() -> None:
    page = board(nasty()).page()
    assert page.count("<script") == 1 and "<img" not in page  # the one script is ours
    assert not set("\u202e\x1b\x07") & set(page)
    assert "<code><" not in board(snapshot(job("a", why="`<b>`"))).page()
    assert "5332114" not in page


def test_what_is_wrong_comes_with_what_to_do() -> None:
    found = {who: (what, hint) for who, what, hint in faults(a_busy_box())}
    assert found["die 4"] == ("the gate refused it", "next try in 12 s")
    assert found["job broken"][1].startswith("put it there")
    fenced = snapshot(dies=[DieView(name="2", lane="0", device="cpu", state="fenced", why="its worker died twice")])
    assert faults(fenced) == [("die 2", "its worker died twice", "`rrd dies --unfence 2` puts it back to use")]
    assert faults(snapshot(job("fine"), dies=[])) == []


def test_a_timeline_ends_now_and_begins_where_memory_does() -> None:
    d = DieView(name="0", lane="0", device="cpu", state="computing", computing="b", since=190.0, visits=[
        VisitView(job="a", start=90.0, end=100.0), VisitView(job="a", start=150.0, end=170.0, steps=7)])
    assert window([d], 200.0) == 120
    drawn = bars(d, 200.0, 120.0)
    assert [(left, width) for left, width, _, _ in drawn] == [(83.3, 83.3), (583.3, 166.7), (916.7, 83.3)]
    assert [k.split()[1] for _, _, k, _ in drawn] == ["load", "visit", "now"]
    assert [t for *_, t in drawn] == [
        "a: loading, measuring, saving or ending, 10 s", "a: 7 steps, 20 s", "b: computing, 10 s"]


def test_a_curve_fills_its_box() -> None:
    points = [tuple(map(float, p.split(","))) for p in curve([3.0, 1.0, 2.0], 120, 28).split()]
    assert points == [(0, 2), (60, 26), (120, 14)]
    assert curve([1.0]) == "" and "nan" not in curve([2.0, 2.0])


def test_a_job_keeps_its_colour_and_the_first_dozen_differ() -> None:
    names = [f"job-{i}" for i in range(30)]
    first = hues(names, {})
    assert sorted(first[n] for n in names[:12]) == list(range(12)) and first["job-0"] == hue("job-0")
    later = hues(["new", *names[5:]], first)
    assert all(later[n] == first[n] for n in names[5:]) and "job-0" not in later
    assert max(list(later.values()).count(h) for h in range(12)) <= 3, "spread"


def test_the_end_is_told_as_a_time_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert finish(JobView(id="a", state=S.RUNNING, eta_seconds=7200.0), 1_700_000_000.0) == "Wed 00:13"
        assert finish(JobView(id="a", state=S.RUNNING, eta_seconds=60.0), 0.0) == ""
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_thousand_jobs_are_cheap_to_keep_up_to_date() -> None:
    jobs = [job(f"job-{i}") for i in range(1000)]
    b = Board(lambda: snapshot(*(j.model_copy() for j in jobs)), monotonic=Clock())
    b.now()
    jobs[500].step += 1
    begin = time.thread_time()
    patch, _ = b.changes(b.now())
    assert time.thread_time() - begin < 1.0  # about 0.03 s; once a second at most, in the web's thread
    assert len(patch) < 5000


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as b:
        yield b


def live(s: Stage, b: Browser, width: int = 1280, *, dark: bool = False) -> None:
    b.open(s.url, width, dark=dark)
    b.wait("document.getElementById('link').textContent === 'live'")


@needs_chromium
class TestInChromium:
    def test_it_shows_everything_and_asks_nobody_else(self, chrome: Browser) -> None:
        with stage(a_busy_box()) as s:
            live(s, chrome)
            assert chrome.eval("document.querySelectorAll('#rows tr').length") == 17
            assert "corpus-4" in chrome.eval("document.getElementById('lanes').innerText")
            assert chrome.complaints() == []
            assert {url.rsplit("/", 1)[0] + "/" for url in chrome.requests()} == {s.url}
            if where := os.environ.get("RRD_PICTURES"):
                for name, width, dark in (("wide", 1600, False), ("dark", 1280, True), ("phone", 390, False)):
                    live(s, chrome, width, dark=dark)
                    chrome.picture(Path(where) / f"{name}.png")

    def test_it_follows_what_happens(self, chrome: Browser) -> None:
        with stage(snapshot(job("a"), job("b"))) as s:
            live(s, chrome)
            chrome.eval("document.getElementById('job:a').dataset.mine = 'kept'")
            s.snapshot = snapshot(job("a"), job("c", S.WAITING, why="no room"), job("b", step=777))
            chrome.wait("document.getElementById('job:b').innerText.includes('777')")
            ids = chrome.eval("[...document.querySelectorAll('#rows tr')].map(r => r.id)")
            assert ids == ["job:a", "job:b", "job:c"]
            assert "no room" in chrome.eval("document.getElementById('job:c').innerText")
            assert chrome.eval("document.getElementById('job:a').dataset.mine") == "kept", "it was not touched"
            s.snapshot = snapshot(job("c"), job("a", S.FAILED, why="its data is gone", hint="bring it back"))
            chrome.wait("document.querySelectorAll('#rows tr').length === 2")
            assert "its data is gone" in chrome.eval("document.getElementById('faults').innerText")
            assert chrome.complaints() == []

    def test_the_title_counts_what_is_wrong(self, chrome: Browser) -> None:
        with stage(snapshot(job("a"), dies=[])) as s:
            live(s, chrome)
            assert chrome.eval("document.title").startswith("rrd on ")
            s.snapshot = snapshot(job("a", S.FAILED, why="no"), job("b", S.FAILED, why="no"), dies=[])
            chrome.wait("document.title.startsWith('(2) rrd on ')")

    def test_an_empty_box_shows_no_empty_table_and_fills(self, chrome: Browser) -> None:
        with stage(snapshot(dies=[])) as s:
            live(s, chrome)
            assert "There are no jobs yet" in chrome.eval("document.body.innerText")
            assert chrome.eval("document.querySelector('table').hidden && document.querySelector('.find').hidden")
            s.snapshot = snapshot(job("a"), dies=[])
            chrome.wait("!document.querySelector('table').hidden && !document.querySelector('.find').hidden")
            assert chrome.eval("document.getElementById('job:a').innerText").startswith("a")

    def test_it_says_when_nobody_answers_and_comes_back(self, chrome: Browser) -> None:
        s = Stage(snapshot(job("a")))
        try:
            live(s, chrome)
        finally:
            s.close()
        chrome.wait("document.getElementById('link').className === 'lost'")
        with stage(snapshot(job("a", step=901)), s.web.port):
            chrome.wait("document.getElementById('job:a').innerText.includes('901')")
            assert chrome.eval("document.getElementById('link').textContent") == "live"

    def test_a_hostile_name_does_nothing(self, chrome: Browser) -> None:
        with stage(nasty()) as s:
            live(s, chrome)
            s.snapshot = nasty()
            s.snapshot.jobs[0].step = 4
            chrome.wait("document.querySelector('#rows tr').innerText.includes('4 of')")
            assert chrome.eval("document.querySelectorAll('img, script:not([src]), iframe, form').length") == 0
            assert chrome.eval("document.querySelector('.id').textContent").startswith('"><script>alert(1)')
            assert chrome.complaints() == []

    def test_scripts_that_got_in_would_not_run(self, chrome: Browser) -> None:
        with stage(snapshot(job("a"))) as s:
            live(s, chrome)
            chrome.eval("""(() => { const x = document.createElement('script'); x.textContent = 'window.ran = 1';
                           document.body.append(x); const y = document.createElement('img');
                           y.src = 'http://127.0.0.1:1/'; document.body.append(y); })()""")
            assert chrome.eval("window.ran") is None
            assert any("Content Security Policy" in said for said in chrome.complaints())

    def test_a_thousand_jobs(self, chrome: Browser) -> None:
        jobs = [job(f"job-{i:04}", S.RUNNING if i < 24 else S.WAITING, why="" if i < 24 else "in line")
                for i in range(1000)]
        with stage(snapshot(*jobs)) as s:
            live(s, chrome)
            assert chrome.eval("document.querySelectorAll('#rows tr').length") == 1000
            jobs[23] = jobs[23].model_copy(update={"step": 151})
            s.snapshot = snapshot(*jobs)
            chrome.wait("document.getElementById('job:job-0023').innerText.includes('151')")
            chrome.eval("""(() => { const f = document.getElementById('find'); f.value = 'job-099';
                           f.dispatchEvent(new Event('input')) })()""")
            assert chrome.eval("document.querySelectorAll('#rows tr:not([hidden])').length") == 10

    def test_states_and_names_can_be_sifted_by_keyboard(self, chrome: Browser) -> None:
        with stage(a_busy_box()) as s:
            live(s, chrome)
            chrome.key("/", "/")
            assert chrome.eval("document.activeElement.id") == "find"
            for letter in "corpus":
                chrome.key(letter, letter)
            assert chrome.eval("document.querySelectorAll('#rows tr:not([hidden])').length") == 6
            chrome.key("Escape")
            chrome.eval("document.querySelector('button[data-state=failed]').focus()")
            chrome.key("Enter", "\r")
            visible = "[...document.querySelectorAll('#rows tr:not([hidden])')].map(r => r.id)"
            chrome.wait(f"{visible}.length === 1")
            assert chrome.eval(visible) == ["job:broken"]
            s.snapshot = a_busy_box()
            s.snapshot.jobs = [j for j in s.snapshot.jobs if j.id != "stopped"]
            chrome.wait("document.getElementById('job:stopped') === null")
            assert chrome.eval(visible) == ["job:broken"], "still sifted after an update"
            assert chrome.eval("document.activeElement.dataset.state") == "failed", "the focus stayed"

    def test_what_is_being_copied_is_not_torn_away(self, chrome: Browser) -> None:
        with stage(snapshot(job("a"), job("b"))) as s:
            live(s, chrome)
            chrome.eval("getSelection().selectAllChildren(document.querySelector('[id=\"job:a\"] .id'))")
            s.snapshot = snapshot(job("a", step=901), job("b", step=902))
            chrome.wait("document.getElementById('job:b').innerText.includes('902')")
            assert chrome.eval("getSelection().toString()") == "a"
            chrome.eval("getSelection().removeAllRanges()")
            s.snapshot = snapshot(job("a", step=903), job("b", step=904))
            chrome.wait("document.getElementById('job:a').innerText.includes('903')")

    def test_it_is_fit_for_keyboards_and_screen_readers(self, chrome: Browser, request: pytest.FixtureRequest) -> None:
        """By the rules of axe-core: names, roles, order, contrast; WCAG 2.1 A and AA, and good practice."""
        home = installed(request, Path(__file__).parent / "axe" / "package.json", "the fitness for screen readers")
        axe = (home / "node_modules" / "axe-core" / "axe.min.js").read_text()
        rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        with stage(a_busy_box()) as s:
            for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
                live(s, chrome, width, dark=dark)
                chrome.eval(axe + ";1")
                chrome.eval(f"""axe.run(document, {{runOnly: {rules}}}).then((found) => {{
                    window.found = found.violations.map((v) => [v.id, v.nodes[0].html, v.nodes[0].failureSummary]);
                    window.passed = found.passes.length; }}); 1""")
                chrome.wait("!!window.found")
                assert chrome.eval("window.found") == [] and chrome.eval("window.passed") > 20, (width, dark)

    @pytest.mark.parametrize("width", [320, 390, 768, 1024, 1280, 2560])
    def test_nothing_sticks_out_at_any_width(self, chrome: Browser, width: int) -> None:
        with stage(a_busy_box()) as s:
            live(s, chrome, width)
            assert chrome.eval("document.documentElement.scrollWidth") <= width
            cells = "[...document.querySelectorAll('#rows td, #rows th')]"
            assert chrome.eval(f"{cells}.every(e => e.scrollWidth <= e.clientWidth + 1)")

    @pytest.mark.parametrize("dark", [False, True])
    def test_every_text_can_be_read(self, chrome: Browser, dark: bool) -> None:
        """Contrast of at least 4.5 to 1 (WCAG 2.2, AA)."""
        with stage(a_busy_box()) as s:
            live(s, chrome, dark=dark)
            assert chrome.eval(FAINT) == []

    def test_a_screen_reader_finds_its_way(self, chrome: Browser) -> None:
        with stage(a_busy_box()) as s:
            live(s, chrome, 390)  # as cards, too, the table is a table
            nodes = chrome.call("Accessibility.getFullAXTree")["nodes"]
            names = {(n["role"]["value"], n.get("name", {}).get("value")) for n in nodes if not n.get("ignored")}
            roles = [n["role"]["value"] for n in nodes if not n.get("ignored")]
            assert {"table", "row", "columnheader", "rowheader", "main", "contentinfo", "banner"} <= set(roles)
            assert ("link", "Skip to the jobs") in names and ("searchbox", "Find a job") in names
            assert ("region", "What is wrong") in names and ("region", "Lanes and dies") in names
            assert not [n for n in names if n[0] in ("image", "button", "progressbar", "img", "link") and not n[1]]
            assert chrome.eval("document.documentElement.lang") == "en"


FAINT = r"""
(() => {
  const parse = (c) => c.match(/[\d.]+/g).map(Number);
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
      .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const faint = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !e.getClientRects().length || e.closest('svg')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) faint.push(`${e.className} ${walk.currentNode.textContent.trim()} ${ratio.toFixed(2)}`);
  }
  return faint;
})()
"""


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def refusal(s: Stage, path: str, **headers: str) -> int:
    try:
        s.get(path, **headers)
    except urllib.error.HTTPError as e:
        return e.code
    return 200


def test_a_foreign_name_for_this_address_gets_nothing() -> None:
    """DNS rebinding: a web page elsewhere has its own name lead to 127.0.0.1."""
    with stage(snapshot()) as s:
        port = s.web.port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "box", "192.168.1.7"):
            assert refusal(s, "", Host=host) == 200, host
        for host in (f"evil.example:{port}", "rebind.attacker.net", "127.0.0.1.nip.io"):
            assert refusal(s, "", Host=host) == 421 and refusal(s, "events", Host=host) == 421
        assert refusal(s, "metrics", Host="scrape.me.example") == 200


def test_there_is_nothing_else_and_nothing_to_write() -> None:
    with stage(snapshot()) as s:
        for path in ("x", "..%2f..%2fetc/passwd", "page.html", "parts.html", "templates/page.css"):
            assert refusal(s, path) == 404
        assert '"GET"' not in s.get("page.js") and "fetch(" not in s.get("page.js")


def test_it_can_be_read_without_scripts() -> None:
    with stage(a_busy_box()) as s:
        page = s.get()
        assert "code-a" in page and "http-equiv" in page and ' style="' not in page and " onclick" not in page


def test_so_many_streams_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "STREAMS", 2)
    with stage(snapshot(job("a"))) as s:
        first = urllib.request.urlopen(s.url + "events", timeout=10)
        with urllib.request.urlopen(s.url + "events", timeout=10):
            assert refusal(s, "events") == 503 and refusal(s, "metrics") == 200 == refusal(s, "")
            first.close()
            end = time.monotonic() + 30  # the server notices when it next writes
            while refusal_of_stream(s) == 503:
                s.snapshot = snapshot(job("a", step=int(time.monotonic() * 1000)))
                assert time.monotonic() < end


def refusal_of_stream(s: Stage) -> int:
    try:
        with urllib.request.urlopen(s.url + "events", timeout=10):
            return 200
    except urllib.error.HTTPError as e:
        time.sleep(0.2)
        return e.code


def test_who_says_nothing_keeps_nobody_else_waiting() -> None:
    with stage(snapshot(job("a"))) as s, contextlib.ExitStack() as idle:
        for _ in range(20):
            idle.enter_context(socket.create_connection(("127.0.0.1", s.web.port)))
        begin = time.monotonic()
        assert "rrd_job_step" in s.get("metrics") and time.monotonic() - begin < 5


def test_a_loop_that_is_stuck_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SNAPSHOT_SECONDS", 0.2)
    with stage(snapshot(job("a"))) as s:
        free = threading.Event()
        s.loop.call_soon_threadsafe(free.wait)
        try:
            for path in ("", "metrics"):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    s.get(path)
                assert caught.value.code == 503 and b"TimeoutError" in caught.value.read()
        finally:
            free.set()
        assert "rrd_job_step" in s.get("metrics")


def test_every_answer_says_what_a_browser_may_do() -> None:
    with stage(snapshot(job("a"))) as s:
        for path in ("", "page.css", "page.js", "icon.svg", "metrics", "events"):
            with urllib.request.urlopen(s.url + path, timeout=10) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'") and "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        request = urllib.request.Request(s.url, method="POST", data=b"x")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 405
        with urllib.request.urlopen(urllib.request.Request(s.url + "metrics", method="HEAD"), timeout=10) as answer:
            assert answer.read() == b""
