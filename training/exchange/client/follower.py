"""Follows the chains of owners: takes published values and their changes into the replica.

A shard of the replica changes only when its whole answer has arrived and the result has the owner's digest. So a body
that is torn, a deadline, or a damaged change leaves the shard as it was. The result is computed off the event loop in
memory of its own. Only a large shard is copied in turns, and has no version while that lasts.
"""

from __future__ import annotations

from overlay.environment import Environment
from training.cooperative import VALUES_PER_TURN, LoopYielder
from training.encoding.codecs import CodecName, Vector
from training.encoding.frames import Allocate, BadFrame, FrameReader, Part, new_memory, read_encoded
from training.exchange.context import Counters
from training.exchange.messages import PullResult
from training.exchange.owner.published import Published, apply_all, whole
from training.exchange.peer_score import Nonsense
from training.exchange.store.replica import Position, Replica
from training.exchange.store.shard_store import ShardStore
from training.shards.delta_range import MAX_STATE_LENGTH, has_length

#: Values decoded, added and compared on the event loop: fewer than a thread is worth.
SMALL_VALUES = 1 << 13

#: Encoded arrays of one shard: the whole, or changes in their order.
Arrays = list[tuple[CodecName, memoryview]]


class ChainFollower:
    """Takes published values into this node's replica."""

    def __init__(self, store: ShardStore, replica: Replica, counters: Counters, environment: Environment) -> None:
        self._store = store
        self._replica = replica
        self._counters = counters
        self._executor = environment.executor
        self._log = environment.log
        self._yielder = LoopYielder()
        #: The digest of each shard that is in a chain.
        self._digests: dict[int, bytes] = {}

    async def read(
        self, reader: FrameReader, result: PullResult, memory: Allocate, *, has_checksum: bool
    ) -> tuple[Arrays, int]:
        """The arrays of one answer, with their bytes. Raises `BadFrame` if they are not what the answer names."""
        shard, size = result.shard, self._store.size(result.shard)
        arrays: Arrays = []
        if result.status == "changes":
            first = result.published - result.changes + 1
            for version in range(first, result.published + 1):
                encoded, codec = await read_encoded(reader, shard, Part.CHANGE, size, new_memory, version=version)
                arrays.append((codec, encoded))
        else:
            encoded, codec = await read_encoded(reader, shard, Part.VALUE, size, memory, has_checksum=has_checksum)
            arrays.append((codec, encoded))
        return arrays, sum(len(encoded) for _, encoded in arrays)

    async def take(self, result: PullResult, arrays: Arrays) -> bool:
        """Bring a shard to the published value of an answer; False if it does not lead from what the shard holds, or
        has another digest. Then the shard is asked for again. Raises `BadFrame` for values out of range."""
        shard = result.shard
        position = self._replica.position_of(shard)
        is_change = result.status == "changes"
        if is_change and position != Position(result.chain, result.published - result.changes):
            return False  # it was overtaken
        before = self._replica.version_of(shard)
        held = self._replica.slice_of(shard) if is_change else None
        if self._store.size(shard) * len(arrays) <= SMALL_VALUES:
            value, digest = _result(held, arrays, self._store.size(shard))
        else:
            value, digest = await self._executor.run(_result, held, arrays, self._store.size(shard))
        if digest != result.digest:
            self._note_mismatch(result)
            if is_change:
                self._replica.doubt(shard)
            return False
        if self._replica.position_of(shard) != position or self._replica.version_of(shard) != before:
            return False  # another answer was faster
        reached = Position(result.chain, result.published)
        with self._replica.writing(shard) as values:
            await self._write(shard, value, values)
            self._replica.set_version(shard, result.rank_term, result.version, reached)
        self._digests[shard] = digest
        if is_change:
            self._counters.followed += 1
        else:
            self._counters.chains_entered += 1
        return True

    async def enter(self, shard: int, published: Published) -> None:
        """Hold a published value that this node has made itself, as the shard's owner until now."""
        reached = Position(published.chain, published.version)
        with self._replica.writing(shard) as into:
            await self._write(shard, published.value, into)
            self._replica.set_version(shard, *published.source, reached)
        self._digests[shard] = published.digest
        self._counters.chains_entered += 1

    def is_same(self, result: PullResult) -> bool:
        """Whether the shard is up to date, as its owner says; False if it is in another place of the chain, or if two
        owners have gone on from one version and this is the other's. Then the shard is asked for again."""
        if not result.chain:
            return True
        if self._replica.position_of(result.shard) != Position(result.chain, result.published):
            return False
        if self._digests[result.shard] == result.digest:
            return True
        self._note_mismatch(result)
        self._replica.doubt(result.shard)
        return False

    def _note_mismatch(self, result: PullResult) -> None:
        self._counters.chain_mismatches += 1
        self._log.warning("chain_mismatch", shard=result.shard, published=result.published, changes=result.changes)

    async def _write(self, shard: int, value: Vector, into: Vector) -> None:
        if value.size > VALUES_PER_TURN:
            self._replica.doubt(shard)
        for first in range(0, value.size, VALUES_PER_TURN):
            last = min(first + VALUES_PER_TURN, value.size)
            into[first:last] = value[first:last]
            if last < value.size:
                await self._yielder.after(last - first)


def _result(held: Vector | None, arrays: Arrays, size: int) -> tuple[Vector, bytes]:
    """The published value after these arrays, and its digest: changes of what is held, or the whole. Raises `BadFrame`,
    and `Nonsense` for one that is out of range."""
    try:
        value, digest = whole(*arrays[0], size) if held is None else apply_all(held, arrays)
    except ValueError as error:
        raise BadFrame(str(error)) from error
    if not has_length(value, MAX_STATE_LENGTH):
        raise Nonsense("a published value is out of range")
    return value, digest
