"""What is scraped, as a real Prometheus understands it."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse
from scraper import needs_prometheus, needs_promtool, prometheus
from stage import HOSTILE, a_busy_box, job, snapshot, stage

from rrd.metrics import Meters, SnapshotCollector, exposition
from rrd.snapshot import Snapshot

Families = list[tuple[str, str, str, list[tuple[str, dict[str, str], str]]]]


def families(text: bytes) -> Families:
    return [(m.name, m.type, m.documentation, [(s.name, s.labels, repr(float(s.value))) for s in m.samples])
            for m in parse(text.decode())]


def registry(s: Snapshot, meters: Meters | None = None) -> CollectorRegistry:
    r = CollectorRegistry()
    r.register(SnapshotCollector(lambda: s, meters or Meters()))
    return r


def odd() -> tuple[Snapshot, Meters]:
    """Everything that has to be written with care."""
    s, meters = a_busy_box(), Meters()
    s.dies[0].model = HOSTILE + '"\\'
    s.jobs[0].loss, s.jobs[1].loss, s.jobs[2].lr = float("nan"), float("inf"), 1e-7
    for seconds in (0.004, 0.2, 0.2, 99.0):
        meters.step("0", seconds)
    meters.grant("1", 0.0003)
    meters.save("0", 1.0)
    return s, meters


def test_our_text_says_what_prometheus_client_s_own_says() -> None:
    r = registry(*odd())
    assert families(exposition(r.collect())) == families(generate_latest(r))


@needs_promtool
def test_promtool_finds_nothing_to_say_about_names_help_and_units() -> None:
    run = subprocess.run(["promtool", "check", "metrics"], input=exposition(registry(*odd()).collect()),
                         capture_output=True)
    assert run.returncode == 0 and run.stdout + run.stderr == b"", run.stderr.decode()


def test_a_thousand_jobs_take_less_than_50_ms_and_a_fixed_number_of_series_each() -> None:
    def series(n: int) -> int:
        return exposition(registry(snapshot(*[job(f"j-{i}") for i in range(n)])).collect()).count(b"\nrrd_")

    assert series(1000) - series(999) == series(2) - series(1) <= 20
    r = registry(snapshot(*[job(f"job-{i}") for i in range(1000)]))
    took = []
    for _ in range(7):
        begin = time.thread_time()
        exposition(r.collect())
        took.append(time.thread_time() - begin)
    assert min(took) < 0.050, f"{min(took) * 1000:.0f} ms"  # 22 where it was written


def test_no_label_is_prometheus_own_and_no_series_is_there_twice() -> None:
    samples = [s for m in registry(*odd()).collect() for s in m.samples]
    assert not {"job", "instance"} & {label for s in samples for label in s.labels}
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)
    assert not [s.name for s in samples if s.name.endswith("_created")]


@needs_prometheus
def test_in_a_real_prometheus(tmp_path: Path) -> None:
    """A daemon that restarts and resumes, jobs that are removed and renamed, and histograms, over half a minute."""
    def at(step: int, run: int, *more: Any) -> Snapshot:
        return snapshot(job("a", step=step, steps_run=run, tokens_run=run * 64), *more)

    with stage(at(100, 0, job("removed"), job("old-name"))) as first:
        port = first.web.port
        for seconds in (0.004, 0.2, 0.2, 99.0):
            first.meters.step("0", seconds)
        first.meters.step("1", 0.2)
        with prometheus(tmp_path, f"127.0.0.1:{port}") as prom:
            prom.until(lambda: prom.value('rrd_job_step{rrd_job="a"}') == 100, "never scraped")
            for n in range(1, 7):
                first.snapshot = at(100 + 2 * n, 2 * n, job("removed"), job("old-name"))
                prom.until(lambda n=n: prom.value('rrd_job_steps_run_total{rrd_job="a"}') == 2 * n, "not scraped")

            # histograms: buckets cumulate, and add up over dies
            assert prom.value('rrd_step_duration_seconds_bucket{die="0", le="0.25"}') == 3
            assert prom.value("sum(rrd_step_duration_seconds_count)") == 5
            assert prom.value('sum(rrd_step_duration_seconds_bucket{le="+Inf"})') == 5
            assert prom.value('rrd_step_duration_seconds_sum{die="0"}') == pytest.approx(99.404)
            median = prom.value("histogram_quantile(0.5, sum by (le) (rrd_step_duration_seconds_bucket))")
            assert median is not None and 0.1 < median <= 0.25

            # removed and renamed: gone at the next scrape, not five minutes later
            first.snapshot = at(112, 12, job("new-name"))
            prom.until(lambda: prom.value('rrd_job_step{rrd_job="new-name"}'), "the new name was not scraped")
            assert {m["rrd_job"] for m, _ in prom.ask("rrd_job_info")} == {"a", "new-name"}

            # the daemon is killed, and resumes from a checkpoint 8 steps back: counters from 0, the gauge back
            first.web.stop()
            with stage(at(104, 0), port) as second:
                prom.until(lambda: prom.value('rrd_job_step{rrd_job="a"}') == 104, "not back")
                for n in range(1, 5):
                    second.snapshot = at(104 + 2 * n, 2 * n)
                    prom.until(lambda n=n: prom.value('rrd_job_steps_run_total{rrd_job="a"}') == 2 * n, "not scraped")
            for _, values in prom.range('rate(rrd_job_steps_run_total{rrd_job="a"}[6s])', 40):
                assert max(values) < 6, f"a spike: {values}"  # two steps a second were made; 12 more would show
            total = prom.value('increase(rrd_job_steps_run_total{rrd_job="a"}[60s])')
            assert total is not None and 15 < total < 32, "12 + 8 steps were run, the repeated ones counted"


@needs_prometheus
def test_a_scrape_over_the_wire_is_quick_while_pages_are_open(tmp_path: Path) -> None:
    with stage(snapshot(*[job(f"job-{i}") for i in range(1000)])) as s, \
            prometheus(tmp_path, s.url.removeprefix("http://").rstrip("/")) as prom, \
            urllib.request.urlopen(s.url + "events", timeout=10) as stream:
        assert stream.readline().startswith(b"retry:")
        prom.until(lambda: (prom.value("count(rrd_job_step)") or 0) == 1000, "never scraped")
        prom.scraped(3)
        fastest = prom.value("min_over_time(scrape_duration_seconds[30s])")
        assert fastest is not None and fastest < 0.5  # the wire, and other tests on the same cores
