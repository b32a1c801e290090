"""rrd.handle: how workers are asked, what their silence and their ends become, and nurseries that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rrd import handle, host_memory
from rrd.handle import Nursery, Worker, WorkerGone
from rrd.job import JobSpec
from rrd.messages import (
    Committed,
    Evict,
    Evicted,
    Failed,
    GaveUp,
    LastWords,
    Load,
    Loaded,
    Message,
    OutOfMemory,
    Progress,
    Ready,
    Step,
    VisitDone,
    Yield,
    encode,
)

HERE = Path(__file__).parent
READY = Ready(pid=1, torch="none", preloaded=True)
PROGRESS = Progress(job="a", what="loading", share=0.5)
COMMITTED = Committed(job="a", step=3, bytes=10, seconds=0.1)
EVICTED = Evicted(job="a")
Act = tuple[object, ...]
HANG: Act = ("hang",)
HEAR: Act = ("hear",)


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 60))


def say(*messages: Message) -> Act:
    return "say", b"".join(map(encode, messages)).hex()


def long() -> float:
    return 30.0


def short() -> float:
    return 0.2


class FakeNursery(Nursery):
    """Its workers follow ``script``."""

    def __init__(self, *script: Act) -> None:
        super().__init__()
        self.script = script
        self.exits: list[asyncio.Future[int]] = []

    async def spawn(self, settings: dict[str, object]) -> tuple[int, socket.socket, asyncio.Future[int]]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(HERE / "fake_worker.py"), str(theirs.fileno()), json.dumps(self.script),
                pass_fds=[theirs.fileno()])
        exit_status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.exits.append(exit_status)
        self._reaping = asyncio.create_task(self._reap(process, exit_status))
        return process.pid, ours, exit_status

    async def _reap(self, process: asyncio.subprocess.Process, exit_status: asyncio.Future[int]) -> None:
        status = await process.wait()
        if not exit_status.cancelled():
            exit_status.set_result(status)

    def die(self) -> None:
        """Nobody will know how its workers end."""
        for exit_status in self.exits:
            exit_status.cancel()


async def started(*script: Act, heard: list[Message] | None = None, nursery: FakeNursery | None = None) -> Worker:
    reports = heard if heard is not None else []
    worker = Worker(nursery or FakeNursery(*script), {}, reports.append)
    await worker.start()
    return worker


async def end_of(worker: Worker) -> str:
    """How a worker ends that is asked for something."""
    with pytest.raises(WorkerGone) as e:
        await worker.ask(Evict(job="a"), Evicted, patience=long)
    assert not worker.alive and worker.end == e.value.message
    return worker.end


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- questions and answers --------------------------------------------------------------------------------------------


def test_a_question_gets_its_answer_and_every_report_is_heard() -> None:
    async def scene() -> None:
        heard: list[Message] = []
        worker = await started(say(READY), HEAR, say(PROGRESS, COMMITTED, EVICTED), HEAR, ("exit", 0), heard=heard)
        assert await worker.ask(None, Ready, patience=long) == READY
        assert worker.alive
        assert await worker.ask(Evict(job="a"), Evicted, patience=long) == EVICTED
        assert heard == [READY, PROGRESS, COMMITTED, EVICTED]
        await worker.stop()
        assert worker.end == "the worker exited with status 0" and gone(worker.pid)

    run(scene())


def test_any_of_several_answers_will_do_and_failed_is_always_one() -> None:
    async def scene() -> None:
        failed = Failed(job="a", blame="job", message="no such model")
        worker = await started(HEAR, say(COMMITTED), HEAR, say(failed), HEAR)
        assert await worker.ask(Evict(job="a"), Evicted, Committed, patience=long) == COMMITTED
        assert await worker.ask(Evict(job="a"), Evicted, patience=long) == failed
        await worker.stop()

    run(scene())


def test_what_came_before_the_question_is_no_answer_to_it() -> None:
    async def scene() -> None:
        heard: list[Message] = []
        worker = await started(say(COMMITTED, READY), HEAR, say(EVICTED.model_copy(update={"job": "b"})), HEAR,
                               heard=heard)
        await worker.ask(None, Ready, patience=long)
        assert await worker.ask(Evict(job="b"), Evicted, Committed, patience=long) == Evicted(job="b")
        await worker.stop()

    run(scene())


def test_one_question_at_a_time() -> None:
    async def scene() -> None:
        worker = await started(HANG)
        first = asyncio.ensure_future(worker.ask(None, Ready, patience=long))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError):
            await worker.ask(None, Ready, patience=long)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await worker.end_now("is not needed any more")

    run(scene())


def test_an_answer_cut_into_pieces_is_an_answer() -> None:
    async def scene() -> None:
        frame = encode(READY)
        worker = await started(("say", frame[:3].hex()), HEAR, ("say", frame[3:20].hex()), HEAR,
                               ("say", frame[20:].hex()), HEAR)
        for _ in range(2):
            await worker.send(Yield())
        assert await worker.ask(None, Ready, patience=long) == READY
        await worker.stop()

    run(scene())


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("act", "end"), [
    (("exit", 0), "the worker exited with status 0"), (("exit", 7), "the worker exited with status 7"),
    (("kill", int(signal.SIGKILL)), "the worker was killed by SIGKILL"),
    (("kill", int(signal.SIGSEGV)), "the worker was killed by SIGSEGV"),
    (("kill", int(signal.SIGRTMIN) + 3), f"the worker was killed by signal {signal.SIGRTMIN + 3}")], ids=repr)
@pytest.mark.parametrize("early", [True, False], ids=["before the question", "instead of an answer"])
def test_a_worker_that_ends_says_how(act: Act, end: str, early: bool) -> None:
    async def scene() -> None:
        worker = await started(*([] if early else [HEAR]), act)
        assert await end_of(worker) == end
        assert await end_of(worker) == end  # and says so again
        with pytest.raises(WorkerGone, match=end):
            await worker.send(Yield())
        worker.tell(Yield())
        await worker.stop()
        assert gone(worker.pid)

    run(scene())


def test_a_kill_of_the_kernels_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own count of those that it killed for want of memory, which must have grown since the question."""
    kills = iter([7, 7, 8, 8, 8, 8])  # of each worker: at its birth, at its question, at its end
    monkeypatch.setattr(host_memory, "oom_kills", lambda: next(kills))

    async def scene() -> None:
        for end in ("the kernel killed the worker for want of memory", "the worker was killed by SIGKILL"):
            worker = await started(HEAR, ("kill", int(signal.SIGKILL)))
            with pytest.raises(WorkerGone, match=f"^{end}$"):
                await worker.ask(Yield(), Ready, patience=long)

    run(scene())


