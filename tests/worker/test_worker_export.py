"""rrd.worker.export: which checkpoint an export takes, and whom it blames."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rrd import checkpoint
from rrd.errors import DiskTrouble
from rrd.job import JOB_FILE
from rrd.train.state import TENSORS
from rrd.worker import export

EMPTY = b"\x02\0\0\0\0\0\0\0{}"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a job with checkpoints of steps 10, 20 and 30, none of which holds a tensor."""
    directory = tmp_path / "good"
    directory.mkdir()
    (directory / JOB_FILE).write_text('model = "/m"\ndata = "/d.txt"\n')
    for step in (10, 20, 30):
        checkpoint.commit(directory, job="good", step=step, identity="i", files={TENSORS: [EMPTY]})
    monkeypatch.setattr(export, "_write", lambda *_, **__: [])
    return directory


def damage(job: Path, step: int) -> None:
    (job / checkpoint.name_of(step) / TENSORS).write_bytes(EMPTY[:-1] + b"!")


def test_a_damaged_newer_checkpoint_is_said_not_passed_over_in_silence(
        job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(job, 30)
    damage(job, 20)
    assert export.main([str(job), str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/out: step 10\n"
    first, second = err.splitlines()
    assert first.startswith("the checkpoint of step 30 is damaged and was skipped: ") and "of step 20 is" in second
    damage(job, 10)
    assert export.main([str(job), str(tmp_path / "out")]) == 65
    assert capsys.readouterr().err.startswith("rrd: no checkpoint of good can be read: ")


def test_where_one_may_not_write_is_said_before_anything_is_read(
        job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert export.main([str(job), str(tmp_path / "root/x")]) == 77
    assert capsys.readouterr().err == f"rrd: no permission: {tmp_path} (name a directory of your own, or use sudo)\n"


def refuse(error: OSError, wrapped: bool) -> Callable[..., Any]:
    def write(*_: object, **__: object) -> list[str]:
        if wrapped:
            raise DiskTrouble("x", hint="rrd goes on by itself") from error
        raise error
    return write


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("number", "code", "said"), [
    (errno.EACCES, 77, "no permission: /root/x (name"), (errno.ENOSPC, 75, "no space left on device: /root/x (free")])
def test_the_systems_refusals_are_one_sentence(
        job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrapped: bool,
        number: int, code: int, said: str) -> None:
    monkeypatch.setattr(export, "_write", refuse(OSError(number, os.strerror(number), "/root/x"), wrapped))
    assert export.main([str(job), str(tmp_path / "out")]) == code
    assert capsys.readouterr().err.startswith(f"rrd: {said}")
