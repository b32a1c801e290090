"""``make soak``: a daemon with twelve jobs at a time, among all that goes wrong, for as long as one likes.

Whenever a job is done, its adapter is compared with that of the same job trained without faults, and another takes its
place. Memory and open files of the daemon and its workers are watched all the while; processes are killed, so a slope
is that within their lives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from apart import apart  # noqa: E402
from boxes import box, digest_of, toy_keys, write_job  # noqa: E402
from campaign import where  # noqa: E402
from cuts import LoopDisk, why_no_loop  # noqa: E402
from kills import faults_of  # noqa: E402
from table import Row, show, timed  # noqa: E402

from rrd.errors import RrdError  # noqa: E402
from rrd.snapshot import DieView, JobView, Snapshot  # noqa: E402

CONFIG = "cpu_dies = 6\njobs_per_die = 4\nhang_seconds = 8\nrescan_seconds = 5\n"
SHAPES: list[dict[str, Any]] = [
    {"seed": n, "checkpoint_every": every, "steps_per_visit": visit, **more}
    for n, (every, visit, more) in enumerate([
        (7, 3, {}), (20, 5, {}), ("2s", 10, {}), (3, 1, {"batch_size": 2}), ("1s", "auto", {"visit_seconds": 0.1}),
        (50, 25, {"lora_rank": 8}), (10, 4, {"method": "full", "lr": 0.001}), ("5s", 7, {"weight_decay": 0.1}),
        (15, 2, {"lora_dropout": 0.0}), (9, 9, {"grad_accum": 1}), ("3s", 6, {"quantize": True}),
        (30, "auto", {"visit_seconds": 0.5, "keep": 1})])]
WARM_UP = 40.0
"""Seconds of a process's life that say nothing of its later memory."""
LAST_SECONDS = 900.0
"""For the jobs that are left when the faults have ended."""
OK_KINDS = frozenset({"ledger"})
"""Kinds of events that are no fault here: with a full disk records cannot be written."""


