"""What is scraped, as a real Prometheus understands it."""

from __future__ import annotations

import subprocess
import time
import urllib.request

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse
from scraper import needs_promtool
from stage import HOSTILE, a_busy_box, job, snapshot, stage

from rrd.job import JobSpec
from rrd.ledger import Record
from rrd.metrics import Meters, SnapshotCollector, exposition
from rrd.roster import Job
from rrd.snapshot import Snapshot
from rrd.states import JobState

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
    jobs = [at_work(f"job-{i}") for i in range(1000)]
    took = []
    for _ in range(15):
        begin = time.thread_time()  # of the loop's part, which is to see what all jobs do, and of the scraper's
        text = exposition(registry(snapshot(*[j.view() for j in jobs])).collect())
        took.append(time.thread_time() - begin)
    assert text.count(b'{rrd_job="job-999"') >= 18
    assert min(took) < 0.050, f"{min(took) * 1000:.0f} ms"  # 37 where it was written


def at_work(name: str) -> Job:
    """A job of which all is known."""
    spec = JobSpec.model_validate({"model": "/m", "data": "/d", "max_steps": 5})
    j = Job(Record(id=name, state=JobState.RUNNING, announced_at=1.0, announced_step=5), spec)
    j.loss, j.eval_loss, j.lr, j.last_step_at, j.loaded_at, j.checkpoint_bytes = 2.0, 2.0, 1e-4, 1.0, 1.0, 60 << 20
    j.losses.extend([2.0] * 64)
    return j


def test_no_label_is_prometheus_own_and_no_series_is_there_twice() -> None:
    samples = [s for m in registry(*odd()).collect() for s in m.samples]
    assert not {"job", "instance"} & {label for s in samples for label in s.labels}
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)
    assert not [s.name for s in samples if s.name.endswith("_created")]


def test_a_scrape_over_the_wire_is_quick_while_pages_are_open() -> None:
    with stage(snapshot(*[job(f"job-{i}") for i in range(1000)])) as s, \
            urllib.request.urlopen(s.url + "events", timeout=30) as stream:
        assert stream.readline().startswith(b"retry:")
        took = []
        for _ in range(15):
            begin = time.process_time()  # of both ends: other processes on the same cores do not count
            assert s.get("metrics").count("\nrrd_job_step{") == 1000
            took.append(time.process_time() - begin)
        assert min(took) < 0.1, f"{min(took) * 1000:.0f} ms"  # 24 where it was written
