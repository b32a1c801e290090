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
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from apart import apart  # noqa: E402
from boxes import box, digest_of, toy_keys, write_job  # noqa: E402
from campaign import where  # noqa: E402
from cuts import LoopDisk, why_no_loop  # noqa: E402
from growth import Growth  # noqa: E402
from kills import faults_of  # noqa: E402
from table import Row, show, timed  # noqa: E402
from toys import make_poisoned  # noqa: E402
from within import Within  # noqa: E402

from rrd import checkpoint  # noqa: E402
from rrd.errors import RrdError  # noqa: E402
from rrd.snapshot import DieView, JobView, Snapshot  # noqa: E402

CONFIG = "cpu_dies = 6\njobs_per_die = 4\nhang_seconds = 8\nrescan_seconds = 5\n"
SHAPES: list[dict[str, Any]] = [
    {"seed": n, "checkpoint_every": every, "steps_per_visit": visit, **more}
    for n, (every, visit, more) in enumerate([
        (7, 3, {}), (20, 5, {}), ("2s", 10, {}), (3, 1, {"batch_size": 2}), ("1s", "auto", {"visit_seconds": 0.1}),
        (50, 25, {"lora_rank": 8}), (10, 4, {"method": "full", "lr": 0.001}), ("5s", 7, {"weight_decay": 0.1}),
        (15, 2, {"lora_dropout": 0.0}), (9, 9, {"grad_accum": 1, "on_nan": "skip"}), ("3s", 6, {"quantize": True}),
        (30, "auto", {"visit_seconds": 0.5, "keep": 1})])]
