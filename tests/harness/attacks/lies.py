"""A member that lies: parts of its requests and answers are replaced, and it makes requests up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, ReceivedResponse, Response, TransportError
from p2pnode.training.encoding.frames import HEADER_BYTES, Part, frames
from p2pnode.training.exchange import messages as steps
from p2pnode.training.exchange import ownership_messages as moves
from p2pnode.training.exchange.messages import decode, encode, record_frames
from tests.harness.attacks.typed_values import Typed
from tests.harness.swarms.exchange_overlay import collected
from tests.harness.swarms.exchange_swarm import GENESIS, Member, World

SHARDS, VALUES = 4, 16

#: Every request of the exchange: what it carries, and what answers it.
KINDS: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "push": (steps.Push, steps.PushAnswer),
    "pull": (steps.Pull, steps.PullAnswer),
    "forward": (steps.Forward, steps.ForwardAnswer),
    "where_is": (steps.LocateOwners, steps.LocateOwnersAnswer),
    "learn": (moves.Learn, moves.TransferResult),
    "state": (moves.ShardList, moves.TransferResult),
    "hand_over": (moves.HandOver, moves.TransferResult),
    "backing": (moves.ShardList, moves.TransferResult),
    "compare": (moves.CompareCopies, moves.TransferResult),
    "final_done": (moves.FinalDone, moves.TransferResult),
    "final_buffers": (moves.FinalBuffers, moves.FinalBuffersAnswer),
    "query_replicas": (moves.ShardList, moves.ReplicasAnswer),
    "fetch": (moves.Fetch, moves.ShardList),
    "offer_repair": (moves.ShardList, moves.ShardList),
    "request_repair": (moves.FindDeltas, moves.FoundDeltas),
    "repair": (moves.OfferedDeltas, moves.OfferedDeltasAnswer),
    "indirect": (steps.Indirect, steps.IndirectAnswer),
    "request_takeover": (moves.ShardList, moves.TransferResult),
    "lacking": (moves.FindLacking, moves.LackingDeltas),
}
#: What is told of a shard in bodies: in requests of these names, or in answers.
RECORDS: dict[str, type[msgspec.Struct]] = {
    "state": moves.StateHead,
    "fetch answer": moves.StateHead,
    "offer answer": moves.OwnedHistory,
}
EXTREMES = (np.nan, np.inf, 3e38, 1e14, -1e14, 0.0, 1.0)


@dataclass
class Tally:
    """What a history did."""

    seed: int
    lies: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    settled_s: float = 0.0
    restarted_s: float = 0.0


class LyingMember:
    """The lies of one running member."""

    def __init__(self, world: World, member: Member, chance: random.Random, tally: Tally) -> None:
        self._world = world
        self._chance = chance
        self._tally = tally
        assert member.overlay is not None
        self._overlay = member.overlay
        self._send = member.overlay.request
        ids = [one.contact.node_id for one in world.members.values()]
        self._typed = Typed(chance, [*ids, bytes(20), b"", GENESIS])

    def begin(self) -> None:
        """From now on requests and answers of this member are lies, some of them."""
        overlay: Any = self._overlay
        overlay.request = self._request
        for name, handler in list(overlay.handlers.items()):
            overlay.handlers[name] = self._lying(name, handler)

    def _request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        if self._chance.random() < 0.3:
            self._tally.lies[name] += 1
            message = decode(payload.removeprefix(GENESIS), KINDS[name][0])
            payload = GENESIS + encode(self._typed.changed(message))
            if name in RECORDS:
                body = self._records_changed(name, list(body))
        return self._send(to, name, payload, body, timeout_s=timeout_s)

    def _lying(self, name: str, handler: Any) -> Any:
        async def answer(sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
            response: Response = await handler(sender, payload, stream)
            head, body = response.head, response.body
            if self._chance.random() < 0.3:
                self._tally.lies[f"{name} answer"] += 1
                kind = KINDS[name][1]
                message = decode(head, kind)
                head = encode(self._typed.value(kind) if self._chance.random() < 0.2 else self._typed.changed(message))
                if f"{name} answer" in RECORDS:
                    body = self._records_changed(f"{name} answer", await collected(body))
            if self._chance.random() < 0.2:
                body = [_spoilt(one) for one in await collected(body)]
            return Response(head, body)

        return answer

    def _records_changed(self, name: str, buffers: Iterable[Buffer]) -> list[Buffer]:
        """The body with other things told of its shards."""
        found: list[Buffer] = []
        for buffer in map(bytes, buffers):
            if found and len(found[-1]) == HEADER_BYTES and found[-1][13] == Part.RECORD:
                shard = int.from_bytes(found.pop()[:4], "little")
                found += record_frames(shard, self._typed.changed(decode(buffer, RECORDS[name])))
            else:
                found.append(buffer)
        return found

    async def invent(self, name: str, to: Contact) -> None:
        """Send a request that is made up."""
        message = self._typed.value(KINDS[name][0])
        if self._chance.random() < 0.5 and hasattr(message, "node"):
            message = msgspec.structs.replace(message, node=self._overlay.node_id)
        self._tally.lies[f"{name} made up"] += 1
        try:
            async with self._send(to, name, GENESIS + encode(message), self._body(message), timeout_s=2.0) as answer:
                async for _ in answer.body:
                    pass
        except TransportError as error:
            self._tally.refused[error.detail.split(":")[0]] += 1

    def _body(self, message: Any) -> list[Buffer]:
        """Frames that fit the head, of values that need not be of training."""
        found: list[Buffer] = []
        entries: Iterable[Any] = getattr(message, "shards", None) or getattr(message, "deltas", None) or ()
        is_state = isinstance(message, moves.ShardList)
        part = Part.VALUE if is_state else Part.DELTA
        for entry in entries:
            shard = entry if isinstance(entry, int) else entry.shard
            if shard < SHARDS:
                values = np.full(VALUES // SHARDS, self._chance.choice(EXTREMES), np.float32)
                if is_state:
                    found += record_frames(
                        shard, msgspec.structs.replace(self._typed.value(moves.StateHead), shard=shard)
                    )
                found += frames(shard, values, "float32", part)
        return found


def _spoilt(buffer: Buffer) -> bytes:
    """Not a number, in float32 and bfloat16; a header stays as it is."""
    return bytes(buffer) if len(buffer) == HEADER_BYTES else b"\xff" * len(buffer)
