"""Serves named values of the shards that this node owns: updates, reads, lists of keys, and repairs after a split.

The messages are encoded as those of `training.exchange.messages`. Updates travel in the body, as bytes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from overlay.peers import Contact
from overlay.transport import Buffer, Response
from training.cooperative import VALUES_PER_UPDATE, LoopYielder
from training.encoding.frames import BadFrame, FrameReader, Part, read_blob
from training.exchange.context import ExchangeContext
from training.exchange.messages import PushResult, encode, record_frames
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.replication import lacks_backup, not_owned
from training.exchange.store.records import Owned
from training.exchange.terms import MAX_SHARDS, Fence, Number, OwnerInfo, ShardIndex, Term, TermNode
from training.shards.applied import DeltaId
from training.shards.value_batch import KeyUpdate
from training.values.encoding import MAX_KEY_BYTES, MAX_VALUE_BYTES
from training.values.rounds import LATER, ValueRounds, result_of
from training.values.script_pulls import Waiting, all_settled

EncodedKey = Annotated[bytes, Meta(min_length=2, max_length=MAX_KEY_BYTES + 1)]
#: Updates, or keys to be read, or shards whose keys are asked for, of one request: a millisecond or two of work.
MAX_ITEMS = 1024
#: Keys of one answer.
MAX_KEYS = 65536


class UpdateValues(msgspec.Struct, frozen=True, array_like=True):
    """Updates of the sender, `UPDATES` in the body: a list of `ShardUpdate`. Answered by one `PushResult` for each, in
    the same order; `retry` with the reason `later` while one is being applied."""

    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class ShardUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An update, and the shard of its key."""

    shard: ShardIndex
    update: KeyUpdate


_UPDATES: msgspec.msgpack.Decoder[list[ShardUpdate]] = msgspec.msgpack.Decoder(
    Annotated[list[ShardUpdate], Meta(max_length=MAX_ITEMS)]
)


def decode_updates(raw: Any) -> list[ShardUpdate]:
    """The updates in a body. Raises `msgspec.DecodeError`."""
    return _UPDATES.decode(raw)


class UpdateValuesAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[PushResult], Meta(max_length=MAX_ITEMS)]


