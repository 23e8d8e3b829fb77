"""The published value of a shard: what its followers hold, and the last encoded changes that lead to it.

An owner that adds to its value x all the time keeps beside it the *published value* p. The next version encodes x − p
once for all who pull, and adds to p what they will decode: `q = Q(x − p)`, `p ← p + decode(q)`. What Q rounds off stays
in x − p and comes with the version after: error feedback without a residual of its own (Seide et al. 2014; at a server:
Tang et al. 2019, DoubleSqueeze). A puller that has p of version u gets the changes after u, or p as a whole where that
is less. The operations on float32 are the same at owner and follower, so all who follow hold the same bits; a digest
proves it.

A follower *enters* a publication with a whole p, or *claims* to have it, and its *position* is the version that it has
reached. A publication begins with p = x rounded to bfloat16: those who enter at its beginning, after a take-over all at
once, are sent two bytes per value, and what was rounded off comes with the first change. A follower that enters later
is sent float32, because p is no longer exact in bfloat16: four bytes once, and then the same bits. That of a run's
initial values is exact from the beginning (`begin_run`), so who has made the same ones holds the state of a shard, too.

A `Published` is never changed. The next version is a new one, so that an answer that is still being sent keeps the old.

A shard of a follower's replica changes only when its whole answer has arrived and the result has the owner's digest. So
a body that is torn, a deadline, or a damaged change leaves the shard as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.training.cooperative import VALUES_PER_TURN, LoopTurns, light, off_loop
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Encoded, Vector
from p2pnode.training.encoding.frames import Allocate, BadFrame, FrameReader, Part, new_memory, read_encoded
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.messages import PullResult
from p2pnode.training.exchange.peer_score import Nonsense
from p2pnode.training.exchange.run_state import Counters
from p2pnode.training.exchange.store.replica import NO_POSITION, Position, Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, Term
from p2pnode.training.shards.agreement import Agreement
from p2pnode.training.shards.delta_range import MAX_STATE_LENGTH, has_length

DIGEST_BYTES = 8
PUBLICATION_ID_BYTES = 8
#: Changes kept at most; with sparse ones their number is what limits the work of a follower that catches up. And the
#: part of the value that they take at most, but for the last one: three of int4 are less.
MAX_CHANGES, KEPT_PART = 64, 0.5
#: 64-bit words of a row of the digest: the sums of the columns stay in the processor's first cache.
_ROW_WORDS = 1024


class Change(NamedTuple):
    """One encoded change, and the published version that it leads to."""

    version: int
    codec: CodecName
    payload: Encoded


class ApproximatedState(NamedTuple):
    """Which state a published value is near to: its version, and the term by which a copy of it ranks."""

    rank_term: Term
    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """`value` is p, float32[n], in its `version`, counted from 0 in each publication. `source`: p is near to the state
    of the shard at that version. `whole_codec`: the shortest one that gives every bit of p. `changes` are the last
    ones, oldest first."""

    publication: bytes
    version: int
    value: Vector
    digest: bytes
    source: ApproximatedState
    changes: tuple[Change, ...] = ()
    whole_codec: CodecName = "float32"

    def since(self, version: int) -> tuple[Change, ...] | None:
        """The changes after a version, oldest first; None if the whole is needed, or is less."""
        missing = self.version - version
        if not 0 <= missing <= len(self.changes):
            return None
        return self.changes[len(self.changes) - missing :]

    @property
    def change_bytes(self) -> int:
        """Memory of the changes."""
        return sum(len(change.payload) for change in self.changes)

    @property
    def last_bytes_per_value(self) -> float:
        """Size of the last change; 0 at the beginning of a publication."""
        return len(self.changes[-1].payload) / max(1, self.value.size) if self.changes else 0.0


def digest_of(value: Vector) -> bytes:
    """Eight bytes that differ where the bits of two values, contiguous `float32[n]`, differ by any accident.

    The 64-bit words are summed by row and by column, modulo 2^64, and the sums are hashed. A changed word changes its
    row and its column, and an exchange of two words at least one of them. It costs a tenth of a hash of all bytes. It
    is no protection against a malicious owner, whose value is what it sends.
    """
    whole = value.size // (2 * _ROW_WORDS) * (2 * _ROW_WORDS)
    words = value[:whole].astype("<f4", copy=False).view("<u8").reshape(-1, _ROW_WORDS)
    digest = hashlib.blake2b(words.sum(axis=0, dtype="<u8").data, digest_size=DIGEST_BYTES)
    digest.update(words.sum(axis=1, dtype="<u8").data)
    digest.update(codecs.as_bytes(value[whole:]))
    return digest.digest()


def begin(publication: bytes, value: Vector, source: ApproximatedState) -> Published:
    """A new publication from a shard's value, `float32[n]`."""
    rounded = np.empty(value.size, dtype=np.float32)
    codecs.decode(codecs.encode(value, "bfloat16"), "bfloat16", rounded)
    return Published(publication, 0, rounded, digest_of(rounded), source, whole_codec="bfloat16")


