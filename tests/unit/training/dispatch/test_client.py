"""Requests to the master: found, repeated, followed to another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import pack_contact
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import ReceivedResponse, TransportError
from p2pnode.training.dispatch.answers import ReportAnswer
from p2pnode.training.dispatch.client import MasterClient
from p2pnode.training.dispatch.directory import MasterDirectory
from p2pnode.training.dispatch.messages import (
    DISPATCH,
    FinishTask,
    MasterRecord,
    ReportsTold,
    TryAgain,
    WhoServes,
    decode_request,
    encode,
)
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run

ME, ONE, TWO = b"m" * 20, b"a" * 20, b"b" * 20
REQUEST = FinishTask(b"q", 3, 1)
ACCEPTED = ReportsTold([ReportAnswer.ACCEPTED], None)


def contact(node: bytes) -> Contact:
    return Contact(node, Address(f"10.0.0.{node[0]}", 8468))


def record(node: bytes, epoch: int, identity: bytes = b"") -> MasterRecord:
    return MasterRecord(pack_contact(contact(node)), epoch, identity)


class FakeSwarm:
    """Two other nodes. `answers` are what each says to a request, or an error; `knows` what it has of the master."""

    node_id = ME
    address = contact(ME).address

    def __init__(self) -> None:
        self.answers: dict[bytes, list[Any]] = {ONE: [], TWO: []}
        self.knows: dict[bytes, MasterRecord | None] = {ONE: None, TWO: None}
        self.gone: set[bytes] = set()
        self.asked: list[tuple[bytes, Any]] = []
        self.handlers: dict[str, Any] = {}

    def register(self, name: str, handler: Any, *, waits: bool = False) -> None:
        self.handlers[name] = handler

    def is_gone(self, node: bytes) -> bool:
        return node in self.gone

    async def lookup(self, target: bytes) -> list[Contact]:
        return [contact(ONE), contact(ME), contact(TWO)]

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        if to.node_id in self.gone:
            raise TransportError("refused", to.address, "is gone")
        if name != DISPATCH:
            yield ReceivedResponse(encode(WhoServes(self.knows[to.node_id])), None)  # type: ignore[arg-type]
            return
        self.asked.append((to.node_id, decode_request(b"".join(body))))
        answer = self.answers[to.node_id].pop(0)
        if answer == "lost":
            await asyncio.sleep(timeout_s)
            raise TransportError("timeout", to.address, "was silent")
        yield ReceivedResponse(b"", _body(encode(answer)))


async def _body(message: bytes) -> AsyncIterator[bytes]:
    yield message


def with_client(scenario: Callable[[FakeSwarm, MasterDirectory, MasterClient], Any]) -> None:
    async def main() -> None:
        swarm = FakeSwarm()
        environment = make_environment()
        directory = MasterDirectory(swarm, environment)  # type: ignore[arg-type]
        await scenario(swarm, directory, MasterClient(swarm, directory, environment))  # type: ignore[arg-type]

    run(main())


def test_a_request_whose_answer_is_lost_is_sent_again_as_it_was() -> None:
    """Until there is an answer; meanwhile `trouble` says since when and why."""

    async def scenario(swarm: FakeSwarm, _: MasterDirectory, client: MasterClient) -> None:
        swarm.knows[TWO] = record(ONE, 1)
        swarm.answers[ONE] = ["lost", "lost", ACCEPTED]
        asking = asyncio.create_task(client.ask(b"g", REQUEST, ReportsTold))
        await asyncio.sleep(6.0)
        assert client.trouble is not None
        assert "was silent" in client.trouble.reason
        assert await asking == ACCEPTED
        assert swarm.asked == [(ONE, REQUEST)] * 3
        assert (client.trouble, client.master) == (None, ONE)

    with_client(scenario)


def test_a_node_that_does_not_serve_names_the_one_that_does() -> None:
    """The request goes there at once; a record with an older epoch is not followed."""

    async def scenario(swarm: FakeSwarm, _: MasterDirectory, client: MasterClient) -> None:
        swarm.knows[ONE] = record(ONE, 4)
        swarm.answers[ONE] = [TryAgain("not now", record(TWO, 3)), TryAgain("no more", record(TWO, 5))]
        swarm.answers[TWO] = [ACCEPTED]
        assert await client.ask(b"g", REQUEST, ReportsTold) == ACCEPTED
        assert [node for node, _ in swarm.asked] == [ONE, ONE, TWO]

    with_client(scenario)


def test_a_new_master_ends_the_wait() -> None:
    """Its record wakes a client that waits, whatever its backoff."""

    async def scenario(swarm: FakeSwarm, directory: MasterDirectory, client: MasterClient) -> None:
        asking = asyncio.create_task(client.ask(b"g", REQUEST, ReportsTold))
        await asyncio.sleep(30.0)
        swarm.answers[TWO] = [ACCEPTED]
        began = asyncio.get_running_loop().time()
        directory.note(record(TWO, 1))
        await asking
        assert asyncio.get_running_loop().time() - began < 0.1

    with_client(scenario)
