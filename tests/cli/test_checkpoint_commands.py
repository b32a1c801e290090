"""rrd checkpoints, verify and export, on real checkpoints of bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Rrd

from rrd import checkpoint


@pytest.fixture
def code(state: Path) -> Path:
    """The directory of the job `code`, with the checkpoints of steps 10, 20 and 30."""
    return make(state, "code", 10, 20, 30)


def make(state: Path, job: str, *steps: int) -> Path:
    directory = state / "jobs" / job
    directory.mkdir(parents=True)
    for step in steps:
        checkpoint.commit(directory, job=job, step=step, identity="x", files={"state": [bytes(200_000)], "m": [b"{}"]})
    return directory


def damage(directory: Path, step: int) -> None:
    """One bit of the largest file, its size unchanged."""
    file = directory / checkpoint.name_of(step) / "state"
    data = bytearray(file.read_bytes())
    data[100_000] ^= 1
    file.write_bytes(data)


def test_listing_newest_first(rrd: Rrd, code: Path) -> None:
    lines = rrd("checkpoints", "code").stdout.splitlines()
    assert lines[0].split() == ["JOB", "RESULT", "STEP", "AGE", "SIZE"]
    assert [line.split()[1:3] for line in lines[1:]] == [["ok", "30"], ["ok", "20"], ["ok", "10"]]
    assert lines[1].endswith("195 KiB")
    found = json.loads(rrd("checkpoints", "code", "--json").stdout)
    assert [(f["step"], f["ok"], f["bytes"]) for f in found] == [(30, True, 200_002), (20, True, 200_002),
                                                                (10, True, 200_002)]


def test_listing_shows_a_broken_manifest_and_verify_a_broken_byte(rrd: Rrd, code: Path) -> None:
    damage(code, 20)
    (code / checkpoint.name_of(10) / "MANIFEST.json").unlink()
    listed = {f["step"]: f["ok"] for f in json.loads(rrd("checkpoints", "code", "--json").stdout)}
    assert listed == {30: True, 20: True, 10: False}
    result = rrd("verify", "code")
    assert result.exit_code == 65
    assert [line.split()[1:3] for line in result.stdout.splitlines()[1:]] == [
        ["ok", "30"], ["damaged", "20"], ["damaged", "10"]]
    assert "its sha256 is not the one in the manifest" in result.stdout
    assert result.stderr == "3 checkpoints checked, 2 damaged\n"
    assert len(checkpoint.listing(code)) == 3  # nothing was moved


def test_verify_all(rrd: Rrd, code: Path, state: Path) -> None:
    prose = make(state, "prose", 5)
    make(state, "empty")
    (state / "jobs/.tmp-x").mkdir()
    result = rrd("verify", "--all")
    assert (result.exit_code, result.stderr) == (0, "4 checkpoints checked, all whole\n")
    damage(prose, 5)
    result = rrd("verify", "--all", "--json")
    assert result.exit_code == 65
    assert [(f["job"], f["step"]) for f in json.loads(result.stdout) if not f["ok"]] == [("prose", 5)]


def test_nothing_there(rrd: Rrd, state: Path) -> None:
    assert rrd("verify", "--all").exit_code == 0
    make(state, "empty")
    assert rrd("checkpoints", "empty").stderr == "empty has no checkpoint yet\n"
    assert json.loads(rrd("checkpoints", "empty", "--json").stdout) == []
    assert rrd("verify", "empty").exit_code == 0
    for command in (["checkpoints", "emtpy"], ["verify", "emtpy"], ["export", "emtpy", "out"]):
        result = rrd(*command)
        assert result.exit_code == 4
        assert "did you mean empty?" in result.stderr


# ---- export ------------------------------------------------------------------------------------------------------


class Subprocess:
    """Records what the export was started with."""

    def __init__(self, returncode: int = 0, out: str = "", err: str = "") -> None:
        self.returncode, self.out, self.err, self.args = returncode, out, err, list[str]()

    def __call__(self, args: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.args = args
        return subprocess.CompletedProcess(args, self.returncode, self.out, self.err)


def test_export_starts_the_workers_own(rrd: Rrd, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Subprocess(out="/out: step 20\n", err="a note\n")
    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.chdir(tmp_path)
    result = rrd("export", "code", "out", "--merged", "--step", "20")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "/out: step 20\n", "a note\n")
    assert started.args == [sys.executable, "-m", "rrd.worker.export", str(code), str(tmp_path / "out"), "--merged",
                            "--step", "20"]
    rrd("export", "code", "out", "--format", "rwkv")
    assert started.args[-2:] == ["--format", "rwkv"]
    rrd("export", "code", "out")
    assert started.args[-1] == str(tmp_path / "out")


@pytest.mark.parametrize(("ended", "code_"), [(65, 65), (1, 1), (-9, 1)])
def test_exports_exit_code_is_ours(
        rrd: Rrd, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, code_: int) -> None:
    monkeypatch.setattr(subprocess, "run", Subprocess(ended, err="rrd: no\x1b[2J (do this)\n"))
    result = rrd("export", "code", tmp_path / "out")
    assert result.exit_code == code_
    assert result.stderr.startswith("error: no\\u001b[2J (do this)\n")
    assert ("signal 9" in result.stderr) is (ended == -9)


def test_what_cannot_be_exported(rrd: Rrd, code: Path, state: Path, tmp_path: Path) -> None:
    make(state, "empty")
    assert "empty has no checkpoint yet" in rrd("export", "empty", tmp_path / "out").stderr
    result = rrd("export", "code", tmp_path / "out", "--step", "21")
    assert result.exit_code == 1
    assert result.stderr == "error: code has no checkpoint of step 21\nhint: there are those of step 30, 20, 10\n"