class Soak:
    """Twelve jobs, a fault every few seconds, samples of memory; ``row.wrong`` is what must not happen."""

    def __init__(self, root: Path, minutes: float, *, steps: int, seed: int, disk: bool) -> None:
        self.root, self.minutes, self.steps, self.disk = root, minutes, steps, disk
        self.inputs = root / "inputs"
        self.chance = random.Random(seed)
        self.row = Row(f"soak of {minutes:g} minutes, {len(SHAPES)} jobs at a time")
        self.serial = 0
        self.shape_of: dict[str, int] = {}
        self.best: dict[str, int] = {}
        self.samples: dict[tuple[str, int], list[tuple[float, float, int, int]]] = defaultdict(list)
        """Of each process: (monotonic time, MiB, open files, jobs that it holds)."""
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.full_until = 0.0
        self.stopped: list[int] = []

    def run(self) -> Row:
        self.inputs.mkdir(parents=True)
        self.wanted = self._straight()
        with contextlib.ExitStack() as stack:
            if self.disk:
                stack.enter_context(LoopDisk(self.root / "box", size=4 << 30))
            self.b = stack.enter_context(box(self.root / "box", CONFIG))
            self._soak()
        return self.row

    def _straight(self) -> list[str]:
        with box(self.root / "straight", "cpu_dies = 6\n") as b:
            for n in range(len(SHAPES)):
                write_job(b.jobs_dir, f"s{n}", **self._keys(n))
            b.start()
            b.wait_done(*(f"s{n}" for n in range(len(SHAPES))), seconds=1800)
            return [digest_of(b.state / "adapters" / f"s{n}") for n in range(len(SHAPES))]

    def _keys(self, shape: int, **more: Any) -> dict[str, Any]:
        return toy_keys(self.inputs, **{**SHAPES[shape], "max_steps": self.steps, **more})

    # --- the loop ---

    def _soak(self) -> None:
        b = self.b
        for n in range(len(SHAPES)):
            self._submit(n)
        b.start()
        end, next_fault, next_sample = time.monotonic() + 60 * self.minutes, time.monotonic() + 20, 0.0
        while (now := time.monotonic()) < end:
            self._do_what_is_due(now)
            if (s := b.snapshot()) is not None:
                self._take_in(s)
                if now >= next_sample:
                    next_sample = now + 5
                    self._sample(s)
                if now >= next_fault:
                    next_fault = now + self.chance.uniform(2, 10)
                    self._fault(s)
            time.sleep(0.2)
        end = time.monotonic() + LAST_SECONDS
        while self.shape_of and time.monotonic() < end:
            self._do_what_is_due(time.monotonic())
            if (s := b.snapshot()) is not None:
                self._take_in(s, renew=False)
            time.sleep(0.5)
        self.row.wrong += [f"{name} was never done" for name in self.shape_of]
        if b.stop() != 0:
            self.row.wrong.append("exit status not 0")
        self._judge_memory()

    def _submit(self, shape: int) -> None:
        self.serial += 1
        name = f"job{self.serial}"
        self.shape_of[name], self.best[name] = shape, 0
        write_job(self.b.jobs_dir, name, **self._keys(shape))

    def _take_in(self, s: Snapshot, *, renew: bool = True) -> None:
        for j in s.jobs:
            if j.state == "failed" and j.id in self.shape_of:
                self.row.wrong.append(f"{j.id} failed: {j.why}")
            elif j.state != "done" or j.id not in self.shape_of:
                continue
            shape = self.shape_of.pop(j.id)
            if j.state == "done":
                self._judge(j, shape)
            (self.b.jobs_dir / f"{j.id}.toml").unlink(missing_ok=True)
            if renew:
                self._submit(shape)
        if fenced := [d.name for d in s.dies if d.state == "fenced"]:
            self.row.wrong.append(f"fenced: {fenced}")
            for die in fenced:
                self.b.ask("unfence", die=die)

    def _judge(self, j: JobView, shape: int) -> None:
        self.row.trials += 1
        at = self.b.state / "jobs" / j.id
        self.row.wrong += [f"{j.id}: {fault}" for fault in faults_of(at, self.steps, OK_KINDS)]
        if digest_of(self.b.state / "adapters" / j.id) != self.wanted[shape]:
            self.row.wrong.append(f"{j.id} (shape {shape}): another adapter")

    def _do_what_is_due(self, now: float) -> None:
        due = [act for at, act in self.later if at <= now]
        self.later = [(at, act) for at, act in self.later if at > now]
        for act in due:
            act()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    # --- what goes wrong ---

    def _fault(self, s: Snapshot) -> None:
        kinds: dict[Callable[[Snapshot], str], float] = {
            self._kill_worker: 5, self._stop_worker: 1, self._kill_nursery: 1, self._kill_daemon: 0.25,
            self._edit: 4, self._take_away: 1.5, self._nonsense: 1, self._pause: 1, self._restart: 0.7,
            self._fill: 0.3 if self.disk else 0.0}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        with contextlib.suppress(RrdError, ProcessLookupError):  # what was meant is over already
            if told := kind(s):
                self.row.count(told)

    def _ripe(self, s: Snapshot) -> DieView | None:
        """A die whose jobs have all made a new step since it was last hit: three deaths without one end a job."""
        jobs = {j.id: j for j in s.jobs}
        ripe = [d for d in s.dies if d.worker_pid and d.jobs and d.state in ("idle", "computing") and all(
            jobs[n].step > self.best.get(n, 0) and jobs[n].state in ("running", "exporting") for n in d.jobs)]
        if not ripe:
            return None
        die = self.chance.choice(ripe)
        self.best |= {n: jobs[n].step for n in die.jobs}
        return die

    def _kill_worker(self, s: Snapshot) -> str:
        if die := self._ripe(s):
            os.kill(die.worker_pid or 0, signal.SIGKILL)
            return "workers killed"
        return ""

    def _stop_worker(self, s: Snapshot) -> str:
        if die := self._ripe(s):
            os.kill(die.worker_pid or 0, signal.SIGSTOP)
            self.stopped.append(die.worker_pid or 0)
            return "workers stopped"
        return ""

    def _kill_nursery(self, _: Snapshot) -> str:
        assert self.b.process
        for pid in Path(f"/proc/{self.b.process.pid}/task/{self.b.process.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
            return "nurseries killed"
        return ""

    def _kill_daemon(self, s: Snapshot) -> str:
        self.b.kill()
        for pid in self.stopped:  # whoever is stopped does not see that its daemon is gone, and keeps its jobs' locks
            with contextlib.suppress(OSError):
                if b"rrd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        self.b.start()
        return "daemons killed"

    def _some_job(self) -> str:
        return self.chance.choice(sorted(self.shape_of))

    def _edit(self, _: Snapshot) -> str:
        """Live keys: they say when, never what."""
        name = self._some_job()
        more: dict[str, Any] = self.chance.choice([
            {"weight": self.chance.choice([0.5, 1.0, 3.0])}, {"keep": self.chance.randint(1, 4)},
            {"steps_per_visit": self.chance.randint(1, 20)}, {"checkpoint_every": self.chance.choice([5, "4s", 40])}])
        if (self.b.jobs_dir / f"{name}.toml").exists():
            write_job(self.b.jobs_dir, name, **self._keys(self.shape_of[name], **more))
            return "job files edited"
        return ""

    def _take_away(self, _: Snapshot) -> str:
        """A job file disappears, and comes back."""
        name = self._some_job()
        shape = self.shape_of[name]
        with contextlib.suppress(FileNotFoundError):
            (self.b.jobs_dir / f"{name}.toml").unlink()
            self._after(self.chance.uniform(0.5, 10), lambda: self._put_back(name, shape))
            return "job files taken away and put back"
        return ""

    def _put_back(self, name: str, shape: int) -> None:
        if name in self.shape_of:
            write_job(self.b.jobs_dir, name, **self._keys(shape))

    def _nonsense(self, _: Snapshot) -> str:
        path = self.b.jobs_dir / f"nonsense{self.chance.randint(0, 3)}.toml"
        path.write_bytes(self.chance.choice([b"", b"\0" * 100, b"model = ", b"= = =", os.urandom(200)]))
        self._after(5, lambda: path.unlink(missing_ok=True))
        return "files of nonsense"

    def _pause(self, _: Snapshot) -> str:
        name = self._some_job()
        self.b.ask("pause", job=name)
        self._after(self.chance.uniform(0.2, 8), lambda: self._ask("resume", name))
        return "pauses"

    def _restart(self, _: Snapshot) -> str:
        self.b.ask("restart", job=self._some_job())
        return "restarts"

    def _ask(self, verb: str, name: str) -> None:
        """It may be that nobody answers just now; then once more."""
        if name not in self.shape_of:
            return
        try:
            self.b.ask(verb, job=name)
        except RrdError as e:
            if "not paused" not in str(e):
                self._after(1, lambda: self._ask(verb, name))

    def _fill(self, _: Snapshot) -> str:
        if time.monotonic() < self.full_until:
            return ""
        seconds = self.chance.uniform(5, 40)
        self.full_until = time.monotonic() + seconds + 30
        space = os.statvfs(self.b.state)
        ballast = self.b.state / "ballast"
        with open(ballast, "wb") as f, contextlib.suppress(OSError):
            os.posix_fallocate(f.fileno(), 0, max(1, space.f_bavail * space.f_frsize - (1 << 20)))
        self._after(seconds, lambda: ballast.unlink(missing_ok=True))
        return "full disks"

    # --- what it costs ---

    def _sample(self, s: Snapshot) -> None:
        who = [("daemon", s.pid, 0), *(("worker", d.worker_pid, len(d.jobs)) for d in s.dies if d.worker_pid)]
        for kind, pid, jobs in who:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                # What is shared with the nursery counts in full, or a share would grow whenever another worker dies.
                kib = int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])
                files = len(os.listdir(f"/proc/{pid}/fd"))
                self.samples[kind, pid].append((time.monotonic(), kib / 1024, files, jobs))

    def _judge_memory(self) -> None:
        told = []
        for kind, most in (("daemon", 30.0), ("worker", 60.0)):
            lives = [[x for x in xs if x[0] >= xs[0][0] + WARM_UP and x[3] == jobs]  # with more jobs it may hold more
                     for (k, _), xs in self.samples.items() if k == kind for jobs in {x[3] for x in xs}]
            memory, seen = _slope([[(t, mib) for t, mib, _, _ in xs] for xs in lives])
            files, _ = _slope([[(t, float(n)) for t, _, n, _ in xs] for xs in lives])
            peak = max((mib for xs in lives for _, mib, _, _ in xs), default=0.0)
            open_files = max((n for xs in lives for _, _, n, _ in xs), default=0)
            told.append(f"{kind}: at most {peak:.0f} MiB and {open_files} open files, {memory:+.1f} MiB and "
                        f"{files:+.1f} files an hour over {seen / 60:.0f} process-minutes")
            if seen > 600 and (memory > most or files > 10):
                self.row.wrong.append(f"the {kind} grows: {told[-1]}")
        self.row.note = "; ".join(told)


