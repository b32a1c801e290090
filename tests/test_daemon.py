"""The user's story with a real daemon: what is dropped, broken, killed, filled up, edited and asked for.

Starts of a daemon are dear on small test machines, so that each story here has several chapters.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from boxes import Box, box, toy_keys
from disks import small_disk
from toys import make_data, make_model, make_poisoned, write_job

from rrd.errors import NoSuchJob, NotRunning, RrdError, TryLater
from rrd.job import to_toml

QUICK = "rescan_seconds = 1\n"


def history(b: Box, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (b.state / "jobs" / name / "history.jsonl").open()]


def steps(b: Box, name: str) -> list[int]:
    return [line["step"] for line in history(b, name) if "loss" in line]


class Pulse:
    """Asks for the status all the time from a thread, and remembers how long each answer took (I4)."""

    def __init__(self, b: Box) -> None:
        self.box, self.taken = b, list[float]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        while not self._stop.wait(0.1):
            start = time.monotonic()
            with contextlib.suppress(NotRunning):
                try:
                    self.box.ask("status")
                except TryLater:
                    self.taken.append(99.0)
                    continue
                self.taken.append(time.monotonic() - start)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def assert_lively(self) -> None:
        taken = sorted(self.taken)
        assert len(taken) > 10
        assert taken[int(0.98 * len(taken))] < 1.0, taken[-10:]


# --- good and bad files -----------------------------------------------------------------------------------------------


def drop_the_zoo(b: Box, good: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Bad files of every kind. Returns of each what its sentence says, and its hint."""
    d, outside = b.jobs_dir, b.root / "outside.toml"
    text = to_toml(good)
    outside.write_text(text)
    files: dict[str, bytes | str] = {
        "empty": "", "notoml": text + "\nlr = = 3\n", "typo": text + "\nlora_rnak = 3\n",
        "kind": text.replace("lr = 0.005", 'lr = "fast"'), "range": text.replace("lr = 0.005", "lr = -1.0"),
        "nan": text.replace("lr = 0.005", "lr = nan"), "twice": text + "\nseed = 1\nseed = 2\n",
        "nomodel": "data = '/d'\n", "relative": text.replace(f'data = "{good["data"]}"', 'data = "data.jsonl"'),
        "bom": b"\xef\xbb\xbf" + text.encode(), "latin": text.encode() + b"\n# \xe4\n", "huge": text + "#" * 70_000,
        "pickle": text.replace(f'data = "{good["data"]}"', 'data = "/d/data.pt"'), "deep": "a = " + "[" * 5000,
        "noeval": text + "\neval_every = 3\n", "holds": text + f'\noutput = "{b.state}"\n',
    }
    for name, data in files.items():
        path = d / f"{name}.toml"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        path.chmod(0o640)
    (d / "open.toml").write_text(text)
    (d / "open.toml").chmod(0o666)
    (d / "link.toml").symlink_to(outside)
    (d / "hard.toml").hardlink_to(outside)
    (d / "dir.toml").mkdir()
    os.mkfifo(d / "fifo.toml")
    (d / "notes.txt").write_text("not a job")
    (d / ".swap.toml.swp").write_text("x")
    return {
        "empty": ("the file is empty", "model"), "notoml": ("not TOML", ""), "typo": ("lora_rnak", "lora_rank"),
        "kind": ("`lr`", ""), "range": ("`lr`", ""), "nan": ("`lr`", ""), "twice": ("`seed` stands twice", "keep one"),
        "nomodel": ("`model`", ""), "relative": ("full path", "rrd submit"),
        "bom": ("byte order mark", "BOM"), "latin": ("UTF-8", ""),
        "huge": ("64 KiB", ""), "pickle": (".pt", "text"), "deep": ("", ""), "noeval": ("eval_data", "held-out"),
        "holds": ("output", "new directory"), "open": ("may be written", "chmod"), "link": ("link", ""),
        "hard": ("link", ""), "dir": ("", ""), "fifo": ("", ""),
    }


