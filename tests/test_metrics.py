"""rrd.metrics: the names and labels that dashboards and alerts are built on, and what Prometheus makes of them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rrd.metrics import GATE_BUCKETS, SAVE_BUCKETS, STEP_BUCKETS, Histogram, Meters, SnapshotCollector, exposition
from rrd.snapshot import DieView, JobView, LaneView, RejectedView, Snapshot
from rrd.states import JobState

DOCUMENTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "rrd_build_info": ("gauge", ("version",)),
    "rrd_config_last_reload_successful": ("gauge", ()),
    "rrd_jobs": ("gauge", ("state",)),
    "rrd_job_info": ("gauge", ("rrd_job",)),
    "rrd_job_step": ("gauge", ("rrd_job",)),
    "rrd_job_target_steps": ("gauge", ("rrd_job",)),
    "rrd_job_steps_run_total": ("counter", ("rrd_job",)),
    "rrd_job_tokens_total": ("counter", ("rrd_job",)),
    "rrd_job_loss": ("gauge", ("rrd_job",)),
    "rrd_job_learning_rate": ("gauge", ("rrd_job",)),
    "rrd_job_last_step_timestamp_seconds": ("gauge", ("rrd_job",)),
    "rrd_job_last_checkpoint_timestamp_seconds": ("gauge", ("rrd_job",)),
    "rrd_job_last_checkpoint_step": ("gauge", ("rrd_job",)),
    "rrd_job_checkpoint_interval_seconds": ("gauge", ("rrd_job",)),
    "rrd_job_checkpoint_interval_steps": ("gauge", ("rrd_job",)),
    "rrd_job_eta_seconds": ("gauge", ("rrd_job",)),
    "rrd_checkpoint_commits_total": ("counter", ("rrd_job",)),
    "rrd_checkpoint_failures_total": ("counter", ("rrd_job",)),
    "rrd_checkpoint_fallbacks_total": ("counter", ("rrd_job",)),
    "rrd_checkpoint_bytes": ("gauge", ("rrd_job",)),
    "rrd_checkpoint_duration_seconds": ("histogram", ("die",)),
    "rrd_step_duration_seconds": ("histogram", ("die",)),
    "rrd_gate_acquire_duration_seconds": ("histogram", ("die",)),
    "rrd_gate_refusals_total": ("counter", ("die",)),
    "rrd_lane_busy_seconds_total": ("counter", ("lane",)),
    "rrd_lane_seconds_total": ("counter", ("lane",)),
    "rrd_worker_up": ("gauge", ("die",)),
    "rrd_worker_restarts_total": ("counter", ("die",)),
    "rrd_die_info": ("gauge", ("die", "uuid", "pci_bus_id", "model")),
    "rrd_die_expected": ("gauge", ()),
    "rrd_die_memory_bytes": ("gauge", ("die",)),
    "rrd_die_memory_used_bytes": ("gauge", ("die",)),
    "rrd_spool_rejected_files": ("gauge", ()),
    "rrd_spool_watch_healthy": ("gauge", ()),
}
"""Names that people's dashboards and alerts use: their types, and labels that every series has. They never change."""


def a_job(job: str = "a", **facts: Any) -> JobView:
    return JobView.model_validate({
        "id": job, "state": JobState.RUNNING, "method": "lora", "die": "0", "lane": "lane0", "step": 150,
        "target_steps": 1500, "loss": 2.5, "eval_loss": 2.25, "lr": 1e-4, "steps_run": 160, "tokens_run": 4096,
        "eta_seconds": 2820.0, "last_step_at": 1.7e9 + 0.25, "last_checkpoint_at": 1.7e9, "weight": 2.0,
        "checkpoint_every_seconds": 600.0, "checkpoint_every_steps": 50, "last_checkpoint_step": 100,
        "checkpoint_bytes": 60 << 20, "checkpoint_commits": 4, "checkpoint_failures": 1,
        "checkpoint_fallbacks": 0, "crashes": 1, **facts})


def a_snapshot(*jobs: JobView, **facts: Any) -> Snapshot:
    return Snapshot.model_validate({
        "version": "0.1", "pid": 1, "time": 1.7e9, "started_at": 1.6e9, "state_dir": "/s", "jobs_dir": "/j",
        "jobs": jobs or (a_job(),),
        "dies": [DieView(name="0", lane="lane0", device="cuda:0", state="computing", jobs=["a"], worker_pid=7,
                         restarts=2, refusals=3, model="Tesla K80", uuid="GPU-1", pci_bus_id="0000:03:00.0",
                         memory_bytes=12 << 30, memory_used_bytes=7 << 30),
                 DieView(name="1", lane="lane0", device="cpu", state="off")],
        "lanes": [LaneView(name="lane0", gate="none", dies=["0", "1"], round=12, busy_seconds=95.5, seconds=100.0)],
        **facts})


