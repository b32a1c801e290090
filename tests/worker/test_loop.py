"""rrd.worker.loop: the order of what it says. (What it computes: test_exact.py and tests/train.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rrd.messages import Committed, Evict, Evicted, Message, Progress, Run, VisitDone
from rrd.ops.cuda.launch import KernelFailed
from rrd.worker.entry import Settings
from rrd.worker.faults import last_words, poisoned, shortage_of
from rrd.worker.loop import Loop, _Visit, card_facts
from rrd.worker.resident import Saved


class Channel:
    """Remembers the reports; no orders."""

    def __init__(self) -> None:
        self.reports: list[Message] = []
        self.on_progress: Callable[[], None] = lambda: None

    def progress(self, job: str, what: str, share: float) -> None:
        self.reports.append(Progress(job=job, what=what, share=share))
        self.on_progress()

    def send(self, report: Message) -> None:
        self.reports.append(report)

    def pending(self) -> bool:
        return False

    def urgency(self) -> int:
        return -1


def a_resident(step: int) -> Any:
    resident = SimpleNamespace(job="a", trainer=SimpleNamespace(step=step, evaluated=None), committed_step=0,
                               written=threading.Event(), save=lambda total: Saved(step, "i", {}))
    resident.written.set()
    return resident


def test_a_checkpoint_is_never_reported_before_the_visit_it_was_copied_in(tmp_path: Path) -> None:
    """The daemon learns from VisitDone that a write is under way; news of its end must not come first."""
    channel = Channel()
    loop = Loop(channel, Settings("0", "cpu", 1, tmp_path, tmp_path))  # type: ignore[arg-type]
    loop.residents["a"] = a_resident(step=7)
    loop.writer.submit = lambda r, saved, keep: channel.send(  # type: ignore[method-assign]  # as fast as can be
        Committed(job="a", step=saved.step, bytes=1, seconds=0.0))
    loop._obey(Run(job="a", steps=0, total=10, checkpoint=True))
    assert [type(report) for report in channel.reports] == [VisitDone, Committed]
    done = channel.reports[0]
    assert isinstance(done, VisitDone) and done.copied and done.step == 7


def test_nothing_is_copied_when_the_step_is_saved_already_or_a_write_is_under_way(tmp_path: Path) -> None:
    channel = Channel()
    loop = Loop(channel, Settings("0", "cpu", 1, tmp_path, tmp_path))  # type: ignore[arg-type]
    saved, busy = a_resident(7), a_resident(7)
    saved.committed_step = 7
    busy.written.clear()
    for resident in (saved, busy):
        loop.residents["a"] = resident
        loop._obey(Run(job="a", steps=1, total=7, checkpoint=True))
    assert [r.copied for r in channel.reports if isinstance(r, VisitDone)] == [False, False]


def test_an_evaluation_that_had_begun_is_not_gone_on_with_at_another_step(tmp_path: Path) -> None:
    """``eval_every`` is live: what was due when it began may not be any more, and training goes on."""
    loop = Loop(Channel(), Settings("0", "cpu", 1, tmp_path, tmp_path))  # type: ignore[arg-type]
    r = a_resident(step=10)
    r.evaluation, r.trainer.evaluated, begun = None, -1, []

    def evaluation() -> Any:
        begun.append(r.trainer.step)
        return SimpleNamespace(step=r.trainer.step, go_on=lambda rungs, enough, alive: None)  # it is always interrupted

    r.trainer.evaluation = evaluation
    for r.trainer.step in (10, 10, 11, 12, 12):
        order = Run(job="a", steps=1, total=100, eval_every=4 if r.trainer.step == 12 else 10)
        loop._evaluated(r, order, _Visit(0.0))
    assert begun == [10, 12]


def test_forgetting_a_job_whose_checkpoint_is_being_written_is_no_silence(tmp_path: Path) -> None:
    """On a slow disk the daemon would take it for a hang, and kill the write."""
    channel = Channel()
    loop = Loop(channel, Settings("0", "cpu", 1, tmp_path, tmp_path))  # type: ignore[arg-type]
    loop.residents["a"] = busy = a_resident(7)
    busy.written.clear()
    busy.close = lambda: None
    channel.on_progress = busy.written.set
    loop._obey(Evict(job="a"))
    assert [type(report) for report in channel.reports] == [Progress, Evicted]
    assert loop.residents == {}


def test_a_card_is_named_as_people_know_it() -> None:
    told = SimpleNamespace(name="Tesla K80", total_memory=11 << 30, uuid="b3f5a0c2-1111-2222-3333-444455556666",
                           pci_domain_id=0, pci_bus_id=0x8A, pci_device_id=0)
    assert card_facts(told) == {"model": "Tesla K80", "memory_bytes": 11 << 30, "pci_bus_id": "0000:8a:00.0",
                                "uuid": "GPU-b3f5a0c2-1111-2222-3333-444455556666"}
    older = SimpleNamespace(name="Tesla K80", total_memory=11 << 30)
    assert card_facts(older) == {"model": "Tesla K80", "memory_bytes": 11 << 30, "pci_bus_id": "", "uuid": ""}


def test_a_poisoned_context_ends_the_worker_and_want_of_memory_does_not() -> None:
    assert poisoned(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not poisoned(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not poisoned(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not poisoned(ValueError("CUDA error"))


def test_what_the_driver_says_to_a_kernel_of_ours_is_judged_like_what_it_says_to_torch() -> None:
    """A launch is often the first to hear of an error before it."""
    lost = KernelFailed("rrd_xent_fold on Tesla K80 (sm_37), grid (9,), of 9x40: cuLaunchKernel: "
                        "CUDA_ERROR_ECC_UNCORRECTABLE (uncorrectable ECC error encountered)")
    assert poisoned(lost) and last_words(lost).die_failed
    assert poisoned(KernelFailed("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access)"))


@pytest.mark.parametrize("e", [
    RuntimeError("CUDA error: out of memory"), KernelFailed("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")])
def test_want_of_memory_is_that_whoever_says_it(e: Exception) -> None:
    assert not poisoned(e) and shortage_of(e, torch.device("cpu"))
