"""What may befall a real worker, and when: a script, one JSON object a fault, for ``faulty_nursery.py``.

``{"job": "a", "at": "step 5", "do": ["oom", 30], "times": 2}``. Moments: prepare, load, step, step N, save (copied
aside), write (in the writer's thread), evaluate, export, probe. Acts: see ``_act``. A fault that has happened ``times``
times, in whatever process, does not happen again; ``write`` may be called at any time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import Faults

from rrd.models.llama import Block
from rrd.train import step
from rrd.train.trainer import Evaluation
from rrd.worker import loop, writer
from rrd.worker.loop import Loop

FOR_EVER = 10**9


def write(path: Path, *faults: dict[str, Any]) -> dict[str, str]:
    """Have these faults happen from now on. Returns the environment for the daemon."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(faults))
    beside.rename(path)
    return {"RRD_FAULTS": str(path)}


def happened(path: Path) -> int:
    """How many faults have happened."""
    return len(list(path.parent.glob(f"{path.name}.*.*")))


def install(path: Path) -> None:
    """Have the workers of this process look into the script at every moment."""
    script = _Script(path)
    _wrap(loop.resident, "load", lambda order, **more: script.at(order.job, "load", more["alive"]))
    _wrap(Loop, "_prepare", lambda self, order: script.at(order.job, "prepare", self._alive(order.job), self))
    _wrap(Loop, "_step", lambda self, r, order: script.at(r.job, f"step {r.trainer.step + 1}", None, self))
    _wrap(Loop, "_copy_aside", lambda self, r, order: order.checkpoint and script.at(r.job, "save", None, self))
    _wrap(Loop, "_export", lambda self, order: script.at(order.job, "export", self._alive(order.job), self))
    _wrap(Loop, "_probe", lambda self: script.at("", "probe", None, self))
    _wrap(Evaluation, "go_on", lambda self, rungs, enough, alive: script.at("", "evaluate", None))
    _wrap(writer, "commit", lambda resident, saved, keep: script.at(resident.job, "write", None))
    inner = Block.forward

    def forward(self: Block, *given: Any) -> Any:
        time.sleep(script.crawl)
        return inner(self, *given)

    Block.forward = forward  # type: ignore[method-assign]
    _slow(step, "_micro_step", script)
    _slow(step, "eval_loss", script)
    import rrd.train.trainer

    rrd.train.trainer.eval_loss = step.eval_loss  # type: ignore[attr-defined]


def _wrap(owner: Any, name: str, before: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        mode = before(*args, **more)
        if not isinstance(mode, Faults):
            return inner(*args, **more)
        with mode:
            return inner(*args, **more)

    setattr(owner, name, wrapped)


def _slow(owner: Any, name: str, script: _Script) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        time.sleep(script.drag)
        return inner(*args, **more)

    setattr(owner, name, wrapped)


class _Script:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.drag = 0.0
        """Seconds that each micro-step and each batch of an evaluation take longer."""
        self.crawl = 0.0
        """The same for each pass through a block."""
        self.poison: Faults | None = None

    def at(self, job: str, moment: str, alive: Callable[[str, float], None] | None, obeys: Loop | None = None
           ) -> Faults | None:
        if moment != "write":  # which is the writer's, while the next step may have begun
            self.drag = self.crawl = 0.0
        if self.poison and self.poison.poison_at is None:
            self.poison = None
        for i, fault in enumerate(json.loads(self.path.read_text())):
            if fault.get("job", job) == job and fault["at"] in (moment, moment.split()[0]) and self._again(i, fault):
                self._act(fault["do"], alive, obeys)
        return self.poison

    def _again(self, i: int, fault: dict[str, Any]) -> bool:
        for k in range(fault.get("times", 1)):
            try:
                os.close(os.open(f"{self.path}.{i}.{k}", os.O_CREAT | os.O_EXCL))
                return True
            except FileExistsError:
                continue
        return False

    def _act(self, do: list[Any], alive: Callable[[str, float], None] | None, obeys: Loop | None) -> None:
        what, *args = do
        if what == "signal":
            os.kill(os.getpid(), getattr(signal, args[0]))
        elif what == "exit":
            os._exit(args[0])
        elif what == "wedge":  # in native code, deaf to all but SIGKILL
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            ctypes.CDLL(None).pause()
        elif what == "hang":  # in native code, but it can be aborted
            ctypes.CDLL(None).sleep(3600)
        elif what == "eof":
            assert obeys
            obeys.channel._socket.close()
            time.sleep(3600)
        elif what == "garbage":
            assert obeys
            obeys.channel._socket.sendall(b"what is this?\n" * 100)
            time.sleep(3600)
        elif what == "sleep":  # long work that gives signs of life
            end = time.monotonic() + args[0]
            while time.monotonic() < end:
                time.sleep(0.05)
                if alive:
                    alive("sleeping", 0.5)
        elif what == "drag":
            self.drag = args[0]
        elif what == "crawl":
            self.crawl = args[0]
        elif what == "oom":
            self.poison = Faults(out_of_memory_at=args[0], until=FOR_EVER)
        elif what == "poison":
            self.poison = Faults(poison_at=args[1], poison=args[0])
        elif what == "no kernel":
            self.poison = Faults(no_kernel=True)
        else:
            raise ValueError(what)
