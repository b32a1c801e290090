"""rrd.worker.resident: getting the job's directory for oneself. (Loading and saving: test_exact.py.)"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import IO

import pytest
import torch

from rrd import checkpoint, durable
from rrd.errors import DiskTrouble, TryLater
from rrd.job import JobSpec
from rrd.train.state import STATE
from rrd.worker import resident


def test_a_lock_that_a_dying_worker_holds_is_waited_for_with_signs_of_life(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[IO[bytes]] = [durable.lock(tmp_path / "lock", what="x")]
    said: list[str] = []

    def alive(what: str, share: float) -> None:
        said.append(what)
        if len(said) == 3:
            held.pop().close()

    monkeypatch.setattr(resident, "LOCK_SECONDS", 60.0)
    with resident._take_lock(tmp_path, alive):
        assert said == ["waiting for the job's lock"] * 3
        with pytest.raises(TryLater):
            durable.lock(tmp_path / "lock", what="x")


def test_a_lock_that_stays_taken_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "LOCK_SECONDS", 0.1)
    with durable.lock(tmp_path / "lock", what="x"), pytest.raises(TryLater, match="is in use by another process"):
        resident._take_lock(tmp_path, lambda what, share: None)


def test_a_directory_that_the_disk_has_no_room_for_is_the_disks_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    def no_room(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(durable, "make_dir", no_room)
    with pytest.raises(DiskTrouble, match=r"the disk is full: cannot write .*/a"):
        resident._take_lock(tmp_path / "a", lambda what, share: pytest.fail("it waits"))


def test_a_lock_that_cannot_be_made_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(DiskTrouble):
        resident._take_lock(tmp_path, lambda what, share: pytest.fail("it waits"))


@pytest.mark.parametrize(("dtype", "stored", "compute"), [
    ("auto", "float32", "float32"), ("bfloat16", "bfloat16", "float32"), ("bfloat16", "bfloat16", "bfloat16")])
def test_what_a_die_computes_in_is_measured_once_and_then_read_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, stored: str, compute: str
) -> None:
    """Measured again it might turn out otherwise, and the job could not go on with the same numbers."""
    monkeypatch.setattr(resident.dtypes, "good_at_bf16", lambda device: compute == "float32")
    state = json.dumps({"identity": {"dtype": stored, "compute": compute}}).encode()
    checkpoint.commit(tmp_path, job="a", step=3, identity="i", files={STATE: [state]})
    spec = JobSpec(model="/m", data="/d", dtype=dtype)
    got = resident._dtypes_of(spec, torch.device("cpu"), tmp_path)
    assert got == (getattr(torch, stored), getattr(torch, compute))
