"""rrd-setup: which Python, which torch, from where. (What it makes of them is tried in tests/systemd.)"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rrd.boards import FLAVOURS

SCRIPT = Path(__file__).parent.parent / "packaging" / "bin" / "rrd-setup"


@pytest.fixture
def setup() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), "--dry-run", "--wheel", "/w/rrd.whl", *words],
                          capture_output=True, text=True, check=False)


def test_a_dry_run_says_what_pip_would_be_asked_for(tmp_path: Path, setup: dict[str, Any]) -> None:
    conf = tmp_path / "setup.conf"
    conf.write_text(f"# mine\nTORCH=p40\nPYTHON={sys.executable}\n")
    if Path(sys.executable).resolve().is_relative_to("/root"):
        conf.write_text("TORCH=p40\n")
    done = run("--conf", str(conf))
    if done.returncode != 0:
        pytest.skip(f"no Python that a service can reach: {done.stderr}")
    assert "torch for p40 (CUDA 12.6; the last with kernels for Maxwell" in done.stdout
    assert "'torch>=2.4,<2.15' --extra-index-url https://download.pytorch.org/whl/cu126" in done.stdout
    mirrored = run("--conf", str(conf), "--index-url", "http://mirror/simple")
    assert "download.pytorch.org" not in mirrored.stdout, "a mirror is asked for everything"


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path) -> None:
    conf = tmp_path / "setup.conf"
    for text, says in (("TORCH=k81\n", "there is no torch called k81"), ("#\nTROCH=cpu\n", f"{conf}:2: not under")):
        conf.write_text(text)
        done = run("--conf", str(conf))
        assert done.returncode == 1 and says in done.stderr and "hint: " in done.stderr


def test_a_python_that_is_too_new_or_out_of_reach_is_not_taken(
        setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = setup["find_python"].__globals__
    monkeypatch.setitem(names, "shutil", type("Which", (), {"which": staticmethod(lambda name: name)}))
    pythons = {"/usr/bin/python3": (3, 13), "python3.11": (3, 11), "/root/python3.10": (3, 10)}
    monkeypatch.setitem(names, "version_of", lambda p: next((v for n, v in pythons.items() if p.endswith(n)), (0, 0)))
    assert setup["find_python"]("", FLAVOURS["cpu"]) == "/usr/bin/python3"
    assert setup["find_python"]("", FLAVOURS["k80"]) == "python3.11"
    for named in ("/usr/bin/python3", "/root/python3.10"):
        with pytest.raises(SystemExit):
            setup["find_python"](named, FLAVOURS["k80"])
        assert f"{named} is not one of 3.10 to 3.11 that a service can reach" in capsys.readouterr().err


def test_wheels_from_a_directory_need_no_network(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def called(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(argv)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setitem(setup["pip"].__globals__, "subprocess", type("S", (), {"run": staticmethod(called)}))
    wanted = ["/w/rrd.whl", "torch>=2.4", "--extra-index-url", "https://x"]
    setup["pip"](["pip", "install"], {"WHEELHOUSE": "/srv/wheels", "PIP_ARGUMENTS": "--proxy 'a b'"}, wanted)
    assert seen[0][-7:] == ["--no-index", "--find-links", "/srv/wheels", "--proxy", "a b", "/w/rrd.whl", "torch>=2.4"]


@pytest.mark.parametrize("cut_off", [False, True])
def test_an_environment_that_cannot_be_made_leaves_the_old_one(tmp_path: Path, cut_off: bool) -> None:
    """Another torch, and no network: the box trains on with what it has, also if a run before was killed half-way."""
    venv, wheels = tmp_path / "venv", tmp_path / "wheels"
    wheels.mkdir()
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("old")
    (venv / "rrd-setup.json").write_text('{"torch": "k80", "python": [3, 8]}')
    if cut_off:
        venv.rename(tmp_path / "venv.old")
        venv.mkdir()
        (venv / "rrd-setup.json").write_text("")  # as after a power cut
    done = subprocess.run([sys.executable, str(SCRIPT), "--venv", str(venv), "--torch", "cpu", "--wheelhouse",
                           str(wheels), "--wheel", str(wheels / "rrd-1-py3-none-any.whl"), "--conf",
                           str(tmp_path / "none"), "--no-doctor"], capture_output=True, text=True, check=False)
    if "can reach" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1, done.stdout
    assert "pip could not install what rrd needs" in done.stderr and f"{venv} is as it was" in done.stdout
    assert (venv / "bin" / "python").read_text() == "old"
    assert list(tmp_path.glob("venv*")) == [venv]


def test_a_full_disk_is_said_before_anything_is_touched(setup: dict[str, Any], tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    free = shutil.disk_usage(tmp_path).free
    setup["needs_room"](tmp_path / "not" / "yet", free // 2)
    with pytest.raises(SystemExit):
        setup["needs_room"](tmp_path / "not" / "yet", 2 * free)
    said = capsys.readouterr().err
    assert f"MiB are free in {tmp_path}, and this takes " in said and "nothing was changed" in said


def test_kernels_that_cannot_be_built_now_cost_a_line(
        tmp_path: Path, setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(setup["build_kernels"].__globals__, "CACHE", tmp_path)
    setup["build_kernels"](tmp_path / "no-venv")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rrd-setup: no kernels for CPU dies yet: ")
