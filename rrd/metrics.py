"""What Prometheus scrapes: gauges and counters read off a snapshot, and the histograms that a snapshot cannot hold.

The collector is asked anew at each scrape, so that the series of a job that is gone are gone. No label is called
``job`` or ``instance``: those are Prometheus' own. No counter goes back when a job resumes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from math import inf, isfinite

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from rrd.snapshot import DieView, JobView, LaneView, Snapshot
from rrd.states import JobState

STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
GATE_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SAVE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Histogram:
    """Counts per bucket of one series; ``le`` semantics as Prometheus has them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.sum = list(self.counts), self.sum
        return other

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as exposed."""
        total, out = 0, []
        for bound, n in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += n
            out.append((bound, float(total)))
        return out


class Meters:
    """Durations since the daemon started, by die. Belongs to the loop; a scraper's thread reads a copy."""

    def __init__(self) -> None:
        self.steps: dict[str, Histogram] = {}
        self.grants: dict[str, Histogram] = {}
        self.saves: dict[str, Histogram] = {}

    def step(self, die: str, seconds: float) -> None:
        self.steps.setdefault(die, Histogram(STEP_BUCKETS)).observe(seconds)

    def grant(self, die: str, seconds: float) -> None:
        self.grants.setdefault(die, Histogram(GATE_BUCKETS)).observe(seconds)

    def save(self, die: str, seconds: float) -> None:
        self.saves.setdefault(die, Histogram(SAVE_BUCKETS)).observe(seconds)

    def copy(self) -> Meters:
        other = Meters()
        other.steps, other.grants, other.saves = ({die: h.copy() for die, h in series.items()}
                                                  for series in (self.steps, self.grants, self.saves))
        return other


Instant = tuple[Snapshot, Meters]


class SnapshotCollector(Collector):
    """Turns one snapshot into metrics, in the scraper's thread.

    ``snapshot`` and the reading of ``meters`` are left to ``on_loop``, which may block: both of the same instant.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], meters: Meters,
                 on_loop: Callable[[Callable[[], Instant]], Instant] = lambda take: take()) -> None:
        self._snapshot, self._meters, self._on_loop = snapshot, meters, on_loop

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: registering must not need a running loop."""
        return []

    def collect(self) -> Iterator[Metric]:
        s, m = self._on_loop(lambda: (self._snapshot(), self._meters.copy()))
        yield from _daemon(s)
        yield from _jobs(s.jobs)
        yield from _lanes(s.lanes)
        yield from _dies(s.dies)
        yield _histogram("rrd_step_duration_seconds", "Seconds of one training step.", m.steps)
        yield _histogram("rrd_gate_acquire_duration_seconds", "Seconds until the gate granted a die.", m.grants)
        yield _histogram("rrd_checkpoint_duration_seconds", "Seconds to write one checkpoint to disk.", m.saves)


def exposition(metrics: Iterable[Metric]) -> bytes:
    """``metrics`` in Prometheus' text format 0.0.4. A third of the time that prometheus-client's own takes, because
    labels that many samples share (the same dictionary) are written out once: 1,000 jobs have 17,000 samples."""
    shown: dict[int, str] = {}
    lines: list[str] = []
    kept = []  # the dictionaries must live as long as their ids are used
    for m in metrics:
        name = m.name + "_total" if m.type == "counter" else m.name
        lines.append(f"# HELP {name} {_escape(m.documentation)}\n# TYPE {name} {m.type}\n")
        for s in m.samples:
            labels = shown.get(id(s.labels))
            if labels is None:
                kept.append(s.labels)
                labels = shown[id(s.labels)] = _labels(s.labels)
            lines.append(f"{s.name}{labels} {_value(s.value)}\n")
    return "".join(lines).encode()


