"""Who serves as master: a small record that the master keeps at the nodes closest to the run's key.

The overlay stores no values, so this is a request of its own: a master sends its record to the nodes that a lookup of
the key finds, again and again, and a worker asks the same nodes. A node accepts a record only from the master that it
names, keeps the one with the highest epoch, and forgets it `RECORD_S` after it was last sent. In a swarm of up to 20
nodes every node has the record.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.kademlia.messages import pack_contact, unpack_contact
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError
from p2pnode.training.dispatch.messages import MASTER, MasterRecord, WhoServes, decode_who, encode
from p2pnode.training.swarm import Swarm

#: A record counts so long after its master has sent it, and is sent again so often.
RECORD_S = 30.0
PUBLISH_S = 5.0
#: Nodes that keep the record, and are asked for it.
KEEPERS = 8
ASK_S = 2.0


def key_of(genesis: bytes) -> bytes:
    """Where in the overlay the record of a run is kept: 20 bytes."""
    return hashlib.sha1(b"p2pnode master\0" + genesis, usedforsecurity=False).digest()


class MasterDirectory:
    """One node's part in it; every node has one. `on_record` callbacks are called with each newer record."""

    def __init__(self, swarm: Swarm, environment: Environment) -> None:
        self._swarm = swarm
        self._clock = environment.clock
        self._record: MasterRecord | None = None
        self._until_s = 0.0
        self._callbacks: list[Callable[[MasterRecord], None]] = []
        swarm.register(MASTER, self._on_request)

    def on_record(self, callback: Callable[[MasterRecord], None]) -> None:
        self._callbacks.append(callback)

    @property
    def record(self) -> MasterRecord | None:
        """The newest record known here; None when it is too old, or its master is known to be gone."""
        record = self._record
        is_fresh = record is not None and self._clock.monotonic() < self._until_s
        return record if record is not None and is_fresh and self.may_serve(record) else None

    def may_serve(self, record: MasterRecord) -> bool:
        """Whether requests can be sent to its node, which is not known to be gone."""
        return unpack_contact(record.contact) is not None and not self._swarm.is_gone(record.node_id)

    def forget(self, record: MasterRecord) -> None:
        """It did not serve when it was asked: another record may take its place, whatever its epoch."""
        if self._record == record:
            self._record = None

    def note(self, record: MasterRecord) -> None:
        """A record from its own master, or from a node that was asked."""
        present = self.record
        if present is not None and present.epoch > record.epoch:
            return
        self._until_s = self._clock.monotonic() + RECORD_S
        if record != self._record:
            self._record = record
            for callback in self._callbacks:
                callback(record)

    # -- the master's side ---------------------------------------------------------------------------------------

    def own_record(self, epoch: int, identity: bytes) -> MasterRecord:
        contact = Contact(self._swarm.node_id, self._swarm.address)
        return MasterRecord(pack_contact(contact), epoch, identity)

    async def publish(self, genesis: bytes, record: MasterRecord) -> None:
        """Send this node's record to its keepers."""
        self.note(record)
        await self._ask_keepers(genesis, WhoServes(record))

    # -- the worker's side ---------------------------------------------------------------------------------------

    async def find(self, genesis: bytes) -> MasterRecord | None:
        """The record known here, or else the newest that its keepers know."""
        if self.record is None:
            for answer in await self._ask_keepers(genesis, WhoServes(None)):
                if answer is not None and answer.record is not None and self.may_serve(answer.record):
                    self.note(answer.record)
        return self.record

    async def confirmed(self, genesis: bytes) -> MasterRecord | None:
        """The record of another node, if that node itself says now that it serves."""
        record = await self.find(genesis)
        contact = None if record is None else unpack_contact(record.contact)
        if contact is None or contact.node_id == self._swarm.node_id:
            return None
        answer = await self._ask(contact, WhoServes(None))
        if answer is None or answer.record is None:
            return None
        return record if answer.record.node_id == contact.node_id else None

    async def _ask_keepers(self, genesis: bytes, message: WhoServes) -> list[WhoServes | None]:
        found = await self._swarm.lookup(key_of(genesis))
        keepers = [contact for contact in found if contact.node_id != self._swarm.node_id][:KEEPERS]
        return await asyncio.gather(*(self._ask(contact, message) for contact in keepers))

    async def _ask(self, contact: Contact, message: WhoServes) -> WhoServes | None:
        try:
            async with self._swarm.request(contact, MASTER, encode(message), timeout_s=ASK_S) as response:
                return decode_who(response.head)
        except (TransportError, ValueError, RecursionError):
            return None

    async def _on_request(self, sender: Contact, payload: bytes, _: AsyncIterator[Buffer]) -> Response:
        try:
            record = decode_who(payload).record
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed WhoServes: {error}") from error
        if record is not None:
            if record.node_id != sender.node_id:
                raise RequestRejected("a node announces itself as the master, not another one")
            self.note(MasterRecord(pack_contact(sender), record.epoch, record.identity))
        return Response(encode(WhoServes(self.record)))
