"""rrd doctor: each fault of a box is one sentence with a fix, and a box in order is said to be."""

from __future__ import annotations

import json
import os
import socket
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from toys import write_job

from rrd.boards import Board
from rrd.cli import checkup, hardware
from rrd.cli.app import app
from rrd.cli.checkup import Finding, Patient, examine, read_jobs
from rrd.cli.host import Host, Reader
from rrd.config import Config

K80 = tuple(Board(f"0000:{n:02x}:00.0", 0x102D, "Tesla K80", 37, "nvidia") for n in (5, 6))
P40 = (Board("0000:05:00.0", 0x1B38, "Tesla P40", 61, "nvidia"),)
OLD_TORCH = {"version": "2.0.1", "cuda": "11.7", "archs": ["sm_37", "sm_50", "sm_60"], "dies": [["Tesla K80", [3, 7]]]}
NEW_TORCH = {"version": "2.13.0", "cuda": "13.0", "archs": ["sm_75", "sm_80", "sm_90"], "dies": []}
UNIT = {"LoadState": "loaded", "ActiveState": "active", "User": "", "ProtectSystem": "strict", "ProtectHome": "yes",
        "PrivateTmp": "yes", "StateDirectory": "rrd", "ReadWritePaths": ""}
TWO_DIES = {"lane": [{"name": "k80", "dies": ["cuda:0", "cuda:1"]}]}