class ReadValues(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the values of keys, each with its shard."""

    keys: Annotated[list[tuple[ShardIndex, EncodedKey]], Meta(max_length=MAX_ITEMS)]
    #: An owner below these terms raises its own, or yields: the reader takes no value of a lower one.
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class ReadResult(msgspec.Struct, frozen=True, array_like=True):
    """A value and its timestamp; `none`: the key was never set; `retry`: the shard moves, or the answer is full."""

    shard: ShardIndex
    status: Literal["value", "none", "redirect", "retry"]
    term_number: Number = 0
    term_node: TermNode = b""
    value: bytes = b""
    timestamp: int = 0
    owner_info: OwnerInfo | None = None
    #: The receiver does not own the shard, and knows nobody who does.
    is_unknown: bool = False

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the request does not own the shard."""
        return self.status == "redirect" or self.is_unknown


class ReadValuesAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A `RECORD` in the body: a value may be as large as a head."""

    results: Annotated[list[ReadResult], Meta(max_length=MAX_ITEMS)]


class ListKeys(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the keys of shards, in the order of their encoding, each from after a key."""

    shards: Annotated[
        list[tuple[ShardIndex, Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)]]], Meta(max_length=MAX_ITEMS)
    ]
    #: As of `ReadValues`.
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class KeysResult(msgspec.Struct, frozen=True, array_like=True):
    """Keys of one shard; `is_whole`: there are no more of them."""

    shard: ShardIndex
    status: Literal["keys", "redirect", "retry"]
    term_number: Number = 0
    term_node: TermNode = b""
    keys: Annotated[list[EncodedKey], Meta(max_length=MAX_KEYS)] = []
    is_whole: bool = True
    owner_info: OwnerInfo | None = None
    #: As of `ReadResult`.
    is_unknown: bool = False

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the request does not own the shard."""
        return self.status == "redirect" or self.is_unknown


class ListKeysAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[KeysResult], Meta(max_length=MAX_ITEMS)]


Result = TypeVar("Result", ReadResult, KeysResult)

#: An answer to updates waits this long; what is not applied by then is answered `later`.
ANSWER_S = 0.25
#: Updates of one member that may wait here, and bytes of all.
MAX_WAITING_UPDATES = 8192
MAX_WAITING_BYTES = 64 * 1024 * 1024
#: Bytes of updates in one request, and of values or keys in one answer: one value more at most.
MAX_REQUEST_BYTES = 4 * 1024 * 1024
MAX_ANSWER_BYTES = 2 * 1024 * 1024
#: Of keys in an answer, which have to fit the head with the results of 1,024 shards.
MAX_KEYS_BYTES = 512 * 1024
#: Entries sorted or searched before other tasks run.
ENTRIES_PER_TURN = 20_000


class ValueHandler:
    """The owner's side of `training.values.client`, also called directly for the node's own requests."""

    def __init__(self, context: ExchangeContext, rounds: ValueRounds) -> None:
        self._context = context
        self._store = context.store
        self._run = context.run
        self._rebalance = context.rebalance
        self._counters = context.counters
        self.rounds = rounds

    def register(self) -> None:
        """Register the request handlers."""
        rpc = self._context.rpc
        rpc.register("update_values", UpdateValues, self._on_update, waits=True)
        rpc.register("read_values", ReadValues, self._on_read)
        rpc.register("list_keys", ListKeys, self._on_list)

    # -- updates ------------------------------------------------------------------------------------------------

    async def _on_update(self, sender: Contact, message: UpdateValues, stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(message.fences)
        raw, _ = await read_blob(FrameReader(stream), 0, Part.UPDATES, MAX_REQUEST_BYTES + 2 * MAX_VALUE_BYTES)
        self._counters.bytes_received += len(raw)
        try:
            updates = decode_updates(raw)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"malformed updates: {error}") from error
        return Response(encode(UpdateValuesAnswer(await self.accept(sender.node_id, updates))))

    async def accept(self, sender: bytes, updates: Sequence[ShardUpdate]) -> list[PushResult]:
        """Apply updates, and answer each; within `ANSWER_S`."""
        answers, turn = [], LoopYielder()
        for one in updates:
            answers.append(self._begin(sender, one.shard, one.update))
            if turn.is_due(VALUES_PER_UPDATE):
                await asyncio.sleep(0)
        waiting = [one for one in answers if isinstance(one, Waiting) and one.result is None]
        if waiting:
            self.rounds.wake()
            # Not cancelled with this request: the update is applied, and the origin asks again.
            await all_settled(waiting, ANSWER_S)
        return [
            answer if isinstance(answer, PushResult) else self._answer(one.shard, answer)
            for one, answer in zip(updates, answers, strict=True)
        ]

    @staticmethod
    def _answer(shard: int, waiting: Waiting) -> PushResult:
        return PushResult(shard, "retry", reason=LATER) if waiting.result is None else waiting.result

    def _begin(self, sender: bytes, shard: int, update: KeyUpdate) -> PushResult | Waiting:
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
        is_full = rounds.waiting_bytes + update.size_bytes > MAX_WAITING_BYTES
        if is_full or rounds.waiting_of.get(sender, 0) >= MAX_WAITING_UPDATES:
            return PushResult(shard, "retry", reason="busy")
        return rounds.enqueue(shard, update, identity, sender)

    def _known(self, shard: int, identity: DeltaId) -> PushResult | Waiting | None:
        """The answer where the update itself does not matter; None for one that is to be applied here."""
        owned = self._store.owned.get(shard)
        if owned is None or owned.state.table is None:
            return not_owned(self._store, shard)
        fate = owned.state.table.fate(identity)
        if fate is not None:
            # After a hand-over the new owner may be the only node that has it: then it is not safe yet.
            if lacks_backup(self._context.view, owned):
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
        if owned is None or owned.state.table is None or batch is None:
            return not_owned(self._store, shard)
        if owned.moving or self._run.is_closed:
            return PushResult.retry(shard, "moving")
        if owned.state.knows(identity):
            return PushResult(shard, "ok", owned.state.version)
        if owned.state.may_have_forgotten(identity):
            return PushResult.refused(shard, "late")
        waiting: list[Waiting] = []
        void: list[KeyUpdate] = []
        reasons: list[str] = []
        refused = dict(batch.refused)
        for place, update in enumerate(batch.updates):
            known_as = update.identity
            answer = self._known(shard, known_as)
            if isinstance(answer, PushResult) and answer.status == "refused" and place not in refused:
                answer = None  # refused here, and applied there
            if isinstance(answer, Waiting):
                answer.is_repair = answer.is_repair or place not in refused
                waiting.append(answer)
            elif answer is None and place in refused:
                void.append(update)
                reasons.append(refused[place])
            elif answer is None:
                waiting.append(self.rounds.enqueue(shard, update, known_as, update.node, is_repair=True))
        if waiting:
            await all_settled(waiting, ANSWER_S)
            if not all(one.result is not None and one.result.status in ("ok", "refused") for one in waiting):
                return PushResult(shard, "retry", reason=LATER)
        return await self.rounds.close(shard, identity, void, reasons)

    # -- reads --------------------------------------------------------------------------------------------------

    async def _on_read(self, _sender: Contact, message: ReadValues, _stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(message.fences)
        return Response(b"", list(record_frames(0, ReadValuesAnswer(self.read(message.keys)))))

    def read(self, keys: Sequence[tuple[int, bytes]]) -> list[ReadResult]:
        """The values of keys, each with its shard, until the answer is full."""
        results = []
        left_bytes = MAX_ANSWER_BYTES
        for shard, key in keys:
            owned = self._owned(shard)
            if isinstance(owned, PushResult):
                results.append(_not_answered(ReadResult, shard, owned))
                continue
            self._counters.values_read += 1
            entry = owned.state.table.entries.get(key) if owned.state.table is not None else None
            if entry is None:
                results.append(ReadResult(shard, "none", *owned.term))
            elif left_bytes <= 0:
                results.append(ReadResult(shard, "retry", *owned.term))
            else:
                left_bytes -= len(entry.value)
                results.append(ReadResult(shard, "value", *owned.term, entry.value, entry.timestamp))
        return results

    def _owned(self, shard: int) -> Owned | PushResult:
        owned = self._store.owned.get(shard)
        if owned is None or owned.state.table is None:
            return not_owned(self._store, shard) if shard < len(self._store) else PushResult.retry(shard, "moving")
        # While a hand-over is unanswered the other node may own it, with newer values.
        return PushResult.retry(shard, "moving") if owned.moving else owned

    async def _on_list(self, _sender: Contact, message: ListKeys, _stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(message.fences)
        return Response(encode(ListKeysAnswer(await self.list_keys(message.shards))))

    async def list_keys(self, shards: Sequence[tuple[int, bytes]]) -> list[KeysResult]:
        """The keys of shards, each from after a key, until the answer is full."""
        results = []
        left_bytes, listed = MAX_KEYS_BYTES, 0
        for shard, after in shards:
            owned = self._owned(shard)
            if isinstance(owned, PushResult):
                results.append(_not_answered(KeysResult, shard, owned))
                continue
            keys = sorted(owned.state.table.entries) if owned.state.table is not None else []
            found: list[bytes] = []
            for key in islice(keys, bisect_right(keys, after), None):
                if left_bytes <= 0:
                    break
                left_bytes -= len(key)
                found.append(key)
            is_whole = not keys or bool(found and found[-1] == keys[-1]) or keys[-1] <= after
            results.append(KeysResult(shard, "keys", *owned.term, found, is_whole))
            listed += len(keys)
            if listed >= ENTRIES_PER_TURN:
                listed = 0
                await asyncio.sleep(0)
        return results


def _not_answered(kind: type[Result], shard: int, why: PushResult) -> Result:
    """The answer for a shard that this node does not own, or that moves."""
    if why.status == "redirect":
        return kind(shard, "redirect", owner_info=why.owner_info)
    return kind(shard, "retry", owner_info=why.owner_info, is_unknown=why.denies_ownership)
