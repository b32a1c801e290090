"""rrd.worker.resident: getting the job's directory for oneself. (Loading and saving: test_exact.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from rrd import durable
from rrd.errors import DiskTrouble, TryLater
from rrd.worker import resident


def test_a_lock_that_a_dying_worker_holds_is_waited_for_with_signs_of_life(tmp_path: Path) -> None:
    held: list[IO[bytes]] = [durable.lock(tmp_path / "lock", what="x")]
    said: list[str] = []

    def alive(what: str, share: float) -> None:
        said.append(what)
        if len(said) == 3:
            held.pop().close()

    with resident._take_lock(tmp_path, alive):
        assert said == ["waiting for the job's lock"] * 3
        with pytest.raises(TryLater):
            durable.lock(tmp_path / "lock", what="x")


def test_a_lock_that_stays_taken_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "LOCK_SECONDS", 0.1)
    with durable.lock(tmp_path / "lock", what="x"), pytest.raises(TryLater, match="is in use by another process"):
        resident._take_lock(tmp_path, lambda what, share: None)


def test_a_lock_that_cannot_be_made_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(DiskTrouble):
        resident._take_lock(tmp_path, lambda what, share: pytest.fail("it waits"))
