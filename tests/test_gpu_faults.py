"""The real ones, on a card, where they are safe: each in a process of its own, for a poisoned context ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA die here")]


def in_a_process(code: str) -> str:
    """What ``code`` prints of a real CUDA error as a worker sees it."""
    head = ("import torch\nfrom rrd.worker.faults import last_words, poisoned, release, shortage_of\n"
            "die = torch.device('cuda:0')\n")
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=240,
                          cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_want_of_memory_has_its_numbers_and_the_die_works_on() -> None:
    said = in_a_process("""
kept = torch.empty(64 << 20, dtype=torch.uint8, device=die)
del kept
try:
    torch.empty(1 << 44, dtype=torch.uint8, device=die)
except RuntimeError as e:
    s = shortage_of(e, die)
    assert not poisoned(e) and s.needed >= 1 << 43 and 0 < s.free < 1 << 40, (s, e)
release(die)
assert torch.cuda.memory_reserved(die) == 0
print(float((torch.ones(8, 8, device=die) @ torch.ones(8, 8, device=die)).sum()))
""")
    assert said.strip() == "512.0"


def test_a_real_error_of_the_context_is_sticky_and_is_seen_as_one() -> None:
    said = in_a_process("""
x = torch.zeros(4, device=die)
try:
    x[torch.tensor([1 << 20], device=die)] + 0
    torch.cuda.synchronize()
except RuntimeError as e:
    print(poisoned(e), last_words(e).die_failed)
try:
    torch.ones(2, device=die).sum().item()
except RuntimeError as e:
    print(poisoned(e))
""")
    assert said.split() == ["True", "False", "True"]


def test_a_job_with_too_large_a_batch_goes_through_by_its_rungs() -> None:
    """A step that is run out of memory by a cap on the process's share of the die, rung by rung, until it fits."""
    said = in_a_process("""
import sys; sys.path.insert(0, 'tests')
import tempfile
from pathlib import Path
from toys import make_model
from rrd.lora import attach
from rrd.models import build, load_base
from rrd.optim import AdamW
from rrd.savings import climb, in_force
from rrd.train.step import Batch, train_step
path = make_model(Path(tempfile.mkdtemp()) / 'm', hidden=512, layers=8, heads=8, kv_heads=8, ffn=2048, vocab=32000)
model = build(load_base(path, device=die))
optimizer = AdamW(attach(model, targets=('q_proj', 'down_proj'), rank=8, dropout=0.1))
batch = Batch(*(torch.randint(32000, (16, 1024), device=die) for _ in range(2)))
total = torch.cuda.get_device_properties(die).total_memory
torch.cuda.set_per_process_memory_fraction(min(1.0, 1.2e9 / total), die)
rungs = ()
while True:
    try:
        r = train_step(model, optimizer, [batch], lr=1e-3, clip_norm=1.0, seeds=[1], savings=in_force(rungs, 1))
        break
    except torch.cuda.OutOfMemoryError:
        rungs = climb(rungs, 1, recomputes=True, most_parts=16)
        assert rungs is not None
    release(die)
print(len(rungs), r.applied)
""")
    rungs, applied = said.split()
    assert int(rungs) >= 1 and applied == "True"
