"""The published value of a shard: what its followers hold, and the last encoded changes that lead to it. Pure.

An owner that adds to its value x all the time keeps beside it the *published value* p. The next version encodes x − p
once for all who pull, and adds to p what they will decode: `q = Q(x − p)`, `p ← p + decode(q)`. What Q rounds off stays
in x − p and comes with the version after: error feedback without a residual of its own (Seide et al. 2014; at a server:
Tang et al. 2019, DoubleSqueeze). A puller that has p of version u gets the changes after u, or p as a whole where that
is less. The operations on float32 are the same at owner and follower, so all who follow hold the same bits; a digest
proves it.

A publication begins with p = x rounded to bfloat16: those who enter at its beginning, after a take-over all at once,
are sent two bytes per value, and what was rounded off comes with the first change. A follower that enters later is sent
float32, because p is no longer exact in bfloat16: four bytes once, and then the same bits. That of a run's initial
values is exact from the beginning (`begin_run`), so who has made the same ones holds the state of a shard, too.

A `Published` is never changed. The next version is a new one, so that an answer that is still being sent keeps the old.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Encoded, Vector
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.terms import Term
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
    advanced = apply(published.value, codec, payload)
    changes = (*published.changes, Change(published.version + 1, codec, payload))
    return Published(
        published.publication,
        published.version + 1,
        advanced,
        digest_of(advanced),
        source,
        newest_within(changes, advanced.nbytes),
    )


def apply(value: Vector, codec: CodecName, payload: Encoded) -> Vector:
    """`value`, `float32[n]`, after one change, as a new array. Raises `ValueError` for a payload of another size."""
    changed = np.empty(value.size, dtype=np.float32)
    codecs.decode(payload, codec, changed)
    changed += value
    return changed


def apply_all(value: Vector, changes: Sequence[tuple[CodecName, Encoded]]) -> tuple[Vector, bytes]:
    """`value` after changes in this order, as a new array, and its digest."""
    for codec, payload in changes:
        value = apply(value, codec, payload)
    return value, digest_of(value)


def whole(codec: CodecName, payload: Encoded, size: int) -> tuple[Vector, bytes]:
    """A published value that was sent as a whole, `float32[size]`, and its digest. Raises `ValueError` as `apply`."""
    value = np.empty(size, dtype=np.float32)
    codecs.decode(payload, codec, value)
    return value, digest_of(value)


def continued(held: Vector, missing: Sequence[Change], last: Published) -> Published | None:
    """The published value of another node, from what a follower of it holds, `float32[n]`, and the changes it lacks.

    `last` is it without the value; None if the result has another digest, or is out of range.
    """
    try:
        value, digest = apply_all(held.copy(), [(change.codec, change.payload) for change in missing])
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
