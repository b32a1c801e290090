"""The Grafana dashboard: as its source has it, typed as Grafana types it; test_observed.py has its queries answered."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from npm import installed
from test_alerts import exported

ETC = Path(__file__).parent.parent / "etc" / "grafana"
HERE = Path(__file__).parent / "grafana"
DASHBOARD: dict[str, Any] = json.loads((ETC / "dashboards" / "rrd.json").read_text())
PANELS = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
QUERIES = [(p["title"], t["expr"]) for p in PANELS for t in p["targets"]]
ANNOTATIONS = [(a["name"], a["target"]["expr"]) for a in DASHBOARD["annotations"]["list"]]


def test_the_file_is_what_its_source_writes() -> None:
    source = runpy.run_path(str(ETC / "build.py"))
    assert source["text"]() == (ETC / "dashboards" / "rrd.json").read_text(), "run: python etc/grafana/build.py"


def test_it_can_be_found_and_asks_only_for_what_is_exported() -> None:
    assert DASHBOARD["uid"] == "rrd-rotation" and "id" not in DASHBOARD
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "instance", "rrd_job", "die"]
    asked = [q for _, q in (*QUERIES, *ANNOTATIONS)] + [
        v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    used = {name for q in asked for name in re.findall(r"\brrd_\w+", q)} - {"rrd_job"}
    assert used <= exported(), used - exported()
    for q in asked[:-1]:  # the last but the first variable keep to the chosen box; that one is the list of boxes
        assert "$instance" in q or "label_values(rrd_build_info" in q, q


def test_panels_neither_overlap_nor_stick_out() -> None:
    taken: set[tuple[int, int]] = set()
    for p in DASHBOARD["panels"]:
        at = p["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24, p["title"]
        taken |= cells
    assert len({p["id"] for p in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_provisioning_finds_the_dashboard_and_a_source() -> None:
    source = yaml.safe_load((ETC / "provisioning/datasources/rrd.yml").read_text())["datasources"][0]
    provider = yaml.safe_load((ETC / "provisioning/dashboards/rrd.yml").read_text())["providers"][0]
    assert source["type"] == "prometheus" and provider["options"]["path"] in (
        ETC.parent.parent / "docs" / "monitoring.md").read_text()


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules(request: pytest.FixtureRequest) -> Path:
    """@grafana/schema and the TypeScript compiler."""
    return installed(request, HERE / "package.json", "the types of the dashboard")


def compiled(home: Path, dashboard: dict[str, Any]) -> str:
    """What the compiler says; empty when it is content."""
    lines = [f"export const dashboard: Ours = {json.dumps(dashboard)};"]
    for i, p in enumerate(p for p in dashboard["panels"] if p["type"] != "row"):
        kind = json.dumps(p["type"])
        lines.append(f"export const options{i}: OptionsOf[{kind}] = {json.dumps(p['options'])};")
        if custom := p["fieldConfig"]["defaults"].get("custom"):
            lines.append(f"export const custom{i}: CustomOf[{kind}] = {json.dumps(custom)};")
        lines.append(f"export const targets{i}: Query[] = {json.dumps(p['targets'])};")
    file = home / "dashboard.ts"
    file.write_text((HERE / "check.ts").read_text() + "\n".join(lines) + "\n")
    run = subprocess.run(["npx", "--no-install", "tsc", "--strict", "--noEmit", "--skipLibCheck", "--module", "esnext",
                          "--moduleResolution", "bundler", file.name], cwd=home, capture_output=True, text=True)
    return run.stdout + run.stderr


def test_grafana_s_own_types_accept_it(modules: Path) -> None:
    assert compiled(modules, DASHBOARD) == ""


@pytest.mark.parametrize(("where", "value"), [
    (("panels", 1, "gridPos", "w"), "4"), (("panels", 1, "options", "colorMode"), "rainbow"),
    (("panels", 8, "fieldConfig", "defaults", "custom", "drawStyle"), "wiggle"), (("refresch",), "30s"),
    (("panels", 8, "options", "legent"), {}), (("templating", "list", 0, "type"), "sauce"),
    (("panels", 8, "targets", 0, "exp"), "up")])
def test_the_types_would_see_a_mistake(modules: Path, where: tuple[Any, ...], value: object) -> None:
    wrong = json.loads(json.dumps(DASHBOARD))
    at = wrong
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    assert "error TS" in compiled(modules, wrong)
