"""SIGKILL at random instants, of the daemon, a worker, both, the nursery: and every adapter comes out the same.

Small jobs are trained to their end again and again while the processes around them are killed. A victim is stopped
first, so that it can be seen whether the instant lies inside a save, and then killed where it stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from boxes import Box, box, digest_of, toy_keys, write_job
from table import Row, at_most

from rrd import checkpoint
from rrd.errors import Damaged
from rrd.snapshot import Snapshot

SHAPES = {
    "a": {"seed": 1},
    "b": {"seed": 2, "steps_per_visit": 1, "checkpoint_every": 3, "batch_size": 2},
    "c": {"seed": 3, "steps_per_visit": "auto", "visit_seconds": 0.05, "checkpoint_every": "1s"},
    "d": {"seed": 4, "method": "full", "lr": 0.001, "weight_decay": 0.1, "steps_per_visit": 5},
}
"""Jobs that differ in all that decides when they are visited and saved."""
DIES = "cpu_dies = 3\n"  # two of the four share a die
WHOM = {"worker": 10, "daemon": 3, "daemon and worker": 3, "nursery": 2, "nursery and worker": 2}
"""Whom to kill, and how often of twenty times: what brings torch into memory anew takes longest."""
PATIENCE = 300.0


def drop(b: Box, inputs: Path, steps: int) -> None:
    for name, keys in SHAPES.items():
        write_job(b.jobs_dir, name, **toy_keys(inputs, **{**keys, "max_steps": steps}))


def straight(root: Path, steps: int) -> dict[str, str]:
    """The adapters of the jobs trained straight through: the bytes that every other history must give."""
    with box(root, "cpu_dies = 4\n") as b:
        drop(b, root, steps)
        b.start()
        b.wait_done(*SHAPES)
        return {name: digest_of(b.state / "adapters" / name) for name in SHAPES}


class Killer:
    """Kills until ``row.trials`` has reached ``kills``, in as many lives of the jobs as that takes."""

    def __init__(self, root: Path, kills: int, *, steps: int, seed: int) -> None:
        self.root, self.kills, self.steps = root, kills, steps
        self.chance = random.Random(seed)
        self.row = Row("SIGKILL at a random instant")

    def run(self) -> Row:
        inputs = self.root / "straight"
        wanted = straight(inputs, self.steps)
        life = 0
        while self.row.trials < self.kills:
            life += 1
            with box(self.root / f"life{life}", DIES) as b:
                drop(b, inputs, self.steps)
                b.start()
                self._harass(b)
                self._judge(b, wanted)
        self.row.count("finished adapters, each the same bytes as undisturbed", by=life * len(SHAPES))
        inside = self.row.counts.get("inside a save", 0)
        self.row.note = f"{inside / self.row.trials:.0%} inside a save; {at_most(self.row.trials)}"
        return self.row

    # --- one life ---

    def _harass(self, b: Box) -> None:
        """Kill as long as there are jobs to kill. A die's jobs have made a new step each before it is hit again: three
        deaths in a row without one, and a job is rightly given up."""
        best = dict.fromkeys(SHAPES, 0)
        while self.row.trials < self.kills:
            whom = self.chance.choices(list(WHOM), list(WHOM.values()))[0]
            s = b.wait(lambda s, best=best: len(s.jobs) == len(SHAPES) and (  # type: ignore[misc]
                _all_done(s) or bool(_ripe(s, best))), "progress", PATIENCE)
            if _all_done(s):
                return
            die = self.chance.choice(_ripe(s, best))
            jobs = [j.id for j in s.jobs if j.state != "done"] if "daemon" in whom else die.jobs
            if self.chance.random() < 0.6:
                self._wait_for_a_save(b, jobs)
            time.sleep(self.chance.random() * 0.01)
            self._kill(b, whom, die.worker_pid or 0, [d.worker_pid for d in s.dies if d.worker_pid], jobs)
            best |= {j.id: max(best[j.id], j.step) for j in s.jobs if j.id in jobs}

    def _wait_for_a_save(self, b: Box, jobs: list[str]) -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end and not _saving(b, jobs):
            time.sleep(0)

    def _kill(self, b: Box, whom: str, worker: int, workers: list[int], jobs: list[str]) -> None:
        assert b.process is not None
        daemon = b.process.pid
        nursery = next(iter(_children(daemon)), 0)
        if "nursery" in whom and not nursery:
            whom = "worker"  # it was killed before, and no worker has been wanted since
        victims = [pid for pid, name in ((daemon, "daemon"), (worker, "worker"), (nursery, "nursery")) if name in whom]
        still = [pid for pid in dict.fromkeys([*workers, nursery, daemon]) if pid and _send(pid, signal.SIGSTOP)]
        for pid in still:
            _wait_stopped(pid)
        self.row.trials += 1
        self.row.count(whom)
        if _saving(b, jobs) and whom != "nursery":
            self.row.count("inside a save")
        for pid in victims:
            _send(pid, signal.SIGKILL)
        for pid in still:
            _send(pid, signal.SIGCONT)
        if daemon in victims:
            b.process.wait(PATIENCE)
            b.start()

    # --- what came of it ---

    def _judge(self, b: Box, wanted: dict[str, str]) -> None:
        b.wait_done(*SHAPES, seconds=PATIENCE)
        for name in SHAPES:
            at = b.state / "jobs" / name
            self.row.wrong += [f"{name}: {fault}" for fault in faults_of(at, self.steps)]
            if digest_of(b.state / "adapters" / name) != wanted[name]:
                self.row.wrong.append(f"{name}: another adapter")


def faults_of(at: Path, steps: int, allowed: frozenset[str] = frozenset()) -> Iterator[str]:
    """What the directory of a finished job tells of its past that must never be; ``allowed`` kinds of events may."""
    announced = 0
    for line in (at / "events.jsonl").read_text().splitlines():
        if not line.strip():
            continue
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event["kind"] == "checkpoint":
                announced = int(re.findall(r"step (\d+)", event["message"])[0])
            elif event["kind"] == "loaded":
                found = re.findall(r"resumed from step (\d+)", event["message"])
                if int((found or [0])[0]) < announced:
                    yield f"step {announced} was announced, and then: {event['message']}"
            elif event["kind"] in {"checkpoint_damaged", "failed", "ledger", "die_fenced"} - allowed:
                yield event["message"]
    history = [json.loads(line)["step"] for line in (at / "history.jsonl").open()]
    if history != list(range(1, steps + 1)):
        yield f"its history has {len(history)} lines"
    for _, path in checkpoint.listing(at):
        try:
            checkpoint.verify(path)
        except Damaged as e:
            yield e.message


def _all_done(s: Snapshot) -> bool:
    bad = [j for j in s.jobs if j.state == "failed"]
    assert not bad, bad
    return all(j.state == "done" for j in s.jobs)


def _ripe(s: Snapshot, best: dict[str, int]) -> list:  # type: ignore[type-arg]
    """The dies whose jobs have all gone on since they were last hit, also by the daemon's count: between our look and
    the kill, it may have seen a step more."""
    jobs = {j.id: j for j in s.jobs}
    return [d for d in s.dies if d.worker_pid and d.jobs and d.state in ("idle", "computing")
            and all(jobs[n].step > best[n] and not jobs[n].crashes and jobs[n].state in ("running", "exporting")
                    for n in d.jobs)]


def _saving(b: Box, jobs: list[str]) -> bool:
    return any(name.startswith(".tmp-") for job in jobs for name in _names(b.state / "jobs" / job))


def _names(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _send(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _wait_stopped(pid: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "TtZX":
            return
        time.sleep(0.001)
