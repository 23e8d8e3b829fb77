"""Serves named values of the shards that this node owns: updates, reads, lists of keys, and repairs after a split.

The messages are encoded as those of `training.exchange.messages`. Updates travel in the body, as bytes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response
from p2pnode.training.cooperative import VALUES_PER_ROW, VALUES_PER_UPDATE, LoopYielder
from p2pnode.training.encoding.frames import BadFrame, FrameReader, Part, read_blob
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import PushResult, encode, record_frames
from p2pnode.training.exchange.owner.replication import lacks_backup, not_owned
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_SHARDS, ZERO_TERM, Fence, ShardIndex, Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import KeyUpdate
from p2pnode.training.values.encoding import MAX_KEY_BYTES, MAX_VALUE_BYTES
from p2pnode.training.values.rounds import LATER, ValueRounds, result_of, table_of
from p2pnode.training.values.script_pulls import Waiting

#: An encoded key; of an empty one there is no value.
EncodedKey = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)]
#: Updates, or keys to be read, or shards whose keys are asked for, of one request: a millisecond or two of work.
MAX_ITEMS = 1024


class UpdateValues(msgspec.Struct, frozen=True, array_like=True):
    """Updates of the sender, each with its shard, `UPDATES` in the body. Answered by one `PushResult` for each, in the
    same order; `retry` with the reason `later` while one is being applied."""

    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


UPDATES: msgspec.msgpack.Decoder[list[tuple[ShardIndex, KeyUpdate]]] = msgspec.msgpack.Decoder(
    Annotated[list[tuple[ShardIndex, KeyUpdate]], Meta(max_length=MAX_ITEMS)]
)


class UpdateValuesAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[PushResult], Meta(max_length=MAX_ITEMS)]


class ReadValues(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the values of keys, each with its shard (`read_values`), or for the keys of shards in the order of their
    encoding, each from after a key (`list_keys`)."""

    asked: Annotated[list[tuple[ShardIndex, EncodedKey]], Meta(max_length=MAX_ITEMS)]
    #: An owner below these terms raises its own, or yields: the reader takes no value of a lower one.
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class ReadResult(PushResult, frozen=True, array_like=True):
    """`ok`: a value and its timestamp, None for a key that was never set; or keys, and whether there are no more of
    them. `retry` with the reason `later`: the answer is full."""

    term: Term = ZERO_TERM
    value: bytes | None = None
    timestamp: int = 0
    keys: list[EncodedKey] = msgspec.field(default_factory=list)
    is_whole: bool = True


class ReadValuesAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A `RECORD` in the body: a value may be as large as a head."""

    results: Annotated[list[ReadResult], Meta(max_length=MAX_ITEMS)]


#: An answer to updates waits this long; what is not applied by then is answered `later`.
ANSWER_S = 0.25
#: Updates that may wait here, and their bytes.
MAX_WAITING_UPDATES = 65_536
MAX_WAITING_BYTES = 64 * 1024 * 1024
#: Bytes of updates in one request, and of values in one answer: one value more at most.
MAX_REQUEST_BYTES = 4 * 1024 * 1024
MAX_ANSWER_BYTES = 2 * 1024 * 1024
#: Keys in one answer, of 257 bytes at most.
MAX_KEYS = 8192


class ValueHandler:
    """The owner's side of `training.values.client`, also called directly for the node's own requests."""

    def __init__(
        self,
        *,
        rpc: ExchangeRpc,
        store: ShardStore,
        run: RunState,
        view: SwarmView,
        rebalance: RebalanceRequests,
        rounds: ValueRounds,
    ) -> None:
        self._rpc = rpc
        self._store = store
        self._run = run
        self._view = view
        self._rebalance = rebalance
        self.rounds = rounds
        #: How many keys it has answered a read of.
        self.reads = 0

    def register(self) -> None:
        """Register the request handlers."""
        self._rpc.register("update_values", UpdateValues, self._on_update, waits=True)
        self._rpc.register("read_values", ReadValues, self._on_read)
        self._rpc.register("list_keys", ReadValues, self._on_list)

    # -- updates ------------------------------------------------------------------------------------------------

    async def _on_update(self, sender: Contact, message: UpdateValues, stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(message.fences)
        raw, _ = await read_blob(FrameReader(stream), 0, Part.UPDATES, MAX_REQUEST_BYTES + 2 * MAX_VALUE_BYTES)
        self._run.counters.bytes_received += len(raw)
        try:
            updates = UPDATES.decode(raw)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"malformed updates: {error}") from error
        return Response(encode(UpdateValuesAnswer(await self.accept(sender.node_id, updates))))

    async def accept(self, sender: bytes, updates: Sequence[tuple[int, KeyUpdate]]) -> list[PushResult]:
        """Apply updates, and answer each; within `ANSWER_S`."""
        answers, turn = [], LoopYielder()
        # Promise 15 (docs/faults.md): updates of one origin are applied in their order.
        behind: dict[int, PushResult] = {}
        for shard, update in updates:
            answer = behind.get(shard) or self._begin(sender, shard, update)
            answers.append(answer)
            if isinstance(answer, PushResult) and answer.status == "retry":
                behind[shard] = answer
            if turn.is_due(VALUES_PER_UPDATE):
                await asyncio.sleep(0)
        await self.rounds.settled([one for one in answers if isinstance(one, Waiting)], ANSWER_S)
        return [
            answer if isinstance(answer, PushResult) else answer.result or PushResult(shard, "retry", reason=LATER)
            for (shard, _), answer in zip(updates, answers, strict=True)
        ]

    def _begin(self, sender: bytes, shard: int, update: KeyUpdate) -> PushResult | Waiting:
        # Promise 15: under another's identity it would count as that one's update.
        if update.node != sender:
            return PushResult.refused(shard, "not_yours")
        if shard >= len(self._store):
            return PushResult.refused(shard, "shape")
        if len(update.update) > MAX_VALUE_BYTES:
            return PushResult(shard, "refused", reason=f"more than {MAX_VALUE_BYTES:,} bytes")
        identity = update.identity
        if (answer := self._known(shard, identity)) is not None:
            return answer
        rounds = self.rounds
        if rounds.waiting >= MAX_WAITING_UPDATES or rounds.waiting_bytes + update.size_bytes > MAX_WAITING_BYTES:
            return PushResult(shard, "retry", reason="busy")
        return rounds.enqueue(shard, update, identity)

    def _known(self, shard: int, identity: DeltaId) -> PushResult | Waiting | None:
        """The answer where the update itself does not matter; None for one that is to be applied here."""
        owned = self._store.owned.get(shard)
        if owned is None:
            return not_owned(self._store, shard)
        if (fate := table_of(owned).fate(identity)) is not None:
            # After a hand-over the new owner may be the only node that has it: then it is not safe yet.
            if lacks_backup(self._view, owned):
                return PushResult.retry(shard, "no_backup_yet")
            return result_of(shard, fate)
        if (waiting := self.rounds.find(shard, identity)) is not None:
            return waiting
        if owned.moving or self._run.is_closed:
            return PushResult.retry(shard, "moving" if owned.moving else "leaving")
        return None

    async def repair(self, identity: DeltaId, item: IncomingDelta) -> PushResult:
        """Apply the updates of a batch of the other side of a split that are not known here, under its identity: `ok`
        when the batch is in."""
        shard, batch = item.shard, item.batch
        owned = self._store.owned.get(shard)
        if owned is None or batch is None:
            return not_owned(self._store, shard)
        if owned.moving or self._run.is_closed:
            return PushResult.retry(shard, "moving")
        if owned.state.knows(identity):
            return PushResult(shard, "ok")
        if owned.state.applied.may_have_forgotten(identity):
            return PushResult.refused(shard, "late")
        waiting: list[Waiting] = []
        void: list[tuple[KeyUpdate, str]] = []
        refused = dict(batch.refused)
        for place, update in enumerate(batch.updates):
            known_as = update.identity
            answer = self._known(shard, known_as)
            if isinstance(answer, PushResult) and answer.status == "refused" and place not in refused:
                answer = None  # refused here, and applied there
            if answer is None and place in refused:
                void.append((update, refused[place]))
            elif answer is None or isinstance(answer, Waiting):
                waiting.append(self.rounds.enqueue(shard, update, known_as, is_repair=place not in refused))
        await self.rounds.settled(waiting, ANSWER_S)
        if not all(one.result is not None and one.result.status in ("ok", "refused") for one in waiting):
            return PushResult(shard, "retry", reason=LATER)
        return await self.rounds.close(shard, identity, void)

    # -- reads --------------------------------------------------------------------------------------------------

    async def _on_read(self, _sender: Contact, message: ReadValues, _stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(message.fences)
        return Response(b"", list(record_frames(0, ReadValuesAnswer(await self.read(message.asked)))))

    async def _on_list(self, _sender: Contact, message: ReadValues, _stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(message.fences)
        return Response(b"", list(record_frames(0, ReadValuesAnswer(await self.list_keys(message.asked)))))

    async def read(self, keys: Sequence[tuple[int, bytes]]) -> list[ReadResult]:
        """The values of keys, each with its shard, until the answer is full."""
        results = []
        left_bytes = MAX_ANSWER_BYTES
        for shard, key in keys:
            owned = self._owned(shard)
            if isinstance(owned, ReadResult):
                results.append(owned)
                continue
            self.reads += 1
            entry = table_of(owned).entries.get(key)
            if entry is None:
                results.append(ReadResult(shard, "ok", term=owned.term))
            elif left_bytes <= 0:
                results.append(ReadResult(shard, "retry", reason=LATER))
            else:
                left_bytes -= len(entry.value)
                value, timestamp = entry.value, entry.timestamp
                results.append(ReadResult(shard, "ok", term=owned.term, value=value, timestamp=timestamp))
        return results

    async def list_keys(self, shards: Sequence[tuple[int, bytes]]) -> list[ReadResult]:
        """The keys of shards, each from after a key, until the answer is full."""
        results, turn = [], LoopYielder()
        left = MAX_KEYS
        for shard, after in shards:
            owned = self._owned(shard)
            if isinstance(owned, ReadResult):
                results.append(owned)
                continue
            keys = sorted(table_of(owned).entries)
            rest = keys[bisect_right(keys, after) :]
            found, is_whole = rest[:left], len(rest) <= left
            left -= len(found)
            if found or is_whole:
                results.append(ReadResult(shard, "ok", term=owned.term, keys=found, is_whole=is_whole))
            else:
                results.append(ReadResult(shard, "retry", reason=LATER))
            await turn.after(VALUES_PER_ROW * len(keys))
        return results

    def _owned(self, shard: int) -> Owned | ReadResult:
        """An owned shard, or the answer where it cannot be read here."""
        owned = self._store.owned.get(shard)
        if owned is not None and not owned.moving:
            return owned
        # While a hand-over is unanswered the other node may own it, with newer values.
        why = not_owned(self._store, shard) if shard < len(self._store) else PushResult.retry(shard, "moving")
        return ReadResult(shard, why.status, reason=why.reason, owner_info=why.owner_info)
