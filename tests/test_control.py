"""rrd.control: one line asks, one line answers, whatever a client does; and who may ask."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rrd import client, control
from rrd.control import MAX_LINE, Control
from rrd.errors import NoSuchJob, RrdError

GROUP = grp.getgrgid(os.getgid()).gr_name
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def pause(job: str, why: str = "") -> str:
    if job == "none":
        raise NoSuchJob(f"there is no job {job!r}", hint="`rrd status` lists them")
    return f"{job} is paused{why}"


def status() -> bytes:
    return b'{"ok": true, "result": {"jobs": [1.5, NaN]}}'


def broken() -> str:
    raise AssertionError("two\nlines")


class Bench:
    """A control socket and what was audited."""

    def __init__(self, path: Path, group: str = GROUP) -> None:
        self.audited: list[tuple[str, int]] = []
        self.clients: list[asyncio.StreamWriter] = []
        verbs: dict[str, Callable[..., Any]] = {v.__name__: v for v in (pause, status, broken)}
        self.control = Control(path, group, verbs, lambda verb, uid: self.audited.append((verb, uid)))

    async def connect(self) -> Streams:
        reader, writer = await asyncio.open_unix_connection(self.control.path)
        self.clients.append(writer)
        return reader, writer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        await self.control.start()
        try:
            yield self
        finally:
            for writer in self.clients:
                writer.close()
            await self.control.stop()


def run(path: Path, scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Bench(path / "control.sock").running() as bench:
            await scene(bench)

    asyncio.run(asyncio.wait_for(main(), 30))


async def answer(reader: asyncio.StreamReader) -> Any:
    return json.loads(await reader.readuntil(b"\n"))


async def ask(streams: Streams, line: bytes) -> Any:
    reader, writer = streams
    writer.write(line)
    return await answer(reader)


PAUSE = b'{"verb": "pause", "job": "a"}\n'
PAUSED = {"ok": True, "result": "a is paused"}


def test_a_line_asks_and_a_line_answers(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        streams = await bench.connect()
        assert await ask(streams, PAUSE) == PAUSED
        assert (await ask(streams, b'{"verb": "pause", "job": "b", "why": "!"}\n'))["result"] == "b is paused!"
        assert await ask(streams, PAUSE + PAUSE) == PAUSED
        assert await answer(streams[0]) == PAUSED
        assert bench.audited == [("pause", os.getuid())] * 4

    run(tmp_path, scene)


def test_bytes_are_an_answer_made_already(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        streams = await bench.connect()
        streams[1].write(b'{"verb": "status"}\n')
        assert await streams[0].readuntil(b"\n") == status() + b"\n"

    run(tmp_path, scene)


def test_a_refusal_has_its_sentence_hint_and_code(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        assert await ask(await bench.connect(), b'{"verb": "pause", "job": "none"}\n') == {"ok": False, "error": {
            "message": "there is no job 'none'", "hint": "`rrd status` lists them", "exit_code": 4}}
        assert bench.audited == []

    run(tmp_path, scene)


@pytest.mark.parametrize("line", [
    b"\n", b"garbage\n", b"\0\xff\xfe\n", b"null\n", b"7\n", b'"status"\n', b"[]\n", b"{}\n",
    b'{"verb": 1}\n', b'{"verb": []}\n', b'{"verb": {}}\n', b'{"verb": "dance"}\n', b'{"verb": "__init__"}\n',
    b'{"verb": "pause"}\n',
    b'{"verb": "pause", "job": "a", "extra": 1}\n', b'{"verb": "status", "job": "a"}\n', b"[" * 50_000 + b"\n",
    b'{"a":' * 10_000 + b"\n", b"GET / HTTP/1.1\r\n", b"1" * 5_000 + b"\n"], ids=lambda line: repr(line[:30]))
def test_nonsense_gets_one_sentence_and_the_next_line_is_heard(tmp_path: Path, line: bytes) -> None:
    async def scene(bench: Bench) -> None:
        streams = await bench.connect()
        said = await ask(streams, line)
        assert said["ok"] is False and said["error"]["exit_code"] == 2
        assert said["error"]["message"].startswith("this is no request of ours: ")
        assert said["error"]["hint"].startswith("a request is a line such as")
        assert "Error" not in said["error"]["message"]
        assert said["error"]["message"].isprintable() and len(said["error"]["message"]) < 300
        assert await ask(streams, PAUSE) == PAUSED

    run(tmp_path, scene)


def test_a_bug_of_ours_is_an_answer_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(bench: Bench) -> None:
        streams = await bench.connect()
        said = await ask(streams, b'{"verb": "broken"}\n')
        assert said["error"] == {"message": "AssertionError: two lines", "exit_code": 1,
                                 "hint": "this is a bug of rrd; its log has the stack"}
        assert await ask(streams, PAUSE) == PAUSED

    run(tmp_path, scene)
    assert "Traceback" in capfd.readouterr().err


def test_a_line_may_come_in_pieces_and_the_last_without_its_end(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        for byte in PAUSE:
            writer.write(bytes([byte]))
            await writer.drain()
        assert await answer(reader) == PAUSED
        writer.write(PAUSE.rstrip())
        writer.write_eof()
        assert await answer(reader) == PAUSED
        assert await reader.read() == b""

    run(tmp_path, scene)


def test_half_a_request_does_nothing(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        for size in range(1, len(PAUSE) - 1):
            reader, writer = await bench.connect()
            writer.write(PAUSE[:size])
            writer.write_eof()
            assert (await answer(reader))["ok"] is False
            writer.close()
        assert bench.audited == []

    run(tmp_path, scene)


@pytest.mark.parametrize("line", [b"x" * (MAX_LINE + 10) + b"\n", b"x" * 10 * MAX_LINE, b" " * 3 * MAX_LINE + PAUSE],
                         ids=["with an end", "without", "spaces"])
def test_a_huge_line_gets_one_answer_and_the_connection_ends(tmp_path: Path, line: bytes) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        writer.write(line)
        said = await answer(reader)
        assert said["error"]["message"] == f"a request has at most {MAX_LINE} bytes"
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert await ask(await bench.connect(), PAUSE) == PAUSED
        assert bench.audited == [("pause", os.getuid())]

    run(tmp_path, scene)


def test_a_slow_client_holds_up_nobody(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        slow, mute = await bench.connect(), await bench.connect()
        slow[1].write(PAUSE[:10])
        for _ in range(3):
            assert await ask(await bench.connect(), PAUSE) == PAUSED
        assert await ask(slow, PAUSE[10:]) == PAUSED
        mute[1].close()

    run(tmp_path, scene)


def test_many_at_once(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        many = await asyncio.gather(*(bench.connect() for _ in range(50)))
        assert await asyncio.gather(*(ask(streams, PAUSE) for streams in many)) == [PAUSED] * 50

    run(tmp_path, scene)


def test_who_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_SECONDS", 0.05)

    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        writer.write(PAUSE[:10])
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    run(tmp_path, scene)


def test_who_asks_and_never_listens_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_SECONDS", 0.2)

    async def scene(bench: Bench) -> None:
        bench.control.verbs["status"] = lambda: b"x" * (1 << 20)
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, str(bench.control.path))
            with pytest.raises(ConnectionError):  # it is let go before all its questions are taken
                await asyncio.get_running_loop().sock_sendall(deaf, b'{"verb": "status"}\n' * 1_000_000)

    run(tmp_path, scene)


def test_a_client_that_goes_away_leaves_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(bench: Bench) -> None:
        bench.control.verbs["status"] = lambda: b"x" * (1 << 20)
        for line in (b"", PAUSE[:5], PAUSE, b'{"verb": "status"}\n' * 20):
            _, writer = await bench.connect()
            writer.write(line)
            writer.transport.abort()
        assert await ask(await bench.connect(), PAUSE) == PAUSED

    run(tmp_path, scene)
    assert caplog.records == []


def test_the_socket_is_the_groups_and_nobody_elses(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Bench(tmp_path / "s").running() as bench:
            s = bench.control.path.stat()
            assert stat.S_IMODE(s.st_mode) == 0o660 and s.st_gid == os.getgid()
        async with Bench(tmp_path / "t", group="no-such-group").running() as bench:
            assert stat.S_IMODE(bench.control.path.stat().st_mode) == 0o600

    old = os.umask(0)
    try:
        asyncio.run(scene())
    finally:
        os.umask(old)


def test_a_dead_daemons_socket_is_replaced_and_ours_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def scene(bench: Bench) -> None:
        assert await ask(await bench.connect(), PAUSE) == PAUSED

    run(tmp_path, scene)
    assert not path.exists()


@pytest.mark.parametrize("name", ["none/control.sock", "x" * 200])
def test_a_socket_that_cannot_be_made_is_said_in_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(RrdError, match=r"the control socket .* cannot be made: ") as e:
        asyncio.run(Bench(tmp_path / name).control.start())
    assert e.value.hint


def test_it_understands_our_own_client(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        assert await asyncio.to_thread(client.call, tmp_path, "pause", job="a") == "a is paused"
        with pytest.raises(NoSuchJob, match="there is no job"):
            await asyncio.to_thread(client.call, tmp_path, "pause", job="none")

    run(tmp_path, scene)