def test_the_last_words_of_a_worker_count() -> None:
    async def scene() -> None:
        worker = await started(HEAR, say(COMMITTED, EVICTED), ("exit", 1))
        assert await worker.ask(Evict(job="a"), Evicted, patience=long) == EVICTED
        assert await end_of(worker) == "the worker exited with status 1"

    run(scene())


def test_a_worker_that_closes_its_socket_and_lives_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "EXIT_SECONDS", 0.2)

    async def scene() -> None:
        nursery = FakeNursery(HEAR, ("close",), HANG)
        worker = await started(nursery=nursery)
        assert await end_of(worker) == "the worker closed its socket"
        assert await nursery.exits[0] == -signal.SIGKILL

    run(scene())


@pytest.mark.parametrize("garbage", [b"Traceback (most recent call last)", b"\0\0\0\x02{}", encode(Yield())],
                         ids=["text", "no kind", "an order"])
def test_a_worker_that_talks_nonsense_is_killed_at_once(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "EXIT_SECONDS", 1000.0)

    async def scene() -> None:
        nursery = FakeNursery(HEAR, ("say", garbage.hex()), HANG)
        worker = await started(nursery=nursery)
        end = await end_of(worker)
        assert end.startswith("the worker said what is no message: ") and end.endswith(" and was ended")
        assert await nursery.exits[0] == -signal.SIGKILL

    run(scene())


def test_its_last_words_are_part_of_its_end_and_may_blame_its_die() -> None:
    async def scene() -> None:
        for failed in (False, True):
            worker = await started(HEAR, say(LastWords(message="CUDA error: gone", die_failed=failed)), ("exit", 1))
            assert await end_of(worker) == "the worker exited with status 1: CUDA error: gone"
            assert worker.die_failed is failed

    run(scene())


