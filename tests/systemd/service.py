"""rrd as a service of a machine: how it got there, what tests ask of it, and jobs for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import Machine, NotUp, why_not
from toys import make_data, make_model

from rrd import client
from rrd.errors import RrdError
from rrd.job import to_toml

ROOT = Path(__file__).resolve().parents[2]
VENV = "/usr/lib/rrd/venv"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"{VENV}/lib/{PYTHON}/site-packages"
INPUTS = "/srv/lm"
JOBS, ADAPTERS = "/var/lib/rrd/jobs", "/var/lib/rrd/adapters"
UNIT = "/etc/systemd/system/rrd.service.d"


def why_no_service() -> str:
    """Why rrd cannot be a service of a machine here; empty when it can."""
    return why_not() or ("" if _python() else "a service cannot reach the Python of these tests: it lies below /root "
                         f"or /home, and /usr/bin/{PYTHON} is not there")


def _python() -> str:
    """A Python that a service can reach and that can use what these tests have installed."""
    real = os.path.realpath(sys.executable)
    if not real.startswith(("/root/", "/home/")):
        return real
    system = f"/usr/bin/{PYTHON}"
    return system if os.access(system, os.X_OK) else ""


def environment() -> tuple[dict[str, tuple[str, int]], dict[str, str], dict[Path, str]]:
    """Files, links and binds that make ``VENV`` an environment with all that rrd needs, and without rrd."""
    files = {f"{VENV}/pyvenv.cfg": (f"home = {os.path.dirname(_python())}\n", 0o644),
             f"{SITE}/tests.pth": ("/opt/site-packages\n", 0o644)}
    return files, {f"{VENV}/bin/python": _python()}, {Path(sysconfig.get_path("purelib")): "/opt/site-packages"}


def with_rrd() -> tuple[dict[str, tuple[str, int]], dict[str, str], dict[Path, str]]:
    """The same with the rrd of this checkout, as a wheel would bring it."""
    files, links, binds = environment()
    files[f"{VENV}/bin/rrd"] = (f"#!{VENV}/bin/python\nfrom rrd.cli import main\nmain()\n", 0o755)
    gate = f"#!{VENV}/bin/python -I\nimport sys\nfrom rrd.helper.main import main\nsys.exit(main())\n"
    files[f"{VENV}/bin/rrd-gate"] = (gate, 0o755)
    binds |= {ROOT / "rrd": f"{SITE}/rrd", ROOT / "kernels": f"{SITE}/kernels",
              ROOT / "units": f"{VENV}/share/rrd/units", ROOT / "etc": f"{VENV}/share/rrd/etc",
              ROOT / "packaging/completion": f"{VENV}/share/rrd/completion"}
    return files, links, binds


def make_inputs(directory: Path) -> Path:
    """A tiny model and data that users of the machine can read."""
    directory.mkdir(parents=True)
    make_model(directory / "model")
    make_data(directory / "data.jsonl")
    subprocess.run(["chmod", "-R", "a+rX", str(directory)], check=True)
    return directory


def keys(**more: Any) -> dict[str, Any]:
    """A job of a second or two with all that could break exactness."""
    return {"model": f"{INPUTS}/model", "data": f"{INPUTS}/data.jsonl", "lora_rank": 4, "lora_dropout": 0.1,
            "grad_accum": 2, "max_steps": 40, "seq_len": 64, "dtype": "float32", "lr": 0.005, "checkpoint_every": 10,
            "steps_per_visit": 3, **more}


ENDLESS = 100_000
"""Steps of a job that a test ends, not its training."""


class Service:
    """The service ``rrd`` of a running machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    # --- systemd ---

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.machine.run("systemctl", *words, check=check)

    def property(self, name: str, unit: str = "rrd.service") -> str:
        return self.systemctl("show", unit, "--property", name, "--value")

    def pid(self) -> int:
        return int(self.property("MainPID"))

    def configure(self, text: str) -> None:
        self.machine.write("/etc/rrd/rrd.toml", text)

    def drop_in(self, *lines: str) -> None:
        """What ``systemctl edit rrd`` writes; nothing: none."""
        self.machine.run("rm", "-rf", UNIT)
        if lines:
            self.machine.run("mkdir", "-p", UNIT)
            self.machine.write(f"{UNIT}/test.conf", "\n".join(lines) + "\n")
        self.systemctl("daemon-reload")

    def clean(self) -> None:
        """No job files, no settings, no failure remembered."""
        self.machine.run("sh", "-c", "rm -rf /etc/rrd/jobs.d/*.toml /etc/rrd/rrd.toml")
        if self.machine.path(UNIT).exists():
            self.drop_in()
        self.systemctl("reset-failed", "rrd", check=False)

    # --- the journal ---

    def now(self) -> str:
        """For ``journal`` to begin at."""
        return f"@{time.time():.6f}"

    def journal(self, *matches: str, since: str = "") -> list[dict[str, Any]]:
        self.machine.run("journalctl", "--sync")
        after = [f"--since={since}"] if since else []
        said = self.machine.run("journalctl", "-o", "json", "--no-pager", "-q", *after, *(matches or ("-u", "rrd")))
        return [json.loads(line) for line in said.splitlines()]

    def said(self, text: str, since: str = "") -> bool:
        """Whether a line of its journal holds ``text``."""
        return any(text in str(entry.get("MESSAGE", "")) for entry in self.journal(since=since))

    def wait_said(self, text: str, since: str) -> None:
        """Until a line of its journal holds ``text``: what a status shows may be there sooner."""
        self.machine.wait(lambda: self.said(text, since), f"it never said {text!r}", 120)

    # --- jobs ---

    def submit(self, name: str, *options: str, user: str = "root", **more: Any) -> str:
        """Through the command, from a file of the user's own."""
        path = f"/tmp/{user}/{name}.toml"
        self.machine.run("mkdir", "-p", f"/tmp/{user}")
        self.machine.write(path, to_toml(keys(**more)))
        return self.machine.run("rrd", "submit", *options, path, user=user)

    def drop(self, name: str, text: str | None = None, **more: Any) -> None:
        """By hand, into the directory."""
        self.machine.write(f"/etc/rrd/jobs.d/{name}.toml", to_toml(keys(**more)) if text is None else text)

    def withdraw(self, *names: str) -> None:
        self.machine.run("rm", "-f", *(f"/etc/rrd/jobs.d/{name}.toml" for name in names))

    def job(self, name: str) -> dict[str, Any]:
        """What the daemon says of a job; empty while there is none, or no daemon."""
        try:
            known = client.call(self.machine.path("/run/rrd"), "status")["jobs"]
        except (RrdError, NotUp):
            return {}
        return next((job for job in known if job["id"] == name), {})

    def wait_job(self, name: str, what: Callable[[dict[str, Any]], object], why: str = "it never got there",
                 seconds: float = 90) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            seen = self.job(name)
            if seen and what(seen):
                return seen
            assert time.monotonic() < end, f"{name}: {why}\n{seen}\n{self.machine.tail()}"
            time.sleep(0.05)

    def wait_done(self, *names: str) -> None:
        for name in names:
            seen = self.wait_job(name, lambda j: j["state"] in ("done", "failed"), "it never ended")
            assert seen["state"] == "done", f"{seen}\n{self.machine.tail()}"

    def wait_step(self, name: str, step: int) -> int:
        return int(self.wait_job(name, lambda j: j["step"] >= step)["step"])

    def adapter(self, name: str, directory: str = ADAPTERS) -> str:
        """sha256 of a finished adapter."""
        return self.machine.run("sha256sum", f"{directory}/{name}/adapter_model.safetensors").split()[0]

    def history(self, name: str) -> list[int]:
        """The steps in a job's history, in order."""
        text = self.machine.run("cat", f"{JOBS}/{name}/history.jsonl")
        return [int(found) for found in re.findall(r'"step": ?(\d+)', text)]
