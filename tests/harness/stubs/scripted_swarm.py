"""One stand-in for the other nodes: a table of peers, what this node says to them, and answers that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.population import Population, counted
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.peers import Activity, Contact, PeerChange
from p2pnode.overlay.requests import Handler
from p2pnode.overlay.transport import Body, ReceivedResponse, Response, TransportError
from p2pnode.training.exchange.messages import decode, encode
from tests.harness.swarms.exchange_overlay import chunks, collected

GENESIS = b"g" * 16
ME = Contact(b"m" * 20, Address("10.0.0.1", 8468))
#: What a test answers to a request: a message, a message with a body, or an exception to raise.
Answer = msgspec.Struct | bytes | tuple[msgspec.Struct, list[bytes]] | Exception


def peer_of(contact: Contact) -> Any:
    return SimpleNamespace(
        node_id=contact.node_id,
        contact=contact,
        eligible=True,
        step=0,
        step_seconds=0.0,
        last_heard=0.0,
        activity=Activity.READY,
        is_worker=lambda _now: True,
    )


class ScriptedSwarm:
    """Implements `training.swarm.Swarm`; the attributes are the script."""

    def __init__(self, me: Contact = ME, others: Sequence[Contact] = ()) -> None:
        self.node_id, self.address = me.node_id, me.address
        self.is_eligible = True
        self.others: list[Any] = [peer_of(one) for one in others]
        self.gone: list[bytes] = []
        self.handlers: dict[str, Handler] = {}
        self.callbacks: list[Callable[[PeerChange], None]] = []
        #: Answers by name of the request: called with the receiver and the payload. Nodes in `silent` give none.
        self.answers: dict[str, Callable[[Contact, bytes], Answer]] = {}
        self.silent: set[bytes] = set()
        self.requests: list[tuple[str, Contact, bytes]] = []
        #: The last body of each request, by its name.
        self.bodies: dict[str, list[bytes]] = {}
        self.announced: list[dict[str, Any]] = []
        self.worker_count = 1.0
        #: How long each request takes.
        self.request_s = 0.0
        self.line = MeasuredLine()
        self._candidates = [me, *others]

    @property
    def peers(self) -> dict[bytes, Any]:
        return {one.node_id: one for one in self.others}

    @property
    def activities(self) -> list[Activity]:
        """Those that were announced."""
        return [changes["activity"] for changes in self.announced if "activity" in changes]

    def announce(self, **changes: Any) -> None:
        self.announced.append(changes)

    def members(self) -> list[Any]:
        return [one for one in self.others if one.node_id not in self.gone]

    def all_members(self, since: float = 0.0) -> list[Any]:
        return self.members()

    def sample(self, count: int, since: float = 0.0) -> list[Any]:
        return self.members()[:count]

    def contact(self, node_id: bytes) -> Contact | None:
        return self.peers[node_id].contact if self.is_alive(node_id) else None

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self.peers and node_id not in self.gone

    def is_gone(self, node_id: bytes) -> bool:
        return node_id in self.gone

    def is_suspect(self, node_id: bytes) -> bool:
        return False

    def suspect(self, node_id: bytes, reason: str) -> None:
        """Nobody is found dead."""

    async def query_steps(self, node_ids: Iterable[bytes]) -> None:
        """The steps in the script are the present ones."""

    def watch(self, node_ids: Iterable[bytes]) -> None:
        """Nobody is probed."""

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        self.callbacks.append(callback)

    def remembered(self) -> list[str]:
        return []

    def workers(self) -> float:
        return self.worker_count

    def population(self) -> Population:
        return counted(len(self.others) + 1)

    def capacity(self, node_id: bytes) -> int:
        return 0

    def may_own(self, peer: Any) -> bool:
        return bool(peer.eligible)

    def takes_streams(self, node_id: bytes) -> bool:
        return True

    async def candidates_of_all(self, keys: Sequence[bytes]) -> list[list[Contact]]:
        return [await self.candidates(key) for key in keys]

    async def candidates(self, key: bytes) -> list[Contact]:
        return [one for one in self._candidates if one.node_id not in self.gone]

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        self.handlers[name] = handler

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Body = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        payload = payload.removeprefix(GENESIS)
        self.requests.append((name, to, payload))
        buffers = self.bodies[name] = await collected(body)
        if self.request_s:
            await asyncio.sleep(self.request_s)
        if to.node_id in self.silent:
            await asyncio.sleep(timeout_s)
        if to.node_id in self.silent or name not in self.answers:
            raise TransportError("timeout", to.address, f"did not answer for {timeout_s:.0f} s")
        answer = self.answers[name](to, payload)
        if isinstance(answer, Exception):
            raise answer
        head, buffers = answer if isinstance(answer, tuple) else (answer, [])
        yield ReceivedResponse(head if isinstance(head, bytes) else encode(head), chunks(buffers), to.node_id)

    def sent(self, name: str, kind: Any) -> list[Any]:
        """The messages of all requests of this name."""
        return [decode(payload, kind) for sent_name, _, payload in self.requests if sent_name == name]

    async def deliver(self, name: str, sender: Contact, message: msgspec.Struct, kind: Any, body: Any = ()) -> Any:
        """Have this node handle a request; returns the message of its answer."""
        return decode((await self.respond(name, sender, message, body)).head, kind)

    async def respond(self, name: str, sender: Contact, message: msgspec.Struct, body: Any = ()) -> Response:
        """Have this node handle a request; returns its answer."""
        return await self.handlers[name](sender, GENESIS + encode(message), chunks(list(body)))
