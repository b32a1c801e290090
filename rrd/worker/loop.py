"""What a worker does: wait for an order, obey, report. The decisions are all the daemon's."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rrd.errors import ProtocolError
from rrd.messages import (
    Evaluated,
    Evict,
    Evicted,
    Export,
    Exported,
    Failed,
    GaveUp,
    Load,
    Loaded,
    Message,
    OutOfMemory,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Ready,
    Run,
    Step,
    Stop,
    VisitDone,
    Yield,
)
from rrd.models import Base
from rrd.ops import pulse
from rrd.train import export
from rrd.worker import resident
from rrd.worker.channel import PROGRESS_SECONDS, Channel, Closed
from rrd.worker.faults import GivenUp, failure, poisoned, release, shortage_of
from rrd.worker.resident import Resident, Saved
from rrd.worker.writer import Writer

if TYPE_CHECKING:
    from rrd.worker.entry import Settings

DISK_SECONDS = 600.0
"""Seconds that a single call may be busy with the disk during a load or an export; then it counts as a hang."""


class Loop:
    """One worker's life. ``residents`` are the jobs that live on its die."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        self.channel, self.settings = channel, settings
        self.device = torch.device(settings.device)
        self.residents: dict[str, Resident] = {}
        self.bases: dict[str, Base] = {}
        self.writer = Writer(channel.send)
        self._what: Literal["training", "evaluating"] = "training"

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
        """Do as told, or say why not. Raises what ends the worker."""
        job: str = getattr(order, "job", "")
        try:
            self._do(order)
            return
        except (Closed, ProtocolError):
            raise  # a daemon that is gone, or that is none
        except GivenUp:
            answer: Message = GaveUp(job=job, resident=isinstance(order, Export))
        except Exception as e:
            if poisoned(e):
                raise  # nothing computes in this process any more; the daemon starts another
            answer = self._excuse(order, e)
        # Only here is the exception gone, and with its traceback the tensors that a failed step still held.
        if not getattr(answer, "resident", False):
            self._drop(job)
        release(self.device)
        self.channel.send(answer)

    def _do(self, order: Message) -> None:
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
            case Probe():
                self._probe()
            case Yield():
                pass  # the visit it was meant for is over
            case _:
                raise AssertionError(f"no such order: {order!r}")

    def _excuse(self, order: Message, e: Exception) -> Failed | OutOfMemory:
        """What to answer in place of what was asked for. A step that ran out of memory has not been: it may be tried
        again, unless it was the update itself."""
        job: str = getattr(order, "job", "")
        shortage = shortage_of(e, self.device)
        if shortage is None:
            failed = failure(job, e)
            stays = isinstance(order, Export) and failed.blame == "disk"
            return failed.model_copy(update={"resident": stays})
        if isinstance(order, Prepare):
            return Failed(job=job, blame="plan", message="the host's memory is too small to prepare its data")
        r = self.residents.get(job)
        what = self._what if isinstance(order, Run) else "export" if isinstance(order, Export) else "load"
        return OutOfMemory(job=job, what=what, step=r.trainer.step + 1 if r else 0, needed=shortage.needed,
                           free=shortage.free, resident=r is not None and r.trainer.optimizer.whole)

    def _alive(self, job: str, most: int = 0) -> resident.Alive:
        """Signs of life for the daemon. Raises GivenUp when what waits is more urgent than ``most``."""
        def alive(what: str, share: float) -> None:
            self.channel.progress(job, what, share)
            if self.channel.urgency() > most:
                raise GivenUp

        return alive

    def _probe(self) -> None:
        n = 256
        x = torch.full((n, n), 2.0, device=self.device)
        found = float((x @ x).sum())
        assert found == 4.0 * n**3, f"the die computes {found} in place of {4.0 * n**3}"
        self.channel.send(Probed())

    def _prepare(self, order: Prepare) -> None:
        needs = resident.check(order.spec, Path(order.output))
        train, _ = resident.prepare(order.spec, self.settings.cache_dir, self._alive(order.job),
                                    processes=len(os.sched_getaffinity(0)))
        self.channel.send(Prepared(job=order.job, samples=train.samples, tokens=train.tokens,
                                   bad_lines=train.bad_count, needs_bytes=needs.total, base_bytes=needs.base,
                                   saved_bytes=needs.saved,
                                   notes=train.notes()))

    def _load(self, order: Load) -> None:
        start = time.monotonic()
        self._drop(order.job)
        with self._disk_takes_its_time(order.job, "loading"):
            r = resident.load(
                order, device=self.settings.device, threads=self.settings.threads,
                job_dir=self.settings.state_dir / "jobs" / order.job, cache_dir=self.settings.cache_dir,
                bases=self.bases, alive=self._alive(order.job))
        self.residents[order.job] = r
        self.channel.send(Loaded(
            job=order.job, step=r.trainer.step, tokens=r.trainer.tokens, samples=len(r.trainer.data),
            seconds=time.monotonic() - start, resumed=r.resumed, fallbacks=r.fallbacks, notes=r.notes,
            memory_bytes=held_bytes(self.device), skipped=r.trainer.skipped, evaluated=r.trainer.evaluated,
            rungs=r.trainer.rungs, recomputes=r.trainer.recomputes, most_parts=r.trainer.most_parts,
            without_kernels=r.trainer.model.without_kernels))

    def _visit(self, order: Run) -> None:
        """Steps, and evaluations where due, until the order is filled, the job is done, or another order waits; then,
        if told to, a checkpoint."""
        r, visit = self.residents[order.job], _Visit(time.monotonic())
        with contextlib.suppress(GivenUp):  # of the step in progress nothing has happened
            while order.steps and self._evaluated(r, order, visit) and r.trainer.step < order.total:
                if visit.steps >= order.steps or (visit.busy and self._enough(order, visit)):
                    break
                visit.seconds += self._step(r, order)
                visit.steps, visit.busy = visit.steps + 1, True
        saved, copy_seconds = self._copy_aside(r, order)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # after VisitDone nothing may touch the die
        self.channel.send(VisitDone(job=order.job, step=r.trainer.step, steps=visit.steps, seconds=visit.seconds,
                                    copied=saved is not None, copy_seconds=copy_seconds,
                                    evaluated=r.trainer.evaluated, memory_bytes=held_bytes(self.device)))
        if saved:
            self.writer.submit(r, saved, order.keep)  # no earlier: its report must not overtake VisitDone

    def _enough(self, order: Run, visit: _Visit) -> bool:
        """Whether the visit should end: its time is up, or another order waits."""
        late = order.seconds is not None and time.monotonic() - visit.start >= order.seconds
        return late or self.channel.pending()

    def _step(self, r: Resident, order: Run) -> float:
        """One step, its line of history and its report. Returns its seconds."""
        start, lr = time.monotonic(), r.trainer.lr(order.total)
        alive = self._alive(r.job, most=1)  # a step may take long, and the daemon has seen none yet to know how long
        self._what, what = "training", f"training, step {r.trainer.step + 1}"
        result = r.trainer.run_step(order.total, order.on_nan, order.rungs, partial(alive, what))
        seconds = time.monotonic() - start
        r.trainer.seconds += seconds
        step = r.trainer.step
        loss = result.loss if result.labels else None
        r.log(step=step, loss=loss, lr=lr, grad_norm=result.grad_norm, tokens=result.tokens, seconds=round(seconds, 6),
              die=self.settings.die, round=order.round, time=round(time.time(), 3), applied=result.applied)
        self.channel.send(Step(job=order.job, step=step, loss=loss, lr=lr, grad_norm=result.grad_norm,
                               tokens=result.tokens, seconds=seconds, applied=result.applied,
                               skipped=r.trainer.skipped))
        return seconds

    def _evaluated(self, r: Resident, order: Run, visit: _Visit) -> bool:
        """Take the held-out loss if it is due: before the first step (what the base knew, against which all later ones
        are measured), every so many steps, and at the end. False if the visit ended before that."""
        t = r.trainer
        due = t.step >= order.total or (order.eval_every is not None and t.step % order.eval_every == 0)
        if t.evaluated in (None, t.step) or not due:
            return True
        alive, visit.busy, self._what = partial(self._alive(r.job, most=1), "evaluating"), True, "evaluating"

        def enough(share: float) -> bool:
            self.channel.progress(r.job, "evaluating", share)
            return self._enough(order, visit)

        if r.evaluation is None or r.evaluation.step != t.step:  # one of another step began before eval_every changed
            r.evaluation = t.evaluation()
        loss = r.evaluation.go_on(order.rungs, enough, alive)
        if loss is None:
            return False
        r.evaluation = None
        r.log(step=t.step, eval_loss=loss, time=round(time.time(), 3))
        self.channel.send(Evaluated(job=r.job, step=t.step, loss=loss))
        return True

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

    @contextlib.contextmanager
    def _disk_takes_its_time(self, job: str, what: str) -> Iterator[None]:
        """Within it a silence of up to ``DISK_SECONDS`` is no hang: one call may have to write many gigabytes."""
        over = threading.Event()

        def tick() -> None:
            with contextlib.suppress(Closed):  # whoever works will see it, too
                while not over.wait(PROGRESS_SECONDS):
                    self.channel.repeat(DISK_SECONDS)

        self.channel.progress(job, what, 0.0)
        threading.Thread(target=tick, name="ticks", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _export(self, order: Export) -> None:
        r = self.residents[order.job]
        alive = self._alive(order.job)
        with self._disk_takes_its_time(order.job, "exporting"), pulse.heard(partial(alive, "exporting"), self.device):
            notes = export.export(r.trainer, order.output, alive=alive)
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


@dataclass
class _Visit:
    """What a visit has come to so far. ``busy``: something was done in it, so that it may end."""

    start: float
    steps: int = 0
    seconds: float = 0.0
    busy: bool = False
