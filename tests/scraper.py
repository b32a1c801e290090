"""A real Prometheus, and where wanted a real Alertmanager, that look at a port once a second."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

RULES = Path(__file__).parent.parent / "etc" / "prometheus" / "rrd.rules.yml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None,
                                    reason="promtool is not installed (apt install prometheus)")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None,
                                      reason="prometheus is not installed (apt install prometheus)")
needs_alertmanager = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="prometheus-alertmanager is not installed (apt install prometheus-alertmanager)")
DEADLINE = 90.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Prometheus:
    """Scrapes ``target`` each second, or ``interval``, as the job "rrd", with our rules."""

    def __init__(self, root: Path, target: str, alertmanager: int | None = None, interval: str = "1s") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.port, self.log = free_port(), root / "prometheus.log"
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval}, "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "rrd", "static_configs": [{"targets": [target]}]}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
                         if alertmanager else []}}
        (root / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._process = _start(self.log, "prometheus", f"--config.file={root / 'prometheus.yml'}",
                               f"--storage.tsdb.path={root / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}")
        self.until(lambda: self.ask("up"), "Prometheus did not come up")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, query: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """The answer's (labels, value); empty while nothing answers."""
        form = {"query": query} | ({"time": str(at)} if at else {})
        return [(r["metric"], float(r["value"][1])) for r in self._result("query", form)]

    def range(self, query: str, seconds: float, step: float = 1.0) -> list[tuple[dict[str, str], list[float]]]:
        now = time.time()
        form = {"query": query, "start": str(now - seconds), "end": str(now), "step": str(step)}
        return [(r["metric"], [float(v) for _, v in r["values"]]) for r in self._result("query_range", form)]

    def _result(self, verb: str, form: dict[str, str]) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.port}/api/v1/{verb}?{urllib.parse.urlencode(form)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as e:
            if e.code == 503:  # it is still starting
                return []
            raise AssertionError(f"{form['query']}: {e.read().decode()}") from e
        except OSError:
            return []

    def value(self, query: str) -> float | None:
        """The one value, or None."""
        found = self.ask(query)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def until(self, what: Callable[[], Any], why: str, seconds: float = DEADLINE) -> Any:
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end and self._process.poll() is None, f"{why}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return found

    def scraped(self, times: int = 1) -> None:
        """Wait until Prometheus has looked so many times from now on."""
        begin = time.time()
        query = f"count_over_time(up[{DEADLINE:.0f}s])"
        before = self.value(query) or 0
        self.until(lambda: (self.value(query) or 0) >= before + times or time.time() - begin > times + 5,
                   "no scrape")


def _start(log: Path, *command: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


@contextlib.contextmanager
def prometheus(root: Path, target: str, alertmanager: int | None = None, interval: str = "1s") -> Iterator[Prometheus]:
    p = Prometheus(root, target, alertmanager, interval)
    try:
        yield p
    finally:
        p.close()


class Pager:
    """An Alertmanager and whom it pages: ``pages`` are the alerts it has delivered."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.pages: list[dict[str, Any]] = []
        pages = self.pages

        class Hook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                pages.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
        threading.Thread(target=self._hook.serve_forever, daemon=True).start()
        self.port = free_port()
        (root / "alertmanager.yml").write_text(json.dumps({
            "route": {"receiver": "test", "group_wait": "0s", "group_interval": "1s", "group_by": ["..."]},
            "receivers": [{"name": "test", "webhook_configs": [
                {"url": f"http://127.0.0.1:{self._hook.server_port}/"}]}]}))
        self._process = _start(
            root / "alertmanager.log", "prometheus-alertmanager", f"--config.file={root / 'alertmanager.yml'}",
            f"--storage.path={root / 'am'}", f"--web.listen-address=127.0.0.1:{self.port}",
            "--cluster.listen-address=")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._hook.shutdown()
        self._hook.server_close()


@contextlib.contextmanager
def pager(root: Path) -> Iterator[Pager]:
    p = Pager(root)
    try:
        yield p
    finally:
        p.close()