def test_last_words_are_said_where_nobody_sees_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nursery that forked it was killed."""
    monkeypatch.setattr(handle, "EXIT_SECONDS", 0.2)

    async def scene() -> None:
        words = say(LastWords(message="CUDA error: GPU is lost", die_failed=True))
        worker = await started(nursery=FakeNursery(HEAR, words, ("close",), HANG))
        assert await end_of(worker) == "the worker closed its socket: CUDA error: GPU is lost"
        assert worker.die_failed

    run(scene())


@pytest.mark.parametrize("excuse", [
    GaveUp(job="a", resident=False), OutOfMemory(job="a", step=3, what="training", resident=True)], ids=repr)
def test_an_excuse_answers_any_question(excuse: Message) -> None:
    async def scene() -> None:
        worker = await started(HEAR, say(excuse), HEAR)
        assert await worker.ask(Evict(job="a"), Evicted, patience=long) == excuse
        await worker.stop()

    run(scene())


def test_what_is_told_meanwhile_does_not_cut_into_an_order_on_its_way() -> None:
    """The order fills the socket's buffer; the worker, stopped until then, must find two whole frames in it."""
    async def scene() -> None:
        worker = await started(say(READY), HEAR, HEAR, say(EVICTED), HEAR)
        await worker.ask(None, Ready, patience=long)
        os.kill(worker.pid or 0, signal.SIGSTOP)
        spec = JobSpec(model="/m", data="/d", lora_targets=tuple(f"module_{i}" for i in range(40_000)))
        sending = asyncio.ensure_future(worker.ask(Load(job="a", spec=spec), Evicted, patience=long))
        await asyncio.sleep(0)
        assert not sending.done()
        worker.tell(Yield())
        await asyncio.sleep(0)
        os.kill(worker.pid or 0, signal.SIGCONT)
        assert await sending == EVICTED  # it heard both, and nothing else
        await worker.stop()

    run(scene())


def test_patience_that_has_changed_counts_from_the_nudge_on() -> None:
    async def scene() -> None:
        worker, patience = await started(HEAR, HANG), 1000.0
        asking = asyncio.ensure_future(worker.ask(Evict(job="a"), Evicted, patience=lambda: patience))
        await asyncio.sleep(0)
        patience = 0.2
        worker.nudge()
        with pytest.raises(WorkerGone, match="reported nothing"):
            await asking

    run(scene())


# --- silence and the ladder -------------------------------------------------------------------------------------------


def test_silence_beyond_patience_is_a_hang_and_ends_the_worker() -> None:
    async def scene() -> None:
        nursery = FakeNursery(HEAR, HANG)
        worker = await started(nursery=nursery)
        with pytest.raises(WorkerGone) as e:
            await worker.ask(Evict(job="a"), Evicted, patience=short)
        assert e.value.message == "the worker reported nothing for 0 s and was ended"
        assert await nursery.exits[0] == -signal.SIGABRT  # it could dump its stacks

    run(scene())


def test_who_ignores_the_abort_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "ABORT_SECONDS", 0.2)

    async def scene() -> None:
        nursery = FakeNursery(("ignore", "SIGABRT"), say(READY), HANG)
        worker = await started(nursery=nursery)
        await worker.ask(None, Ready, patience=long)
        with pytest.raises(WorkerGone, match="reported nothing"):
            await worker.ask(Evict(job="a"), Evicted, patience=short)
        assert await nursery.exits[0] == -signal.SIGKILL

    run(scene())


def test_patience_begins_anew_with_every_report_and_is_asked_anew() -> None:
    async def scene() -> None:
        heard: list[Message] = []
        step = Step(job="a", step=1, loss=1.0, lr=0.1, grad_norm=1.0, tokens=1, seconds=0.1)
        worker = await started(HEAR, say(PROGRESS), HEAR, say(step), HEAR, say(EVICTED), HANG, heard=heard)
        answered = 0

        def patience() -> float:
            nonlocal answered
            if len(heard) > answered:
                worker.tell(Yield())  # only now does the script go on
                answered = len(heard)
            return 30.0

        assert await worker.ask(Evict(job="a"), Evicted, patience=patience) == EVICTED
        assert heard == [PROGRESS, step, EVICTED]
        with pytest.raises(WorkerGone):
            await worker.ask(None, VisitDone, patience=short)

    run(scene())


def test_a_worker_that_does_not_even_read_its_order_is_hung() -> None:
    async def scene() -> None:
        worker = await started(HANG)
        spec = JobSpec(model="/m", data="/d", lora_targets=tuple(f"module_{i}" for i in range(40_000)))
        with pytest.raises(WorkerGone, match="reported nothing"):
            await worker.ask(Load(job="a", spec=spec), Loaded, patience=short)

    run(scene())


