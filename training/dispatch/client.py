"""Who serves as master, and requests to it.

The master keeps a small record at the nodes closest to the run's key. The overlay stores no values, so this is a
request of its own: a master sends its record to the nodes that a lookup of the key finds, again and again, and a worker
asks the same nodes. A node accepts a record only from the master that it names, keeps the one with
the highest epoch, and forgets it `RECORD_S` after it was last sent. In a swarm of up to 20 nodes every node has it.

A request to the master is repeated until it is answered, and follows the master to another node. One whose answer got
lost is sent again as it was: the master answers it as before. `trouble` says since when there is no answer, for
`/status`. Needs no trainer and no torch: other engines draw tasks through it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import key_id, short
from p2pnode.overlay.kademlia.messages import pack_contact, unpack_contact
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError, gathered, in_parts
from p2pnode.training.dispatch.messages import (
    DISPATCH,
    MASTER,
    MAX_MESSAGE_BYTES,
    A,
    DispatchAnswer,
    DispatchRequest,
    MasterRecord,
    TryAgain,
    WhoServes,
    decode_answer,
    decode_who,
    encode,
)
from p2pnode.training.swarm import Swarm

#: A record counts so long after its master has sent it, and is sent again so often.
RECORD_S = 30.0
PUBLISH_S = 5.0
#: Nodes that keep the record, and are asked for it.
KEEPERS = 8
ASK_S = 2.0
#: A master answers at once, or after its store has synced: this much silence means that it does not serve.
ANSWER_S = 5.0
#: Waits between two attempts; the first one is short, because a failover takes about as long.
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 2.0
#: Trouble that lasts longer is logged and shown.
TROUBLE_S = 5.0

#: Answers requests of this node itself, where it is the master.
LocalMaster = Callable[[DispatchRequest], Awaitable[DispatchAnswer]]


def key_of(genesis: bytes) -> bytes:
    """Where in the overlay the record of a run is kept: 20 bytes."""
    return key_id(b"p2pnode master\0" + genesis)


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


class Trouble(NamedTuple):
    """The master has not answered since `since` (monotonic seconds), and why."""

    since: float
    reason: str


class MasterClient:
    """One node's requests to the master of its run."""

    def __init__(
        self, swarm: Swarm, directory: MasterDirectory, environment: Environment, local: LocalMaster | None = None
    ) -> None:
        self.trouble: Trouble | None = None
        #: Who answered last.
        self.master: bytes | None = None
        self._swarm = swarm
        self._directory = directory
        self._clock = environment.clock
        self._random = environment.entropy.random
        self._log = environment.log
        self._local = local
        self._has_told = False
        self._news = asyncio.Event()
        directory.on_record(lambda _: self._news.set())

    async def ask(self, genesis: bytes, request: DispatchRequest, kind: type[A]) -> A:
        """The master's answer, however long that takes; cancel it to give up."""
        wait_s = FIRST_RETRY_S
        while True:
            self._news.clear()
            answer = await self._attempt(genesis, request)
            if isinstance(answer, kind):
                self._note_success()
                return answer
            reason = answer.reason if isinstance(answer, TryAgain) else f"answered with {type(answer).__name__}"
            self._note_trouble(reason)
            try:
                async with asyncio.timeout(wait_s * self._random.uniform(0.5, 1.0)):
                    await self._news.wait()
            except TimeoutError:
                wait_s = min(MAX_RETRY_S, 2.0 * wait_s)
            else:
                wait_s = FIRST_RETRY_S

    async def _attempt(self, genesis: bytes, request: DispatchRequest) -> DispatchAnswer:
        record = await self._directory.find(genesis)
        if record is None:
            return TryAgain("no node of this run says that it is the master")
        contact = unpack_contact(record.contact)
        assert contact is not None  # the directory has checked it
        if contact.node_id == self._swarm.node_id:
            if self._local is None:
                self._directory.forget(record)
                return TryAgain("this node was the master before its restart")
            answer = await self._local(request)
        else:
            try:
                body = in_parts(encode(request))
                async with self._swarm.request(contact, DISPATCH, b"", body, timeout_s=ANSWER_S) as response:
                    answer = decode_answer(await gathered(response.body, MAX_MESSAGE_BYTES))
            except (TransportError, ValueError, RecursionError) as error:
                # A node that is the master again sends its record again.
                self._directory.forget(record)
                return TryAgain(f"the master {short(contact.node_id)} did not answer: {error}")
        if isinstance(answer, TryAgain):
            if answer.record is not None and self._directory.may_serve(answer.record):
                self._directory.note(answer.record)  # the node that was asked does not serve, and knows who does
        else:
            self.master = contact.node_id
        return answer

    # -- what people see -----------------------------------------------------------------------------------------

    def _note_success(self) -> None:
        if self.trouble is not None and self._has_told:
            self._log.info("dispatch_master_found", node=short(self.master or b""), after_s=round(self._since_s(), 3))
        self.trouble, self._has_told = None, False

    def _note_trouble(self, reason: str) -> None:
        now = self._clock.monotonic()
        self.trouble = Trouble(now if self.trouble is None else self.trouble.since, reason)
        if not self._has_told and self._since_s() >= TROUBLE_S:
            self._has_told = True
            self._log.warning("dispatch_master_missing", reason=reason, since_s=round(self._since_s(), 3))

    def _since_s(self) -> float:
        return 0.0 if self.trouble is None else self._clock.monotonic() - self.trouble.since