def test_bad_files_of_every_kind_are_explained_while_good_jobs_train(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path)
    with box(tmp_path, QUICK + "cpu_dies = 2\njobs_per_die = 2\n") as b, Pulse(b) as pulse:
        sentences = drop_the_zoo(b, keys)
        write_job(b.jobs_dir, "late", **{**keys, "model": str(tmp_path / "later"), "seed": 3})
        write_job(b.jobs_dir, "nodata", **{**keys, "data": str(tmp_path / "nowhere.jsonl")})
        write_job(b.jobs_dir, "nodie", **keys, die=77)
        write_job(b.jobs_dir, "good", **keys)
        write_job(b.jobs_dir, "same", **{**keys, "seed": 9, "output": str(b.state / "adapters" / "good")})
        b.start()
        b.wait_state("good", "done")
        s = b.wait(lambda s: len(s.rejected) >= len(sentences) + 1, "the rejections")
        said = {r.file.removesuffix(".toml"): r for r in s.rejected}
        assert said.keys() == sentences.keys() | {"same"}
        for name, (sentence, hint) in sentences.items():
            r = said[name]
            assert sentence in r.message and hint in r.hint and name in r.message, r
            assert "\n" not in r.message and "Traceback" not in r.message
        assert said["typo"].line and said["typo"].key == "lora_rnak"
        assert "good.toml" in said["same"].message
        assert {j.id for j in s.jobs} == {"late", "nodata", "nodie", "good"}

        # what is missing fails the job with the path, and is tried again by itself when it is there
        failed = b.wait_state("late", "failed")
        assert str(tmp_path / "later") in failed.why and failed.hint
        assert str(tmp_path / "nowhere.jsonl") in b.wait_state("nodata", "failed").why
        assert "there is no die" in b.wait_state("nodie", "waiting").why
        make_model(tmp_path / "arriving")
        (tmp_path / "arriving").rename(tmp_path / "later")
        make_data(tmp_path / "nowhere.jsonl")
        # a mended file is taken; one that was taken and turns bad goes on as accepted
        write_job(b.jobs_dir, "typo", **keys, seed=4)
        for name in ("late", "nodata", "typo"):
            b.wait_state(name, "done")
        (b.jobs_dir / "nodie.toml").write_text("nonsense = = 1")
        s = b.wait(lambda s: any(r.file == "nodie.toml" for r in s.rejected), "the damaged file")
        assert (j := s.job("nodie")) is not None and j.state == "waiting"
        assert "typo.toml" not in {r.file for r in s.rejected}
        pulse.assert_lively()
        assert b.stop() == 0
    assert "Traceback" not in b.tail(10**7)
    assert steps(b, "good") == list(range(1, 31))


# --- verbs, edits, files that come and go, and the configuration ------------------------------------------------------


def test_a_day_with_two_jobs(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=100_000, steps_per_visit="auto", visit_seconds=0.3, checkpoint_every="1h")
    with box(tmp_path, QUICK + "cpu_dies = 1\n") as b:
        for name in ("a", "b"):
            write_job(b.jobs_dir, name, **keys)
        b.start()
        for name in ("a", "b"):
            b.wait_job(name, lambda j: j.step >= 5)
        _chapter_of_verbs(b)
        _chapter_of_edits(b, keys)
        _chapter_of_files(b, keys)
        _chapter_of_configuration(b)
        _chapter_of_a_second_daemon(b)
        write_job(b.jobs_dir, "a", **{**keys, "max_steps": 10})
        write_job(b.jobs_dir, "b", **{**keys, "max_steps": 10})
        b.wait_done("a", "b")
        done = b.job("a")
        assert b.stop() == 0
        b.start()
        again = b.wait_state("a", "done")
        assert done and (again.loss, again.losses) == (done.loss, done.losses), "what it came to is not forgotten"
        assert b.stop() == 0
    assert "Traceback" not in b.tail(10**7)
    assert steps(b, "a")[:3] == [1, 2, 3]