def begin_run(genesis: bytes, shard: int, value: Vector, source: ApproximatedState) -> Published:
    """The publication of a shard's initial value, `float32[n]`, of a run. Its name follows from the value, so a node
    whose script has made the same one needs no copy of it."""
    digest = digest_of(value)
    name = hashlib.blake2b(genesis + shard.to_bytes(4, "little") + digest, digest_size=PUBLICATION_ID_BYTES).digest()
    return Published(name, 0, value.copy(), digest, source)


def next_version(published: Published, value: Vector, source: ApproximatedState, codec: CodecName) -> Published:
    """The next version, nearer to `value`, `float32[n]`; encodes and decodes once."""
    difference = value - published.value
    rounded_off = np.zeros(difference.size, dtype=np.float32)
    payload = codecs.encode_with_feedback(difference, rounded_off, codec)
    advanced, digest = after(published.value, [(codec, payload)], value.size)
    changes = (*published.changes, Change(published.version + 1, codec, payload))
    return Published(
        published.publication,
        published.version + 1,
        advanced,
        digest,
        source,
        newest_within(changes, advanced.nbytes),
    )


def after(held: Vector | None, arrays: Sequence[tuple[CodecName, Encoded]], size: int) -> tuple[Vector, bytes]:
    """A published value, `float32[size]`, and its digest: what is held, after changes in this order; or, where nothing
    is held, one array that is the whole. Raises `ValueError` for a payload of another size."""
    value = held
    for codec, payload in arrays:
        changed = np.empty(size, dtype=np.float32)
        codecs.decode(payload, codec, changed)
        value = changed if value is None else np.add(changed, value, out=changed)
    assert value is not None
    return value, digest_of(value)


def continued(held: Vector, missing: Sequence[Change], last: Published) -> Published | None:
    """The published value of another node, from what a follower of it holds, `float32[n]`, and the changes it lacks.

    `last` is it without the value; None if the result has another digest, or is out of range.
    """
    try:
        value, digest = after(held.copy(), [(change.codec, change.payload) for change in missing], held.size)
    except ValueError:  # no encoding of so many values
        return None
    return replace(last, value=value) if digest == last.digest and has_length(value, MAX_STATE_LENGTH) else None


def newest_within(changes: tuple[Change, ...], whole_bytes: int) -> tuple[Change, ...]:
    """The newest changes, at most `MAX_CHANGES` and `KEPT_PART` of the whole; of more the last, if it is smaller."""
    kept_bytes = 0
    for count, change in enumerate(reversed(changes)):
        kept_bytes += len(change.payload)
        limit_bytes = whole_bytes if not count else KEPT_PART * whole_bytes
        if kept_bytes >= limit_bytes or count == MAX_CHANGES:
            return changes[len(changes) - count :]
    return changes


#: Values copied at once: half a millisecond.
VALUES_PER_COPY = 2 * VALUES_PER_TURN

#: Encoded arrays of one shard: the whole, or changes in their order.
Arrays = list[tuple[CodecName, memoryview]]