def _slope(lives: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """Least squares with a level of its own for each life: (units an hour, seconds seen)."""
    above = below = seen = 0.0
    for xs in lives:
        if len(xs) < 3:
            continue
        t0, v0 = sum(t for t, _ in xs) / len(xs), sum(v for _, v in xs) / len(xs)
        above += sum((t - t0) * (v - v0) for t, v in xs)
        below += sum((t - t0) ** 2 for t, _ in xs)
        seen += xs[-1][0] - xs[0][0]
    return (3600 * above / below if below else 0.0), seen


def soak(root: Path, minutes: float, *, steps: int, seed: int) -> Row:
    if why_no_loop(root / "probe"):
        return Soak(root, minutes, steps=steps, seed=seed, disk=False).run()
    return apart(lambda: Soak(root, minutes, steps=steps, seed=seed, disk=True).run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--steps", type=int, default=600, help="of each job")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rrd-soak-"))
    print(f"{where()}; seed {args.seed}; {args.minutes:g} minutes from {time.strftime('%H:%M')}; in {root}", flush=True)
    row = timed(lambda: soak(root, args.minutes, steps=args.steps, seed=args.seed))
    row.what += ", faults at random"
    print(show([row]), *row.wrong, sep="\n")
    if not row.wrong:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if row.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