def _chapter_of_verbs(b: Box) -> None:
    assert b.ask("pause", job="a") == "a rests after its step in progress"
    paused = b.wait_state("a", "paused")
    assert paused.why == "paused by the user" and paused.die is None
    assert paused.last_checkpoint_step == paused.step == steps(b, "a")[-1]
    at = b.job("b")
    assert at
    b.wait_job("b", lambda j: j.step > at.step + 5)
    with pytest.raises(RrdError, match="not paused"):
        b.ask("resume", job="b")
    with pytest.raises(NoSuchJob):
        b.ask("pause", job="nobody")
    for nonsense in ({"verb": "fly"}, {"verb": "pause"}, {"verb": "pause", "job": "b", "more": 1}):
        with pytest.raises(RrdError, match="no request of ours"):
            b.ask(**nonsense)  # type: ignore[arg-type]
    assert b.ask("resume", job="a") == "a carries on"
    b.wait_job("a", lambda j: j.state == "running" and j.step > paused.step)
    b.ask("cancel", job="a")
    cancelled = b.wait_state("a", "cancelled")
    assert cancelled.hint == "`rrd restart a` carries on"
    b.ask("restart", job="a")
    b.wait_job("a", lambda j: j.state == "running" and j.step > cancelled.step)
    assert steps(b, "a") == list(range(1, len(steps(b, "a")) + 1))


def _chapter_of_edits(b: Box, keys: dict[str, Any]) -> None:
    write_job(b.jobs_dir, "a", **{**keys, "visit_seconds": 0.1, "weight": 2.0, "keep": 2})
    b.wait_job("a", lambda j: j.weight == 2.0)
    write_job(b.jobs_dir, "a", **{**keys, "lora_rank": 8})
    refused = b.wait_job("a", lambda j: "lora_rank" in j.why)
    assert refused.state == "running" and "is not in force" in refused.why
    assert b.ask("restart", job="a").endswith("at step 0")
    b.wait_job("a", lambda j: j.state == "running" and not j.why and 0 < j.step < refused.step)
    assert any(b.state.glob("jobs/a/.old-ckpt-*"))  # kept, for a change of mind


def _chapter_of_files(b: Box, keys: dict[str, Any]) -> None:
    (b.jobs_dir / "b.toml").unlink()
    b.wait(lambda s: s.job("b") is None, "removed")
    at = steps(b, "b")[-1]
    assert (b.state / "jobs" / "b" / f"ckpt-{at:012}").is_dir()
    write_job(b.jobs_dir, "b", **keys)
    b.wait_job("b", lambda j: j.state == "running" and j.step > at)
    assert steps(b, "b")[: at + 1] == list(range(1, at + 2))


def _chapter_of_configuration(b: Box) -> None:
    good = b.config.read_text()
    b.config.write_text(good + "jobs_per_dice = 3\n")
    assert b.process
    b.process.send_signal(signal.SIGHUP)
    s = b.wait(lambda s: s.config_error != "", "the bad configuration")
    assert "jobs_per_dice" in s.config_error
    with pytest.raises(RrdError, match="stays as it was"):
        b.ask("reload")
    b.config.write_text(good + "jobs_per_die = 3\nthreads = 2\n")
    assert b.ask("reload") == "read again"
    b.wait(lambda s: s.config_error == "", "the good configuration")
    b.wait(lambda s: "threads will change at the next start" in b.tail(10**6), "what does not change at once")


