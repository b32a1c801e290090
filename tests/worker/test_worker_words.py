"""rrd.worker.faults: what went wrong, by what CUDA, the host's allocator and rrd itself say."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch
from faults import MORE, NO_KERNEL, POISON, AcceleratorError, out_of_memory

from rrd.errors import BadJob, DiskTrouble
from rrd.worker.faults import failure, last_words, poisoned, shortage_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(("said", "needed", "free"), [
    (out_of_memory("2.00 GiB", "310.00 MiB"), 2 << 30, 310 << 20),
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.17 GiB total capacity; "
                                 "10.02 GiB already allocated; 7.50 MiB free; 10.5 GiB reserved in total by PyTorch)"),
     20 << 20, int(7.5 * 2**20)),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                  "to allocate 8796093022208 bytes. Error code 12 (Cannot allocate memory)"), 1 << 43, None)])
def test_a_shortage_has_its_numbers(said: Exception, needed: int, free: int | None) -> None:
    shortage = shortage_of(said, CPU)
    assert shortage and shortage.needed == needed
    assert shortage.free == free if free is not None else shortage.free
    assert not poisoned(said)


def test_a_real_shortage_of_the_host_is_one_and_other_errors_are_none() -> None:
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 60, dtype=torch.uint8)
    shortage = shortage_of(e.value, CPU)
    assert shortage and shortage.needed == 1 << 60 and shortage.free
    assert shortage_of(MemoryError(), CPU) is not None
    assert shortage_of(RuntimeError("shapes cannot be multiplied"), CPU) is None
    assert shortage_of(BadJob("out of memory"), CPU) is None


@pytest.mark.parametrize("kind", POISON)
def test_an_error_of_the_context_ends_the_worker_and_only_some_are_the_dies_fault(kind: Any) -> None:
    e = AcceleratorError(POISON[kind] + MORE)
    assert poisoned(e)
    words = last_words(e)
    assert words.message == POISON[kind] and words.die_failed == (kind not in (700, 719))


def test_a_missing_kernel_is_the_dies_fault_and_no_poison() -> None:
    e = AcceleratorError(NO_KERNEL + MORE)
    assert not poisoned(e)
    assert failure("a", e).blame == "die" and torch.__version__ in failure("a", e).message


def test_everybody_gets_their_own_blame(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure("a", BadJob("no", hint="do")).blame == "job"
    assert failure("a", DiskTrouble("full")).blame == "disk"
    full = failure("a", OSError(errno.ENOSPC, "No space left on device", "/proc/self/x"))
    assert full.blame == "disk" and full.message == "the disk is full: cannot write /proc/self/x"
    assert failure("a", OSError(errno.EIO, "Input/output error")).blame == "worker"
    ours = failure("a", KeyError("x\ny"))
    assert ours.blame == "worker" and ours.message == "KeyError: 'x\\ny'"
    assert "KeyError" in capsys.readouterr().err
