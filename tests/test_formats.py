"""What an older rrd left on disk is carried on for ever; what a newer one left is refused in words, and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from boxes import Box, box, digest_of

from rrd import checkpoint
from rrd.ledger import FILE, Ledger
from rrd.snapshot import Snapshot
from rrd.states import JobState
from rrd.train.data import Dataset
from rrd.train.prepare import KIND
from rrd.train.sealed import read_seal, verify
from rrd.train.state import STATE, TENSORS, named_parameters

FROZEN = Path(__file__).parent / "data" / "format-1"
JOBS = ("done", "running", "full")


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The frozen box somewhere else, as after a move to another machine."""
    home = tmp_path / "box"
    shutil.copytree(FROZEN, home)
    for file in (*home.glob("jobs.d/*.toml"), *home.glob("state/jobs/*/job.toml")):
        file.write_text(file.read_text().replace("/frozen", str(home)))
        file.chmod(0o640)
    return home


def said(b: Box, job: str) -> list[tuple[str, str]]:
    """(kind, message) of the job's events of this life."""
    lines = (b.state / "jobs" / job / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line]
    return [(e["kind"], e["message"]) for e in events][len(FROZEN_EVENTS[job]):]


FROZEN_EVENTS = {job: (FROZEN / "state/jobs" / job / "events.jsonl").read_text().splitlines() for job in JOBS}


@pytest.mark.parametrize("path", sorted(FROZEN.glob("state/jobs/*/ckpt-*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_every_byte_of_a_frozen_checkpoint_is_read(path: Path) -> None:
    manifest = checkpoint.verify(path)
    state = json.loads(checkpoint.read_bytes(path, manifest, STATE))
    assert state["step"] == manifest.step and manifest.job == path.parent.name
    tensors = named_parameters(memoryview(bytearray(checkpoint.read_bytes(path, manifest, TENSORS))), "frozen")
    assert tensors and all(t.isfinite().all() for t in tensors.values())


def test_the_frozen_ledger_status_and_cache_are_read(tmp_path: Path) -> None:
    shutil.copytree(FROZEN / "state", tmp_path / "state")
    records, faults = Ledger(tmp_path / "state" / "jobs").load()
    assert faults == [] and {k: r.state for k, r in records.items()} == {
        "done": JobState.DONE, "running": JobState.RUNNING, "full": JobState.RUNNING}
    assert records["running"].announced_step == 21
    status = Snapshot.read(json.loads((FROZEN / "run/status/snapshot.json").read_bytes()))
    assert {j.id for j in status.jobs} == set(JOBS)
    (ready,) = FROZEN.glob("cache/data/*/ready")
    verify(ready, seal := read_seal(ready, KIND))
    assert len(Dataset.open(ready)) == seal.facts["samples"] == 12


def test_a_frozen_box_is_carried_on_to_its_end(moved: Path) -> None:
    with box(moved, "cpu_dies = 2\n") as b:
        b.start()
        b.wait_done(*JOBS)
        for job, step in (("running", 21), ("full", 14)):
            assert any(m.endswith(f"resumed from step {step}") for kind, m in said(b, job) if kind == "loaded")
            history = [json.loads(line) for line in (b.state / "jobs" / job / "history.jsonl").open()]
            assert [line["step"] for line in history if "loss" in line] == list(range(1, 31))
        assert all(kind != "loaded" for kind, _ in said(b, "done"))
        wanted = json.loads((FROZEN / "digests.json").read_bytes())
        for job in JOBS:
            same_machine = not any(kind == "job_note" for kind, _ in said(b, job))
            if same_machine:  # or else a note says what is another
                assert digest_of(b.state / "adapters" / job) == wanted[job]
        assert b.stop() == 0


def test_a_newer_checkpoint_is_refused_and_left_as_it_is_and_a_newer_ledger_set_aside(moved: Path) -> None:
    newest = moved / "state/jobs/running/ckpt-000000000021"
    manifest = checkpoint.read_manifest(newest)
    with mock.patch.object(checkpoint, "FORMAT", 2):
        (newest / checkpoint.MANIFEST).write_bytes(manifest.encode())
    ledger = moved / "state/jobs/full" / FILE
    ledger.write_bytes(newer := ledger.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with box(moved, "cpu_dies = 2\n") as b:
        b.start()
        failed = b.wait_state("running", "failed")
        assert failed.why.endswith("MANIFEST.json has format 2, and this rrd knows 1") and "newer" in failed.hint
        assert newest.is_dir()
        b.wait_done("done", "full")
        (aside,) = (moved / "state/jobs/full").glob(".bad-*")
        assert aside.read_bytes() == newer
        assert "ledger.json is of format 2, and this rrd knows 1; it was set aside as .bad-" in b.tail()
