"""Follows the publications of owners: takes published values and their changes into the replica.

A shard of the replica changes only when its whole answer has arrived and the result has the owner's digest. So a body
that is torn, a deadline, or a damaged change leaves the shard as it was. The result is computed off the event loop in
memory of its own. Only a large shard is copied in turns, and has no version while that lasts. Own shards are copied so
too.
"""

from __future__ import annotations

from p2pnode.overlay.environment import Environment
from p2pnode.training.cooperative import VALUES_PER_TURN, LoopTurns, light, off_loop
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import Allocate, BadFrame, FrameReader, Part, new_memory, read_encoded
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.messages import PullResult
from p2pnode.training.exchange.owner.published import ApproximatedState, Published, apply_all, begin_run, whole
from p2pnode.training.exchange.peer_score import Nonsense
from p2pnode.training.exchange.run_state import Counters
from p2pnode.training.exchange.store.replica import NO_POSITION, Position, Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, Term
from p2pnode.training.shards.delta_range import MAX_STATE_LENGTH, has_length

#: Values copied at once: half a millisecond.
VALUES_PER_COPY = 2 * VALUES_PER_TURN

#: Encoded arrays of one shard: the whole, or changes in their order.
Arrays = list[tuple[CodecName, memoryview]]


class Subscriber:
    """Takes published values into this node's replica."""

    def __init__(
        self, store: ShardStore, replica: Replica, counters: Counters, turns: LoopTurns, environment: Environment
    ) -> None:
        self._store = store
        self._replica = replica
        self._counters = counters
        self._turns = turns
        self._executor = environment.executor
        self._log = environment.log
        #: The digest of each shard that is in a publication.
        self._digests: dict[int, bytes] = {}

    async def claim(self, genesis: bytes, shard: int) -> None:
        """This node's script has made initial values: if they are the run's, bit by bit, its
        owner sends only what has changed since. Without a version until the owner has confirmed it."""
        source = ApproximatedState(ZERO_TERM, 0)
        value = self._replica.slice_of(shard)
        own = await off_loop(self._executor, value.size, begin_run, genesis, shard, value, source)
        await self.enter(shard, own)

    async def enter(self, shard: int, published: Published) -> None:
        """Follow from a published value that this node has itself."""
        position = Position(published.publication, published.version)
        if await self.write(shard, published.value, published.source, position):
            self._digests[shard] = published.digest

    async def read(self, reader: FrameReader, result: PullResult, memory: Allocate) -> tuple[Arrays, int]:
        """The arrays of one answer, with their bytes. Raises `BadFrame` if they are not what the answer names."""
        shard, size = result.shard, self._store.size(result.shard)
        arrays: Arrays = []
        if result.status == "changes":
            first = result.published - result.changes + 1
            for version in range(first, result.published + 1):
                encoded, codec = await read_encoded(reader, shard, Part.CHANGE, size, new_memory, version=version)
                arrays.append((codec, encoded))
        else:
            encoded, codec = await read_encoded(reader, shard, Part.VALUE, size, memory)
            arrays.append((codec, encoded))
        return arrays, sum(len(encoded) for _, encoded in arrays)

    async def take(self, result: PullResult, arrays: Arrays) -> bool:
        """Bring a shard to the published value of an answer; False if it does not lead from what the shard holds, or
        has another digest. Then the shard is asked for again. Raises `BadFrame` for values out of range."""
        shard = result.shard
        position = self._replica.position_of(shard)
        is_change = result.status == "changes"
        if is_change and position != Position(result.publication, result.published - result.changes):
            return False  # it was overtaken
        before = self._replica.version_of(shard)
        held = self._replica.slice_of(shard) if is_change else None
        size = self._store.size(shard)
        value, digest = await off_loop(self._executor, size * len(arrays), _result, held, arrays, size)
        if digest != result.digest:
            self._note_mismatch(result)
            if is_change:
                self._replica.invalidate(shard)
            return False
        if self._replica.position_of(shard) != position or self._replica.version_of(shard) != before:
            return False  # another answer was faster
        reached = Position(result.publication, result.published)
        if not await self.write(shard, value, (result.rank_term, result.version), reached):
            raise Nonsense("a published value is out of range")
        self._digests[shard] = digest
        if is_change:
            self._counters.shards_followed += 1
        else:
            self._counters.publications_entered += 1
        return True

    def is_same(self, result: PullResult) -> bool:
        """Whether the shard is up to date, as its owner says; False if it is in another place of the publication, or if
        two owners have gone on from one version and this is the other's. Then the shard is asked for again."""
        if not result.publication:
            return True
        if self._replica.position_of(result.shard) != Position(result.publication, result.published):
            return False
        if self._digests[result.shard] == result.digest:
            if self._replica.pulled_version(result.shard) is None:  # it was claimed
                position = self._replica.position_of(result.shard)
                self._replica.set_version(result.shard, result.rank_term, result.version, position)
            return True
        self._note_mismatch(result)
        self._replica.invalidate(result.shard)
        return False

    def _note_mismatch(self, result: PullResult) -> None:
        self._counters.publication_mismatches += 1
        self._log.warning(
            "publication_mismatch", shard=result.shard, published=result.published, changes=result.changes
        )

    async def write(
        self, shard: int, value: Vector, version: tuple[Term, int], position: Position = NO_POSITION
    ) -> bool:
        """Copy a value into the replica, in turns of the event loop; False if it has values out of range."""
        with self._replica.writing(shard) as values:
            if values.size > VALUES_PER_COPY:
                self._replica.invalidate(shard)  # what is cut off leaves a part of it
            for first in range(0, values.size, VALUES_PER_COPY):
                part = slice(first, min(first + VALUES_PER_COPY, values.size))
                await self._turns.take(light(part.stop - first))
                # Promise 7: the trainer never sees such values.
                if not has_length(value[part], MAX_STATE_LENGTH):
                    return False
                values[part] = value[part]
            self._replica.set_version(shard, *version, position)
        return True


def _result(held: Vector | None, arrays: Arrays, size: int) -> tuple[Vector, bytes]:
    """The published value after these arrays, and its digest: changes of what is held, or the whole. Raises
    `BadFrame`."""
    try:
        return whole(*arrays[0], size) if held is None else apply_all(held, arrays)
    except ValueError as error:
        raise BadFrame(str(error)) from error
