"""An RWKV-7 from job file to adapter and merged model, through the daemon; the results run in the `rwkv` package."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boxes import box, toy_keys, write_job
from rwkv_toys import make_rwkv
from safetensors.torch import load_file

from rrd.models import build, load_base
from rrd.ops import native


def test_a_run_from_job_file_to_a_model_that_the_rwkv_package_runs(tmp_path: Path) -> None:
    model = make_rwkv(tmp_path / "rwkv7")
    (model / "model.safetensors").rename(model / "RWKV-x070-toy.safetensors")
    jobs = tmp_path / "jobs.d"
    jobs.mkdir()
    keys = {**toy_keys(tmp_path), "model": str(model / "RWKV-x070-toy.safetensors"), "lr": 0.01, "export_merged": True}
    write_job(jobs, "lora", **keys)
    write_job(jobs, "full", **{**keys, "method": "full", "lr": 1e-3, "export_merged": False, "model": str(model)})
    state = tmp_path / "state"
    bring_kernels(state / "cache")
    run = subprocess.run([sys.executable, "-m", "rrd", "run", "--config", str(jobs), "--state", str(state)],
                         capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stdout + run.stderr
    base = load_file(model / "RWKV-x070-toy.safetensors")
    for result in ("lora/merged", "full"):
        tensors = load_file(state / "adapters" / result / "model.safetensors")
        assert tensors.keys() == base.keys()
        assert_the_peer_agrees(tensors, state / "adapters" / result, tmp_path)
    assert not torch.equal(tensors["blocks.1.att.w0"], base["blocks.1.att.w0"])


def assert_the_peer_agrees(tensors: dict[str, torch.Tensor], ours: Path, tmp_path: Path) -> None:
    if not hasattr(torch, "compiler"):
        return  # the package needs torch 2.1
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    peer = pytest.importorskip("rwkv.model")
    torch.save(tensors, tmp_path / "peer.pth")
    idx = torch.randint(320, (30,))
    expected, _ = peer.RWKV(model=str(tmp_path / "peer"), strategy="cpu fp32").forward(
        idx.tolist(), None, full_output=True)
    with torch.no_grad():
        torch.testing.assert_close(build(load_base(ours))(idx[None])[0], expected, atol=1e-4, rtol=1e-4)


def bring_kernels(cache: Path) -> None:
    """What this machine has built before, so that not every box builds it again."""
    if native.kernels() is not None:
        shutil.copytree(native.default_cache_dir() / "kernels", cache / "kernels")


def test_killed_and_in_pieces_it_gives_the_same_bytes(tmp_path: Path) -> None:
    """I1 for a model with states, compiled kernels and samples in pieces."""
    make_rwkv(tmp_path / "rwkv7")
    keys = toy_keys(tmp_path, model=str(tmp_path / "rwkv7"), chunk_len=16, checkpoint_every=4)
    digests = []
    for kills in (0, 2):
        with box(tmp_path / f"killed-{kills}", "cpu_dies = 1\n") as b:
            bring_kernels(b.root / "cache")
            b.start()
            write_job(b.jobs_dir, "job", **keys)
            for i in range(kills):
                b.wait_job("job", lambda j, i=i: j.step >= 6 + 8 * i)  # type: ignore[misc]
                for pid in b.worker_pids():
                    os.kill(pid, signal.SIGKILL)
            b.wait_done("job")
            digests.append(b.adapter("job"))
            lines = (b.state / "jobs" / "job" / "history.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(1, 31))
    assert digests[0] == digests[1]


def test_without_a_compiler_it_trains_and_says_so_and_goes_on_so_when_there_is_one(tmp_path: Path) -> None:
    """The same job with torch's operations: said by `rrd dies` and the log. With kernels at hand it goes on without."""
    make_rwkv(tmp_path / "rwkv7")
    why = "RWKV runs on torch's operations, at half the speed"
    with box(tmp_path / "box", "cpu_dies = 1\n") as b:
        b.start(CXX="", PATH=str(tmp_path))
        write_job(b.jobs_dir, "job", **toy_keys(tmp_path, model=str(tmp_path / "rwkv7"), max_steps=10_000))
        b.wait_job("job", lambda j: j.step >= 3)
        rrd = [sys.executable, "-m", "rrd", "dies", "-c", str(b.config)]
        dies = subprocess.run(rrd, capture_output=True, text=True, check=True).stdout
        assert f"{why}: no C++ compiler is installed" in " ".join(dies.split())
        assert f"job: {why}: no C++ compiler is installed" in b.tail()
        assert b.stop() == 0
        bring_kernels(b.root / "cache")
        b.start()
        b.wait_job("job", lambda j: j.loaded_at is not None)
        assert "resumed from step" in b.tail()
        if native.kernels() is not None:
            assert f"job: {why}: so the job began" in b.tail()
        s = b.snapshot()
        assert s and not s.dies[0].without_kernels
