"""The campaign's long parts, as tests marked slow; and that what it finds is seen."""

from __future__ import annotations

import json
import random
from pathlib import Path

import campaign
import growth
import kills
import pytest
import soak
import trouble
import within
from cuts import why_no_loop
from table import Row, at_most, show


def test_the_table_says_what_went_wrong_and_what_was_not_run() -> None:
    bad, none = Row("kills", 3, {"worker": 3}, ["a: another adapter"]), Row("cuts", skipped="needs root")
    assert show([bad, none]).splitlines()[2:] == [
        "| kills | 3 | 3 worker | 1 wrong | 0 s |", "| cuts | 0 |  | not run: needs root | 0 s |"]
    assert at_most(1000) == "so at most 1 in 333 goes wrong, at 95 %"
    assert "torch" in campaign.where()


def test_a_past_that_must_not_be_is_seen(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"kind": "checkpoint", "message": "checkpoint of step 20 is safe"}\n'
        '{"kind": "loaded", "message": "loaded in 1 s, resumed from step 20"}\n'
        '{"kind": "checkpoint", "message": "checkpoint of step 40 is safe"}\n'
        '{"kind": "loaded", "message": "loaded in 1 s, resumed from step 20"}\n'
        '{"kind": "checkpoint_damaged", "message": "a damaged checkpoint"}\n')
    (tmp_path / "history.jsonl").write_text('{"step": 1}\n{"step": 1}\n')
    (tmp_path / "ckpt-000000000040").mkdir()
    lost, damaged, history, unreadable = kills.faults_of(tmp_path, 2)
    assert lost.startswith("step 40 was announced, and then") and "damaged" in damaged
    assert history == "its history has 2 lines" and "manifest" in unreadable


def test_growth_is_told_from_noise_and_from_another_process(tmp_path: Path) -> None:
    grows = [[(float(t), 100.0 * life + t / 36 + (-1) ** t) for t in range(100)] for life in range(3)]
    slope, seen = growth.slope(grows)
    assert slope == pytest.approx(100, rel=0.05) and seen == 297


def test_what_befalls_a_worker_from_within_counts_when_it_has_happened(tmp_path: Path) -> None:
    script = tmp_path / "faults" / "script.json"
    w = within.Within(script, random.Random(1))
    w.befall("a")
    assert json.loads(script.read_text())[1]["job"] == "a" and w.withdraw() == []
    w.befall("b")
    script.with_name("script.json.2.0").touch()
    (name,) = w.withdraw()
    assert name in within.KINDS and json.loads(script.read_text()) == [within.NOTHING]
    assert w.withdraw() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_disk_full_without_inodes_and_read_only_under_a_daemon(tmp_path: Path) -> None:
    if why := why_no_loop(tmp_path):
        pytest.skip(why)
    assert trouble.troubled(tmp_path).wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_soak(tmp_path: Path) -> None:
    row = soak.soak(tmp_path, 3, steps=300, seed=1)
    assert row.wrong == [] and row.trials >= 12, row
