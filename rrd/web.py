"""The metrics over HTTP, from a thread of prometheus-client's: a slow scraper never holds up the loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

from rrd.errors import RrdError
from rrd.metrics import Meters, SnapshotCollector
from rrd.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

SCRAPE_SECONDS = 2.0
"""How long a scrape waits for the loop's snapshot."""


class Web:
    """Serves ``/metrics``. ``snapshot`` is called on the loop, so that a scrape sees one consistent instant."""

    def __init__(self, snapshot: Callable[[], Snapshot], meters: Meters) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = snapshot
        self.registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry.register(SnapshotCollector(self._snapshot, meters))
        self._server: object = None
        self.port = 0

    def start(self, address: tuple[str, int]) -> None:
        """Listen. Raises RrdError when the address cannot be had."""
        host, port = address
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as e:
            raise RrdError(f"metrics cannot be served on {host}:{port}: {e.strerror or e}",
                           hint='choose another `metrics = "host:port"`, or "" for none') from e
        self._server, self.port = server, server.server_port

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()  # type: ignore[attr-defined]
            self._server.server_close()  # type: ignore[attr-defined]

    def _snapshot(self) -> Snapshot:
        async def take() -> Snapshot:
            return self._take()

        return asyncio.run_coroutine_threadsafe(take(), self._loop).result(SCRAPE_SECONDS)