def some_meters() -> Meters:
    meters = Meters()
    meters.step("0", 0.15)
    meters.grant("0", 0.0003)
    meters.save("0", 2.0)
    return meters


class Scraper:
    """Prometheus' own reader over what is exposed."""

    def __init__(self, snapshot: Snapshot, meters: Meters | None = None) -> None:
        self.collector = SnapshotCollector(lambda: snapshot, meters or some_meters())
        self.text = exposition(self.collector.collect()).decode()
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(self.text):
            assert family.name not in self.families, f"{family.name} twice"
            self.families[family.name] = family

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample whose labels are at least these; None if there is none."""
        found = [s.value for f in self.families.values() for s in f.samples
                 if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) <= 1
        return found[0] if found else None

    def labels(self) -> set[str]:
        return {label for f in self.families.values() for s in f.samples for label in s.labels}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_name_is_there_with_its_type_and_labels(name: str) -> None:
    kind, labels = DOCUMENTED[name]
    family = Scraper(a_snapshot()).families[name.removesuffix("_total")]
    assert family.type == kind
    assert family.documentation.endswith(".")
    for sample in family.samples:
        assert sample.name == name or (kind == "histogram" and sample.name.startswith(name))
        assert set(labels) <= set(sample.labels)
    assert family.samples


def test_names_and_labels_are_well_formed() -> None:
    scraper = Scraper(a_snapshot())
    assert not {"job", "instance"} & scraper.labels()
    for family in scraper.families.values():
        assert re.fullmatch(r"rrd_[a-z_]+", family.name)
        assert not any(s.name.endswith("_created") for s in family.samples)
    assert "_created" not in scraper.text


def test_prometheus_clients_own_writer_says_the_same() -> None:
    snapshot, meters = a_snapshot(), some_meters()
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: snapshot, meters))

    def samples(text: str) -> list[Any]:
        return sorted((s.name, sorted(s.labels.items()), s.value) for f in text_string_to_metric_families(text)
                      for s in f.samples)

    assert samples(generate_latest(registry).decode()) == samples(Scraper(snapshot, meters).text)


# --- values -----------------------------------------------------------------------------------------------------------


def test_what_a_snapshot_says_is_what_is_scraped() -> None:
    s = Scraper(a_snapshot(a_job("a"), a_job("b", state=JobState.WAITING, die=None, lane=None)))
    for name, value in {
        "rrd_job_step": 150, "rrd_job_target_steps": 1500, "rrd_job_steps_run_total": 160, "rrd_job_tokens_total": 4096,
        "rrd_job_loss": 2.5, "rrd_job_eval_loss": 2.25, "rrd_job_learning_rate": 1e-4, "rrd_job_weight": 2,
        "rrd_job_last_step_timestamp_seconds": 1.7e9 + 0.25, "rrd_job_last_checkpoint_timestamp_seconds": 1.7e9,
        "rrd_job_checkpoint_interval_seconds": 600, "rrd_job_checkpoint_interval_steps": 50,
        "rrd_job_last_checkpoint_step": 100, "rrd_job_eta_seconds": 2820, "rrd_job_crashes": 1,
        "rrd_job_skipped_steps": 0,
        "rrd_checkpoint_bytes": 60 << 20, "rrd_checkpoint_commits_total": 4, "rrd_checkpoint_failures_total": 1,
        "rrd_checkpoint_fallbacks_total": 0,
    }.items():
        assert s.value(name, rrd_job="a") == value, name
    for name, value in {"rrd_worker_up": 1, "rrd_worker_restarts_total": 2, "rrd_worker_crashes_total": 0,
                        "rrd_gate_refusals_total": 3,
                        "rrd_die_memory_bytes": 12 << 30, "rrd_die_memory_used_bytes": 7 << 30,
                        "rrd_die_jobs": 1, "rrd_die_fenced": 0}.items():
        assert s.value(name, die="0") == value, name
    assert s.value("rrd_worker_up", die="1") == 0
    assert s.value("rrd_die_info", die="0", uuid="GPU-1", pci_bus_id="0000:03:00.0", model="Tesla K80") == 1
    assert s.value("rrd_die_expected") == 2
    assert s.value("rrd_lane_busy_seconds_total", lane="lane0") == 95.5
    assert s.value("rrd_lane_seconds_total", lane="lane0") == 100
    assert s.value("rrd_job_info", rrd_job="b", die="", lane="", state="waiting") == 1
    assert s.value("rrd_build_info", version="0.1") == 1
    assert s.value("rrd_start_time_seconds") == 1.6e9


def test_jobs_are_counted_in_every_state_there_is() -> None:
    s = Scraper(a_snapshot(a_job("a"), a_job("b"), a_job("c", state=JobState.FAILED)))
    for state in JobState:
        assert s.value("rrd_jobs", state=state.value) == {JobState.RUNNING: 2, JobState.FAILED: 1}.get(state, 0)


def test_what_is_not_known_has_no_series() -> None:
    s = Scraper(a_snapshot(JobView(id="new", state=JobState.WAITING), dies=[]))
    for name in ("rrd_job_loss", "rrd_job_target_steps", "rrd_job_eta_seconds", "rrd_checkpoint_bytes",
                 "rrd_job_last_checkpoint_timestamp_seconds", "rrd_job_learning_rate"):
        assert s.value(name, rrd_job="new") is None, name
    assert s.value("rrd_job_steps_run_total", rrd_job="new") == 0  # a counter begins at 0, or its first step is missed
    assert s.value("rrd_checkpoint_failures_total", rrd_job="new") == 0
    assert s.value("rrd_die_expected") == 0
    assert Scraper(a_snapshot()).value("rrd_die_memory_bytes", die="1") is None


def test_health_is_told() -> None:
    well, ill = a_snapshot(), a_snapshot(config_error="no", spool_watch_healthy=False, rejected=[
        RejectedView(file="x.toml", message="no")])
    for name, good, bad in (("rrd_config_last_reload_successful", 1, 0), ("rrd_spool_watch_healthy", 1, 0),
                            ("rrd_spool_rejected_files", 0, 1)):
        assert (Scraper(well).value(name), Scraper(ill).value(name)) == (good, bad)


def test_a_job_that_is_gone_is_gone_from_the_next_scrape() -> None:
    now = a_snapshot(a_job("a"), a_job("b"))
    collector = SnapshotCollector(lambda: now, Meters())
    assert 'rrd_job="b"' in exposition(collector.collect()).decode()
    now = a_snapshot(a_job("a"))
    assert 'rrd_job="b"' not in exposition(collector.collect()).decode()


def test_a_resumed_job_takes_no_counter_back() -> None:
    """The step goes back to the checkpoint's; what was run was run."""
    before, after = a_job(step=150, steps_run=160), a_job(step=100, steps_run=160, checkpoint_fallbacks=1)
    scrapes = [Scraper(a_snapshot(j)) for j in (before, after)]
    for family in scrapes[0].families.values():
        if family.type == "counter":
            for sample in family.samples:
                assert (scrapes[1].value(sample.name, **sample.labels) or 0) >= sample.value


