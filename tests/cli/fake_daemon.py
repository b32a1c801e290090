"""A daemon's control socket without a daemon, and snapshots made up for it."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from rrd.snapshot import DieView, JobView, LaneView, RejectedView, Snapshot
from rrd.states import JobState

HOSTILE = "evil\x1b[2J\x07\u202egnp.toml [bold red]x[/]\nsecond"
"""What a file may carry: terminal escapes, a bidirectional override, rich's markup, a line break."""


class FakeDaemon:
    """Answers on the control socket as told; remembers what it was asked."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.asked = run_dir, list[dict[str, Any]]()
        self.answers: dict[str, Any] = {}
        """For each verb the answer: JSON, raw bytes, None for silence, or a function of the request."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(run_dir / "control.sock"))
        self.socket.listen()
        self.open: list[socket.socket] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self.socket.accept()
            except OSError:
                return
            self.open.append(peer)
            line = peer.makefile("rb").readline()
            if not line:
                continue
            request = json.loads(line)
            self.asked.append(request)
            answer = self.answers.get(request["verb"], {"ok": True, "result": None})
            answer = answer(request) if callable(answer) else answer
            if answer is not None:
                peer.sendall(answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n")
                peer.shutdown(socket.SHUT_RDWR)

    def show(self, snapshot: Snapshot) -> None:
        self.answers["status"] = {"ok": True, "result": json.loads(snapshot.model_dump_json())}

    def refuse(self, verb: str, message: str, exit_code: int, hint: str = "") -> None:
        self.answers[verb] = {"ok": False, "error": {"message": message, "hint": hint, "exit_code": exit_code}}

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)
        self.socket.close()
        for peer in self.open:
            peer.close()


def job(name: str, state: JobState = JobState.RUNNING, **more: Any) -> JobView:
    """A job in the middle of its life."""
    now = time.time()
    middle = {"step": 150, "target_steps": 1500, "loss": 2.3412, "losses": [4 - i / 20 for i in range(40)],
              "steps_per_minute": 28.53, "eta_seconds": 2840.0, "last_checkpoint_at": now - 130,
              "last_checkpoint_step": 120, "checkpoint_bytes": 12_163_481, "die": "3", "lane": "1", "epoch": 0.31,
              "model": "/models/smollm2", "output": f"/var/lib/rrd/adapters/{name}", "method": "lora",
              "file": f"/etc/rrd/jobs.d/{name}.toml", "tokens": 76_800, "lr": 1.9e-4, "checkpoint_every": "10min",
              "checkpoint_commits": 5, "submitted_at": now - 9000}
    return JobView(id=name, state=state, **({**middle, **more} if state is JobState.RUNNING else more))


def snapshot(*jobs: JobView, **more: Any) -> Snapshot:
    """Two lanes of three dies each; what is given, and jobs."""
    now = time.time()
    dies = [DieView(name=str(i), lane=str(i % 2), device="cpu", state="idle") for i in range(6)]
    dies[3] = dies[3].model_copy(update={"state": "computing", "jobs": ["code-a", "code-b"], "computing": "code-a"})
    dies[4] = dies[4].model_copy(update={"state": "backing off", "why": "the gate refused it", "retry_at": now + 12})
    lanes = [LaneView(name=n, gate="none", dies=d, round=12, busy_seconds=98.5, seconds=100.0, computing=c)
             for n, d, c in (("0", ["0", "2", "4"], None), ("1", ["1", "3", "5"], "code-a"))]
    usual = {"version": "0.1.0", "pid": 4711, "time": now, "started_at": now - 11520, "state_dir": "/var/lib/rrd",
             "jobs_dir": "/etc/rrd/jobs.d", "dies": dies, "lanes": lanes}
    return Snapshot(jobs=list(jobs), **{**usual, **more})


def busy() -> Snapshot:
    """One job in every state, and a rejected file with a hostile name."""
    S = JobState
    return snapshot(
        job("code-a"), job("code-b", loss=0.918, step=1499),
        job("a-rather-long-name-for-a-job-that-somebody-really-chose", die="1", step=12_000, target_steps=150_000),
        job("prose", S.WAITING, why="no room: 4 jobs are resident on each of the 6 dies", target_steps=800),
        job("stdlib", S.PREPARING, prepared=0.42), job("jargon", S.LOADING, die="0", target_steps=400),
        job("broken", S.FAILED, why="the model directory /models/gone is missing",
            hint="put it there, or change `model`; the job is tried again by itself", step=30, target_steps=100),
        job("quiet", S.PAUSED, why="paused by rrd pause", step=7, target_steps=100),
        job("old", S.DONE, step=300, target_steps=300, loss=1.5), job("gone", S.REMOVED, why="its job file is gone"),
        job("stopped", S.CANCELLED, step=3),
        rejected=[RejectedView(file=HOSTILE, line=3, key="lrr", message="unknown key `lrr`", hint="is it `lr`?")])
