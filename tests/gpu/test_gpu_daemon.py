"""The real daemon on a CUDA die: four jobs in rotation, killed and resumed, come to the same bytes as alone."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from boxes import Box, box, digest_of, toy_keys, write_job
from toys import make_data, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

STEPS = 50
JOBS = {
    "a": {"seed": 1, "lora_dropout": 0.0},
    "b": {"seed": 2, "steps_per_visit": 1, "checkpoint_every": 5},
    "c": {"seed": 3, "quantize": True},
    "d": {"seed": 4, "method": "full", "lr": 0.001, "weight_decay": 0.1, "steps_per_visit": 5},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_model(root / "model", hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=320)
    make_data(root / "data.jsonl", rows=64)
    return root


def one_die(device: str) -> str:
    return f'jobs_per_die = 4\nhang_seconds = 120\n[[lane]]\ndies = ["{device}"]\n'


def keys(inputs: Path, name: str, **more: object) -> dict:
    return {**toy_keys(inputs, max_steps=STEPS, lora_rank=16, batch_size=2), **JOBS[name], **more}


def digests(b: Box) -> dict[str, str]:
    return {name: digest_of(b.state / "adapters" / name) for name in JOBS}


@pytest.fixture(scope="module")
def straight(inputs: Path, device: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each job in one visit, with nobody else on the die."""
    with box(tmp_path_factory.mktemp("straight"), one_die(device)) as b:
        b.start()
        for name in JOBS:
            write_job(b.jobs_dir, name, **keys(inputs, name, steps_per_visit=1000, checkpoint_every=1000))
            b.wait_done(name)
        return digests(b)


def test_four_jobs_in_rotation_are_as_alone(inputs: Path, device: str, straight: dict[str, str], tmp_path: Path,
                                            row) -> None:
    with box(tmp_path, one_die(device)) as b:
        b.start()
        start = time.monotonic()
        for name in JOBS:
            write_job(b.jobs_dir, name, **keys(inputs, name))
        b.wait_done(*JOBS)
        took = time.monotonic() - start
        assert digests(b) == straight
    row(f"four jobs in rotation on {device}, {4 * STEPS} steps", f"{took:.1f} s, loading included",
        "adapters bitwise as alone: yes")


def test_killed_and_resumed_they_are_as_if_nothing_had_been(inputs: Path, device: str, straight: dict[str, str],
                                                            tmp_path: Path, row) -> None:
    chance, kills = random.Random(3), 0
    with box(tmp_path, one_die(device)) as b:
        for name in JOBS:
            write_job(b.jobs_dir, name, **keys(inputs, name))
        b.start()
        for ahead in (8, 16, 24, 32):
            b.wait(lambda s, ahead=ahead: len(s.jobs) == len(JOBS) and all(  # type: ignore[misc]
                j.step >= min(ahead, STEPS - 1) or j.state == "done" for j in s.jobs), "progress")
            pids = b.worker_pids()
            if pids and chance.random() < 0.5:
                os.kill(pids[0], signal.SIGKILL)
            else:
                b.kill()
                b.start()
            kills += 1
        b.wait_done(*JOBS)
        assert digests(b) == straight
    row(f"{kills} SIGKILLs of daemon or worker", "adapters identical", "bitwise as straight through: yes")
