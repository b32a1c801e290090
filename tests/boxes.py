"""A box for tests: a real daemon in a process of its own, with directories of its own, to be fed, killed and asked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toys import make_data, make_model, write_job

from rrd import client
from rrd.errors import NotRunning, TryLater
from rrd.snapshot import JobView, Snapshot

DEADLINE = 120.0
"""Seconds after which a wait has failed: generous, because test machines are shared."""


class Box:
    """One daemon's world below ``root``. ``start`` and ``kill`` as often as you like; ``close`` at the end."""

    def __init__(self, root: Path, config: str = "cpu_dies = 2\n") -> None:
        self.root = root
        self.state, self.jobs_dir, self.run_dir = root / "state", root / "jobs.d", root / "run"
        self.jobs_dir.mkdir(parents=True, exist_ok=True)
        self.config = root / "rrd.toml"
        self.configure(config)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = root / "log"

    def configure(self, text: str) -> None:
        self.config.write_text(f'state_dir = "{self.state}"\ncache_dir = "{self.root}/cache"\n'
                               f'run_dir = "{self.run_dir}"\njobs_dir = "{self.jobs_dir}"\nmetrics = ""\n' + text)

    # --- the process ---

    def start(self, **environment: str) -> None:
        """With RRD_FAULTS in the environment, its workers do what that script says (faulty_worker.py)."""
        rrd = [str(Path(__file__).with_name("faulty_daemon.py"))] if "RRD_FAULTS" in environment else ["-m", "rrd"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([sys.executable, *rrd, "daemon", "-c", str(self.config)], stderr=log,
                                            stdout=log, start_new_session=True, env={**os.environ, **environment})

    def kill(self) -> None:
        """SIGKILL the daemon; its workers see their sockets close."""
        assert self.process
        self.process.kill()
        self.process.wait(DEADLINE)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process
        self.process.terminate()
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.kill()

    # --- asking ---

    def ask(self, verb: str, **args: Any) -> Any:
        return client.call(self.run_dir, verb, **args)

    def snapshot(self) -> Snapshot | None:
        """None while nothing answers."""
        with contextlib.suppress(NotRunning, TryLater):  # TryLater: a test machine that has no second for it
            return Snapshot.model_validate(self.ask("status"))
        return None

    def job(self, name: str) -> JobView | None:
        s = self.snapshot()
        return s.job(name) if s else None

    def wait(self, what: Callable[[Snapshot], bool], why: str, seconds: float = DEADLINE) -> Snapshot:
        """The first snapshot of which ``what`` holds; fails with the log when none comes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            s = self.snapshot()
            if s is not None and what(s):
                return s
            assert self.process is None or self.process.poll() is None or s is not None, self.tail()
            time.sleep(0.02)
        raise AssertionError(f"{why}\n{s.model_dump_json(indent=1) if s else 'no answer'}\n{self.tail()}")

    def wait_job(self, name: str, what: Callable[[JobView], bool], seconds: float = DEADLINE) -> JobView:
        def holds(s: Snapshot) -> bool:
            j = s.job(name)
            return j is not None and what(j)

        found = self.wait(holds, f"{name} never got there", seconds).job(name)
        assert found
        return found

    def wait_state(self, name: str, state: str, seconds: float = DEADLINE) -> JobView:
        return self.wait_job(name, lambda j: j.state == state, seconds)

    def wait_done(self, *names: str, seconds: float = DEADLINE) -> None:
        def done(s: Snapshot) -> bool:
            jobs = [s.job(n) for n in names]
            bad = [j for j in jobs if j and j.state == "failed"]
            assert not bad, f"{bad}\n{self.tail()}"
            return all(j is not None and j.state == "done" for j in jobs)

        self.wait(done, f"{names} were never done", seconds)

    def tail(self, n: int = 6000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-n:] if self.log.exists() else ""

    # --- looking ---

    def adapter(self, name: str) -> str:
        """sha256 of a finished adapter."""
        return digest(self.state / "adapters" / name)

    def worker_pids(self) -> list[int]:
        s = self.snapshot()
        return [d.worker_pid for d in s.dies if d.worker_pid] if s else []


def digest_of(result: Path) -> str:
    """sha256 of the weights that a job came to, an adapter's or a whole model's."""
    found = [result / name for name in ("adapter_model.safetensors", "model.safetensors") if (result / name).exists()]
    return hashlib.sha256(found[0].read_bytes()).hexdigest()


def digest(adapter: Path) -> str:
    return hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()


@contextlib.contextmanager
def box(root: Path, config: str = "cpu_dies = 2\n") -> Iterator[Box]:
    b = Box(root, config)
    try:
        yield b
    finally:
        b.close()


def toy_keys(root: Path, **more: Any) -> dict[str, Any]:
    """Keys of a small job with all that could break exactness: dropout, accumulation, several epochs."""
    model, data = root / "model", root / "data.jsonl"
    if not model.exists():
        make_model(model)
        make_data(data)
    return {"model": str(model), "data": str(data), "lora_rank": 4, "lora_dropout": 0.1, "grad_accum": 2,
            "max_steps": 30, "seq_len": 64, "dtype": "float32", "lr": 0.005, "checkpoint_every": 7,
            "steps_per_visit": 3, **more}


__all__ = ["Box", "box", "digest", "digest_of", "signal", "toy_keys", "write_job"]
