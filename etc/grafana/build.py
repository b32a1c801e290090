"""Writes ``dashboards/rrd.json``: ``python etc/grafana/build.py``. A test holds the file to what this writes.

A dashboard is a list of rows of panels, each a title, a kind, queries and a unit; everything else here says it in
Grafana's words. Every query keeps to the chosen ``$instance``, ``$rrd_job`` and ``$die``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "dashboards" / "rrd.json"
UID = "rrd-rotation"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
I = '{instance=~"$instance"}'  # noqa: E741
J = '{instance=~"$instance", rrd_job=~"$rrd_job"}'
D = '{instance=~"$instance", die=~"$die"}'
MOVING = '{instance=~"$instance", state=~"running|exporting|loading|preparing"}'
RUNNING = '{instance=~"$instance", state="running"}'
FAILED = '{instance=~"$instance", state="failed"}'
RESTING = '{instance=~"$instance", rrd_job=~"$rrd_job", state=~"failed|waiting|paused"}'
GREEN, AMBER, RED, BLUE = "green", "orange", "red", "blue"

Query = tuple[str, str]
"""Expression and legend."""
Steps = Sequence[tuple[float | None, str]]


def panel(kind: str, title: str, queries: Sequence[Query], *, width: int, height: int, unit: str = "short",
          text: str = "", options: dict[str, Any] | None = None, custom: dict[str, Any] | None = None,
          steps: Steps = ((None, GREEN),), instant: bool = False, **defaults: Any) -> dict[str, Any]:
    """One panel; ``lay_out`` gives it its place and number. ``steps`` are thresholds, ``defaults`` its fields'."""
    targets = [{"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto",
                **({"instant": True, "range": False, "format": "table" if kind == "table" else "time_series"}
                   if instant else {"range": True})}
               for i, (expr, legend) in enumerate(queries)]
    field = {"unit": unit, "thresholds": {"mode": "absolute", "steps": [{"value": v, "color": c} for v, c in steps]},
             **defaults}
    return {"type": kind, "title": title, "description": text, "datasource": SOURCE, "targets": targets,
            "gridPos": {"x": 0, "y": 0, "w": width, "h": height},
            "fieldConfig": {"defaults": {**field, **({"custom": custom} if custom else {})}, "overrides": []},
            "options": options or {}}


