"""What a worker does: wait for an order, obey, report. The decisions are all the daemon's."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rrd.errors import ProtocolError, RrdError, TryLater
from rrd.messages import (
    Evaluated,
    Evict,
    Evicted,
    Export,
    Exported,
    Failed,
    Load,
    Loaded,
    Message,
    Prepare,
    Prepared,
    Ready,
    Run,
    Step,
    Stop,
    VisitDone,
    Yield,
)
from rrd.models import Base
from rrd.train import export
from rrd.train.step import NotFinite
from rrd.worker import resident
from rrd.worker.channel import Channel, Closed
from rrd.worker.resident import Resident, Saved
from rrd.worker.writer import Writer

if TYPE_CHECKING:
    from rrd.worker.entry import Settings


class Loop:
    """One worker's life. ``residents`` are the jobs that live on its die."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        self.channel, self.settings = channel, settings
        self.device = torch.device(settings.device)
        self.residents: dict[str, Resident] = {}
        self.bases: dict[str, Base] = {}
        self.writer = Writer(channel.send)

    def run(self) -> None:
        """Obey until Stop; raises Closed when the daemon is gone."""
        self.channel.send(self._ready())
        while not isinstance(order := self.channel.receive(), Stop):
            self._obey(order)
        self.writer.finish()

    def _ready(self) -> Ready:
        facts: dict[str, object] = {}
        if self.device.type == "cuda":
            facts = card_facts(torch.cuda.get_device_properties(self.device))
        return Ready.model_validate({"pid": os.getpid(), "torch": torch.__version__, "preloaded": True, **facts})

    def _obey(self, order: Message) -> None:
        job: str = getattr(order, "job", "")
        try:
            match order:
                case Prepare():
                    self._prepare(order)
                case Load():
                    self._load(order)
                case Run():
                    self._visit(order)
                case Export():
                    self._export(order)
                case Evict():
                    self._evict(order)
                case Yield():
                    pass  # the visit it was meant for is over
                case _:
                    raise AssertionError(f"no such order: {order!r}")
        except (Closed, ProtocolError):
            raise  # a daemon that is gone, or that is none
        except Exception as e:
            if poisoned(e):
                raise  # nothing computes in this process any more; the daemon starts another
            self._drop(job)
            self.channel.send(_failure(job, e))

    def _alive(self, job: str) -> resident.Alive:
        return lambda what, share: self.channel.progress(job, what, share)

    def _prepare(self, order: Prepare) -> None:
        needs = resident.check(order.spec, Path(order.output))
        train, _ = resident.prepare(order.spec, self.settings.cache_dir, self._alive(order.job))
        self.channel.send(Prepared(job=order.job, samples=train.samples, tokens=train.tokens,
                                   bad_lines=train.bad_count, needs_bytes=needs.total, base_bytes=needs.base,
                                   notes=train.notes()))

    def _load(self, order: Load) -> None:
        start = time.monotonic()
        self._drop(order.job)
        r = resident.load(
            order, device=self.settings.device, threads=self.settings.threads,
            job_dir=self.settings.state_dir / "jobs" / order.job, cache_dir=self.settings.cache_dir,
            bases=self.bases, alive=self._alive(order.job))
        self.residents[order.job] = r
        self.channel.send(Loaded(
            job=order.job, step=r.trainer.step, tokens=r.trainer.tokens, samples=len(r.trainer.data),
            seconds=time.monotonic() - start, resumed=r.resumed, fallbacks=r.fallbacks, notes=r.notes,
            memory_bytes=held_bytes(self.device)))

    def _visit(self, order: Run) -> None:
        """Steps until the order is filled, the job is done, or another order waits; then, if told to, a checkpoint."""
        r = self.residents[order.job]
        start, steps, seconds = time.monotonic(), 0, 0.0
        while steps < order.steps and r.trainer.step < order.total:
            if order.seconds is not None and steps and time.monotonic() - start >= order.seconds:
                break
            if steps and self.channel.pending():
                break
            seconds += self._step(r, order)
            steps += 1
        saved, copy_seconds = self._copy_aside(r, order)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # after VisitDone nothing may touch the die
        self.channel.send(VisitDone(job=order.job, step=r.trainer.step, steps=steps, seconds=seconds,
                                    copied=saved is not None, copy_seconds=copy_seconds,
                                    memory_bytes=held_bytes(self.device)))
        if saved:
            self.writer.submit(r, saved, order.keep)  # no earlier: its report must not overtake VisitDone

    def _step(self, r: Resident, order: Run) -> float:
        """One step, its line of history and its report. Returns its seconds."""
        if r.trainer.step == 0 and r.trainer.held_out and order.eval_every:
            self._evaluate(r)  # what the base knew: the loss that all later ones are measured against
        start, lr = time.monotonic(), r.trainer.lr(order.total)
        alive = self._alive(r.job)  # a step may take long, and the daemon has seen none yet to know how long
        result = r.trainer.run_step(order.total, order.on_nan, lambda: alive("training", 0.0))
        seconds = time.monotonic() - start
        r.trainer.seconds += seconds
        step = r.trainer.step
        loss = result.loss if result.labels else None
        r.log(step=step, loss=loss, lr=lr, grad_norm=result.grad_norm, tokens=result.tokens, seconds=round(seconds, 6),
              die=self.settings.die, round=order.round, time=round(time.time(), 3), applied=result.applied)
        self.channel.send(Step(job=order.job, step=step, loss=loss, lr=lr, grad_norm=result.grad_norm,
                               tokens=result.tokens, seconds=seconds, applied=result.applied))
        if r.trainer.held_out and (step >= order.total or (order.eval_every and step % order.eval_every == 0)):
            self._evaluate(r)
        return seconds

    def _evaluate(self, r: Resident) -> None:
        alive = self._alive(r.job)
        loss = r.trainer.evaluate(lambda share: alive("evaluating", share))
        r.log(step=r.trainer.step, eval_loss=loss, time=round(time.time(), 3))
        self.channel.send(Evaluated(job=r.job, step=r.trainer.step, loss=loss))

    def _copy_aside(self, r: Resident, order: Run) -> tuple[Saved | None, float]:
        if not order.steps:
            self._wait_for_writer(r)
        if not order.checkpoint or r.trainer.step == r.committed_step or not r.written.is_set():
            return None, 0.0
        start = time.monotonic()
        saved = r.save(order.total)
        return saved, time.monotonic() - start

    def _wait_for_writer(self, r: Resident) -> None:
        """Until nothing of this job is being written, giving signs of life: a disk may take its time."""
        while not r.written.wait(1.0):
            self.channel.progress(r.job, "writing a checkpoint", 0.0)

    def _export(self, order: Export) -> None:
        r = self.residents[order.job]
        notes = export.export(r.trainer, order.output, alive=self._alive(order.job))
        self.channel.send(Exported(job=order.job, output=order.output, notes=notes))

    def _evict(self, order: Evict) -> None:
        self._drop(order.job)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize(self.device)
        self.channel.send(Evicted(job=order.job))

    def _drop(self, job: str) -> None:
        """Forget a job after its writes have ended; a base that nobody uses any more goes with it."""
        if r := self.residents.get(job):
            self._wait_for_writer(r)
            del self.residents[job]
            r.close()
        used = {id(r.trainer.base) for r in self.residents.values()}
        self.bases = {key: base for key, base in self.bases.items() if id(base) in used}


