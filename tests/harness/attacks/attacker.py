"""One member that attacks: what it can send, announce and answer, and how an attack enters a table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from tests.harness.attacks.lies import KINDS
from tests.harness.attacks.typed_values import Typed
from tests.harness.swarms.swarm import Host, Swarm
from training.encoding.frames import Part, frames
from training.exchange import messages as steps
from training.exchange import ownership_messages as moves
from training.exchange.messages import decode, encode
from training.exchange.terms import OwnerInfo, Term

HONEST = ("n0", "n1", "n2", "n3")
LIAR = "n4"
SIZE, SHARDS = 64, 4
#: How long an attack lasts.
ATTACK_S = 60.0

Attack = Callable[["Attacker"], Awaitable[None]]


def entry_of(table: dict[str, Attack]) -> Callable[[str], Callable[[Attack], Attack]]:
    """A decorator that enters an attack into the table under a name."""

    def attack(name: str) -> Callable[[Attack], Attack]:
        def enter(function: Attack) -> Attack:
            table[name] = function
            return function

        return enter

    return attack


@dataclass
class Attacker:
    """What the member that attacks can do: send anything, announce anything, answer anything."""

    swarm: Swarm
    chance: random.Random
    shards: int = SHARDS
    #: Values of the vector.
    size: int = SIZE

    @property
    def host(self) -> Host:
        return self.swarm.hosts[LIAR]

    @property
    def honest(self) -> list[Host]:
        return [self.swarm.hosts[name] for name in HONEST]

    @property
    def genesis(self) -> bytes:
        return self.host.living.exchange.context.genesis

    @property
    def me(self) -> Contact:
        return contact_of(self.host)

    def step(self) -> int:
        return max(host.living.progress.step for host in self.honest)

    def filled(self, value: float) -> np.ndarray[Any, Any]:
        """The values of one shard, all the same."""
        return np.full(self.size // self.shards, value, np.float32)

    def typed(self) -> Typed:
        ids = [host.living.overlay.node_id for host in (*self.honest, self.host)]
        return Typed(self.chance, [*ids, self.genesis])

    def owner_of(self, shard: int) -> Host | None:
        for host in self.honest:
            if shard in host.living.exchange.store.owned:
                return host
        return None

    def term(self, shard: int) -> Term:
        return max(host.living.exchange.store.ownership.fence(shard) for host in self.honest)

    async def ask(self, to: Host, name: str, message: msgspec.Struct, body: Iterable[Buffer] = ()) -> bytes | None:
        """The head of the answer; None if there is none."""
        try:
            request = self.host.living.overlay.request(contact_of(to), name, encode(message), list(body), timeout_s=5.0)
            async with request as answer:
                return answer.head
        except TransportError:
            return None

    async def tell_all(self, name: str, message: msgspec.Struct, body: Iterable[Buffer] = ()) -> None:
        buffers = list(body)
        await asyncio.gather(*(self.ask(host, name, message, buffers) for host in self.honest))

    async def push(self, values: np.ndarray[Any, Any], **changes: Any) -> None:
        """A delta of every shard to its owner, under a new step unless `changes` says otherwise."""
        living = self.host.living
        step = self.step() + self.chance.randrange(1, 100)
        for shard in range(self.shards):
            if (owner := self.owner_of(shard)) is not None:
                push = steps.Push(self.genesis, self.me.node_id, living.incarnation, step, step, 0.2, [shard])
                await self.ask(owner, "push", msgspec.structs.replace(push, **changes), delta(shard, values))

    async def mend(self, values: np.ndarray[Any, Any], **changes: Any) -> None:
        """A repair of every shard to its owner."""
        for shard in range(self.shards):
            if (owner := self.owner_of(shard)) is not None:
                step = self.chance.randrange(1, 1 << 20)
                logged = moves.LoggedDelta(shard, self.me.node_id, self.host.living.incarnation, step, 0.2, 5.0)
                logged = msgspec.structs.replace(logged, **changes)
                await self.ask(owner, "mend", moves.OfferedDeltas(self.genesis, [logged]), delta(shard, values))

    async def claim(self, shard: int, term: Term, owner: Contact) -> None:
        claim = OwnerInfo.of(shard, term, owner)
        await self.tell_all("where_is", steps.LocateOwners(self.genesis, [shard], [claim]))

    def announces(self, **fields: Any) -> None:
        """Whatever this node announces from now on, these fields are in it."""
        local: Any = self.host.living.overlay.local
        announce = local.announce
        local.announce = lambda **given: announce(**(given | fields))
        local.announce()

    def answers(self, name: str, change: Callable[[Any, list[bytes]], tuple[Any, list[bytes]]]) -> None:
        """Its answers to requests of this name are changed; `change` gets the message and the body."""
        handlers = self.host.living.overlay._requests._handlers
        honest = handlers[name]

        async def lie(sender: Contact, payload: bytes, stream: Any) -> Response:
            response = await honest(sender, payload, stream)
            body = response.body
            found = [bytes(one) async for one in body] if hasattr(body, "__aiter__") else [bytes(one) for one in body]
            message, found = change(decode(response.head, KINDS[name][1]), found)
            return Response(encode(message), found)

        handlers[name] = lie


def contact_of(host: Host) -> Contact:
    return Contact(host.living.overlay.node_id, host.living.overlay.address)


def delta(shard: int, values: np.ndarray[Any, Any]) -> list[Buffer]:
    return list(frames(shard, values.astype(np.float32), "float32", Part.DELTA))


async def for_ever(work: Callable[[], Awaitable[Any]], every_s: float = 0.5) -> None:
    while True:
        await work()
        await asyncio.sleep(every_s)
