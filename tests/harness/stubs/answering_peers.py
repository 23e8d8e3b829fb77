"""Three peers that answer small messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.scripted_swarm import ScriptedSwarm

PEERS = [Contact(name * 20, Address("10.0.0.1", 8000 + number)) for number, name in enumerate((b"a", b"b", b"c"))]


async def nothing() -> AsyncIterator[Buffer]:
    for _ in ():
        yield b""


class NewsSwarm(ScriptedSwarm):
    """Each of the three answers `answer`, and what they were asked is in `asked`."""

    def __init__(self) -> None:
        super().__init__(others=PEERS)
        self.answer, self.request_s = b"", 0.01

    def register(self, name: str, handler: Any, *, waits: bool = False) -> None:
        super().register(name, handler)
        self.answers[name] = lambda _to, _payload: self.answer

    @property
    def asked(self) -> list[tuple[bytes, str, bytes]]:
        return [(to.node_id, name, payload) for name, to, payload in self.requests]

    async def receive(self, name: str, payload: bytes) -> bytes:
        """A request of the first peer; returns the answer."""
        return (await self.handlers[name](PEERS[0], payload, nothing())).head

    async def asked_all(self) -> None:
        """Wait until every peer was asked, and its answer has been read."""
        before = len(self.requests)
        while len(self.requests) < before + len(PEERS):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.03)


def exchange_news(scenario: Callable[[Any, ListLog], Awaitable[None]]) -> None:
    """Run a scenario on the virtual loop."""

    async def main() -> None:
        await scenario(NewsSwarm(), ListLog([]))

    run(main(), limit_s=60)