class MadeUp(Host):
    """A machine as a test wants it."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(environ=facts.pop("environ", {}))
        self.facts = {"boards": [], "torch": {"version": "2.13.0", "cuda": None, "archs": [], "dies": []}, "unit": {},
                      "driver": "470.256.02", "uvm": True, "free": 100 << 30, "files": 10**6, "kind": "ext4",
                      "now": 2e9, "synchronized": True, **facts}

    boards = property(lambda self: list(self.facts["boards"]))  # type: ignore[assignment]
    torch = property(lambda self: self.facts["torch"])  # type: ignore[assignment]
    unit = property(lambda self: self.facts["unit"])  # type: ignore[assignment]

    def driver_version(self) -> str:
        return str(self.facts["driver"])

    def has_uvm(self) -> bool:
        return bool(self.facts["uvm"])

    def statvfs(self, path: Path) -> Any:
        return types.SimpleNamespace(f_bavail=self.facts["free"], f_frsize=1, f_files=10**6,
                                     f_favail=self.facts["files"])

    def filesystem(self, path: Path) -> str:
        return str(self.facts["kind"])

    def now(self) -> float:
        return float(self.facts["now"])

    def synchronized(self) -> bool | None:
        found: bool | None = self.facts["synchronized"]
        return found

    def reader(self, user: str) -> Reader | None:
        return None


def patient(tmp_path: Path, config: dict[str, Any] | None = None, **facts: Any) -> Patient:
    (tmp_path / "jobs.d").mkdir(exist_ok=True)
    run = "/run/rrd" if "unit" in facts else tmp_path / "run"
    made = Config.model_validate({"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", "run_dir": run,
                                  "jobs_dir": tmp_path / "jobs.d", "cpu_dies": 2, **(config or {})})
    p = Patient(made, MadeUp(**facts))
    read_jobs(p)
    return p


def find(p: Patient, check: str) -> list[Finding]:
    every = {**checkup.CHECKS, **hardware.CHECKS}
    return list(examine(p, {check: every[check]}))


def test_a_box_of_cores_is_well(tmp_path: Path) -> None:
    p = patient(tmp_path)
    found = list(examine(p, {**checkup.CHECKS, **hardware.CHECKS}))
    assert [f for f in found if f.level == "bad"] == []
    assert {f.check for f in found if f.level == "warn"} <= {"daemon"}


@pytest.mark.parametrize(("check", "config", "facts", "says", "fix"), [
    ("torch", TWO_DIES, {"boards": K80, "torch": NEW_TORCH},
     "sm_37 (Tesla K80) is not in this torch 2.13.0 with CUDA 13.0 (sm_75 sm_80 sm_90)",
     "pip install 'torch==2.0.1' 'numpy<2', on Python 3.10 to 3.11"),
    ("torch", TWO_DIES, {"boards": P40, "torch": NEW_TORCH}, "sm_61 (Tesla P40) is not in this torch",
     "rrd-setup --torch p40"),
    ("torch", TWO_DIES, {"boards": K80}, "torch 2.13.0 for CPUs, and rrd.toml names CUDA dies", "--torch k80"),
    ("torch", {}, {"torch": {"error": "No module named torch"}}, "torch cannot be imported: No module", "--torch cpu"),
    ("dies", {"lane": [{"dies": ["cuda:2"]}]}, {"boards": K80}, "names cuda:2, and this box has 2 NVIDIA chips",
     "lspci"),
    ("driver", TWO_DIES, {"boards": K80, "driver": ""}, "NVIDIA's driver is not loaded", "branch 470"),
    ("driver", TWO_DIES, {"boards": K80, "driver": "550.54.14"}, "550.54.14 knows no Kepler chips", "branch 470"),
    ("driver", TWO_DIES, {"boards": [K80[0]._replace(driver="nouveau")]}, "driver nouveau holds the chips", "install"),
    ("uvm", TWO_DIES, {"boards": K80, "uvm": False}, "nvidia_uvm is not loaded", "modprobe nvidia_uvm"),
    ("disk", {}, {"free": 100 << 20}, "100 MiB free for state_dir", "free some"),
    ("disk", {}, {"files": 3}, "no more files fit where", "free some"),
    ("clock", {}, {"now": 1e9}, "the clock is behind by at least", "timedatectl set-ntp true"),
    ("daemon", {}, {"unit": {**UNIT, "ActiveState": "failed"}}, "the service rrd has failed", "systemctl status rrd"),
    ("gate", {"lane": [{"dies": ["cpu"], "gate": {"kind": "command", "acquire": ["/no/swap"], "release": ["/no/s"]}}]},
     {}, "its gate's program /no/swap cannot be run", "[lane.gate]"),
    ("gate", {"lane": [{"dies": ["cpu"], "gate": {"kind": "socket", "socket": "/no/gate.sock"}}]}, {},
     "its gate at /no/gate.sock does not answer: no such file", "rrd-gate.socket"),
])
def test_what_will_not_work_is_said_with_what_to_do(tmp_path: Path, check: str, config: dict[str, Any],
                                                    facts: dict[str, Any], says: str, fix: str) -> None:
    name = "gates" if check == "gate" else check
    bad = [f for f in find(patient(tmp_path, config, **facts), name) if f.level == "bad"]
    assert bad and says in bad[0].sentence and fix in bad[0].fix, bad


@pytest.mark.parametrize(("check", "config", "facts", "says"), [
    ("dies", {}, {"boards": K80}, "this box has 2 x Tesla K80 (sm_37), and rrd.toml uses none"),
    ("disk", {}, {"free": 2 << 30}, "2.0 GiB free"),
    ("filesystem", {}, {"kind": "tmpfs"}, "is on tmpfs, which is gone after a reboot"),
    ("filesystem", {}, {"kind": "nfs4"}, "whose locks and syncs are not those of a local disk"),
    ("clock", {}, {"synchronized": False}, "not kept right by the network"),
    ("order", {}, {"boards": [*K80, *P40]}, "CUDA_DEVICE_ORDER is not PCI_BUS_ID"),
    ("order", {}, {"boards": K80, "environ": {"CUDA_VISIBLE_DEVICES": "1"}}, "CUDA_VISIBLE_DEVICES hides dies"),
    ("daemon", {}, {}, "rrd is not running"),
])
def test_what_is_doubtful_is_said(tmp_path: Path, check: str, config: dict[str, Any], facts: dict[str, Any],
                                  says: str) -> None:
    doubts = [f for f in find(patient(tmp_path, config, **facts), check) if f.level == "warn"]
    assert doubts and says in doubts[0].sentence and doubts[0].fix, doubts


def test_a_k80_box_with_its_torch_is_well(tmp_path: Path) -> None:
    p = patient(tmp_path, TWO_DIES, boards=K80, torch=OLD_TORCH)
    assert {f.level for name in hardware.CHECKS for f in find(p, name)} == {"ok"}


def test_paths_that_the_unit_forbids_are_found_before_a_job_is(tmp_path: Path) -> None:
    (tmp_path / "jobs.d").mkdir()
    write_job(tmp_path / "jobs.d", "a", model="/home/me/model", data="/tmp/data.jsonl", output="/srv/adapters/a")
    p = patient(tmp_path, unit=UNIT)
    (out,) = find(p, "outputs")
    assert (out.level, out.sentence) == ("bad", "job a: its output is in /srv, which the unit makes read-only")
    assert "[Service] and ReadWritePaths=/srv" in out.fix
    model, data = find(p, "inputs")
    assert "the unit hides /home" in model.sentence and "ProtectHome=read-only" in model.fix
    assert "the unit hides /tmp" in data.sentence
    allowed = patient(tmp_path, unit={**UNIT, "ReadWritePaths": "/srv/adapters", "ProtectHome": "read-only"})
    assert find(allowed, "outputs")[0].level == "ok"
    assert "is not there" in find(allowed, "inputs")[0].sentence


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for another user")
def test_root_finds_out_what_the_daemons_user_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (tmp_path / "jobs.d").mkdir()
    write_job(tmp_path / "jobs.d", "a", model=str(secret), data=str(secret))
    p = patient(tmp_path)
    monkeypatch.setattr(p.host, "reader", lambda user: Host().reader("nobody"))
    (found,) = find(p, "inputs")
    assert found.level == "bad" and "cannot be read by nobody" in found.sentence


def test_a_gate_that_answers_is_well(tmp_path: Path) -> None:
    path = str(tmp_path / "gate.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def answer() -> None:
            peer, _ = listening.accept()
            with peer:
                asked = json.loads(peer.recv(4096))
                peer.sendall(json.dumps({"id": asked["id"], "ok": False, "reason": "no such verb"}).encode() + b"\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (found,) = find(patient(tmp_path, {"lane": [{"dies": ["cpu"], "gate": {"kind": "socket", "socket": path}}]}),
                        "gates")
        thread.join()
    assert (found.level, found.sentence) == ("ok", f"lane 0: {path} answers")


def test_bad_job_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.d").mkdir()
    write_job(tmp_path / "jobs.d", "a", model="/m", data="/d", lora_rang=3)
    (found,) = find(patient(tmp_path), "spool")
    assert found.level == "warn" and "a.toml:3: unknown key `lora_rang`" in found.sentence


def test_a_check_that_fails_itself_hides_no_other(tmp_path: Path) -> None:
    def broken(p: Patient) -> Any:
        raise ZeroDivisionError("oh")

    found = list(examine(patient(tmp_path), {"broken": broken, "python": checkup.python}))
    assert [f.check for f in found] == ["broken", "python"] and "ZeroDivisionError: oh" in found[0].sentence


def test_the_command_says_it_for_people_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ["--state", str(tmp_path / "state")]
    shown = CliRunner().invoke(app, ["doctor", *state])
    assert "python: Python 3." in shown.output and "torch: torch 2." in shown.output
    monkeypatch.setattr(Host, "torch", NEW_TORCH)  # to import it once is enough
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", *state]).stdout)
    assert {"check", "level", "sentence", "fix"} == set(found[0])
    bad = tmp_path / "rrd.toml"
    bad.write_text("cpu_dyes = 3\n")
    refused = CliRunner().invoke(app, ["doctor", "-q", "--skip", "daemon", "-c", str(bad)])
    assert refused.exit_code == 78
    assert "daemon" not in refused.output
    assert CliRunner().invoke(app, ["doctor", "--skip", "demon", *state]).exit_code == 2
    assert "rrd.toml:1: unknown key `cpu_dyes`" in refused.output and "did you mean `cpu_dies`?" in refused.output
