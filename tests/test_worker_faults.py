"""Real workers that crash, hang, run out of memory and lose their die; and the end of the daemon at every moment.

Whatever happens, a job ends with the adapter that it would have had.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import faulty_worker
import pytest
from boxes import Box, box, toy_keys, write_job

KEYS = {"max_steps": 12, "checkpoint_every": 4, "batch_size": 2, "lora_dropout": 0.2}
"""Of every job here: the same training, so that all must give the same bytes."""

BEFALLS: dict[str, tuple[list[Any], str]] = {
    "crash": (["signal", "SIGSEGV"], "the worker was killed by SIGSEGV"),
    "abort": (["signal", "SIGABRT"], "the worker was killed by SIGABRT"),
    "killed": (["signal", "SIGKILL"], "the worker was killed by SIGKILL"),
    "stopped": (["signal", "SIGSTOP"], "the worker reported nothing for"),
    "hang": (["hang"], "the worker reported nothing for"),
    "wedged": (["wedge"], "the worker reported nothing for"),
    "eof": (["eof"], "the worker closed its socket"),
    "garbage": (["garbage"], "the worker said what is no message"),
    "exit": (["exit", 3], "the worker exited with status 3"),
    "poisoned": (["poison", 700, 30], "CUDA error: an illegal memory access was encountered"),
}


def events(b: Box, job: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (b.state / "jobs" / job / "events.jsonl").open()]


def said(b: Box, job: str, kind: str) -> list[str]:
    return [e["message"] for e in events(b, job) if e["kind"] == kind]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The inputs, and the adapter's digest where nothing befalls anybody."""
    root = tmp_path_factory.mktemp("plain")
    with box(root, "cpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "plain", **toy_keys(root, **KEYS))
        b.start()
        b.wait_done("plain")
        return root, b.adapter("plain")


def test_whatever_befalls_a_worker_its_job_ends_with_the_same_adapter(tmp_path: Path, plain: tuple[Path, str]) -> None:
    inputs, expected = plain
    memory = [{"job": "memory", "at": "step 6", "do": ["oom", 40], "times": 2}]
    lost = [{"job": "lost", "at": "step 6", "do": ["poison", "lost", 10]},
            {"job": "kernels", "at": "load", "do": ["no kernel"]}, {"at": "probe", "do": ["no kernel"], "times": 99}]
    killer = [{"job": "killer", "at": "step 3", "do": ["signal", "SIGSEGV"], "times": 3}]
    once = [{"job": name, "at": "step 6", "do": do} for name, (do, _) in BEFALLS.items()]
    silent = [name for name, (_, end) in BEFALLS.items() if end.endswith("nothing for")]
    names = [*silent, *(name for name in BEFALLS if name not in silent), "memory"]
    rest = len(names) - len(silent) + 4  # their dies take turns, so that a small machine is not too slow for them
    lanes = "".join(f'[[lane]]\nname = "{name}"\ndies = ["cpu"]\n' for name in silent)
    lanes += f'[[lane]]\nname = "rest"\ndies = {json.dumps(["cpu"] * rest)}\n'
    with box(tmp_path, "hang_seconds = 30\njobs_per_die = 2\n" + lanes) as b:
        env = faulty_worker.write(tmp_path / "faults" / "script.json", *memory, *lost, *killer, *once)
        for i, name in enumerate(names):
            write_job(b.jobs_dir, name, **toy_keys(inputs, **KEYS, die=i))
        for name in ("killer", "mate"):
            write_job(b.jobs_dir, name, **toy_keys(inputs, **KEYS, die=len(silent) + rest - 1))
        b.start(**env)
        b.wait(lambda s: len(s.jobs) == len(names) + 2 and all(
            j.state in ("loading", "running", "done") for j in s.jobs if j.id in names), "each on its own die")
        for name in ("lost", "kernels"):  # only now: else they might take, and lose, a die that another job is bound to
            write_job(b.jobs_dir, name, **toy_keys(inputs, **KEYS))
        b.wait_state("killer", "failed")
        b.wait_done(*names, "lost", "kernels", "mate")
        for name in [*names, "lost", "kernels", "mate"]:
            assert b.adapter(name) == expected, name
        for name, (_, end) in BEFALLS.items():
            died = said(b, name, "worker_died")
            assert len(died) == 1 and end in died[0], died
            stood = [m for m in said(b, name, "worker_stack") if "faulty_worker.py" in m]
            assert bool(stood) == (name in ("crash", "abort", "hang", "stopped")), (name, stood)
        assert said(b, "memory", "worker_died") == [] and len(said(b, "memory", "out_of_memory")) == 2
        job = b.job("memory")
        assert job and job.savings == "activations are computed again since step 6"
        killed = b.job("killer")
        assert killed and killed.why.startswith("the worker was killed by SIGSEGV, 3 times in a row")
        fenced = [json.loads(line) for line in (b.state / "events.jsonl").open()]
        assert sum(e["kind"] == "die_fenced" and e["message"].startswith("fenced") for e in fenced) == 2
        s = b.snapshot()
        assert s and sorted(d.state for d in s.dies).count("fenced") == 2
        assert all(d.retry_at for d in s.dies if d.state == "fenced")
        for d in s.dies:
            if d.state == "fenced":
                assert b.ask("unfence", die=d.name) == f"die {d.name} is in use again"
        b.wait(lambda s: all(d.state != "fenced" for d in s.dies), "in use again")
        assert b.stop() == 0


def test_a_long_step_is_no_hang_and_a_block_that_never_ends_is_one(tmp_path: Path, plain: tuple[Path, str]) -> None:
    """Steps of several times ``hang_seconds``, whose longest silence is a block's."""
    inputs, expected = plain
    slow = [{"job": "slow", "at": "step 2", "do": ["crawl", 0.6]}, {"job": "slow", "at": "step 5", "do": ["crawl", 99]}]
    with box(tmp_path, "hang_seconds = 2\ncpu_dies = 1\n") as b:
        write_job(b.jobs_dir, "slow", **toy_keys(inputs, **KEYS, gradient_checkpointing=True))
        b.start(**faulty_worker.write(tmp_path / "faults" / "script.json", *slow))
        b.wait_done("slow")
        steps = [json.loads(line) for line in (b.state / "jobs" / "slow" / "history.jsonl").open()]
        assert next(s["seconds"] for s in steps if s["step"] == 2) > 4.0
        died = said(b, "slow", "worker_died")
        assert len(died) == 1, died
        assert re.match(r"the worker reported nothing for \d+ s and was ended at step 4", died[0])
        assert b.adapter("slow") == expected
        assert b.stop() == 0


def test_what_the_daemon_says_is_no_order_and_the_worker_says_so(tmp_path: Path) -> None:
    """Garbage in the other direction."""
    import asyncio

    from rrd.handle import Nursery, Worker, WorkerGone
    from rrd.messages import Evict, Evicted, Ready

    settings = {"die": "0", "device": "cpu", "threads": 1, "state_dir": str(tmp_path), "cache_dir": str(tmp_path)}

    async def scene() -> None:
        nursery = Nursery()
        worker = Worker(nursery, settings, lambda _: None)
        await worker.start()
        await worker.ask(None, Ready, patience=lambda: 60.0)
        assert worker._socket
        await asyncio.get_running_loop().sock_sendall(worker._socket, b"\0\0\0\7garbage")
        with pytest.raises(WorkerGone, match="exited with status 1: not a message"):
            await worker.ask(Evict(job="a"), Evicted, patience=lambda: 60.0)
        await nursery.stop()

    asyncio.run(asyncio.wait_for(scene(), 120))


# --- the end of the daemon at every moment ----------------------------------------------------------------------------

LONG = 100.0
CADENCE = 2
"""Steps between the checkpoints of the job that is killed again and again."""
STOP_SECONDS = 30.0
"""The end must not take longer, whatever is going on (the service has 180)."""


class Moments:
    """One job, its daemon started and ended again and again."""

    def __init__(self, b: Box, inputs: Path, cadence: int = 1000) -> None:
        self.b, self.script = b, b.root / "faults" / "script.json"
        faulty_worker.write(self.script)
        eval_data = inputs / "held-out.jsonl"
        eval_data.write_text("".join(json.dumps({"text": f"held out, sample {i}"}) + "\n" for i in range(40)))
        self.keys = toy_keys(inputs, **{**KEYS, "grad_accum": 8, "eval_data": str(eval_data), "eval_every": 6,
                                        "checkpoint_every": cadence, "steps_per_visit": 100, "data": str(
                                            inputs / "data.jsonl")})
        self.n = 0

    def until(self, *faults: dict[str, Any], what: Any = None) -> None:
        """Start the daemon, and wait until the last of ``faults`` is happening."""
        self.n += 1
        self.script = self.script.with_name(f"script-{self.n}.json")
        self.b.start(**faulty_worker.write(self.script, *faults))
        end = time.monotonic() + 120
        while faulty_worker.happened(self.script) < len(faults):
            assert time.monotonic() < end, self.b.tail()
            time.sleep(0.01)

    def end(self, how: str) -> float:
        """End the daemon; returns how long it took."""
        start = time.monotonic()
        if how == "killed":
            self.b.kill()
        else:
            assert self.b.process
            if how == "twice":
                self.b.process.terminate()
                time.sleep(0.5)
            assert self.b.stop() == 0
        return time.monotonic() - start

    @property
    def reached(self) -> int:
        """The newest step that the history has."""
        history = self.b.state / "jobs" / "a" / "history.jsonl"
        return max((json.loads(line)["step"] for line in history.open()), default=0) if history.exists() else 0

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint."""
        return max((int(p.name[5:]) for p in (self.b.state / "jobs" / "a").glob("ckpt-*")), default=0)


@pytest.mark.parametrize("how", ["terminated", pytest.param("killed", marks=pytest.mark.slow)])
def test_the_end_at_any_moment_saves_the_last_finished_step(tmp_path: Path, how: str) -> None:
    with box(tmp_path / "straight", "cpu_dies = 1\n") as b:
        straight = Moments(b, tmp_path / "straight")
        write_job(b.jobs_dir, "a", **straight.keys)
        b.start()
        b.wait_done("a")
        expected, lines = b.adapter("a"), losses(b)
    with box(tmp_path / "ended", "cpu_dies = 1\n") as b:
        m = Moments(b, tmp_path / "straight", cadence=CADENCE if how == "killed" else 1000)
        write_job(b.jobs_dir, "a", **m.keys)

        def one(at: str, do: list[Any], saved: int, most: float = STOP_SECONDS, how: str = how) -> None:
            m.until({"job": "a", "at": at, "do": do} if at != "evaluate" else {"at": at, "do": do})
            taken = m.end(how)
            assert taken < most, f"{at}: {taken:.0f} s\n{b.tail()}"
            if how == "killed":  # the checkpoint of the newest cadence may have been under way
                assert m.saved >= m.reached - 2 * CADENCE, f"{at}: {m.saved} of {m.reached}\n{b.tail()}"
            else:
                assert m.saved == saved, f"{at}\n{b.tail()}"

        one("prepare", ["sleep", LONG], 0)
        one("load", ["sleep", LONG], 0)
        one("evaluate", ["drag", 0.2], 0)          # before step 1
        one("step 3", ["drag", 0.3], 3)            # 8 micro-steps: it is finished first
        one("step 5", ["drag", 5.0], 4, how="twice" if how == "terminated" else how)  # 40 s, not waited for
        one("evaluate", ["drag", 0.2], 6)
        write_job(b.jobs_dir, "a", **{**m.keys, "checkpoint_every": 2, "steps_per_visit": 2})
        one("save", ["sleep", 1.0], 8)
        write_job(b.jobs_dir, "a", **m.keys)
        one("write", ["sleep", 1.0], 12)
        one("export", ["sleep", LONG], 12)
        b.start()
        b.wait_done("a")
        assert b.adapter("a") == expected and losses(b) == lines


@pytest.mark.slow
def test_a_step_of_a_minute_is_finished_and_saved(tmp_path: Path) -> None:
    with box(tmp_path, "cpu_dies = 1\n") as b:
        m = Moments(b, tmp_path)
        write_job(b.jobs_dir, "a", **m.keys)
        m.until({"job": "a", "at": "step 3", "do": ["drag", 7.5]})  # 8 micro-steps
        assert 50 < m.end("terminated") < 90
        assert m.saved == 3


def losses(b: Box) -> list[tuple[int, float | None, float | None]]:
    """Every line of the history: step, loss, held-out loss."""
    found = [json.loads(line) for line in (b.state / "jobs" / "a" / "history.jsonl").open()]
    return [(line["step"], line.get("loss"), line.get("eval_loss")) for line in found]


@pytest.mark.slow
def test_a_second_wish_to_end_ends_a_worker_that_is_deaf(tmp_path: Path) -> None:
    with box(tmp_path, "cpu_dies = 1\n") as b:
        m = Moments(b, tmp_path)
        write_job(b.jobs_dir, "a", **{**m.keys, "checkpoint_every": 2, "steps_per_visit": 1})
        m.until({"job": "a", "at": "step 5", "do": ["wedge"]})
        assert m.end("twice") < STOP_SECONDS
        assert m.saved == 4
