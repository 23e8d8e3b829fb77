"""Answers reads of the shards of this node: pulled values, known owners, and copies for a take-over.

A read changes no state, except that a pull makes deltas visible: under `bsp` those of its step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple
from weakref import ref

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, Response
from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.encoding.frames import Part, encoded_frames, framed_bytes, frames, sized
from training.exchange.context import ExchangeContext
from training.exchange.messages import (
    LocateOwners,
    LocateOwnersAnswer,
    Pull,
    PullAnswer,
    PullResult,
    Wanted,
    encode,
    record_frames,
)
from training.exchange.owner.final_values import BUFFERS_SHARD, FinalValues
from training.exchange.owner.published import Published
from training.exchange.owner.publishing import Publisher
from training.exchange.owner.validation import ShardInspector
from training.exchange.ownership_messages import (
    Fetch,
    FinalBuffers,
    FinalBuffersAnswer,
    FinalDone,
    IntegerBuffers,
    ShardList,
    StateHead,
    SurveyAnswer,
    TransferResult,
)
from training.exchange.store import state_stream
from training.exchange.store.copies import copy_status, replica_copy
from training.exchange.store.replica import Position
from training.exchange.store.state_stream import describe
from training.exchange.terms import Term
from training.shards.state import ShardState

#: Encoded values kept: enough for a whole model of 16 million values in bfloat16.
MAX_ENCODED_BYTES = 32 * 1024 * 1024


class _Sending(NamedTuple):
    """The frames of arrays to be sent, produced when they are, and their size."""

    buffers: Iterator[Buffer]
    size_bytes: int


def _whole(
    shard: int, value: Vector, version: int, pull: Pull, encode: Callable[[int, Vector], Buffer] | None = None
) -> _Sending:
    checks = pull.has_checksums
    buffers = frames(shard, value, pull.codec, Part.VALUE, version=version, has_checksum=checks, encode=encode)
    return _Sending(buffers, framed_bytes(pull.codec, value.size))


def _followed(wanted: Wanted, term: Term, published: Published, pull: Pull) -> tuple[PullResult, list[_Sending]]:
    """The answer to a puller that follows: nothing new, the changes that it lacks, or the published value."""
    shard, size, checks = wanted.shard, published.value.size, pull.has_checksums
    changes = published.since(wanted.published) if wanted.chain == published.chain else None
    rank_term, version = published.source
    result = PullResult(
        shard,
        "value" if changes is None else "changes" if changes else "same",
        term,
        version,
        rank=rank_term,
        chain=published.chain,
        published=published.version,
        digest=published.digest,
        changes=len(changes or ()),
    )
    if changes is None:
        codec = published.whole_codec
        whole = frames(shard, published.value, codec, Part.VALUE, version=version, has_checksum=checks)
        return result, [_Sending(whole, framed_bytes(codec, size))]
    return result, [
        _Sending(
            encoded_frames(shard, change.payload, change.codec, Part.CHANGE, version=change.version),
            framed_bytes(change.codec, size, len(change.payload)),
        )
        for change in changes
    ]


class EncodingCache:
    """The encoded pieces of one owner's shards: several nodes that pull the same version cost one encoding.

    Beyond a limit the oldest pieces are dropped. Nodes that pull at the same time go through the shards in the same
    order, so that a few megabytes serve many shards.
    """

    def __init__(self, max_bytes: int = MAX_ENCODED_BYTES) -> None:
        self._max_bytes = max_bytes
        #: By (shard, offset, codec): the array of the values, their version, and the encoded piece.
        self._pieces: dict[tuple[int, int, CodecName], tuple[ref[Vector], int, codecs.Encoded]] = {}
        self.size_bytes = 0

    def piece(self, shard: int, state: ShardState, offset: int, values: Vector, codec: CodecName) -> codecs.Encoded:
        """The encoding of `values`, `float32[n]`, which are those of the state from `offset` on."""
        key = (shard, offset, codec)
        found = self._pieces.get(key)
        if found is not None:
            if found[0]() is state.value and found[1] == state.version:
                return found[2]
            self._forget(key)
        encoded = codecs.encode(values, codec)
        self._pieces[key] = ref(state.value), state.version, encoded
        self.size_bytes += len(encoded)
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._pieces)))
        return encoded

    def _forget(self, key: tuple[int, int, CodecName]) -> None:
        self.size_bytes -= len(self._pieces.pop(key)[2])


class ReadHandler:
    """Serves pulls, and the requests of nodes that look for an owner or a copy."""

    def __init__(
        self, context: ExchangeContext, final_values: FinalValues, publisher: Publisher, inspector: ShardInspector
    ) -> None:
        self._context = context
        self._inspector = inspector
        self._final_values = final_values
        self._publisher = publisher
        self._store = context.store
        self._replica = context.replica
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._counters = context.counters
        self._encoded = EncodingCache()

    def register(self) -> None:
        """Register the request handlers."""
        self._rpc.register("pull", Pull, self._on_pull, waits=True)
        self._rpc.register("where_is", LocateOwners, self._on_where_is)
        self._rpc.register("survey", ShardList, self._on_survey)
        self._rpc.register("fetch", Fetch, self._on_fetch)
        self._rpc.register("final_buffers", FinalBuffers, self._on_final_buffers, waits=True)
        self._rpc.register("final_done", FinalDone, self._on_final_done)

    # -- pull ---------------------------------------------------------------------------------------------------

    async def _on_pull(self, sender: Contact, pull: Pull, _stream: AsyncIterator[Buffer]) -> Response:
        self._rebalance.challenge(pull.fences)
        furthest = self._view.passable_step() if self._context.synchronous else self._view.furthest_step()
        if pull.step > furthest:
            pull = msgspec.structs.replace(pull, step=furthest)
        await self._inspector.inspect(wanted.shard for wanted in pull.shards)
        if pull.is_final:
            await self._final_values.prepare([wanted.shard for wanted in pull.shards], pull.step)
        elif pull.follows:
            for wanted in pull.shards:
                self._make_visible(wanted.shard, pull.step)
            positions = [(wanted.shard, Position(wanted.chain, wanted.published)) for wanted in pull.shards]
            await self._publisher.publish(sender.node_id, positions)
        results = []
        sending: list[_Sending] = []
        for wanted in pull.shards:
            result, body = self._answer(wanted, pull)
            results.append(result)
            sending += body

        def stream() -> Iterator[Buffer]:
            for one in sending:
                for buffer in one.buffers:
                    self._counters.bytes_sent += len(buffer)
                    yield buffer

        return Response(encode(PullAnswer(results)), sized(stream(), sum(one.size_bytes for one in sending)))

    def _answer(self, wanted: Wanted, pull: Pull) -> tuple[PullResult, list[_Sending]]:
        """The result for one shard, and the arrays that follow with it."""
        shard, owned = wanted.shard, self._store.owned.get(wanted.shard)
        copied = self._copy(shard) if owned is None and pull.takes_copies else None
        if copied is not None:
            term, version, value = copied
            return PullResult(shard, "copy", term, version), [_whole(shard, value, version, pull)]
        if owned is None:
            info = self._store.redirect(shard)
            return PullResult(shard, "retry" if info is None else "redirect", owner_info=info), []
        if pull.is_final and not self._final_values.is_final(shard):
            return PullResult(shard, "later"), []
        self._make_visible(shard, pull.step)
        state, rank_term = owned.state, owned.rank_term
        published = self._publisher.published(shard) if pull.follows and not pull.is_final else None
        # A copy of a chain is compared by its place there: one of another chain has other bits in the same version.
        if not wanted.chain and (wanted.term, wanted.version) == (rank_term, state.version):
            return PullResult(shard, "same", owned.term, state.version), []
        if published is not None:
            return _followed(wanted, owned.term, published, pull)
        encoder = self._encoder(shard, state, pull.codec)
        result = PullResult(shard, "value", owned.term, state.version, rank=rank_term)
        return result, [_whole(shard, state.value, state.version, pull, encoder)]

    def _make_visible(self, shard: int, step: int) -> None:
        """Make deltas visible: the puller has passed the barrier of that step."""
        if self._context.synchronous and shard in self._store.owned:
            self._store.fold(shard, step)

    def _encoder(self, shard: int, state: ShardState, codec: CodecName) -> Callable[[int, Vector], Buffer]:
        return lambda offset, values: self._encoded.piece(shard, state, offset, values, codec)

    def _copy(self, shard: int) -> tuple[Term, int, Vector] | None:
        """The copy of a node that does not own the shard: a backup's value, or its own replica."""
        if shard >= len(self._store):
            return None
        if (found := self._store.unowned_copy(shard)) is not None:
            term, state = found
            return term, state.version, state.value
        pulled = self._replica.pulled_version(shard)
        return None if pulled is None else (*pulled, self._replica.slice_of(shard))

    async def _on_final_buffers(
        self, _sender: Contact, _message: FinalBuffers, _stream: AsyncIterator[Buffer]
    ) -> Response:
        buffers = await self._final_values.confirmed_buffers(self._run.step)
        body = () if buffers is None else record_frames(BUFFERS_SHARD, IntegerBuffers(buffers))
        return Response(encode(FinalBuffersAnswer(buffers is not None)), body)

    async def _on_final_done(self, sender: Contact, _message: FinalDone, _stream: AsyncIterator[Buffer]) -> Response:
        self._run.final_done[sender.node_id] = None
        return Response(encode(TransferResult([], [])))

    # -- owners and copies --------------------------------------------------------------------------------------

    async def _on_where_is(self, _sender: Contact, message: LocateOwners, _stream: AsyncIterator[Buffer]) -> Response:
        self._store.note_owners(message.known)
        self._rebalance.challenge(message.fences)
        shards = message.shards or range(len(self._store))
        known = [info for shard in shards if (info := self._store.redirect(shard)) is not None]
        return Response(encode(LocateOwnersAnswer(known)))

    async def _on_survey(self, _sender: Contact, message: ShardList, _stream: AsyncIterator[Buffer]) -> Response:
        shards = [shard for shard in message.shards if shard < len(self._store)]
        pulled, step = self._replica.pulled_version, self._run.step
        statuses = [copy_status(self._store, shard, pulled(shard), step) for shard in shards]
        known = [info for shard in shards if (info := self._store.redirect(shard)) is not None]
        return Response(encode(SurveyAnswer(statuses, known)))

    async def _on_fetch(self, _sender: Contact, message: Fetch, _stream: AsyncIterator[Buffer]) -> Response:
        shards = [shard for shard in message.shards if shard < len(self._store)]
        snapshots = [found for shard in shards if (found := self._snapshot(shard)) is not None]
        transfer = ShardList([head.shard for head, _ in snapshots])
        return Response(encode(transfer), state_stream.body(snapshots))

    def _snapshot(self, shard: int) -> tuple[StateHead, ShardState] | None:
        """The best copy of a shard that this node does not own: a state, or its replica as the state of a new era."""
        if (found := self._store.unowned_copy(shard)) is not None:
            return describe(shard, *found), found[1].copy()
        found = replica_copy(self._store, self._replica, self._run.step, shard)
        return None if found is None else (describe(shard, *found), found[1].copy())
