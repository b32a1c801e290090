"""A state directory on another box, under another torch or number of threads, and a base that changes under its job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from boxes import Box, box, digest_of, toy_keys, write_job
from safetensors.torch import load_file, save_file

from rrd import checkpoint
from rrd.train.state import STATE, TENSORS


def straight(tmp_path: Path, keys: dict[str, Any]) -> str:
    """The digest of the adapter of a job that nothing befalls."""
    with box(tmp_path / "straight", "cpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "a", **keys)
        b.start()
        b.wait_done("a")
        return digest_of(b.state / "adapters" / "a")


def half_way(b: Box, *names: str) -> None:
    """Train to a checkpoint, and stop there."""
    b.start()
    b.wait(lambda s: len(s.jobs) == len(names) and all((j.last_checkpoint_step or 0) >= 7 for j in s.jobs), "saved")
    assert b.stop() == 0
    assert all(checkpoint.listing(b.state / "jobs" / name)[0][0] < 300 for name in names)


def as_saved_by_another_torch(job_dir: Path) -> None:
    """The newest checkpoint, as the same rrd on another torch would have written it."""
    step, path = checkpoint.listing(job_dir)[0]
    manifest = checkpoint.read_manifest(path)
    state = json.loads(checkpoint.read_bytes(path, manifest, STATE))
    state["identity"]["torch"] = "2.0.1"
    files = {TENSORS: [checkpoint.read_bytes(path, manifest, TENSORS)], STATE: [json.dumps(state).encode()]}
    checkpoint.commit(job_dir, job=manifest.job, step=step, identity=manifest.identity, files=files)


def notes(b: Box, job: str) -> str:
    return "\n".join(json.loads(line)["message"] for line in (b.state / "jobs" / job / "events.jsonl").open()
                     if line.strip() and "job_note" in line)


def test_moved_to_another_machine_exact_refuses_compatible_goes_on_and_both_say_what_changed(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=1000, steps_per_visit=1)
    names = ("exact", "compatible", "torch")
    with box(tmp_path / "here", "cpu_dies = 3\n") as b:
        write_job(b.jobs_dir, "exact", **keys)
        write_job(b.jobs_dir, "compatible", **keys, resume="compatible")
        write_job(b.jobs_dir, "torch", **keys, resume="compatible")
        half_way(b, *names)
        as_saved_by_another_torch(b.state / "jobs" / "torch")
    shutil.copytree(tmp_path / "here" / "state", tmp_path / "there" / "state")
    shutil.copytree(tmp_path / "here" / "jobs.d", tmp_path / "there" / "jobs.d", dirs_exist_ok=True)
    with box(tmp_path / "there", "cpu_dies = 3\nthreads = 2\n") as b:
        b.start(ATEN_CPU_CAPABILITY="default")
        failed = b.wait_state("exact", "failed")
        assert "cannot be continued exactly: " in failed.why and "threads was 1 and is 2" in failed.why
        assert "cpu was " in failed.why and 'resume = "compatible"' in failed.hint
        for job in names[1:]:
            b.wait_job(job, lambda j: j.state == "running" and j.step > 30)
            assert "is continued, but not bit for bit: " in notes(b, job) and "threads was 1 and is 2" in notes(b, job)
        assert "torch was '2.0.1' and is '2." in notes(b, "torch") and "torch was" not in notes(b, "compatible")


@pytest.mark.slow
def test_put_back_as_it_was_it_goes_on_exactly(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=300, steps_per_visit=1)
    wanted = straight(tmp_path, keys)
    with box(tmp_path / "moved", "cpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "a", **keys)
        half_way(b, "a")
        b.configure("cpu_dies = 1\nthreads = 2\n")
        b.start()
        b.wait_state("a", "failed")
        assert b.stop() == 0
        b.configure("cpu_dies = 1\nthreads = 1\n")
        b.start()
        b.wait_state("a", "failed")
        b.ask("restart", job="a")
        b.wait_done("a")
        assert digest_of(b.state / "adapters" / "a") == wanted


def test_a_base_that_changes_under_its_job_is_refused_even_by_a_compatible_one(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=1000, steps_per_visit=1, resume="compatible")
    with box(tmp_path, "cpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "a", **keys)
        half_way(b, "a")
        weights = tmp_path / "model" / "model.safetensors"
        old = weights.read_bytes()
        tensors = load_file(weights)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, weights, metadata={"format": "pt"})
        b.start()
        failed = b.wait_state("a", "failed")
        assert failed.why.endswith(f"was trained on other weights than are in {tmp_path / 'model'} now")
        assert "put those back" in failed.hint
        weights.write_bytes(old)
        b.ask("reload")
        b.wait_job("a", lambda j: j.state == "running" and j.step > 7)


def test_model_and_data_may_move_and_must_stay_the_same(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=300, steps_per_visit=1)
    wanted = straight(tmp_path, keys)
    with box(tmp_path / "moved", "cpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "a", **keys)
        half_way(b, "a")
        model = Path(str(keys["model"])).rename(tmp_path / "new-model")
        data = Path(str(keys["data"])).rename(tmp_path / "new-data.jsonl")
        other = tmp_path / "other.jsonl"
        other.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        b.start()
        b.wait_state("a", "failed")
        write_job(b.jobs_dir, "a", **{**keys, "model": str(model), "data": str(other)})
        failed = b.wait_job("a", lambda j: j.state == "failed" and "other text" in j.why)
        assert str(other) in failed.why and "--fresh" in failed.hint
        write_job(b.jobs_dir, "a", **{**keys, "model": str(model), "data": str(data)})
        b.wait_job("a", lambda j: j.state != "failed")
        b.wait_done("a")
        assert digest_of(b.state / "adapters" / "a") == wanted