def _labels(labels: dict[str, str]) -> str:
    inside = ",".join(f'{k}="{_escape(v, True)}"' for k, v in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escape(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _value(value: float) -> str:
    """Python's shortest digits are a Go float; only what is not finite is called otherwise."""
    return repr(value) if isinstance(value, int) or isfinite(value) else {inf: "+Inf", -inf: "-Inf"}.get(value, "NaN")


def _histogram(name: str, text: str, series: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["die"])
    for die, h in series.items():
        family.add_metric([die], buckets=h.buckets(), sum_value=h.sum)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _daemon(s: Snapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily("rrd_build_info", "Always 1; the version is a label.", labels=["version"])
    info.add_metric([s.version], 1)
    yield info
    yield _gauge("rrd_start_time_seconds", "When the daemon started, Unix time.", s.started_at)
    yield _gauge("rrd_config_last_reload_successful", "Whether the configuration was good when last read.",
                 float(not s.config_error))
    yield _gauge("rrd_spool_rejected_files", "Job files that are not accepted as they are.", len(s.rejected))
    yield _gauge("rrd_spool_watch_healthy", "Whether changes in the spool are heard of at once; 0 means it is polled.",
                 float(s.spool_watch_healthy))
    if s.disk_free_bytes is not None and s.disk_size_bytes is not None:
        yield _gauge("rrd_disk_free_bytes", "Room left on the file system of the state directory.", s.disk_free_bytes)
        yield _gauge("rrd_disk_size_bytes", "Size of the file system of the state directory.", s.disk_size_bytes)
    states = GaugeMetricFamily("rrd_jobs", "Jobs by state.", labels=["state"])
    for state in JobState:
        states.add_metric([state.value], sum(j.state is state for j in s.jobs))
    yield states


_JOB_GAUGES: tuple[tuple[str, str, Callable[[JobView], float | None]], ...] = (
    ("rrd_job_step", "Steps done.", lambda j: j.step),
    ("rrd_job_target_steps", "Steps of the whole job.", lambda j: j.target_steps),
    ("rrd_job_loss", "Training loss of the newest step.", lambda j: j.loss),
    ("rrd_job_eval_loss", "Newest loss on held-out data.", lambda j: j.eval_loss),
    ("rrd_job_learning_rate", "Learning rate of the newest step.", lambda j: j.lr),
    ("rrd_job_weight", "Share of the turns, against other jobs' weights.", lambda j: j.weight),
    ("rrd_job_crashes", "Worker deaths on the job's visits since its last new step.", lambda j: j.crashes),
    ("rrd_job_skipped_steps", "Steps left out because their loss or gradient was no number.", lambda j: j.skipped),
    ("rrd_job_last_step_timestamp_seconds", "When the newest step ended, Unix time.", lambda j: j.last_step_at),
    ("rrd_job_loaded_timestamp_seconds", "When the job became resident, Unix time; absent while it is not.",
     lambda j: j.loaded_at),
    ("rrd_job_last_checkpoint_timestamp_seconds", "When the newest checkpoint was durable, Unix time.",
     lambda j: j.last_checkpoint_at),
    ("rrd_job_last_checkpoint_step", "Steps that the newest durable checkpoint holds.",
     lambda j: j.last_checkpoint_step),
    ("rrd_job_checkpoint_interval_seconds", "The cadence asked for, where it is a duration.",
     lambda j: j.checkpoint_every_seconds),
    ("rrd_job_checkpoint_interval_steps", "The cadence asked for, where it is a number of steps.",
     lambda j: j.checkpoint_every_steps),
    ("rrd_job_eta_seconds", "Seconds until the job is trained, at the present pace.", lambda j: j.eta_seconds),
    ("rrd_checkpoint_bytes", "Size of the newest checkpoint.", lambda j: j.checkpoint_bytes),
)
_JOB_COUNTERS: tuple[tuple[str, str, Callable[[JobView], float]], ...] = (
    ("rrd_job_steps_run", "Steps run since the daemon started, repeated ones included.", lambda j: j.steps_run),
    ("rrd_job_tokens", "Tokens trained on since the daemon started, repeated ones included.", lambda j: j.tokens_run),
    ("rrd_checkpoint_commits", "Checkpoints made durable.", lambda j: j.checkpoint_commits),
    ("rrd_checkpoint_failures", "Checkpoints that could not be written.", lambda j: j.checkpoint_failures),
    ("rrd_checkpoint_fallbacks", "Damaged checkpoints put aside for an older one.", lambda j: j.checkpoint_fallbacks),
)


def _jobs(jobs: list[JobView]) -> Iterator[Metric]:
    info = GaugeMetricFamily("rrd_job_info", "Always 1; what does not change is in the labels.",
                             labels=["rrd_job", "method", "die", "lane", "state"])
    for j in jobs:
        info.add_metric([j.id, j.method, j.die or "", j.lane or "", j.state.value], 1)
    yield info
    labelled = [(j, {"rrd_job": j.id}) for j in jobs]  # one dictionary a job: see ``exposition``
    for name, text, of in _JOB_GAUGES:
        gauge = Metric(name, text, "gauge")
        gauge.samples = [Sample(name, labels, value) for j, labels in labelled if (value := of(j)) is not None]
        yield gauge
    for name, text, count in _JOB_COUNTERS:
        counter = Metric(name, text, "counter")
        counter.samples = [Sample(name + "_total", labels, count(j)) for j, labels in labelled]
        yield counter


def _lanes(lanes: list[LaneView]) -> Iterator[Metric]:
    busy = CounterMetricFamily("rrd_lane_busy_seconds", "Seconds inside training steps.", labels=["lane"])
    wall = CounterMetricFamily("rrd_lane_seconds", "Seconds in which the lane had visits to make.", labels=["lane"])
    rounds = CounterMetricFamily("rrd_lane_rounds", "Passes over the lane's dies.", labels=["lane"])
    for lane in lanes:
        busy.add_metric([lane.name], lane.busy_seconds)
        wall.add_metric([lane.name], lane.seconds)
        rounds.add_metric([lane.name], lane.round)
    yield from (busy, wall, rounds)


def _dies(dies: list[DieView]) -> Iterator[Metric]:
    yield _gauge("rrd_die_expected", "Dies in the configuration.", len(dies))
    info = GaugeMetricFamily("rrd_die_info", "Always 1; uuid lines up with DCGM's UUID.",
                             labels=["die", "lane", "device", "uuid", "pci_bus_id", "model"])
    up = GaugeMetricFamily("rrd_worker_up", "Whether the die's worker runs.", labels=["die"])
    available = GaugeMetricFamily("rrd_die_available", "Whether the die can be had: neither fenced nor refused.",
                                  labels=["die"])
    fenced = GaugeMetricFamily("rrd_die_fenced", "Whether the die is kept out of use after faults.", labels=["die"])
    jobs = GaugeMetricFamily("rrd_die_jobs", "Jobs that have a place on the die.", labels=["die"])
    memory = GaugeMetricFamily("rrd_die_memory_bytes", "Memory of the die; of a CPU die, the machine's.",
                               labels=["die"])
    used = GaugeMetricFamily("rrd_die_memory_used_bytes", "What the die's worker holds of it: of a card what torch has "
                             "reserved, of a CPU die what is resident.", labels=["die"])
    restarts = CounterMetricFamily("rrd_worker_restarts", "Times the die's worker was started again.", labels=["die"])
    crashes = CounterMetricFamily("rrd_worker_crashes", "Ends of the die's worker that nobody had asked for.",
                                  labels=["die"])
    refusals = CounterMetricFamily("rrd_gate_refusals", "Times the gate did not grant the die.", labels=["die"])
    for d in dies:
        info.add_metric([d.name, d.lane, d.device, d.uuid, d.pci_bus_id, d.model], 1)
        up.add_metric([d.name], float(d.worker_pid is not None))
        available.add_metric([d.name], float(not d.why))
        fenced.add_metric([d.name], float(d.state == "fenced"))
        jobs.add_metric([d.name], len(d.jobs))
        restarts.add_metric([d.name], d.restarts)
        crashes.add_metric([d.name], d.crashes)
        refusals.add_metric([d.name], d.refusals)
        if d.memory_bytes is not None:
            memory.add_metric([d.name], d.memory_bytes)
        if d.memory_used_bytes is not None:
            used.add_metric([d.name], d.memory_used_bytes)
    yield from (info, up, available, fenced, jobs, memory, used, restarts, crashes, refusals)