@dataclass(eq=False)
class Follower:
    """Takes published values into this node's replica. The result is computed off the event loop in memory of its own;
    only a large shard is copied in turns, and has no version while that lasts. Own shards are copied so too."""

    store: ShardStore
    replica: Replica
    counters: Counters
    turns: LoopTurns
    agreement: Agreement
    environment: Environment

    def __post_init__(self) -> None:
        #: The digest of each shard that is in a publication.
        self._digests: dict[int, bytes] = {}

    async def claim(self, genesis: bytes, shard: int) -> None:
        """This node's script has made initial values: if they are the run's, bit by bit, its
        owner sends only what has changed since. Without a version until the owner has confirmed it."""
        source = ApproximatedState(ZERO_TERM, 0)
        value = self.replica.slice_of(shard)
        own = await off_loop(self.environment.executor, value.size, begin_run, genesis, shard, value, source)
        await self.enter(shard, own)

    async def enter(self, shard: int, published: Published) -> None:
        """Follow from a published value that this node has itself."""
        position = Position(published.publication, published.version)
        if await self.write(shard, published.value, published.source, position):
            self._digests[shard] = published.digest

    async def read(self, reader: FrameReader, result: PullResult, memory: Allocate) -> tuple[Arrays, int]:
        """The arrays of one answer, with their bytes. Raises `BadFrame` if they are not what the answer names."""
        shard, size = result.shard, self.store.size(result.shard)
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
        position = self.replica.position_of(shard)
        is_change = result.status == "changes"
        if is_change and position != Position(result.publication, result.published - result.changes):
            return False  # it was overtaken
        before = self.replica.version_of(shard)
        held = self.replica.slice_of(shard) if is_change else None
        size = self.store.size(shard)
        try:
            value, digest = await off_loop(self.environment.executor, size * len(arrays), after, held, arrays, size)
        except ValueError as error:
            raise BadFrame(str(error)) from error
        if digest != result.digest:
            self._note_mismatch(result)
            if is_change:
                self.replica.invalidate(shard)
            return False
        if self.replica.position_of(shard) != position or self.replica.version_of(shard) != before:
            return False  # another answer was faster
        reached = Position(result.publication, result.published)
        if not await self.write(shard, value, (result.rank_term, result.version), reached):
            raise Nonsense("a published value is out of range")
        self._digests[shard] = digest
        if is_change:
            self.counters.shards_followed += 1
        else:
            self.counters.publications_entered += 1
        return True

    def is_same(self, result: PullResult) -> bool:
        """Whether the shard is up to date, as its owner says; False if it is in another place of the publication, or if
        two owners have gone on from one version and this is the other's. Then the shard is asked for again."""
        if not result.publication:
            return True
        if self.replica.position_of(result.shard) != Position(result.publication, result.published):
            return False
        if self._digests[result.shard] == result.digest:
            if self.replica.pulled_version(result.shard) is None:  # it was claimed
                position = self.replica.position_of(result.shard)
                self.replica.set_version(result.shard, result.rank_term, result.version, position)
            return True
        self._note_mismatch(result)
        self.replica.invalidate(result.shard)
        return False

    def _note_mismatch(self, result: PullResult) -> None:
        self.counters.publication_mismatches += 1
        self.environment.log.warning(
            "publication_mismatch", shard=result.shard, published=result.published, changes=result.changes
        )

    async def write(
        self, shard: int, value: Vector, version: tuple[Term, int], position: Position = NO_POSITION
    ) -> bool:
        """Copy a value into the replica, in turns of the event loop; False if it has values out of range."""
        with self.replica.writing(shard) as values:
            if values.size > VALUES_PER_COPY:
                self.replica.invalidate(shard)  # what is cut off leaves a part of it
            for first in range(0, values.size, VALUES_PER_COPY):
                part = slice(first, min(first + VALUES_PER_COPY, values.size))
                await self.turns.take(light(part.stop - first))
                # Promise 7 (docs/faults.md): the trainer never sees such values.
                if not has_length(value[part], MAX_STATE_LENGTH):
                    return False
                self.agreement.note(self.replica.bounds[shard][0] + first, values[part], value[part])
                values[part] = value[part]
            self.replica.set_version(shard, *version, position)
        return True
