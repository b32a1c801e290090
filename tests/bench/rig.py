"""What the benchmarks share: models and data made on the spot, a daemon at work on them, results as a table."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import toys  # noqa: E402

from rrd.client import call  # noqa: E402
from rrd.errors import RrdError  # noqa: E402
from rrd.job import to_toml  # noqa: E402
from rrd.snapshot import JobView, Snapshot  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "toy": {"hidden": 32, "ffn": 64, "layers": 1, "heads": 2, "kv_heads": 2, "vocab": 320},
    "12m": {"hidden": 320, "ffn": 896, "layers": 6, "heads": 5, "kv_heads": 5, "vocab": 8192, "tie": False},
    # the shape of SmolLM2-135M:
    "140m": {"hidden": 576, "ffn": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "vocab": 49152},
}
START_SECONDS = 300.0
"""How long a daemon may take until its jobs train, on a busy box."""


# ---- things to train ------------------------------------------------------------------------------------------------


def make_model(where: Path, size: str) -> Path:
    """A llama of random weights with a tokenizer."""
    return toys.make_model(where / size, **MODELS[size])


def make_data(path: Path, *, rows: int = 200, words: int = 700) -> Path:
    """Texts of random words, each longer than any ``seq_len`` here, so that every sample is exactly that long."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = (" ".join("".join(rng.choices(letters, k=4)) for _ in range(words)) for _ in range(rows))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


# ---- a daemon -------------------------------------------------------------------------------------------------------


class Rrd:
    """A daemon of its own in ``where``, with ``settings`` in its rrd.toml. Use as a context manager."""

    def __init__(self, where: Path, **settings: Any) -> None:
        self.where, self.run_dir, self.jobs_dir = where, where / "run", where / "jobs.d"
        self.jobs_dir.mkdir(parents=True)
        self.port = free_port()
        config = where / "rrd.toml"
        config.write_text(to_toml({"metrics": f"127.0.0.1:{self.port}", **settings}))
        self._command = [sys.executable, "-m", "rrd", "daemon", "--config-file", str(config), "--state", str(where)]
        self.log = where / "daemon.log"

    def __enter__(self) -> Rrd:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.tree():
            os.kill(pid, signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def submit(self, name: str, **keys: Any) -> None:
        toys.write_job(self.jobs_dir, name, **keys)

    def status(self) -> Snapshot:
        return Snapshot.model_validate(call(self.run_dir, "status", deadline=60))

    def wait(self, good: Callable[[Snapshot], bool], what: str, seconds: float = START_SECONDS) -> Snapshot:
        """The first status that is ``good``. Ends the benchmark, with the daemon's last words, if none comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if good(snapshot := self.status()):
                    return snapshot
            except RrdError:
                pass  # not listening yet
            time.sleep(0.1)
        sys.exit(f"the daemon did not get to: {what}\n{self.log.read_text()[-3000:]}")

    def wait_running(self, jobs: int, steps: int = 2) -> Snapshot:
        """Until ``jobs`` jobs have made ``steps`` steps each."""
        def good(s: Snapshot) -> bool:
            return sum(j.steps_run >= steps for j in s.jobs) >= jobs

        return self.wait(good, f"{jobs} jobs running")

    def history(self, job: str) -> list[dict[str, Any]]:
        """The job's steps so far."""
        lines = (self.where / "jobs" / job / "history.jsonl").read_bytes().split(b"\n")[:-1]
        return [h for h in map(json.loads, lines) if "loss" in h]

    def tree(self) -> list[int]:
        return tree(self.process.pid)


def steps_between(history: Iterable[dict[str, Any]], start: float, end: float) -> list[dict[str, Any]]:
    """The steps that ended between two Unix times."""
    return [h for h in history if start <= h["time"] < end]


def running(snapshot: Snapshot) -> list[JobView]:
    return [j for j in snapshot.jobs if j.state.value == "running"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ---- processes ------------------------------------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for one in found:
        found += parents.get(one, [])
    return found


def memory(pids: Iterable[int], what: str = "Pss") -> float:
    """MB of ``Rss`` or ``Pss`` of processes together: Pss counts a page shared by n processes 1/n in each."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))
    return total * 1024 / 1e6


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that processes, with their threads, have used so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


# ---- results --------------------------------------------------------------------------------------------------------


def machine() -> str:
    """This box in one line."""
    import torch

    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (f"{model}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB, Linux {platform.release()}, "
            f"Python {platform.python_version()}, torch {torch.__version__}, load at start {load:.1f}")


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


class Results:
    """Figures under their names, each with its target where it has one; printed as a table and as a line of JSON."""

    def __init__(self, bench: str) -> None:
        self.bench = bench
        self.rows: list[tuple[str, float, str, str, bool | None]] = []
        print(f"{bench}: {machine()}", flush=True)

    def add(self, name: str, value: float, unit: str = "", *, least: float | None = None, most: float | None = None,
            digits: int = 3) -> None:
        """One figure; ``least`` and ``most`` say where it should be."""
        target = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else ""
        met = value >= least if least is not None else value <= most if most is not None else None
        self.rows.append((name, round(value, digits), unit, target, met))
        verdict = "" if met is None else "ok" if met else "MISSED"
        print(f"  {name:58} {value:>12,.{digits}f} {unit:9} {target:9} {verdict}", flush=True)

    def finish(self) -> None:
        figures = {name: {"value": value, "unit": unit, **({"target": target, "met": met} if target else {})}
                   for name, value, unit, target, met in self.rows}
        print(json.dumps({"bench": self.bench, "machine": machine(), "figures": figures}), flush=True)
