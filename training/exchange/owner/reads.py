"""Answers reads of the shards of this node: pulled values, known owners, and copies for a take-over.

A read changes no state, except that a pull makes deltas visible: under `bsp` those of its step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from weakref import ref

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import Part, framed_bytes, frames, sized
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.messages import (
    LocateOwners,
    LocateOwnersAnswer,
    Pull,
    PullAnswer,
    PullResult,
    Wanted,
    encode,
)
from p2pnode.training.exchange.owner.final_values import FinalValues
from p2pnode.training.exchange.owner.publishing import Publisher, Sending, changes_of
from p2pnode.training.exchange.owner.validation import ShardInspector
from p2pnode.training.exchange.ownership_messages import (
    Fetch,
    ReplicasAnswer,
    ShardList,
    StateHead,
)
from p2pnode.training.exchange.published import Published
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.replica import Position, Replica, copy_status, replica_copy
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Term
from p2pnode.training.shards.state import ShardState

#: Encoded values kept: enough for a whole model of 16 million values in bfloat16.
MAX_ENCODED_BYTES = 32 * 1024 * 1024


def _whole(
    shard: int, value: Vector, version: int, codec: CodecName, encode: Callable[[int, Vector], Buffer] | None = None
) -> Sending:
    buffers = frames(shard, value, codec, Part.VALUE, version=version, encode=encode)
    return Sending(buffers, framed_bytes(codec, value.size))


#: Of a shard of which no array follows.
_NOTHING = Sending(iter(()), 0)


def _followed(wanted: Wanted, term: Term, published: Published) -> tuple[PullResult, Sending]:
    """The answer to a puller that follows: nothing new, the changes that it lacks, or the published value."""
    shard = wanted.shard
    changes = published.since(wanted.published) if wanted.publication == published.publication else None
    rank_term, version = published.source
    result = PullResult(
        shard,
        "value" if changes is None else "changes" if changes else "same",
        term,
        version,
        rank=rank_term,
        publication=published.publication,
        published=published.version,
        digest=published.digest,
        changes=len(changes or ()),
    )
    if changes is None:
        return result, _whole(shard, published.value, version, published.whole_codec)
    return result, changes_of(shard, published, changes)


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


@dataclass(eq=False)
class ReadHandler:
    """Serves pulls, and the requests of nodes that look for an owner or a copy."""

    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    final_values: FinalValues
    publisher: Publisher
    inspector: ShardInspector

    def __post_init__(self) -> None:
        self._encoded = EncodingCache()

    def register(self) -> None:
        """Register the request handlers."""
        self.rpc.register("pull", Pull, self._on_pull, waits=True)
        self.rpc.answer("where_is", LocateOwners, self._on_where_is)
        self.rpc.answer("query_replicas", ShardList, self._on_query_replicas)
        self.rpc.register("fetch", Fetch, self._on_fetch)

    # -- pull ---------------------------------------------------------------------------------------------------

    async def _on_pull(self, sender: Contact, pull: Pull, _stream: AsyncIterator[Buffer]) -> Response:
        self.rebalance.challenge(pull.fences)
        shards = [wanted.shard for wanted in pull.shards]
        # Promise 7 (docs/faults.md): an absurd step makes no delta visible.
        step = min(pull.step, self.view.passable_step())
        await self.inspector.inspect(shards)
        if pull.is_final:
            await self.final_values.prepare(shards, step)
        else:
            for shard in shards:
                self.store.fold(shard, step)
        if pull.follows and not pull.is_final:
            positions = [(wanted.shard, Position(wanted.publication, wanted.published)) for wanted in pull.shards]
            await self.publisher.publish(sender.node_id, positions)
        results = []
        sending: list[Sending] = []
        for wanted in pull.shards:
            result, body = self._answer(wanted, pull)
            results.append(result)
            sending.append(body)

        def stream() -> Iterator[Buffer]:
            for one in sending:
                for buffer in one.buffers:
                    self.run.counters.bytes_sent += len(buffer)
                    yield buffer

        return Response(encode(PullAnswer(results)), sized(stream(), sum(one.size_bytes for one in sending)))

    def _answer(self, wanted: Wanted, pull: Pull) -> tuple[PullResult, Sending]:
        """The result for one shard, and the arrays that follow with it."""
        shard, owned = wanted.shard, self.store.owned.get(wanted.shard)
        copied = self._copy(shard) if owned is None and pull.takes_copies else None
        if copied is not None:
            term, version, value = copied
            return PullResult(shard, "copy", term, version), _whole(shard, value, version, pull.codec)
        if owned is None:
            info = self.store.redirect(shard)
            return PullResult(shard, "retry" if info is None else "redirect", owner_info=info), _NOTHING
        if pull.is_final and not self.final_values.is_final(shard):
            return PullResult(shard, "later"), _NOTHING
        state, rank_term = owned.state, owned.rank_term
        published = self.publisher.published(shard) if pull.follows and not pull.is_final else None
        # A copy of a publication is compared by its place there: one of another publication has other bits in the same
        # version.
        if not wanted.publication and (wanted.term, wanted.version) == (rank_term, state.version):
            return PullResult(shard, "same", owned.term, state.version), _NOTHING
        if published is not None:
            return _followed(wanted, owned.term, published)
        result = PullResult(shard, "value", owned.term, state.version, rank=rank_term)
        encoder = partial(self._encoded.piece, shard, state, codec=pull.codec)
        return result, _whole(shard, state.value, state.version, pull.codec, encoder)

    def _copy(self, shard: int) -> tuple[Term, int, Vector] | None:
        """The copy of a node that does not own the shard: a backup's value, or its own replica."""
        if shard >= len(self.store):
            return None
        if (found := self.store.unowned_copy(shard)) is not None:
            term, state = found
            return term, state.version, state.value
        pulled = self.replica.pulled_version(shard)
        return None if pulled is None else (*pulled, self.replica.slice_of(shard))

    # -- owners and copies --------------------------------------------------------------------------------------

    async def _on_where_is(self, _sender: Contact, message: LocateOwners) -> LocateOwnersAnswer:
        self.store.note_owners(message.known)
        self.rebalance.challenge(message.fences)
        shards = message.shards or range(len(self.store))
        return LocateOwnersAnswer(self.store.redirects(shards))

    async def _on_query_replicas(self, _sender: Contact, message: ShardList) -> ReplicasAnswer:
        shards = [shard for shard in message.shards if shard < len(self.store)]
        pulled, step = self.replica.pulled_version, self.run.step
        statuses = [copy_status(self.store, shard, pulled(shard), step) for shard in shards]
        return ReplicasAnswer(statuses, self.store.redirects(shards))

    async def _on_fetch(self, _sender: Contact, message: Fetch, _stream: AsyncIterator[Buffer]) -> Response:
        shards = [shard for shard in message.shards if shard < len(self.store)]
        snapshots = [found for shard in shards if (found := self._snapshot(shard)) is not None]
        transfer = ShardList([head.shard for head, _ in snapshots])
        return Response(encode(transfer), shard_states.body(snapshots))

    def _snapshot(self, shard: int) -> tuple[StateHead, ShardState] | None:
        """The best copy of a shard that this node does not own: a state, or its replica as the state of a new era."""
        if (found := self.store.unowned_copy(shard)) is not None:
            return shard_states.describe(shard, *found), found[1].copy()
        found = replica_copy(self.store, self.replica, self.run.step, shard)
        return None if found is None else (shard_states.describe(shard, *found), found[1].copy())