INODES = 80_000
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
        self.hit: dict[str, float] = {}
        """When each die's worker was last hit, in Unix time."""
        self.flipped: dict[str, str] = {}
        """The checkpoint of a job of which a bit was flipped."""
        self.growth = Growth()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.full_until = 0.0
        self.stopped: list[int] = []
        self.within = Within(root / "faults" / "script.json", self.chance)

    def run(self) -> Row:
        self.inputs.mkdir(parents=True)
        self.poisoned = make_poisoned(self.inputs / "poisoned")
        self.wanted = self._straight()
        with contextlib.ExitStack() as stack:
            if self.disk:
                stack.enter_context(LoopDisk(self.root / "box", size=4 << 30, inodes=INODES))
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
        nan = self.poisoned if SHAPES[shape].get("on_nan") else {}
        return toy_keys(self.inputs, **{**SHAPES[shape], **nan, "max_steps": self.steps, **more})

    # --- the loop ---

    def _soak(self) -> None:
        b = self.b
        for n in range(len(SHAPES)):
            self._submit(n)
        b.start(**self.within.environment)
        end, next_fault, next_sample = time.monotonic() + 60 * self.minutes, time.monotonic() + 20, 0.0
        while (now := time.monotonic()) < end:
            self._do_what_is_due(now)
            if (s := b.snapshot()) is not None:
                self._take_in(s)
                if now >= next_sample:
                    next_sample = now + 5
                    self.growth.sample(s)
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
        self.row.count(*self.within.withdraw())
        self.row.wrong += [f"{name} was never done" for name in self.shape_of]
        if b.stop() != 0:
            self.row.wrong.append("exit status not 0")
        wrong, self.row.note = self.growth.judge()
        self.row.wrong += wrong

    def _submit(self, shape: int) -> None:
        self.serial += 1
        name = f"job{self.serial}"
        self.shape_of[name] = shape
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
        for die in s.dies:
            if die.state == "fenced" and "GPU is lost" not in die.why:  # that one comes back by itself
                self.row.wrong.append(f"die {die.name} is fenced: {die.why}")
                self.b.ask("unfence", die=die.name)

    def _judge(self, j: JobView, shape: int) -> None:
        self.row.trials += 1
        flipped = self.flipped.get(j.id)
        known = (flipped, f"step {int(flipped[5:])} was announced") if flipped else ()
        allowed = OK_KINDS | {"checkpoint_damaged"} if flipped else OK_KINDS
        told = faults_of(self.b.state / "jobs" / j.id, self.steps, allowed)
        self.row.wrong += [f"{j.id}: {fault}" for fault in told if not any(of in fault for of in known)]
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
            self._kill_worker: 3, self._stop_worker: 1, self._befall: 6, self._flip: 1, self._kill_nursery: 1,
            self._kill_daemon: 0.3, self._end_daemon: 0.5, self._edit: 4, self._take_away: 1.5, self._nonsense: 1,
            self._pause: 1, self._restart: 0.7, self._fill: 0.3 if self.disk else 0.0,
            self._use_inodes: 0.3 if self.disk else 0.0}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        with contextlib.suppress(RrdError, ProcessLookupError):  # what was meant is over already
            if told := kind(s):
                self.row.count(told)

    def _ripe(self, s: Snapshot) -> DieView | None:
        """A die that has made a good visit since it was last hit, and its jobs a new step since a worker died on them:
        three deaths without one end a job, and two on different jobs without a good visit between fence the die."""
        self.row.count(*self.within.withdraw())
        jobs = {j.id: j for j in s.jobs}
        ripe = [d for d in s.dies if d.worker_pid and d.jobs and d.state in ("idle", "computing")
                and any(v.steps and v.start > self.hit.get(d.name, 0.0) for v in d.visits)
                and all(jobs[n].state in ("running", "exporting") and not jobs[n].crashes for n in d.jobs)]
        if not ripe:
            return None
        die = self.chance.choice(ripe)
        self.hit[die.name] = time.time()
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

    def _befall(self, s: Snapshot) -> str:
        """Something from within; it is counted when it has happened."""
        if die := self._ripe(s):
            self.within.befall(self.chance.choice(die.jobs))
        return ""

    def _flip(self, s: Snapshot) -> str:
        """A bit of a job's newest checkpoint, before its worker is killed: an older one counts then."""
        if (die := self._ripe(s)) is None:
            return ""
        for job in set(die.jobs) - set(self.flipped):
            saved = checkpoint.listing(self.b.state / "jobs" / job)
            if len(saved) > 1:
                path = self.chance.choice(sorted(saved[0][1].iterdir()))
                data = bytearray(path.read_bytes())
                data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
                path.write_bytes(data)
                self.flipped[job] = saved[0][1].name
                os.kill(die.worker_pid or 0, signal.SIGKILL)
                return "bits flipped in a newest checkpoint"
        return ""

    def _kill_nursery(self, _: Snapshot) -> str:
        assert self.b.process
        for pid in Path(f"/proc/{self.b.process.pid}/task/{self.b.process.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
            return "nurseries killed"
        return ""

    def _kill_daemon(self, s: Snapshot) -> str:
        self.b.kill()
        for pid in self.stopped:  # if their nursery is gone, too, nobody is left to end them
            self._after(20, lambda pid=pid: self._end_orphan(pid))  # type: ignore[misc]
        self.stopped.clear()
        self.b.start(**self.within.environment)
        return "daemons killed"

    def _end_orphan(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            if b"nursery" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                self.row.count("stopped workers left by nursery and daemon")

    def _end_daemon(self, _: Snapshot) -> str:
        """SIGTERM, and now and then another: every job is saved, and nothing is left behind."""
        assert self.b.process
        if hurry := self.chance.random() < 0.3:
            self.b.process.terminate()
            time.sleep(self.chance.random())
        if (status := self.b.stop()) != 0:
            self.row.wrong.append(f"exit status {status} after SIGTERM")
        self.b.start(**self.within.environment)
        return "daemons ended twice in a row" if hurry else "daemons ended"

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
        if not self._disk_fails():
            return ""
        space = os.statvfs(self.b.state)
        with open(self.b.state / "ballast", "wb") as f, contextlib.suppress(OSError):
            os.posix_fallocate(f.fileno(), 0, max(1, space.f_bavail * space.f_frsize - (1 << 20)))
        return "full disks"

    def _use_inodes(self, _: Snapshot) -> str:
        if not self._disk_fails():
            return ""
        with contextlib.suppress(OSError):
            for n in range(INODES):
                (self.b.state / f"ballast{n}").touch()
        return "disks without inodes"

    def _disk_fails(self) -> bool:
        """Whether it may now; it is well again after a while."""
        if time.monotonic() < self.full_until:
            return False
        seconds = self.chance.uniform(5, 40)
        self.full_until = time.monotonic() + seconds + 30
        self._after(seconds, self._relieve)
        return True

    def _relieve(self) -> None:
        for path in self.b.state.glob("ballast*"):
            path.unlink()


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
