"""The alert rules: right in themselves, made of what rrd exports, explained, and heard by somebody."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from boxes import box, toy_keys, write_job
from scraper import RULES, free_port, needs_alertmanager, needs_prometheus, needs_promtool, pager, prometheus

from rrd.metrics import Meters, SnapshotCollector
from rrd.snapshot import DieView, JobView, LaneView, Snapshot
from rrd.states import JobState

ROOT = RULES.parent.parent.parent
NAMES = {"RrdDown", "RrdJobStalled", "RrdCheckpointStale", "RrdCheckpointFailing", "RrdCheckpointFallback",
         "RrdWorkerFlapping", "RrdDieMissing", "RrdSpoolRejected", "RrdDiskLow", "RrdJobFailed"}


def rules() -> list[dict[str, object]]:
    found: list[dict[str, object]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return found


def exported() -> set[str]:
    """Every name that rrd exports, histogram parts included."""
    full = JobView(id="a", state=JobState.RUNNING, target_steps=1, loss=1.0, eval_loss=1.0, lr=1.0, last_step_at=1.0,
                   loaded_at=1.0, last_checkpoint_at=1.0, last_checkpoint_step=1, checkpoint_every_seconds=1.0,
                   checkpoint_every_steps=1, eta_seconds=1.0, checkpoint_bytes=1)
    s = Snapshot(version="1", pid=1, time=1.0, started_at=1.0, state_dir="", jobs_dir="", jobs=[full],
                 dies=[DieView(name="0", lane="0", device="cpu", state="idle", memory_bytes=1, memory_used_bytes=1)],
                 lanes=[LaneView(name="0", gate="none", dies=["0"])], disk_free_bytes=1, disk_size_bytes=1)
    meters = Meters()
    for observe in (meters.step, meters.grant, meters.save):
        observe("0", 1.0)
    return {sample.name for m in SnapshotCollector(lambda: s, meters).collect() for sample in m.samples}


@needs_promtool
@pytest.mark.parametrize("command", [
    ("check", "rules", "rrd.rules.yml"), ("check", "config", "prometheus.example.yml"),
    ("test", "rules", "rrd.rules.test.yml")], ids=" ".join)
def test_promtool_is_content(command: tuple[str, ...]) -> None:
    run = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_alert_has_a_unit_test_that_would_miss_it(name: str, tmp_path: Path) -> None:
    """Silence one alert, and the tests are red."""
    silent = re.sub(rf"(alert: {name}\n +expr: )(\||.*)", r"\1vector(0) > 1 #", RULES.read_text())
    silent = re.sub(r"vector\(0\) > 1 #\n(?: {10,}.*\n)+", "vector(0) > 1\n", silent)
    (tmp_path / "rrd.rules.yml").write_text(silent)
    shutil.copy(RULES.parent / "rrd.rules.test.yml", tmp_path)
    run = subprocess.run(["promtool", "test", "rules", "rrd.rules.test.yml"], cwd=tmp_path, capture_output=True,
                         text=True)
    assert run.returncode != 0 and f"alertname: {name}" in run.stdout + run.stderr, run.stdout + run.stderr


def test_rules_use_only_what_is_exported() -> None:
    used = {name for rule in rules() for name in re.findall(r"rrd_\w+", str(rule["expr"]))} - {"rrd_job"}
    assert used and used <= exported(), used - exported()


def test_each_alert_leads_to_its_paragraph() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^##|\Z)", text, re.M | re.S))
    assert {str(r["alert"]) for r in rules()} == NAMES == set(sections)
    for rule in rules():
        notes = rule["annotations"]
        assert isinstance(notes, dict)
        assert notes["runbook"] == f"docs/operations.md#{str(rule['alert']).lower()}"
        assert "**Do:**" in sections[str(rule["alert"])]


@needs_promtool
def test_dcgm_lines_up_as_documented(tmp_path: Path) -> None:
    """The documented expression gives a card's temperature the die it is of, with and without GPU- in front."""
    text = (ROOT / "docs" / "monitoring.md").read_text().split("**Beside DCGM.**")[1]
    expr = re.findall(r"```\n(.*?)```", text, re.S)[0]
    assert "metric_relabel_configs" in text and "target_label: uuid" in text  # from where DCGM's series have it
    series = {'DCGM_FI_DEV_GPU_TEMP{uuid="GPU-1a"}': 61, 'DCGM_FI_DEV_GPU_TEMP{uuid="GPU-2b"}': 70,
              'DCGM_FI_DEV_GPU_TEMP{uuid="GPU-not-ours"}': 40, 'rrd_die_info{die="0", lane="k80", uuid="GPU-1a"}': 1,
              'rrd_die_info{die="1", lane="k80", uuid="2b"}': 1, 'rrd_die_info{die="2", lane="k80", uuid=""}': 1,
              'rrd_die_info{die="3", lane="k80", uuid=""}': 1}
    found = [{"labels": f'{{uuid="{uuid}", die="{die}", lane="k80"}}', "value": value}
             for uuid, die, value in (("GPU-1a", 0, 61), ("GPU-2b", 1, 70))]
    (tmp_path / "dcgm.yml").write_text(yaml.safe_dump({"tests": [{
        "interval": "1m", "input_series": [{"series": s, "values": str(v)} for s, v in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "0m", "exp_samples": found}]}]}))
    run = subprocess.run(["promtool", "test", "rules", "dcgm.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_prometheus
@needs_alertmanager
def test_a_worker_killed_again_and_again_pages_somebody(tmp_path: Path) -> None:
    """From SIGKILL through rrd, a real Prometheus and a real Alertmanager to a webhook."""
    port = free_port()
    with box(tmp_path, "cpu_dies = 1\n") as b, pager(tmp_path / "p") as p, \
            prometheus(tmp_path / "p", f"127.0.0.1:{port}", p.port) as prom:
        b.config.write_text(b.config.read_text().replace('metrics = ""', f'metrics = "127.0.0.1:{port}"'))
        b.start()
        write_job(b.jobs_dir, "unlucky", **toy_keys(tmp_path, max_steps=100_000, steps_per_visit=1))
        b.wait_job("unlucky", lambda j: j.step > 3)
        prom.until(lambda: prom.value("rrd_worker_restarts_total") == 0, "no scrape before the first death")
        for deaths in range(1, 5):
            at = b.wait_job("unlucky", lambda j: j.state == "running" and j.loaded_at is not None).steps_run
            b.wait_job("unlucky", lambda j, at=at: j.steps_run > at + 8)  # it does make steps: no job is to blame
            for pid in b.worker_pids():
                os.kill(pid, signal.SIGKILL)
            prom.until(lambda n=deaths: (prom.value("rrd_worker_restarts_total") or 0) >= n, "a death was not counted")
        page = prom.until(lambda: [x for x in p.pages if x["labels"]["alertname"] == "RrdWorkerFlapping"],
                          "nobody was paged")[0]
        assert page["status"] == "firing" and page["labels"]["die"] == "0"
        assert page["annotations"]["summary"].startswith("the worker of die 0 has died")
        assert {x["labels"]["alertname"] for x in p.pages} == {"RrdWorkerFlapping"}, "nothing else cried"