def held_bytes(device: torch.device) -> int:
    """What this process holds on its die: of a card what torch has reserved, of a CPU what is resident of it, the
    pages that it shares with other workers included."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    with open("/proc/self/statm") as f:  # see proc(5)
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def card_facts(p: Any) -> dict[str, object]:
    """What CUDA's device properties ``p`` say of a card, by the names that people and nvidia-smi know it under.

    Older torch does not tell UUID and PCI address; they are empty then.
    """
    uuid = str(getattr(p, "uuid", ""))
    bus = getattr(p, "pci_bus_id", None)
    domain, device = getattr(p, "pci_domain_id", 0), getattr(p, "pci_device_id", 0)
    address = "" if bus is None else f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return {"model": p.name, "memory_bytes": p.total_memory, "pci_bus_id": address,
            "uuid": uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"}


def poisoned(e: Exception) -> bool:
    """Whether a CUDA error has made this process's context useless: all of them do, but for want of memory."""
    return isinstance(e, RuntimeError) and not isinstance(e, torch.cuda.OutOfMemoryError) and "CUDA error" in str(e)


def _failure(job: str, e: Exception) -> Failed:
    """What went wrong, and whose fault it is."""
    if isinstance(e, NotFinite):
        return Failed(job=job, blame="job", message=e.message, hint=e.hint)
    if isinstance(e, torch.cuda.OutOfMemoryError):
        return Failed(job=job, blame="plan", message=f"the die's memory is too small: {str(e).splitlines()[0]}",
                      hint="a smaller batch_size or seq_len, or gradient_checkpointing = true, needs less")
    if isinstance(e, MemoryError):
        return Failed(job=job, blame="plan", message="the host's memory is too small",
                      hint="fewer jobs side by side, or a smaller batch_size or seq_len, need less")
    if isinstance(e, TryLater):  # the disk, or somebody who holds what is needed: nobody's fault, and it passes
        return Failed(job=job, blame="disk", message=e.message, hint=e.hint)
    if isinstance(e, RrdError):
        return Failed(job=job, blame="job", message=e.message, hint=e.hint)
    traceback.print_exc()  # ours, or the library's: the journal should have the whole of it
    return Failed(job=job, blame="worker", message=f"{type(e).__name__}: {e}",
                  hint="this is a bug of rrd or a library; the journal has the stack")


