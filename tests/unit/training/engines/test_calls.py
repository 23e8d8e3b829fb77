"""Calls between scripts through their daemons, on a swarm that is a table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import PART_BYTES, ReceivedResponse, RequestRejected, TransportError
from p2pnode.training.engines import calls
from p2pnode.training.engines.calls import REQUEST, ScriptCalls
from p2pnode.training.trainer_link.engine_messages import CallAnswered, CallReceived, MembersFound, NotAnswered
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

SERVER, WORKER = b"S" * 20, b"W" * 20
AT = Address("127.0.0.1", 1)


class Table:
    """The swarm as one node sees it; requests go straight to the handler of the other node."""

    def __init__(self, node_id: bytes, all_tables: dict[bytes, Table]) -> None:
        self.node_id = node_id
        self.gone: set[bytes] = set()
        self.handlers: dict = {}
        self.peers: list = []
        self._all = all_tables
        all_tables[node_id] = self

    def register(self, name: str, handler: Callable, *, waits: bool = False) -> None:
        self.handlers[name] = handler

    def members(self) -> list:
        return self.peers

    def contact(self, node_id: bytes) -> Contact | None:
        return Contact(node_id, AT) if node_id in self._all else None

    def is_gone(self, node_id: bytes) -> bool:
        return node_id in self.gone

    @asynccontextmanager
    async def request(self, to: Contact, name: str, payload: bytes, body=(), *, timeout_s: float):
        async def parts(chunks) -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        handler = self._all[to.node_id].handlers[name]
        try:
            answer = await handler(Contact(self.node_id, AT), payload, parts(body))
        except RequestRejected as error:
            raise TransportError("rejected", AT, str(error)) from error
        yield ReceivedResponse(answer.head, parts(answer.body))


def pair(answer: Callable[[CallReceived], bytes | None]) -> tuple[Table, ScriptCalls, ScriptCalls]:
    """The worker's swarm, and the calls of worker and server; the server's script answers with `answer`."""
    tables: dict[bytes, Table] = {}
    worker = Table(WORKER, tables)

    def to_script(call: CallReceived) -> None:
        found = answer(call)
        if found is not None:
            asyncio.get_running_loop().call_later(0.1, server.on_answer, CallAnswered(call.number, found))

    server = ScriptCalls(Table(SERVER, tables), to_script, is_server=True)  # type: ignore[arg-type]
    return worker, ScriptCalls(worker, lambda call: None, is_server=False), server  # type: ignore[arg-type]


def test_a_call_is_answered_by_the_other_script() -> None:
    """The payload comes whole, in parts of a megabyte, with its sender; so does the answer."""

    async def history() -> tuple[bytes, bytes]:
        seen = []
        _, worker, _ = pair(lambda call: (seen.append(call.sender), call.payload[::-1])[1])
        found = await worker.call(SERVER, b"ab" + b"x" * (PART_BYTES + 3))
        return seen[0], found

    sender, found = run(history())
    assert sender == WORKER
    assert found == b"x" * (PART_BYTES + 3) + b"ba"


def test_a_dead_server_ends_the_wait() -> None:
    """As soon as it is declared dead; nobody waits for its answer."""

    async def history() -> float:
        table, worker, _ = pair(lambda call: None)
        asyncio.get_running_loop().call_later(3.0, table.gone.add, SERVER)
        began = asyncio.get_running_loop().time()
        with pytest.raises(NotAnswered, match="is gone"):
            await worker.call(SERVER, b"")
        return asyncio.get_running_loop().time() - began

    assert 3.0 <= run(history()) < 3.0 + 2 * calls.LOOK_S


@run_by(run)
async def test_a_script_that_has_ended_answers_nobody() -> None:
    """Calls that wait are refused, and later ones too."""
    _, worker, server = pair(lambda call: None)
    asyncio.get_running_loop().call_later(1.0, server.end)
    for _ in range(2):
        with pytest.raises(NotAnswered, match="script"):
            await worker.call(SERVER, b"")


@run_by(run)
async def test_a_node_that_is_no_server_refuses_calls() -> None:
    """And a node that nobody knows is not asked."""
    _, _, server = pair(lambda call: b"")
    with pytest.raises(NotAnswered, match="no server"):
        await server.call(WORKER, b"")
    with pytest.raises(NotAnswered, match="not known"):
        await server.call(b"?" * 20, b"")


@run_by(run)
async def test_too_long_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all of it is in memory."""
    monkeypatch.setattr(calls, "MAX_CALL_BYTES", 100)
    _, worker, _ = pair(lambda call: b"")
    with pytest.raises(NotAnswered, match="more than 100 bytes"):
        await worker.call(SERVER, b"x" * 101)


def test_servers_are_the_live_nodes_that_may_own_values() -> None:
    """In the order of their ids, this node included; one that leaves is none."""

    def peer(name: bytes, *, eligible: bool, activity: Activity = Activity.TRAINING) -> SimpleNamespace:
        return SimpleNamespace(node_id=name * 20, eligible=eligible, activity=activity)

    table, worker, server = pair(lambda call: b"")
    table.peers = [peer(b"Z", eligible=True), peer(b"A", eligible=True), peer(b"B", eligible=False)]
    table.peers.append(peer(b"C", eligible=True, activity=Activity.LEAVING))
    table.gone = {b"D" * 20}
    assert worker.members([b"A" * 20, b"D" * 20]) == MembersFound([b"A" * 20, b"Z" * 20], [b"D" * 20])
    assert server.members([]).servers == [SERVER]
    assert REQUEST in table.handlers


def test_a_late_answer_is_dropped() -> None:
    """Its asker has gone."""
    _, _, server = pair(lambda call: b"")
    server.on_answer(CallAnswered(77, b""))