def _chapter_of_a_second_daemon(b: Box) -> None:
    """On the same state directory, whatever else is different."""
    other = b.root / "other.toml"
    other.write_text(b.config.read_text().replace(str(b.run_dir), str(b.root / "run2")).replace("threads = 2\n", ""))
    second = subprocess.run([sys.executable, "-m", "rrd", "daemon", "-c", str(other)], capture_output=True, text=True,
                            timeout=60)
    assert second.returncode == 75, second
    assert str(b.state) in second.stderr and "Traceback" not in second.stderr
    assert len([line for line in second.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert b.snapshot() is not None


# --- what breaks ------------------------------------------------------------------------------------------------------


def test_a_day_when_everything_breaks(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=100_000, steps_per_visit="auto", visit_seconds=0.3, checkpoint_every="1s")
    with box(tmp_path, QUICK + "cpu_dies = 2\nhang_seconds = 2\n") as b, Pulse(b) as pulse:
        for name in ("a", "b"):
            write_job(b.jobs_dir, name, **keys)
        b.start()
        for name in ("a", "b"):
            b.wait_job(name, lambda j: (j.last_checkpoint_step or 0) >= 5)
        _chapter_of_a_hang(b)
        _chapter_of_the_nursery(b, keys)
        _chapter_of_vanished_directories(b, keys)
        pulse.assert_lively()
        assert b.stop() == 0
    for name in ("a", "b"):
        assert steps(b, name) == list(range(1, len(steps(b, name)) + 1))


def die_of(b: Box, job: str) -> tuple[str, int]:
    """The die of ``job`` and the pid of its worker."""
    s = b.wait(lambda s: any(job in d.jobs and d.worker_pid for d in s.dies), f"{job} on a die")
    return next((d.name, d.worker_pid) for d in s.dies if job in d.jobs and d.worker_pid)


def on_its_way(b: Box, *names: str) -> None:
    """Wait until each has made a step that it had not made before."""
    s = b.wait(lambda s: all(s.job(n) for n in names), "the jobs")
    best = {n: max(steps(b, n)) for n in names}
    assert s
    for n in names:
        b.wait_job(n, lambda j, n=n: j.state == "running" and j.step > best[n])  # type: ignore[misc]


def _chapter_of_a_hang(b: Box) -> None:
    die, pid = die_of(b, "a")
    os.kill(pid, signal.SIGSTOP)
    b.wait(lambda s: any(d.name == die and d.worker_pid not in (pid, None) for d in s.dies), "another worker")
    on_its_way(b, "a", "b")
    log = b.tail(10**6)
    assert "the worker reported nothing for 2 s and was ended" in log
    assert "a: it stood in " in log and ".py:" in log  # the stack of the one that hung
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _chapter_of_the_nursery(b: Box, keys: dict[str, Any]) -> None:
    """Its workers live on; new ones come from a new nursery. Then all at once."""
    nursery = int(subprocess.check_output(["pgrep", "-P", str(b.process.pid), "-f", "rrd.worker.nursery"]))  # type: ignore[union-attr]
    os.kill(nursery, signal.SIGKILL)
    write_job(b.jobs_dir, "c", **{**keys, "max_steps": 10, "seed": 5})
    b.wait_done("c")
    for pid in b.worker_pids():
        os.kill(pid, signal.SIGKILL)
    on_its_way(b, "a", "b")
    s = b.snapshot()
    assert s and not [d for d in s.dies if d.state == "fenced"] and not [j for j in s.jobs if j.state == "failed"]


def _chapter_of_vanished_directories(b: Box, keys: dict[str, Any]) -> None:
    b.jobs_dir.rename(b.root / "away")
    s = b.wait(lambda s: s.spool_error != "", "the missing spool")
    assert str(b.jobs_dir) in s.spool_error and "jobs go on" in s.spool_error
    on_its_way(b, "a", "b")
    shutil.rmtree(b.root / "cache")
    (b.root / "away").rename(b.jobs_dir)
    write_job(b.jobs_dir, "d", **{**keys, "max_steps": 10, "seed": 6, "method": "full"})
    b.wait_done("d")
    assert b.wait(lambda s: s.spool_error == "", "the spool again")
    shutil.rmtree(b.run_dir)
    b.wait(lambda s: True, "an answer on a new socket")
    on_its_way(b, "a", "b")
    end = time.monotonic() + 20
    while not (b.run_dir / "status" / "snapshot.json").exists():
        assert time.monotonic() < end
        time.sleep(0.1)


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_pauses_the_jobs_and_they_go_on_by_themselves(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=400, steps_per_visit=5, checkpoint_every=20, lora_rank=32)
    with small_disk(tmp_path / "state", "80m"), box(tmp_path, QUICK + "cpu_dies = 1\n") as b, Pulse(b) as pulse:
        ballast = b.state / "ballast"
        write_job(b.jobs_dir, "a", **keys)
        b.start()
        b.wait_job("a", lambda j: (j.last_checkpoint_step or 0) >= 20)
        with open(ballast, "wb") as f:
            os.posix_fallocate(f.fileno(), 0, shutil.disk_usage(b.state).free - 2**18)
        paused = b.wait_state("a", "paused")
        assert "the disk is" in paused.why and "full" in paused.why and "by itself" in paused.hint
        assert paused.checkpoint_failures >= 2 and paused.step < 400
        with pytest.raises(RrdError, match="not paused"):
            b.ask("resume", job="a")
        ballast.unlink()
        b.wait_done("a")
        pulse.assert_lively()
        assert b.stop() == 0
        assert steps(b, "a") == list(range(1, 401))


# --- training that goes wrong, and what is measured -------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_job_or_is_skipped_and_held_out_data_is_measured(tmp_path: Path) -> None:
    poisoned = make_poisoned(tmp_path / "poisoned")
    data = poisoned["data"]
    keys = {**toy_keys(tmp_path, max_steps=24, grad_accum=1, batch_size=1, checkpoint_every=5), "data": data}
    with box(tmp_path, "cpu_dies = 2\n") as b:
        write_job(b.jobs_dir, "stops", **{**keys, **poisoned})
        write_job(b.jobs_dir, "skips", **{**keys, **poisoned}, on_nan="skip")
        write_job(b.jobs_dir, "sound", **keys, eval_data=data, eval_every=10)
        b.start()
        b.wait_done("skips", "sound")
        stopped = b.wait_state("stops", "failed")
        assert stopped.why.startswith("the loss is nan at step ") and "on sample" in stopped.why, stopped
        assert "the gradient's norms before: " in stopped.why and stopped.hint and stopped.die is None
        step = int(stopped.why.split("at step ")[1].split(",")[0])
        assert stopped.last_checkpoint_step == (step - 1) // 5 * 5 or step <= 5  # the last good one is kept
        lines = history(b, "skips")
        assert [line["step"] for line in lines] == list(range(1, 25))
        assert sum(not line["applied"] for line in lines) == 3  # 24 steps of 24 rows, three of them poisoned
        skips = b.job("skips")
        assert skips and skips.skipped == 3
        told = [json.loads(line) for line in (b.state / "jobs" / "skips" / "events.jsonl").open()]
        assert sum(e["kind"] == "step_skipped" for e in told) in (2, 3)  # once for several in a row
        evals = [line for line in history(b, "sound") if "eval_loss" in line]
        assert [e["step"] for e in evals] == [0, 10, 20, 24] and evals[-1]["eval_loss"] < evals[0]["eval_loss"]
        sound = b.job("sound")
        assert sound and sound.eval_loss == evals[-1]["eval_loss"]
        assert b.stop() == 0


# --- in the foreground ------------------------------------------------------------------------------------------------


def test_the_older_tools_list_runs_in_the_foreground_to_its_end(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    job = {"die": 0, "model": str(model), "data": str(data), "lora_rank": 4, "lr": 0.005, "epochs": 1, "seq_len": 64,
           "steps_per_visit": 5, "quantize": False}
    jobs = [{**job, "output": str(tmp_path / "out" / n)} for n in ("code", "chat")]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "rrd", "run", "--config", "jobs.json", "--state", str(tmp_path / "state")]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "XDG_STATE_HOME": "",
                   "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"code", "chat"}
    assert all((tmp_path / "out" / n / "adapter_model.safetensors").exists() for n in ("code", "chat"))
    assert "[round " in done.stdout and "step 24/24 loss" in done.stdout and "code" in done.stdout

    # again: nothing is left to do; with a job that cannot succeed the exit code says so
    jobs.append({**job, "data": str(tmp_path / "nowhere.jsonl"), "output": str(tmp_path / "out" / "bad")})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert again.returncode == 1, again.stderr
    assert "nowhere.jsonl" in again.stderr and "[round " not in again.stdout


# --- the daemon itself ------------------------------------------------------------------------------------------------


def test_it_is_small_and_quick_with_a_thousand_job_files(tmp_path: Path) -> None:
    code = ("import time; t = time.process_time(); import rrd.daemon; print(time.process_time() - t)")
    taken = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert taken < 0.5
    keys = toy_keys(tmp_path, max_steps=100_000, steps_per_visit="auto", visit_seconds=0.5)
    with box(tmp_path, "cpu_dies = 2\njobs_per_die = 1\n") as b:
        for i in range(1000):
            write_job(b.jobs_dir, f"job-{i:04}", **{**keys, "seed": i}, paused=i % 2 == 1)
        b.start()
        b.wait(lambda s: len(s.jobs) == 1000 and sum(j.state == "running" for j in s.jobs) == 2, "two running")
        assert b.process
        taken_all = []
        for _ in range(10):
            start = time.monotonic()
            b.ask("status")
            taken_all.append(time.monotonic() - start)
        assert sorted(taken_all)[5] < 1.0, taken_all
        (line,) = (x for x in Path(f"/proc/{b.process.pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
        assert int(line.split()[1]) < 80 * 1024, line
        s = b.snapshot()
        assert s and all(j.why for j in s.jobs if j.state in ("waiting", "paused")), "I5"
        assert b.stop() == 0