def test_registering_asks_for_no_snapshot() -> None:
    def snapshot() -> Snapshot:
        raise AssertionError

    CollectorRegistry().register(SnapshotCollector(snapshot, Meters()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5e-324, 1e300, 0.1])
def test_odd_values_are_read_back(value: float) -> None:
    read = Scraper(a_snapshot(a_job(loss=value))).value("rrd_job_loss")
    assert read == value or (read is not None and math.isnan(read) and math.isnan(value))


def test_odd_text_is_read_back() -> None:
    odd = 'K80 "x"\\ \n {},= \N{SNOWMAN}'
    die = DieView(name="0", lane="lane0", device="cpu", state="off", model=odd)
    info = Scraper(a_snapshot(dies=[die])).families["rrd_die_info"].samples
    assert [s.labels["model"] for s in info] == [odd]


# --- histograms -------------------------------------------------------------------------------------------------------


def test_a_histogram_counts_as_prometheus_does() -> None:
    h = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.100001, 1.0, 7.0):
        h.observe(seconds)
    assert h.buckets() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert h.sum == pytest.approx(8.250001)


@pytest.mark.parametrize("bounds", [STEP_BUCKETS, GATE_BUCKETS, SAVE_BUCKETS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_durations_are_scraped_by_die() -> None:
    meters = Meters()
    for _ in range(3):
        meters.step("0", 0.2)
    meters.step("1", 0.3)
    meters.grant("0", 0.0002)
    meters.save("1", 2.0)
    s = Scraper(a_snapshot(), meters)
    assert s.value("rrd_step_duration_seconds_count", die="0") == 3
    assert s.value("rrd_step_duration_seconds_sum", die="0") == pytest.approx(0.6)
    assert s.value("rrd_step_duration_seconds_bucket", die="0", le="0.1") == 0
    assert s.value("rrd_step_duration_seconds_bucket", die="0", le="0.25") == 3
    assert s.value("rrd_step_duration_seconds_count", die="1") == 1
    assert s.value("rrd_gate_acquire_duration_seconds_bucket", die="0", le="0.0003") == 1
    assert s.value("rrd_checkpoint_duration_seconds_bucket", die="1", le="+Inf") == 1
    assert s.value("rrd_checkpoint_duration_seconds_count", die="0") is None
