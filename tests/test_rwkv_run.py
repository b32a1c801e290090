"""An RWKV-7 from job file to adapter and merged model, through the daemon; the results run in the `rwkv` package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boxes import toy_keys, write_job
from rwkv_toys import make_rwkv
from safetensors.torch import load_file

from rrd.models import build, load_base


def test_a_run_from_job_file_to_a_model_that_the_rwkv_package_runs(tmp_path: Path) -> None:
    model = make_rwkv(tmp_path / "rwkv7")
    (model / "model.safetensors").rename(model / "RWKV-x070-toy.safetensors")
    jobs = tmp_path / "jobs.d"
    jobs.mkdir()
    keys = {**toy_keys(tmp_path), "model": str(model / "RWKV-x070-toy.safetensors"), "lr": 0.01, "export_merged": True}
    write_job(jobs, "lora", **keys)
    write_job(jobs, "full", **{**keys, "method": "full", "lr": 1e-3, "export_merged": False, "model": str(model)})
    state = tmp_path / "state"
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
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    peer = pytest.importorskip("rwkv.model")
    torch.save(tensors, tmp_path / "peer.pth")
    idx = torch.randint(320, (30,))
    expected, _ = peer.RWKV(model=str(tmp_path / "peer"), strategy="cpu fp32").forward(
        idx.tolist(), None, full_output=True)
    with torch.no_grad():
        torch.testing.assert_close(build(load_base(ours))(idx[None])[0], expected, atol=1e-4, rtol=1e-4)
