"""I1, I2: a job's adapter is the same bytes alone, in a rotation, at any visit length and cadence, killed anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import kills
import pytest
from boxes import Box, box, digest_of, toy_keys, write_job
from kills import SHAPES


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Each job straight through in one visit, alone on the box: the bytes that every other history must give."""
    root = tmp_path_factory.mktemp("reference")
    digests = {}
    with box(root, "cpu_dies = 1\n") as b:
        b.start()
        for name, keys in SHAPES.items():
            keys = {**keys, "steps_per_visit": 1000, "checkpoint_every": 1000}
            write_job(b.jobs_dir, name, **toy_keys(root, **keys))
            b.wait_done(name)
            digests[name] = digest_of(b.state / "adapters" / name)
    assert len(set(digests.values())) == len(SHAPES)
    return root, digests


def _drop_all(b: Box, inputs: Path) -> None:
    for name, keys in SHAPES.items():
        write_job(b.jobs_dir, name, **toy_keys(inputs, **keys))


def test_in_rotation_it_is_as_alone(tmp_path: Path, reference: tuple[Path, dict[str, str]]) -> None:
    inputs, digests = reference
    with box(tmp_path, "cpu_dies = 3\n") as b:  # two of the four share a die
        b.start()
        _drop_all(b, inputs)
        b.wait_done(*SHAPES)
        assert {n: digest_of(b.state / "adapters" / n) for n in SHAPES} == digests
        for name in SHAPES:
            lines = [json.loads(line) for line in (b.state / "jobs" / name / "history.jsonl").open()]
            assert [line["step"] for line in lines] == list(range(1, 31))


@pytest.mark.timeout(900)
def test_thirty_kills_anywhere_change_no_byte(tmp_path: Path) -> None:
    row = kills.Killer(tmp_path, 30, steps=200, seed=7).run()
    assert row.wrong == [] and row.trials == 30, row
    assert row.counts["inside a save"] >= 5, row
    assert sum(n for whom, n in row.counts.items() if "daemon" in whom) >= 2, row


def test_sigterm_loses_no_step(tmp_path: Path) -> None:
    with box(tmp_path, "cpu_dies = 2\n") as b:
        for name in ("a", "b"):
            keys = toy_keys(tmp_path, max_steps=5000, checkpoint_every="1h", steps_per_visit="auto", visit_seconds=30.0)
            write_job(b.jobs_dir, name, **keys)
        b.start()
        b.wait(lambda s: len(s.jobs) == 2 and all(j.step >= 5 for j in s.jobs), "progress")
        assert b.stop() == 0
        done = {n: sum(1 for _ in (b.state / "jobs" / n / "history.jsonl").open()) for n in ("a", "b")}
        b.start()
        for name in ("a", "b"):
            j = b.wait_job(name, lambda j: j.state == "running")
            assert j.last_checkpoint_step == done[name] >= 5
