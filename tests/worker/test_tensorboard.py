"""TensorBoard's event files, read back by TensorBoard itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from boxes import box, toy_keys, write_job
from pasts import make_past

from rrd.history import read
from rrd.worker.tensorboard import DIRECTORY, EventFile, crc32c


def scalars(job_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard sees in a job's directory."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed (pip install tensorboard): its files were not read back")
    a: Any = event_accumulator.EventAccumulator(str(job_dir / DIRECTORY))
    a.Reload()
    return {tag: [(e.step, e.value) for e in a.Scalars(tag)] for tag in a.Tags()["scalars"]}


def test_the_checksum_is_castagnoli_s() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_tensorboard_reads_the_whole_history(tmp_path: Path) -> None:
    job_dir = make_past(tmp_path / "code", 300, torn=True)
    events = EventFile(job_dir)
    events.add({"step": 301, "loss": 1.25, "lr": 1e-4, "grad_norm": None, "tokens": 8, "seconds": 0.1, "time": 1.0})
    events.close()
    seen, h = scalars(job_dir), read(job_dir)
    assert [s for s, _ in seen["train/loss"]] == list(range(1, 302)) and seen["train/loss"][-1][1] == 1.25
    assert seen["train/loss"][6][1] == pytest.approx(h.steps[6].loss)
    assert [s for s, _ in seen["eval/loss"]] == [s for s, _ in h.evals] and len(seen["train/grad_norm"]) == 300


def test_a_load_begins_a_new_file(tmp_path: Path) -> None:
    job_dir = make_past(tmp_path / "code", 50)
    EventFile(job_dir).close()
    EventFile(job_dir).close()
    assert len(list((job_dir / DIRECTORY).iterdir())) == 1
    assert len(scalars(job_dir)["train/loss"]) == 50


def test_a_place_that_cannot_be_written_costs_the_job_nothing(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).write_text("in the way")
    events = EventFile(tmp_path)
    events.add({"step": 1, "loss": 1.0})
    events.close()


def test_a_job_that_asks_for_it_has_it_even_when_killed(tmp_path: Path) -> None:
    with box(tmp_path, "cpu_dies = 1\n") as b:
        b.start()
        write_job(b.jobs_dir, "a", **toy_keys(tmp_path, tensorboard=True))
        b.wait_job("a", lambda j: j.step > 10)
        b.kill()
        b.start()
        b.wait_done("a")
        job_dir = b.state / "jobs" / "a"
        shutil.copytree(job_dir, tmp_path / "copy")
    loss = scalars(tmp_path / "copy")["train/loss"]
    assert [s for s, _ in loss] == list(range(1, 31))
    assert [v for _, v in loss] == pytest.approx([y for _, y in read(job_dir).losses()])
