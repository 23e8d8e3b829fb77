"""A swarm of three peers that keeps the requests it is given and answers them, for tests of small messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.requests import Handler
from p2pnode.overlay.transport import Buffer, ReceivedResponse, TransportError
from p2pnode.training.swarm import Swarm
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run

PEERS = [Contact(name * 20, Address("10.0.0.1", 8000 + number)) for number, name in enumerate((b"a", b"b", b"c"))]


async def nothing() -> AsyncIterator[Buffer]:
    for _ in ():
        yield b""


class NewsSwarm:
    """The part of `training.swarm.Swarm` that sends and serves requests. Nodes in `silent` do not answer."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.asked: list[tuple[bytes, str, bytes]] = []
        self.silent: set[bytes] = set()
        self.answer = b""

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        self.handlers[name] = handler

    def members(self) -> list[Any]:
        return [SimpleNamespace(node_id=peer.node_id, contact=peer) for peer in PEERS]

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        await asyncio.sleep(0.01)
        self.asked.append((to.node_id, name, payload))
        if to.node_id in self.silent:
            raise TransportError("timeout", to.address, f"did not answer for {timeout_s:.0f} s")
        yield ReceivedResponse(self.answer, nothing(), to.node_id)

    async def receive(self, name: str, payload: bytes) -> bytes:
        """A request of the first peer; returns the answer."""
        return (await self.handlers[name](PEERS[0], payload, nothing())).head

    async def asked_all(self) -> None:
        """Wait until every peer was asked, and its answer has been read."""
        before = len(self.asked)
        while len(self.asked) < before + len(PEERS):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)


def exchange_news(scenario: Callable[[Any, ListLog], Awaitable[None]]) -> None:
    """Run a scenario on the virtual loop."""

    async def main() -> None:
        await scenario(cast(Swarm, NewsSwarm()), ListLog([]))

    run(main(), limit_s=60)
