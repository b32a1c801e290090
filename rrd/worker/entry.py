"""Where a forked worker begins: set the process up for its die, then obey."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rrd import roots
from rrd.messages import LastWords
from rrd.worker.channel import Channel, Closed
from rrd.worker.faults import last_words
from rrd.worker.loop import Loop

PR_SET_NAME = 15


@dataclass(frozen=True)
class Settings:
    """What the daemon says of a new worker. ``die`` is empty for one that only prepares."""

    die: str
    device: str
    threads: int
    state_dir: Path
    cache_dir: Path

    @classmethod
    def of(cls, request: dict[str, Any]) -> Settings:
        return cls(str(request["die"]), str(request["device"]), int(request["threads"]),
                   Path(request["state_dir"]), Path(request["cache_dir"]))


def main(sock: socket.socket, request: dict[str, Any], stack_fd: int = 2) -> int:
    """Run one worker to its end; returns the exit status. If it crashes it writes its stacks to ``stack_fd``."""
    settings, channel = Settings.of(request), Channel(sock)
    try:
        roots.confine(model=request.get("model_roots", ()), data=request.get("data_roots", ()),
                      output=request.get("output_root", ()))
        faulthandler.enable(stack_fd)  # for SIGABRT, too, the ladder's second rung
        _set_up_process(settings)
        if why := _no_die(settings.device):
            channel.send(LastWords(message=why, die_failed=True))
            return 1
        Loop(channel, settings).run()
    except Closed:
        os._exit(0)  # the daemon is gone; a write in progress is an attempt that the next start sweeps away
    except Exception as e:
        with contextlib.suppress(Closed):
            channel.send(last_words(e))
        raise
    return 0


def _set_up_process(settings: Settings) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the daemon says when to stop, over the socket
    name = f"rrd-die{settings.die}" if settings.die else "rrd-prepare"
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    with contextlib.suppress(OSError):  # if memory runs out, a worker is a better victim than the daemon
        Path("/proc/self/oom_score_adj").write_text("500")
    if not settings.die:
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        with contextlib.suppress(OSError):
            os.nice(10)  # all cores, but only what training leaves of them
    torch.set_num_threads(settings.threads)
    torch.set_flush_denormal(True)  # denormals make steps several times slower on CPUs
    if settings.device.startswith("cuda") and torch.cuda.is_available():
        torch.cuda.set_device(settings.device)
        torch.use_deterministic_algorithms(True)  # some CUDA kernels add up in the order in which threads arrive


def _no_die(device: str) -> str:
    """Why this torch cannot use ``device`` at all; empty where it can."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return ""
    what = "finds no CUDA device on this box" if torch.version.cuda else "is one without CUDA"
    return f"torch {torch.__version__} {what}, and the configuration names {device}; `rrd doctor` says more"
