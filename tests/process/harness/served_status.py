"""The HTTP API of a node that is none, on a real socket, and a client that asks it from another thread."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from p2pnode.config.settings import Config, StatusSettings
from p2pnode.overlay.system import SystemClock
from p2pnode.status.server import StatusServer
from tests.process.harness.fake_node import FakeSource

TOKEN = "a-token-for-tests-only"
HEADER = {"X-P2PNode": "1"}
POST = HEADER | {"Authorization": f"Bearer {TOKEN}"}


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Asked(NamedTuple):
    """A server under test and a way to ask it from another thread."""

    source: FakeSource
    address: str
    server: StatusServer

    async def __call__(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Response:
        return await asyncio.to_thread(ask, self.address, method, path, headers or {}, body)


def ask(address: str, method: str, path: str, headers: dict[str, str], body: bytes) -> Response:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body=body or None, headers=headers)
        response = connection.getresponse()
        return Response(response.status, {key.lower(): value for key, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def served(scenario: Callable[[Asked], Awaitable[None]], misbehave: str = "", **settings: Any) -> None:
    """Run a scenario against a server on a free port of the loopback."""

    async def run() -> None:
        source = FakeSource(Config(), misbehave)
        server = StatusServer(source, StatusSettings(port=0, **settings), TOKEN, SystemClock())
        address = await server.start()
        try:
            await scenario(Asked(source, str(address), server))
        finally:
            await server.stop()
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), 180))