def test_a_worker_that_cannot_be_killed_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "ABORT_SECONDS", 0.1)
    monkeypatch.setattr(handle, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(Worker, "_signal", lambda *_: None)  # as if it hung in the kernel

    async def scene() -> None:
        nursery = FakeNursery(HEAR, HANG)
        worker = await started(nursery=nursery)
        with pytest.raises(WorkerGone) as e:
            await worker.ask(Evict(job="a"), Evicted, patience=short)
        assert e.value.message == "the worker reported nothing for 0 s and cannot be killed"
        assert not worker.alive
        os.kill(worker.pid or 0, signal.SIGKILL)
        await nursery.exits[0]

    run(scene())


def test_stop_asks_first_and_then_insists() -> None:
    async def scene() -> None:
        obeys = await started(HEAR, ("exit", 0))
        await obeys.stop()
        assert obeys.end == "the worker exited with status 0"
        await obeys.stop()
        deaf = await started(HANG)
        await deaf.stop(patience=0.2)
        assert deaf.end == "the worker did not stop when asked and was ended"
        never_born = Worker(FakeNursery(), {}, lambda _: None)
        await never_born.stop()
        with pytest.raises(WorkerGone, match="not running"):
            await never_born.ask(None, Ready, patience=long)

    run(scene())


# --- the nursery ------------------------------------------------------------------------------------------------------


def nursery(mood: str) -> Nursery:
    return Nursery([sys.executable, "-I", "-S", str(HERE / "fake_nursery.py"), mood])


def test_workers_outlive_their_nursery_and_can_still_be_ended() -> None:
    async def scene() -> None:
        parent = FakeNursery(say(READY), HEAR, say(EVICTED), HEAR, HANG)
        worker = await started(nursery=parent)
        await worker.ask(None, Ready, patience=long)
        parent.die()
        assert worker.alive
        assert await worker.ask(Evict(job="a"), Evicted, patience=long) == EVICTED
        with pytest.raises(WorkerGone, match="reported nothing"):
            await worker.ask(Evict(job="a"), Evicted, patience=short)
        await parent._reaping
        assert gone(worker.pid)

    run(scene())


def test_each_worker_gets_its_own_news() -> None:
    async def scene() -> None:
        n = nursery("born")
        born = await asyncio.gather(*(n.spawn({"die": str(i)}) for i in range(3)))
        for i, (pid, ours, exit_status) in enumerate(born):
            assert (pid, await exit_status) == (1_000_000 + i, i)
            ours.close()
        await n.stop()

    run(scene())


@pytest.mark.parametrize("mood", ["dead", "dies", "garbage"])
def test_a_nursery_that_fails_is_told_and_the_next_request_starts_another(mood: str) -> None:
    async def scene() -> None:
        n = nursery(mood)
        with pytest.raises(WorkerGone):
            await n.spawn({})
        n.command = nursery("lives").command
        pid, ours, exit_status = await n.spawn({})
        assert pid == 1_000_001 and not exit_status.done()
        await n.stop()
        assert exit_status.cancelled()  # nobody will know it any more
        ours.close()

    run(scene())


def test_a_nursery_that_cannot_be_started_is_told() -> None:
    async def scene() -> None:
        worker = Worker(Nursery(["/no/such/python"]), {}, lambda _: None)
        with pytest.raises(WorkerGone, match="no worker can be started: no such file or directory"):
            await worker.start()
        assert not worker.alive
        await worker.stop()

    run(scene())


def test_a_nursery_that_does_not_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "BIRTH_SECONDS", 0.2)

    async def scene() -> None:
        n = nursery("silent")
        with pytest.raises(WorkerGone, match="does not answer"):
            await n.spawn({})
        await n.stop()

    run(scene())


def test_a_request_given_up_leaves_no_worker_behind() -> None:
    """A worker without an owner would hold its job's lock: it must see the end of its socket."""
    async def scene() -> None:
        n = nursery("silent")
        made: asyncio.Queue[socket.socket] = asyncio.Queue()
        request = n._request

        def remember(*args: Any) -> tuple[socket.socket, int]:
            made.put_nowait((asked := request(*args))[0])
            return asked

        n._request = remember  # type: ignore[method-assign]
        task = asyncio.ensure_future(n.spawn({}))
        ours = await made.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ours.fileno() == -1
        await n.stop()

    run(scene())


def test_a_machine_that_was_frozen_does_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended, paused by its host, or out of memory: the worker did not run either."""
    monkeypatch.setattr(handle, "LISTEN_SECONDS", 0.05)

    async def scene() -> None:
        worker, loop = Worker(Nursery(), {}, print), asyncio.get_running_loop()
        loop.call_later(0.01, time.sleep, 0.6)
        loop.call_later(0.65, worker.nudge)
        await worker._wait_for_news(lambda: 0.3)
        worker._news.clear()
        with pytest.raises(asyncio.TimeoutError):
            await worker._wait_for_news(lambda: 0.3)

    asyncio.run(scene())
