"""I1, I2: a job's adapter is the same bytes alone, in a rotation, at any visit length and cadence, killed anywhere."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from boxes import Box, box, toy_keys, write_job

SHAPES = {
    "a": {"seed": 1},
    "b": {"seed": 2, "steps_per_visit": 1, "checkpoint_every": 3, "batch_size": 2},
    "c": {"seed": 3, "steps_per_visit": "auto", "visit_seconds": 0.05, "checkpoint_every": "1s"},
    "d": {"seed": 4, "method": "full", "lr": 0.001, "weight_decay": 0.1, "steps_per_visit": 5},
}


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
            digests[name] = _digest(b, name)
    assert len(set(digests.values())) == len(SHAPES)
    return root, digests


def _digest(b: Box, name: str) -> str:
    import hashlib

    at = b.state / "adapters" / name
    file = at / ("model.safetensors" if SHAPES[name].get("method") == "full" else "adapter_model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _drop_all(b: Box, inputs: Path) -> None:
    for name, keys in SHAPES.items():
        write_job(b.jobs_dir, name, **toy_keys(inputs, **keys))


def campaign_steps(kills: int) -> dict[str, int]:
    """Steps of each job, so many that a quick machine has jobs left to kill: b saves every 3 steps and is slow."""
    return {name: 30 + kills * (10 if name == "b" else 30) for name in SHAPES}


def _drop_campaign(b: Box, inputs: Path, kills: int) -> None:
    for name, steps in campaign_steps(kills).items():
        write_job(b.jobs_dir, name, **toy_keys(inputs, **{**SHAPES[name], "max_steps": steps}))


def test_in_rotation_it_is_as_alone(tmp_path: Path, reference: tuple[Path, dict[str, str]]) -> None:
    inputs, digests = reference
    with box(tmp_path, "cpu_dies = 3\n") as b:  # two of the four share a die
        b.start()
        _drop_all(b, inputs)
        b.wait_done(*SHAPES)
        assert {n: _digest(b, n) for n in SHAPES} == digests
        for name in SHAPES:
            lines = [json.loads(line) for line in (b.state / "jobs" / name / "history.jsonl").open()]
            assert [line["step"] for line in lines] == list(range(1, 31))


def kill_campaign(b: Box, inputs: Path, kills: int, seed: int) -> dict[str, int]:
    """Run the jobs of SHAPES to the end through ``kills`` SIGKILLs of the daemon, a worker, or both; counts them.

    Every job has made a new step before the next kill: three deaths in a row without one, and a job is given up.
    """
    chance = random.Random(seed)
    done = {"daemon": 0, "worker": 0, "both": 0, "in a save": 0}
    _drop_campaign(b, inputs, kills)
    b.start()
    best = dict.fromkeys(SHAPES, 0)
    while sum(done[k] for k in ("daemon", "worker", "both")) < kills:
        whom, ahead = chance.choice(["daemon", "worker", "worker", "both"]), chance.randint(1, 3)
        s = b.wait(lambda s, ahead=ahead, best=best: len(s.jobs) == len(SHAPES) and all(  # type: ignore[misc]
            j.state == "done" or j.step >= best[j.id] + ahead for j in s.jobs), "progress")
        assert any(j.state != "done" for j in s.jobs), f"all were done after {done}: give them more steps"
        best = {j.id: max(best[j.id], j.step) for j in s.jobs}
        if chance.random() < 0.4 and _wait_for_a_save(b):
            done["in a save"] += 1
        pids = b.worker_pids()
        if whom in ("worker", "both") and pids:
            os.kill(chance.choice(pids), signal.SIGKILL)
        if whom in ("daemon", "both"):
            b.kill()
            b.start()
        done[whom] += 1
    b.wait_done(*SHAPES)
    return done


def _wait_for_a_save(b: Box) -> bool:
    """Wait until a checkpoint is being written somewhere; False if none is soon."""
    import time

    end = time.monotonic() + 3
    while time.monotonic() < end:
        if any(b.state.glob("jobs/*/.tmp-*")):
            return True
    return False


@pytest.mark.timeout(600)
def test_thirty_kills_anywhere_change_no_byte(tmp_path: Path, reference: tuple[Path, dict[str, str]]) -> None:
    inputs, _ = reference
    kills = 30
    with box(tmp_path / "straight", "cpu_dies = 4\n") as b:
        b.start()
        _drop_campaign(b, inputs, kills)
        b.wait_done(*SHAPES)
        digests = {n: _digest(b, n) for n in SHAPES}
    with box(tmp_path / "killed", "cpu_dies = 3\n") as b:
        done = kill_campaign(b, inputs, kills, seed=7)
        assert {n: _digest(b, n) for n in SHAPES} == digests, done
        for name in SHAPES:
            lines = [json.loads(line) for line in (b.state / "jobs" / name / "history.jsonl").open()]
            assert [line["step"] for line in lines] == list(range(1, campaign_steps(kills)[name] + 1))
        assert done["daemon"] + done["both"] >= 5, done
        assert done["worker"] >= 5, done


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
