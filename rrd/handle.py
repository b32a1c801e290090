"""The daemon's side of its workers: spawn, send, hear, and the ladder that ends one.

A worker is alive while its socket is; a worker that reports nothing for too long is hung, however alive its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rrd import host_memory
from rrd.errors import ProtocolError, RrdError, TryLater
from rrd.messages import REPORTS, Decoder, Failed, GaveUp, LastWords, Message, OutOfMemory, Stop, encode
from rrd.stack import MAX_BYTES
from rrd.text import signal_name

PACKET = 1 << 16
ASK_SECONDS, ABORT_SECONDS, KILL_SECONDS = 10.0, 5.0, 10.0
"""The rungs of the ladder: how long a worker has to end after being asked, aborted, and killed."""
BIRTH_SECONDS = 120.0
"""How long a fork may take, torch's import on a cold disk included."""
LISTEN_SECONDS = 5.0
"""A silence is counted in parts of so long."""
EXIT_SECONDS = 2.0
"""How long after the end of its socket a worker's exit status may take."""


SILENT = "reported nothing for"
"""How the end of a worker reads that was ended for its silence."""


class WorkerGone(RrdError):
    """The worker ended, or was ended, before it answered."""


EXCUSES = (Failed, OutOfMemory, GaveUp)
"""Answers to any question, in place of the one that was asked for."""


class CannotStart(TryLater, WorkerGone):
    """No worker could be had at all: the box is short of something, and no job is to blame."""


class Nursery:
    """Forks workers out of one process that has torch loaded; started on first use, again if it dies."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "rrd.worker.nursery")) -> None:
        self.command = command
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._ids = itertools.count()
        self._born: dict[int, asyncio.Future[tuple[int, asyncio.Future[int]]]] = {}
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._stacks: dict[int, int] = {}
        """By pid: the memory file into which a worker that crashes writes where it stood."""
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process if none runs. It is ready to fork a second or so later; requests wait.

        Raises CannotStart.
        """
        async with self._lock:
            if self._reader is not None and not self._reader.done():
                return
            try:
                await self._start()
            except OSError as e:
                raise CannotStart(f"no worker can be started: {(e.strerror or str(e)).lower()}") from e

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = await asyncio.create_subprocess_exec(
                *self.command, str(theirs.fileno()), pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True, env=_environment())
            undo.pop_all()
        self._control = ours
        self._reader = asyncio.create_task(self._read(ours))

    async def spawn(self, settings: dict[str, object]) -> tuple[int, socket.socket, asyncio.Future[int]]:
        """A new worker: its pid, our end of its socket, and a future of its exit status.

        Raises CannotStart when the nursery cannot be started or dies meanwhile.
        """
        await self.start()
        number = next(self._ids)
        born = self._born[number] = asyncio.get_running_loop().create_future()
        try:
            ours, stack = self._request({**settings, "id": number})
        except OSError as e:
            del self._born[number]
            raise CannotStart(f"no worker can be started: {(e.strerror or str(e)).lower()}") from e
        try:
            await asyncio.wait([born], timeout=BIRTH_SECONDS)
            if not born.done() or born.cancelled():
                raise CannotStart("the process that forks workers has ended or does not answer")
        except BaseException:
            ours.close()  # the worker, if there ever is one, ends by it
            os.close(stack)
            raise
        pid, ended = born.result()
        self._stacks[pid] = stack
        return pid, ours, ended

    def _request(self, request: dict[str, object]) -> tuple[socket.socket, int]:
        """Ask for a worker. Returns our end of the socket whose other end it gets, and the file for its stack."""
        assert self._control is not None
        with contextlib.ExitStack() as undo:
            stack = os.memfd_create("rrd-stack")
            undo.callback(os.close, stack)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno(), stack])
            undo.pop_all()
        return ours, stack

    def take_stack(self, pid: int) -> str:
        """Where the worker ``pid``, which has ended, stood when it crashed or was aborted; empty for other ends."""
        fd = self._stacks.pop(pid, None)
        if fd is None:
            return ""
        try:
            return os.pread(fd, MAX_BYTES, 0).decode(errors="replace")
        finally:
            os.close(fd)

    async def _read(self, control: socket.socket) -> None:
        try:
            while packet := await asyncio.get_running_loop().sock_recv(control, PACKET):
                self._hear(json.loads(packet))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the same as its end: it ends when its socket does
        finally:
            control.close()
            unknown: list[asyncio.Future[Any]] = [*self._born.values(), *self._ended.values()]
            for future in unknown:
                future.cancel()  # nobody will know any more
            self._born.clear()
            self._ended.clear()

    def _hear(self, news: dict[str, int]) -> None:
        """``{"pid", "id"}``: the worker asked for under this id is born; ``{"pid", "status"}``: it has ended."""
        pid = int(news["pid"])
        if "id" in news:
            ended = self._ended[pid] = asyncio.get_running_loop().create_future()
            born = self._born.pop(news["id"])
            if not born.done():
                born.set_result((pid, ended))
        else:
            self._ended.pop(pid).set_result(int(news["status"]))

    async def stop(self) -> None:
        if self._control is not None and self._control.fileno() >= 0:
            self._control.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), 5)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1)


