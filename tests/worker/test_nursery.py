"""rrd.worker.nursery: the real one, with torch in it and real workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rrd.handle import Nursery, Worker, WorkerGone
from rrd.messages import Evict, Evicted, Message, Ready


def long() -> float:
    return 100.0


def running(pid: int | None) -> bool:
    """Whether the process is there and not merely unreaped."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def name_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def until_ended(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    fd = os.pidfd_open(pid)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    await asyncio.wait_for(ended.wait(), 60)
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


def test_a_nursery_and_its_workers(tmp_path: Path) -> None:
    """One story, for a nursery takes seconds to start."""
    settings: dict[str, object] = {"die": "0", "device": "cpu", "threads": 1, "state_dir": str(tmp_path),
                                   "cache_dir": str(tmp_path)}

    async def worker(nursery: Nursery) -> Worker:
        born = Worker(nursery, settings, heard.append)
        await born.start()
        ready = await born.ask(None, Ready, patience=long)
        assert isinstance(ready, Ready) and (ready.pid, ready.preloaded) == (born.pid, True)
        return born

    heard: list[Message] = []

    async def scene() -> None:
        nursery = Nursery()
        stopped, killed, left, last = await asyncio.gather(*(worker(nursery) for _ in range(4)))
        assert name_of(stopped.pid) == "rrd-die0"

        await stopped.stop()
        assert stopped.end == "the worker exited with status 0" and not running(stopped.pid)

        os.kill(killed.pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerGone, match="was killed by SIGKILL"):
            await killed.ask(Evict(job="a"), Evicted, patience=long)

        assert left.pid and left._socket
        os.kill(left.pid, signal.SIGTERM)  # ignored: the daemon says when to stop
        assert await left.ask(Evict(job="a"), Evicted, patience=long) == Evicted(job="a")
        left._socket.shutdown(2)  # as if the daemon were gone
        await until_ended(left.pid)

        assert nursery._process and nursery._reader
        nursery._process.kill()
        await asyncio.wait([nursery._reader])
        assert await last.ask(Evict(job="b"), Evicted, patience=long) == Evicted(job="b")
        another = await worker(nursery)  # of a new nursery
        await last.end_now("is not needed any more")
        assert not running(last.pid)

        pid = nursery._process.pid
        await nursery.stop()
        assert not running(pid) and running(another.pid)
        await another.stop()
        assert another.end == "the worker closed its socket"  # whose exit status nobody knows any more

        stuck = await worker(orphans := Nursery())
        assert stuck.pid and orphans._control and orphans._process
        os.kill(stuck.pid, signal.SIGSTOP)  # it would keep its jobs' locks from the next daemon
        orphans._control.shutdown(2)  # as if this one had been killed
        await until_ended(stuck.pid)
        await asyncio.wait_for(orphans._process.wait(), 60)

    asyncio.run(asyncio.wait_for(scene(), 200))
    assert {type(m) for m in heard} == {Ready, Evicted}
