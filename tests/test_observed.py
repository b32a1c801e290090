"""A real daemon at work for half a minute, faults included, as a real Prometheus sees it: the dashboard's every query
is answered, and no counter, histogram or series tells a tale."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from boxes import Box, box, toy_keys, write_job
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse
from scraper import Prometheus, free_port, needs_prometheus, needs_promtool, prometheus
from test_dashboard import ANNOTATIONS, DASHBOARD, QUERIES

from rrd.history import read

CONFIG = """\
jobs_per_die = 3
[[lane]]
name = "shared"
dies = ["cpu", "cpu"]
[lane.gate]
kind = "simulated"
[[lane]]
name = "own"
dies = ["cpu"]
"""
WINDOW = 240.0
"""Seconds that hold the whole run."""

pytestmark = needs_prometheus


class Run(NamedTuple):
    box: Box
    prom: Prometheus
    port: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root, port = tmp_path_factory.mktemp("observed"), free_port()
    with box(root, CONFIG) as b, prometheus(root / "prometheus", f"127.0.0.1:{port}", interval="500ms") as prom:
        b.config.write_text(b.config.read_text().replace('metrics = ""', f'metrics = "127.0.0.1:{port}"'))
        live(Run(b, prom, port))
        yield Run(b, prom, port)
        assert b.stop() == 0


def live(r: Run) -> None:
    """Jobs come and go, a worker is killed, then the daemon; all go on."""
    b, prom = r.box, r.prom
    keys = toy_keys(b.root, max_steps=100_000, steps_per_visit=5)
    write_job(b.jobs_dir, "by-time", **keys | {"checkpoint_every": "2s", "eval_data": keys["data"], "eval_every": 50})
    write_job(b.jobs_dir, "by-steps", **keys | {"checkpoint_every": 20})
    write_job(b.jobs_dir, "passing", **keys)
    write_job(b.jobs_dir, "old-name", **keys)
    write_job(b.jobs_dir, "broken", **keys | {"data": "/nowhere.jsonl"})
    b.start()
    for name in ("by-time", "by-steps", "passing", "old-name"):
        b.wait_job(name, lambda j: j.last_checkpoint_step is not None)
        prom.until(lambda name=name: prom.value(f'rrd_job_step{{rrd_job="{name}"}}'), f"{name} was not scraped")
    prom.scraped(3)
    # a worker dies, and its jobs resume
    die = b.job("by-steps").die  # type: ignore[union-attr]
    pid = next(d.worker_pid for d in b.snapshot().dies if d.name == die)  # type: ignore[union-attr]
    assert pid
    os.kill(pid, signal.SIGKILL)
    prom.until(lambda: prom.value("sum(rrd_worker_restarts_total)") == 1, "no restart was counted")
    # one job's file goes, another's is renamed
    (b.jobs_dir / "passing.toml").unlink()
    (b.jobs_dir / "old-name.toml").rename(b.jobs_dir / "new-name.toml")
    prom.until(lambda: prom.value('rrd_job_step{rrd_job="new-name"}'), "the new name was not scraped")
    prom.until(lambda: not prom.ask('rrd_job_step{rrd_job=~"passing|old-name"}'), "what is gone is still there")
    prom.scraped(4)
    # the daemon dies, and all goes on
    b.kill()
    b.start()
    prom.until(lambda: (prom.value("count(rrd_job_last_step_timestamp_seconds)") or 0) >= 3, "jobs did not go on")
    b.wait_job("by-time", lambda j: j.eval_loss is not None)
    prom.scraped(6)


def filled(query: str) -> str:
    """With the variables as they are when all is chosen, and a rate's interval that suits such quick scrapes."""
    for name, value in (("$__rate_interval", "10s"), ("$instance", ".*"), ("$rrd_job", ".*"), ("$die", ".*")):
        query = query.replace(name, value)
    return query