def _environment() -> dict[str, str]:
    """Idle OpenMP threads must soon sleep: spinning ones would eat into the next die's turn. Soon, and not at once:
    between the operations of a step they wait for less than a millisecond. cuBLAS gives the same bits each time only
    with a workspace of its own."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Worker:
    """One worker process. ``on_report`` hears every report, the answers to ``ask`` included; ``on_end`` its end."""

    def __init__(self, nursery: Nursery, settings: dict[str, object], on_report: Callable[[Message], None],
                 on_end: Callable[[], None] = lambda: None) -> None:
        self.nursery, self.settings, self.on_report, self.on_end = nursery, settings, on_report, on_end
        self.pid: int | None = None
        self.end = ""
        """How it ended, as a sentence's half; empty while it lives."""
        self.stack = ""
        """Where it stood when it crashed or was aborted, if that is known."""
        self.die_failed = False
        """It ended because of its die, which is of no use; or it holds its die and cannot be ended."""
        self._socket: socket.socket | None = None
        self._exit: asyncio.Future[int] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._answer: Message | None = None
        self._awaited: tuple[type[Message], ...] = ()
        self._ended_by = self._last_words = ""
        self._oom_kills = host_memory.oom_kills()
        """As of the last question: if there are more after a SIGKILL, the kernel has sent it."""
        self._sending = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        return self._reader is not None and not self.end

    async def start(self) -> None:
        self.pid, self._socket, self._exit = await self.nursery.spawn(self.settings)
        self._reader = asyncio.create_task(self._read(self._socket))

    async def ask(self, order: Message | None, *answers: type[Message], patience: Callable[[], float]) -> Message:
        """Send ``order`` and wait for one of ``answers`` or ``EXCUSES``. Any report is a sign of life: only a silence
        of ``patience()`` seconds is a hang, and ends the worker by the ladder.

        Raises WorkerGone.
        """
        assert not self._awaited, "one question at a time"
        self._awaited, self._answer = (*answers, *EXCUSES), None
        self._oom_kills = host_memory.oom_kills()
        try:
            if order is not None:
                await asyncio.wait_for(self.send(order), patience())
            while self._answer is None:
                self._news.clear()
                if not self.alive:
                    raise self._gone()
                await self._wait_for_news(patience)
            return self._answer
        except asyncio.TimeoutError:
            await self.end_now(f"{SILENT} {patience():.0f} s")
            raise self._gone() from None
        finally:
            self._awaited = ()

    async def _wait_for_news(self, patience: Callable[[], float]) -> None:
        """Raises TimeoutError after ``patience()`` seconds of silence. Those in which we did not run ourselves (the
        machine was frozen, or had no memory left) do not count: the worker did not run in them either."""
        silent = 0.0
        while (most := min(LISTEN_SECONDS, patience() - silent)) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), most)
                return
            silent += most
        raise asyncio.TimeoutError

    def _gone(self) -> WorkerGone:
        return WorkerGone(self.end or "the worker is not running")

    async def send(self, order: Message) -> None:
        """Raises WorkerGone."""
        if not self.alive or self._socket is None:
            raise self._gone()
        try:
            async with self._sending:  # or two orders could be mixed up on their way
                await asyncio.get_running_loop().sock_sendall(self._socket, encode(order))
        except OSError:
            await self._wait_end(EXIT_SECONDS)  # the reader will know how it ended
            raise WorkerGone(self.end or "the worker closed its socket") from None

    def tell(self, order: Message) -> None:
        """Send an order that has no answer, without waiting until it is taken; lost if the worker is gone."""
        if self.alive:
            self._telling.add(task := asyncio.ensure_future(self._tell(order)))
            task.add_done_callback(self._telling.discard)

    async def _tell(self, order: Message) -> None:
        with contextlib.suppress(WorkerGone):
            await self.send(order)

    def nudge(self) -> None:
        """Have ``ask`` look at its patience again, which has changed."""
        self._news.set()

    async def _read(self, sock: socket.socket) -> None:
        loop, decoder = asyncio.get_running_loop(), Decoder(REPORTS)
        try:
            while data := await loop.sock_recv(sock, 1 << 16):
                for report in decoder.feed(data):
                    self._hear(report)
        except ProtocolError as e:
            self._ended_by = f"said what is no message: {e.message}"
            self._signal(signal.SIGKILL)
        except OSError:
            pass  # reset is an end like any other
        finally:
            self.end = await self._how_it_ended()
            self.stack = self.nursery.take_stack(self.pid or 0)
            self._news.set()
            for task in self._telling:
                task.cancel()
            sock.close()
            self.on_end()

    def _hear(self, report: Message) -> None:
        if isinstance(report, LastWords):
            self._last_words, self.die_failed = report.message, report.die_failed
        if isinstance(report, self._awaited) and self._answer is None:
            self._answer = report
        self.on_report(report)
        self._news.set()

    async def _how_it_ended(self) -> str:
        status: int | None = None
        if self._exit is not None:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                status = await asyncio.wait_for(asyncio.shield(self._exit), EXIT_SECONDS)
        if status is None:
            self._signal(signal.SIGKILL)  # its socket is closed but its end was not seen: make sure
        if self._ended_by:
            return f"the worker {self._ended_by} and was ended"
        words = f": {self._last_words}" if self._last_words else ""
        if status is None:  # whoever forked it has ended, too
            return f"the worker closed its socket{words}"
        if status == -signal.SIGKILL and host_memory.oom_kills() > self._oom_kills:
            return "the kernel killed the worker for want of memory"
        if status < 0:
            return f"the worker was killed by {signal_name(-status)}"
        return f"the worker exited with status {status}{words}"

    def _signal(self, number: signal.Signals) -> None:
        ended = self._exit is not None and self._exit.done() and not self._exit.cancelled()
        if self.pid is not None and not ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    async def _wait_end(self, seconds: float) -> bool:
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=seconds)
        return not self.alive

    async def stop(self, *, patience: float = ASK_SECONDS) -> None:
        """The whole ladder: ask, abort with a stack dump on stderr, kill."""
        if self.alive:
            with contextlib.suppress(WorkerGone, asyncio.TimeoutError):
                await asyncio.wait_for(self.send(Stop()), 1)
        if not await self._wait_end(patience):
            await self.end_now("did not stop when asked")

    async def end_now(self, reason: str) -> None:
        """The ladder's lower rungs, for a worker that no longer listens."""
        self._ended_by = reason
        for number, seconds in ((signal.SIGABRT, ABORT_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            if not self.alive:
                return
            self._signal(number)
            self._signal(signal.SIGCONT)  # one that was stopped is told nothing but this, and SIGKILL
            if await self._wait_end(seconds):
                return
        self.end, self.die_failed = f"the worker {reason} and cannot be killed", True
        self._news.set()
