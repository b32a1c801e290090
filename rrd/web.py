"""The metrics port: ``/metrics`` for Prometheus, ``/`` for people, ``/events`` for what changes on their screens.

Read-only, and served from threads of its own: a slow reader never holds up the loop, which is only asked for snapshots.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry

from rrd.errors import RrdError
from rrd.metrics import Meters, SnapshotCollector, exposition
from rrd.snapshot import Snapshot

if TYPE_CHECKING:
    from rrd.page import Board

SNAPSHOT_SECONDS = 2.0
"""How long a request waits for the loop's snapshot."""
CLIENT_SECONDS = 30.0
"""A client that neither sends nor takes anything for so long is let go."""
THREADS = 64
"""Requests at one time; who comes after them is turned away."""
STREAMS = 32
"""Pages with live updates at one time, of these."""
QUIET_TICKS = 15
"""After so many seconds without news a stream says that it lives, which finds out whether somebody still listens."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
                               "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""With every answer. Nothing is loaded from elsewhere, nothing inline runs, nobody frames us."""

TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"

T = TypeVar("T")
Answer = tuple[str, str, "Iterable[bytes]"]
"""Status, content type, body."""


class Web:
    """Serves the port. ``snapshot`` is called on the loop, so that a reader sees one consistent instant."""

    def __init__(self, snapshot: Callable[[], Snapshot], meters: Meters) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = snapshot
        self.registry = CollectorRegistry()
        self.registry.register(SnapshotCollector(snapshot, meters, self._on_loop))
        self._server: _Server | None = None
        self._stopping = threading.Event()
        self._streams = threading.BoundedSemaphore(STREAMS)
        self._made = threading.Lock()
        self._board: Board | None = None
        self.port = 0

    def start(self, at: tuple[str, int] | socket.socket) -> None:
        """Listen on host and port, or serve a socket that listens. Raises RrdError when the address cannot be had."""
        if isinstance(at, socket.socket):
            self._server = _adopt(at)
        else:
            host, port = at
            try:
                self._server = _server(host, port)
            except OSError as e:
                raise RrdError(f"metrics cannot be served on {host}:{port}: {e.strerror or e}",
                               hint='choose another `metrics = "host:port"`, or "" for none') from e
        self._server.set_app(self._app)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="web", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _app(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """WSGI (PEP 3333)."""
        try:
            status, kind, body = self._answer(environ)
        except Exception as e:  # no snapshot in time, or none: the loop is stopping, or stuck
            status, kind = "503 Service Unavailable", TEXT
            body = [f"no answer from the loop: {type(e).__name__}\n".encode()]
        start_response(status, [("Content-Type", kind), *HEADERS.items()])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else body

    def _answer(self, environ: dict[str, Any]) -> Answer:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", TEXT, [b"this is only to be looked at\n"]
        if path == "/metrics":
            return "200 OK", METRICS, [exposition(self.registry.collect())]
        if not known_host(environ.get("HTTP_HOST", "")):
            return "421 Misdirected Request", TEXT, [b"ask for this page by an address or by this host's own name\n"]
        if path == "/events":
            seen = environ.get("HTTP_LAST_EVENT_ID") or environ.get("QUERY_STRING", "")
            return self._stream(seen) if environ["REQUEST_METHOD"] == "GET" else ("200 OK", "text/event-stream", [])
        return self._page(path)

    # --- the page ---

    def _page(self, path: str) -> Answer:
        from rrd.page import ASSETS, asset

        if path == "/":
            return "200 OK", HTML, [self.board.page().encode()]
        if path in ASSETS:
            return "200 OK", ASSETS[path], [asset(path)]
        return "404 Not Found", TEXT, [b"there is / and /metrics\n"]

    @property
    def board(self) -> Board:
        """What is on the page; made when somebody first looks, for the templates cost time and memory."""
        from rrd.page import Board

        with self._made:
            self._board = self._board or Board(self._snapshot)
        return self._board

    def _stream(self, seen: str) -> Answer:
        if not self._streams.acquire(blocking=False):
            return "503 Service Unavailable", TEXT, [b"too many pages are open\n"]
        return "200 OK", "text/event-stream", _Closing(self._patches(seen), self._streams.release)

    def _patches(self, name: str) -> Iterator[bytes]:
        """Server-sent events: each second what has changed, since what the page calls ``name`` at first."""
        seen = self.board.seen(name)
        quiet = 0
        yield b"retry: 2000\nevent: live\ndata:\n\n"
        while not self._stopping.is_set():
            try:
                patch, seen = self.board.changes(seen)
            except Exception:  # the loop is stuck or ending: the page says that it hears nothing
                return
            quiet = 0 if patch else quiet + 1
            if patch:
                yield f"id: {seen.name}\ndata: {patch}\n\n".encode()
            elif quiet % QUIET_TICKS == 0:
                yield b":\n\n"
            self._stopping.wait(1.0)

    def _snapshot(self) -> Snapshot:
        return self._on_loop(self._take)

    def _on_loop(self, take: Callable[[], T]) -> T:
        """What ``take`` returns on the loop: of one instant. Raises TimeoutError where the loop is stuck."""
        async def taken() -> T:
            return take()

        return asyncio.run_coroutine_threadsafe(taken(), self._loop).result(SNAPSHOT_SECONDS)


def known_host(header: str) -> bool:
    """Whether a Host header names this machine: an address, a name without dots, or the host's own name.

    A web page elsewhere can have its own name lead to 127.0.0.1 and read what answers (DNS rebinding); it then asks for
    that name.
    """
    name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
    name = name.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name.rstrip(".") or name in _own_names()
    return True


@cache
def _own_names() -> frozenset[str]:
    """Asked once: a name server may take its time."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


class _Closing:
    """An iterator that calls ``then`` once when the server is through with it, begun or not."""

    def __init__(self, parts: Iterator[bytes], then: Callable[[], None]) -> None:
        self._parts, self._then = parts, then

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        self._then()


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every 15 s is no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any, **more: Any) -> None:
        self._free = threading.BoundedSemaphore(THREADS)
        super().__init__(*args, **more)

    def server_bind(self) -> None:
        """As HTTPServer does it, without asking a name server who we are."""
        socketserver.TCPServer.server_bind(self)
        self.name_itself()

    def name_itself(self) -> None:
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that went away is no fault of ours."""


def _server(host: str, port: int) -> _Server:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]

    class Server(_Server):
        address_family = family

    return Server(address[:2], _Handler)


def _adopt(listening: socket.socket) -> _Server:
    server = _Server(listening.getsockname()[:2], _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket, server.server_address = listening, listening.getsockname()
    server.name_itself()
    return server