def scrape(r: Run) -> list[Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{r.port}/metrics", timeout=10) as answer:
        return list(parse(answer.read().decode()))


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{t}-{i}" for i, (t, _) in enumerate(QUERIES)])
def test_every_query_of_the_dashboard_is_answered(run: Run, title: str, query: str) -> None:
    found = run.prom.until(lambda: [v for _, v in run.prom.ask(filled(query)) if v == v],
                           f"{title}: {filled(query)} has no data", seconds=15.0)
    assert found


@pytest.mark.parametrize(("name", "query"), ANNOTATIONS, ids=[name for name, _ in ANNOTATIONS])
def test_restarts_are_annotated(run: Run, name: str, query: str) -> None:
    assert run.prom.range(filled(query), WINDOW), f"{name}: {filled(query)} marks nothing"


def test_variables_find_their_values(run: Run) -> None:
    for v in DASHBOARD["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", v["query"]["query"])
        assert found
        assert any(found[2] in labels for labels, _ in run.prom.ask(filled(found[1]))), v["name"]


def test_no_counter_goes_back_but_with_the_daemon(run: Run) -> None:
    """A job that resumes from a checkpoint takes nothing back, and Prometheus sees no spike."""
    counters = {s.name for f in scrape(run) if f.type in ("counter", "histogram") for s in f.samples}
    resets = [r for name in counters for r in run.prom.ask(f"resets({name}[{WINDOW:.0f}s])")]
    assert len(resets) > 50 and {v for _, v in resets} <= {0.0, 1.0}, resets
    for job in ("by-time", "by-steps"):
        times = [s.time for s in read(run.box.state / "jobs" / job).steps]
        densest = max(sum(t <= u < t + 6 for u in times) for t in times[::5])
        again = densest + 25  # steps since the newest checkpoint, at most: run twice, they stand in the history once
        [(_, rates)] = run.prom.range(f'rate(rrd_job_steps_run_total{{rrd_job="{job}"}}[5s])', WINDOW)
        assert rates and max(rates) * 5 <= 1.3 * densest + again, (job, max(rates), densest)


def test_histograms_add_up_to_what_the_jobs_did(run: Run) -> None:
    """In one scrape, which is of one instant: no job was removed since the daemon's last start."""
    families = {f.name: f for f in scrape(run)}

    def total(family: str, sample: str) -> float:
        return sum(s.value for s in families[family].samples if s.name == sample)

    steps = total("rrd_step_duration_seconds", "rrd_step_duration_seconds_count")
    assert steps == total("rrd_job_steps_run", "rrd_job_steps_run_total") > 0
    busy = total("rrd_lane_busy_seconds", "rrd_lane_busy_seconds_total")
    assert total("rrd_step_duration_seconds", "rrd_step_duration_seconds_sum") == pytest.approx(busy, rel=0.2)
    saves = total("rrd_checkpoint_duration_seconds", "rrd_checkpoint_duration_seconds_count")
    assert saves == total("rrd_checkpoint_commits", "rrd_checkpoint_commits_total") > 0
    assert run.prom.value("sum(rrd_step_duration_seconds_count)") == run.prom.value(
        'sum(rrd_step_duration_seconds_bucket{le="+Inf"})')


def test_memory_of_dies_is_told(run: Run) -> None:
    used = {m["die"]: v for m, v in run.prom.ask("rrd_die_memory_used_bytes")}
    assert used and all(20e6 < v < 20e9 for v in used.values())
    assert all(v > used[m["die"]] for m, v in run.prom.ask("rrd_die_memory_bytes") if m["die"] in used)


@needs_promtool
def test_promtool_finds_nothing_to_say(run: Run) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{run.port}/metrics", timeout=10) as answer:
        check = subprocess.run(["promtool", "check", "metrics"], input=answer.read(), capture_output=True)
    assert check.returncode == 0 and check.stdout + check.stderr == b"", check.stderr.decode()


def test_it_is_the_run_that_was_meant(run: Run) -> None:
    """What the tests above stand on did happen."""
    log = Path(run.box.log).read_text()
    assert "was killed by SIGKILL" in log and "resumed from step" in log and log.count("ready: ") == 2
