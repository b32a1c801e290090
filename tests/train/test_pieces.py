"""Sequences longer than memory: gradients in pieces are those of the whole, and memory does not grow with length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boxes import toy_keys
from rwkv_toys import hybrid, make_rwkv, saved

from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.lora import attach
from rrd.models import build, load_base
from rrd.optim import AdamW
from rrd.savings import Savings
from rrd.train.data import Dataset, prepare
from rrd.train.step import NO_LABEL, Batch, eval_loss, train_step
from rrd.train.trainer import Trainer


def batch(T: int) -> Batch:
    g = torch.Generator().manual_seed(1)
    idx, labels = torch.randint(97, (2, T), generator=g), torch.randint(97, (2, T), generator=g)
    labels[:, :7], labels[0, 20:34], labels[:, T - 3:] = NO_LABEL, NO_LABEL, NO_LABEL
    return Batch(idx, labels)


def one_step(path: Path, longest: int, *, method: str, dtype: torch.dtype, T: int, dropout: float = 0.0,
             checkpointing: bool = False) -> tuple[float, dict[str, torch.Tensor], float]:
    """Training loss, gradients and evaluation loss with at most ``longest`` tokens in memory."""
    model = build(load_base(path, trainable=method == "full", dtype=dtype, compute=dtype))
    model.longest = longest
    named = list(model.named_parameters()) if method == "full" else attach(
        model, targets=("receptance", "key", "value", "output"), rank=4, seed=1, dropout=dropout)
    with torch.no_grad():
        for name, p in named:
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(2))
    optimizer = AdamW(named)
    result = train_step(model, optimizer, [batch(T)], lr=0.0, clip_norm=0.0, seeds=[3],
                        savings=Savings(checkpointing=checkpointing))
    total, labels = eval_loss(model, [batch(T)])
    return result.loss, {s.name: optimizer.view("grad", s).clone() for s in optimizer.layout}, total / labels


KINDS: list[dict[str, int]] = [{}, {"moba": 1, "rfa": 2}, {"attn": 2}]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize(("method", "dtype", "tolerance"), [
    ("lora", torch.float64, 1e-6), ("full", torch.float64, 1e-6), ("full", torch.float32, 2e-4)])
def test_gradients_in_pieces_are_those_of_the_whole(kinds: dict[str, int], method: str, dtype: torch.dtype,
                                                    tolerance: float, tmp_path: Path) -> None:
    path = saved(hybrid(L=2, C=64, **kinds), tmp_path)
    (tmp_path / "config.json").write_text('{"moba_chunk_size": 8}')
    loss, whole, held_out = one_step(path, 1000, method=method, dtype=dtype, T=61)
    for longest, checkpointing in ((16, False), (60, False), (23, True)):
        got, grads, again = one_step(path, longest, method=method, dtype=dtype, T=61, checkpointing=checkpointing)
        assert got == pytest.approx(loss, rel=1e-5)
        assert again == pytest.approx(held_out, rel=1e-5)
        for name, grad in whole.items():  # kept in fp32, whatever it was computed in
            assert (grads[name] - grad).abs().max() <= tolerance * grad.abs().max(), (longest, name)


def test_truncated_gradients_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states' gradients matter: without them the same comparison fails."""
    from rrd.train import pieces

    path = saved(hybrid(L=2, C=64), tmp_path)
    _, whole, _ = one_step(path, 1000, method="full", dtype=torch.float64, T=61)
    back = pieces._back
    monkeypatch.setattr(pieces, "_back", lambda *args: (back(*args)[0], None))
    _, truncated, _ = one_step(path, 16, method="full", dtype=torch.float64, T=61)
    name = "blocks.1.att.key.weight"
    assert (truncated[name] - whole[name]).abs().max() > 1e-2 * whole[name].abs().max()


def test_dropout_is_the_same_on_the_way_there_and_back(tmp_path: Path) -> None:
    """Were it not, the loss would not fit its gradient: a tiny step along it changes the loss as it says."""
    path = saved(hybrid(L=2, C=64), tmp_path)
    model = build(load_base(path, dtype=torch.float64, compute=torch.float64))
    model.longest = 16
    named = attach(model, targets=("receptance", "key", "value", "output"), rank=4, seed=1, dropout=0.3)
    optimizer = AdamW(named)
    with torch.no_grad():
        optimizer.flat["param"].normal_(generator=torch.Generator().manual_seed(2)).mul_(0.3)

    def loss() -> float:
        return train_step(model, optimizer, [batch(61)], lr=0.0, clip_norm=0.0, seeds=[3]).loss

    loss()
    start, norm = optimizer.flat["param"].clone(), float(optimizer.grad.norm())
    direction, losses = optimizer.grad / norm, []
    for distance in (3e-4, -3e-4):
        optimizer.flat["param"].copy_(start).add_(direction, alpha=distance)
        losses.append(loss())
    assert (losses[0] - losses[1]) / 6e-4 == pytest.approx(norm, rel=3e-3)


def test_a_job_says_how_much_is_in_memory(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, chunk_len=16)
    llama = JobSpec.model_validate(keys)
    rwkv = JobSpec.model_validate({**keys, "model": str(make_rwkv(tmp_path / "rwkv7"))})
    data = Dataset.open(prepare(llama.data, llama.model, seq_len=64, cache_dir=tmp_path / "cache").path)
    with pytest.raises(BadJob, match="llama models cannot run a sample in pieces"):
        Trainer(llama, load_base(llama.model), data, None, threads=1)
    trainer = Trainer(rwkv, load_base(rwkv.model), data, None, threads=1)
    assert trainer.model.longest == 16
    assert trainer.run_step(30, "stop").applied


PROGRAM = """
import resource, sys, torch
torch.set_num_threads(1)
from rrd.models import build, load_base
from rrd.lora import attach
from rrd.optim import AdamW
from rrd.train.step import Batch, train_step
T = int(sys.argv[2])
model = build(load_base(sys.argv[1]))
model.longest = 2048
optimizer = AdamW(attach(model, targets=("receptance", "key", "value", "output"), rank=4, seed=1))
idx = torch.randint(97, (1, T))
train_step(model, optimizer, [Batch(idx, idx)], lr=1e-4, clip_norm=1.0, seeds=[0])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak_megabytes(path: Path, T: int) -> int:
    command = [sys.executable, "-c", PROGRAM, str(path), str(T)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_peak_memory_is_flat_from_2k_to_64k_tokens(tmp_path: Path) -> None:
    path = saved(hybrid(L=2, C=64), tmp_path)
    short, long = peak_megabytes(path, 2 * 2048), peak_megabytes(path, 64 * 1024)
    assert long - short < 16, (short, long)  # one piece's activations are 50 MB; the whole's would be 1,500