def stat(title: str, query: str, *, width: int = 4, **more: Any) -> dict[str, Any]:
    options = {"colorMode": "value", "graphMode": "area", "textMode": "value", "wideLayout": True,
               "justifyMode": "auto", "orientation": "auto", "percentChangeColorMode": "standard",
               "showPercentChange": False, "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return panel("stat", title, [(query, "")], width=width, height=4, options=options, **more)


def graph(title: str, *queries: Query, width: int = 12, height: int = 8, fill: int = 8, stack: bool = False,
          bars: bool = False, log: bool = False, calcs: Sequence[str] = ("lastNotNull",),
          **more: Any) -> dict[str, Any]:
    options = {"legend": {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": list(calcs)},
               "tooltip": {"mode": "multi", "sort": "desc"}}
    custom = {"drawStyle": "bars" if bars else "line", "lineWidth": 1 if stack or bars else 2,
              "fillOpacity": 60 if bars else fill, "showPoints": "never", "spanNulls": 120_000,
              "stacking": {"mode": "normal" if stack else "none", "group": "A"},
              "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"}}
    return panel("timeseries", title, queries, width=width, height=height, options=options, custom=custom, **more)


def table(title: str, query: str, *, text: str = "") -> dict[str, Any]:
    """The labels of what ``query`` finds, without those that are Prometheus' own."""
    own = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
    return {**panel("table", title, [(query, "")], width=12, height=8, instant=True, text=text,
                    options={"showHeader": True, "cellHeight": "sm", "frameIndex": 0},
                    custom={"align": "left", "cellOptions": {"type": "auto"}, "inspect": False}),
            "transformations": [{"id": "organize", "options": {"excludeByName": own}}]}


def quantile(share: float, name: str) -> Query:
    """Of a histogram, for each die."""
    return (f"histogram_quantile({share}, sum by (instance, die, le) (rate({name}_bucket{D}[$__rate_interval])))",
            "die {{die}}")


def a_minute(name: str) -> Query:
    """The rate of a counter, for each die."""
    return f"60 * rate({name}{D}[$__rate_interval])", "die {{die}}"


def bars_of(mode: str) -> dict[str, Any]:
    """The options of a bar gauge; ``mode``: what colours the values."""
    return {"displayMode": "basic", "orientation": "horizontal", "showUnfilled": True, "valueMode": mode,
            "namePlacement": "auto", "sizing": "auto", "minVizHeight": 16, "maxVizHeight": 24, "minVizWidth": 8,
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}


def row(title: str) -> dict[str, Any]:
    return {"type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}}


AVAILABLE = [{"type": "value", "options": {"0": {"text": "cannot be had", "color": RED, "index": 0},
                                           "1": {"text": "available", "color": GREEN, "index": 1}}}]


def at_a_glance() -> list[dict[str, Any]]:
    return [
        row("At a glance"),
        stat("Jobs that train", f"sum(rrd_jobs{MOVING})"),
        stat("Jobs that failed", f"sum(rrd_jobs{FAILED})",
             steps=((None, GREEN), (1, RED)), width=3),
        stat("Dies that can be had", f"sum(rrd_die_available{I}) / sum(rrd_die_expected{I})", unit="percentunit",
             steps=((None, RED), (1, GREEN)), min=0, max=1),
        stat("Rotation efficiency", f"sum(rate(rrd_lane_busy_seconds_total{I}[$__rate_interval])) / "
             f"sum(rate(rrd_lane_seconds_total{I}[$__rate_interval]))", unit="percentunit", min=0, max=1,
             steps=((None, RED), (0.8, AMBER), (0.95, GREEN)),
             text="Of the time in which lanes had visits to make, the share that went into training steps. The rest is "
                  "gates, loads, checkpoints being copied, and the end of jobs."),
        stat("All trained in", f"max(rrd_job_eta_seconds{J})", unit="s", decimals=1, steps=((None, "text"),),
             text="The longest time left of the jobs that are under way. Jobs that still wait are not in it."),
        stat("Oldest checkpoint", f"max((time() - rrd_job_last_checkpoint_timestamp_seconds{J}) "
             f"and on (instance, rrd_job) rrd_job_info{RUNNING})", unit="s", decimals=0, width=5,
             steps=((None, GREEN), (1800, AMBER), (3600, RED)),
             text="Of the jobs that run: what a power cut would cost."),
    ]


def rotation() -> list[dict[str, Any]]:
    busy = "rate(rrd_lane_busy_seconds_total{i}[$__rate_interval]) / rate(rrd_lane_seconds_total{i}[$__rate_interval])"
    return [
        row("Rotation"),
        graph("Efficiency of each lane", (busy.format(i=I), "lane {{lane}}"), unit="percentunit", min=0, max=1,
              text="Seconds inside training steps, of the seconds in which the lane had visits to make."),
        graph("Visits a minute", a_minute("rrd_gate_acquire_duration_seconds_count"),
              stack=True, fill=40, text="How often each die was granted. Dies of a lane should have equal bands."),
        graph("Seconds a step, median", quantile(0.5, "rrd_step_duration_seconds"), unit="s", width=8),
        graph("Seconds until granted, 99 of 100", quantile(0.99, "rrd_gate_acquire_duration_seconds"), unit="s",
              width=8, log=True),
        graph("Refused by the gate, a minute", a_minute("rrd_gate_refusals_total"),
              width=8, bars=True),
    ]


def training() -> list[dict[str, Any]]:
    return [
        row("Training"),
        graph("Loss", (f"rrd_job_loss{J}", "{{rrd_job}}"), (f"rrd_job_eval_loss{J}", "{{rrd_job}}, held out"),
              height=10, fill=0, calcs=("lastNotNull", "min"), text="Of the newest step; `rrd plot JOB` has all."),
        panel("bargauge", "Done", [(f"100 * rrd_job_step{J} / rrd_job_target_steps{J}", "{{rrd_job}}")], width=6,
              height=10, unit="percent", instant=True, min=0, max=100, decimals=0, steps=((None, BLUE), (100, GREEN)),
              options=bars_of("color")),
        panel("bargauge", "Time left", [(f"sort_desc(rrd_job_eta_seconds{J})", "{{rrd_job}}")], width=6, height=10,
              unit="s", instant=True, min=0, decimals=1, steps=((None, BLUE),), options=bars_of("text")),
        graph("Steps a minute", (f"60 * rate(rrd_job_steps_run_total{J}[$__rate_interval])", "{{rrd_job}}"), stack=True,
              fill=40, text="Waiting for other dies' turns included; steps repeated after a crash are counted again."),
        graph("Tokens a second", (f"rate(rrd_job_tokens_total{J}[$__rate_interval])", "{{rrd_job}}"), stack=True,
              fill=40),
        graph("Learning rate", (f"rrd_job_learning_rate{J}", "{{rrd_job}}"), fill=0, unit="sci"),
        graph("Jobs by state", (f"sum by (state) (rrd_jobs{I}) > 0", "{{state}}"), stack=True, fill=40),
    ]


def checkpoints() -> list[dict[str, Any]]:
    return [
        row("Checkpoints"),
        graph("Age", (f"time() - rrd_job_last_checkpoint_timestamp_seconds{J}", "{{rrd_job}}"), unit="s", width=8,
              fill=0),
        graph("Seconds to write one, 95 of 100", quantile(0.95, "rrd_checkpoint_duration_seconds"), unit="s", width=8),
        graph("Written, failed, put aside",
              (f"sum(increase(rrd_checkpoint_commits_total{J}[$__rate_interval]))", "written"),
              (f"sum(increase(rrd_checkpoint_failures_total{J}[$__rate_interval]))", "failed"),
              (f"sum(increase(rrd_checkpoint_fallbacks_total{J}[$__rate_interval]))", "damaged, put aside"), width=8,
              bars=True, calcs=("sum",)),
        graph("Size", (f"rrd_checkpoint_bytes{J}", "{{rrd_job}}"), unit="bytes", width=8, fill=0),
        graph("Room on the disk", (f"rrd_disk_free_bytes{I}", "{{instance}} free"), unit="bytes", width=8, min=0),
        graph("Whose cadence is missed", (f"(time() - rrd_job_last_checkpoint_timestamp_seconds{J}) / "
              f"rrd_job_checkpoint_interval_seconds{J} or "
              f"(rrd_job_step{J} - rrd_job_last_checkpoint_step{J}) / rrd_job_checkpoint_interval_steps{J}",
              "{{rrd_job}}"), width=8, fill=0,
              text="Age of the newest checkpoint, in cadences. RrdCheckpointStale fires above 3."),
    ]


def dies() -> list[dict[str, Any]]:
    return [
        row("Dies and faults"),
        panel("state-timeline", "Can be had", [(f"rrd_die_available{D}", "die {{die}}")], width=12, height=8,
              mappings=AVAILABLE, text="Neither fenced nor refused by its gate.", steps=((None, RED), (1, GREEN)),
              options={"showValue": "never", "rowHeight": 0.8, "mergeValues": True, "alignValue": "left",
                       "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                       "tooltip": {"mode": "single", "sort": "none"}},
              custom={"fillOpacity": 75, "lineWidth": 0}),
        graph("Workers started again", (f"increase(rrd_worker_restarts_total{D}[$__rate_interval])", "die {{die}}"),
              bars=True, calcs=("sum",), text="Each costs its jobs the steps since their newest checkpoints."),
        table("Dies", f"rrd_die_info{D}"),
        table("Jobs that failed, wait or are paused", f"rrd_job_info{RESTING}",
              text="`rrd status JOB` says why, and what to do."),
        graph("Memory that each die's worker holds", (f"rrd_die_memory_used_bytes{D}", "die {{die}}"), unit="bytes",
              width=6, fill=0, min=0, text="Of a card what torch has reserved there, of a CPU die what is resident."),
        panel("bargauge", "Of the die's memory", [(f"100 * rrd_die_memory_used_bytes{D} / rrd_die_memory_bytes{D}",
              "die {{die}}")], width=6, height=8, unit="percent", instant=True, min=0, max=100, decimals=0,
              steps=((None, GREEN), (90, AMBER), (97, RED)), options=bars_of("color"),
              text="CPU dies share the machine's. The chip's own view: DCGM_FI_DEV_FB_USED, see docs/monitoring.md."),
        graph("Deaths since a job's last new step", (f"rrd_job_crashes{J} > 0 or 0 * sum(rrd_start_time_seconds{I})",
              "{{rrd_job}}"), width=6, fill=30, text="At 3 the job has failed."),
        graph("Alerts that fire", ('sum by (alertname) (ALERTS{alertname=~"Rrd.*", alertstate="firing"}) '
              f"or 0 * sum(rrd_start_time_seconds{I})", "{{alertname}}"), width=6, bars=True),
    ]


def lay_out(panels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number the panels and put them side by side, 24 columns wide."""
    x = y = tallest = 0
    for i, p in enumerate(panels, 1):
        at = p["gridPos"]
        if x + at["w"] > 24:
            x, y, tallest = 0, y + tallest, 0
        p["id"], at["x"], at["y"] = i, x, y
        x, tallest = x + at["w"], max(tallest, at["h"])
    return list(panels)


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE, "refresh": 2, "sort": 3, "multi": True,
            "includeAll": True, "allValue": ".*", "query": {"query": query, "refId": name}, "regex": "", "hide": 0,
            "options": [], "skipUrlSync": False, "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}


def annotation(name: str, expr: str, title: str, color: str) -> dict[str, Any]:
    return {"name": name, "enable": True, "hide": False, "iconColor": color, "datasource": SOURCE,
            "target": {"refId": "Anno", "expr": expr, "interval": "15s"}, "titleFormat": title}


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "regex": "",
              "hide": 0, "multi": False, "includeAll": False, "refresh": 1, "options": [], "skipUrlSync": False}
    return {
        "uid": UID, "title": "rrd: training in rotation", "tags": ["rrd", "training"], "schemaVersion": 39,
        "version": 1, "editable": True, "graphTooltip": 1, "timezone": "browser", "refresh": "30s",
        "fiscalYearStartMonth": 0,
        "description": "Is every job moving, is a die idle, will it be done by Monday, what went wrong last night?",
        "time": {"from": "now-6h", "to": "now"}, "timepicker": {}, "links": [],
        "annotations": {"list": [
            annotation("rrd started", f"changes(rrd_start_time_seconds{I}[1m]) > 0", "rrd started", BLUE),
            annotation("workers that died", f"increase(rrd_worker_restarts_total{D}[1m]) > 0",
                       "the worker of die {{die}} was started again", RED)]},
        "templating": {"list": [
            source, variable("instance", "Box", "label_values(rrd_build_info, instance)"),
            variable("rrd_job", "Job", f"label_values(rrd_job_info{I}, rrd_job)"),
            variable("die", "Die", f"label_values(rrd_die_info{I}, die)")]},
        "panels": lay_out([*at_a_glance(), *rotation(), *training(), *checkpoints(), *dies()]),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
