"""This node's replica of the vector, how a thread writes it to disk, and how copies of a shard rank without its owner.

The vector of a node that exchanges is of no single moment: its shards come from pulls of different moments, and those
that the node holds are written after it. So nothing is copied before it changes (`ReplicaReading`), and a checkpoint
takes the memory of one shard, with the version that it had. A shard that was written while it was read is read again.
A node that exchanges nothing adds to the whole vector at once: its checkpoint reads a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.ownership_messages import CopyStatus
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ROLE_RANK, ZERO_TERM, Role, Term
from p2pnode.training.shards.state import ShardState


class Position(NamedTuple):
    """A place in a publication of changes: its name, and a published version."""

    publication: bytes
    published: int


class Stamp(NamedTuple):
    """What a shard holds at a moment at which nobody writes it. Equal stamps: it was not written in between."""

    version: tuple[Term, int]
    writes: int


#: Of a shard that is in no publication: the next answer of an owner that publishes one brings the whole.
NO_POSITION = Position(b"", 0)


class Replica:
    """The whole vector as this node has pulled it; the copies that `exchange.replicas` asks for are backups of shards.

    `vector` is the trainer's shared memory, `float32[total]`. Pulls change it through `writing`, so that a thread
    that reads a shard for a checkpoint knows whether it has changed.

    A shard has a position in a publication while it holds that published value to the bit. Whatever else is recorded of
    it, a version or that it is invalid, ends that.
    """

    def __init__(self, vector: Vector, bounds: Sequence[tuple[int, int]]) -> None:
        self.vector = vector
        self.bounds = bounds
        #: How often the writing of each shard has begun, and ended.
        self._begun = [0] * len(bounds)
        self._ended = [0] * len(bounds)
        #: (term, version) of every shard; others read it, this class writes it.
        self.shard_versions: list[tuple[Term, int]] = [(ZERO_TERM, 0)] * len(bounds)
        self._positions: list[Position] = [NO_POSITION] * len(bounds)

    def slice_of(self, shard: int) -> Vector:
        """The values of one shard, as a view to be read."""
        start, stop = self.bounds[shard]
        return self.vector[start:stop]

    @contextmanager
    def writing(self, shard: int) -> Iterator[Vector]:
        """The values of one shard, as a view to be overwritten within the context; its version is set there too."""
        self._begun[shard] += 1
        try:
            yield self.slice_of(shard)
        finally:
            self._ended[shard] += 1

    def stamp(self, shard: int) -> Stamp | None:
        """What the shard holds; None while it is being written. For another thread than the one that writes."""
        ended = self._ended[shard]
        version = self.shard_versions[shard]
        return Stamp(version, ended) if self._begun[shard] == ended else None

    def versions(self) -> list[tuple[Term, int]]:
        """(term, version) of every shard; the term is the one by which the copy ranks among copies."""
        return list(self.shard_versions)

    def version_of(self, shard: int) -> tuple[Term, int]:
        return self.shard_versions[shard]

    def pulled_version(self, shard: int) -> tuple[Term, int] | None:
        """`version_of`, or None for a shard that was never pulled."""
        term, version = self.shard_versions[shard]
        return None if term == ZERO_TERM else (term, version)

    def set_version(self, shard: int, term: Term, version: int, position: Position = NO_POSITION) -> None:
        """The shard holds this version now and, if it was pulled from a publication, is in this position of it."""
        self.shard_versions[shard] = (term, version)
        self._positions[shard] = position

    def position_of(self, shard: int) -> Position:
        """Where the shard is in its owner's publication; `NO_POSITION` if what it holds is not a published value."""
        return self._positions[shard]

    def invalidate(self, shard: int) -> None:
        """The shard is being written, or has other bits than it should: it has no version, and the next pull brings
        the whole. As a copy it ranks lowest under its term."""
        self.set_version(shard, self.shard_versions[shard][0], 0)

    def restore_versions(self, versions: list[tuple[Term, int]]) -> None:
        """Adopt the versions of a checkpoint; those of another number of shards are ignored."""
        if len(versions) == len(self.shard_versions):
            self.shard_versions[:] = versions
            self._positions[:] = [NO_POSITION] * len(versions)


class ReadingClosed(Exception):
    """The reading was given up."""


#: How often a shard that is being written is tried again. After that it is taken as it is, under version 0: as a copy
#: it then ranks lowest. A write that was cut off leaves such a shard, until the next pull.
ATTEMPTS = 500


class ReplicaReading:
    """`slices` belongs into a thread; `pause` waits there, some milliseconds, before a shard is tried again."""

    def __init__(self, replica: Replica, pause: Callable[[], None]) -> None:
        self._replica = replica
        self._pause = pause
        #: (term, version) of each shard that was read.
        self.versions: list[tuple[Term, int]] = []
        self._is_closed = False

    def slices(self) -> Iterator[Vector]:
        """The values of each shard, in order. A slice is valid until the next one. Raises `ReadingClosed`."""
        bounds = self._replica.bounds
        buffer = np.empty(max((stop - start for start, stop in bounds), default=0), dtype=np.float32)
        for shard, (start, stop) in enumerate(bounds):
            values = buffer[: stop - start]
            self.versions.append(self._read(shard, values))
            yield values

    def close(self) -> None:
        """Nobody reads it any more."""
        self._is_closed = True

    def _read(self, shard: int, into: Vector) -> tuple[Term, int]:
        for attempt in range(ATTEMPTS):
            if self._is_closed:
                raise ReadingClosed
            if attempt:
                self._pause()
            before = self._replica.stamp(shard)
            np.copyto(into, self._replica.slice_of(shard))
            if before is not None and self._replica.stamp(shard) == before:
                return before.version
        return self._replica.version_of(shard)[0], 0


class CopyRank(NamedTuple):
    """The rank of a copy: by term, by role, learners by the term promised to them, then by version.

    Among equals a state from disk ranks above a bare value, because it has the identities of its deltas.

    Two terms with the same number belong to the two sides of a split: neither came after the other, since every
    take-over raises the number. Among these a state with its history ranks above a replica, whatever the node ids.
    """

    number: int
    has_history: bool
    node: bytes
    role: int
    promise: Term
    version: int
    is_stored: bool


def rank_copy(standing: CopyStatus, seen: Container[Term] = ()) -> CopyRank:
    """`seen` are the terms known to be in use. If the term promised to a learner is in use, the learner is the backup,
    even before a message under that term reached it."""
    role, term, promise = ROLE_RANK[standing.role], standing.term, ZERO_TERM
    if standing.role == "learner":
        if standing.fence in seen:
            role, term = ROLE_RANK["backup"], standing.fence
        else:
            promise = standing.fence
    has_history = role >= ROLE_RANK["learner"]
    return CopyRank(term.number, has_history, term.node, role, promise, standing.version, standing.is_stored)


def stored_above(store: ShardStore, shard: int, replica: tuple[Term, int] | None) -> StoredState | None:
    """The state from disk, unless the replica is newer; at the same version it is preferred: it has identities."""
    stored = store.stored.get(shard)
    if stored is None or (replica is not None and replica > (stored.term, stored.state.version)):
        return None
    return stored


def replica_copy(store: ShardStore, replica: Replica, step: int, shard: int) -> tuple[Term, ShardState] | None:
    """The state from disk, or the replica, and its term: a start for this node if the shard has no owner and no backup.
    Either begins a new era, so that a later copy with the whole history replaces it."""
    pulled = replica.pulled_version(shard)
    stored = stored_above(store, shard, pulled)
    if stored is not None:
        # A state from disk has its identities, so that no delta is refused for its age: any new era number will do.
        era = stored.state.era_step + 1
        return stored.term, dataclasses.replace(stored.state, era_step=era, era_term=stored.term)
    if pulled is None:
        return None
    # Deltas with a base before it are refused: it is unknown which of them it has. An era of 0 would have all.
    (term, version), era = pulled, max(1, step)
    state = store.fresh_state(shard, replica.slice_of(shard), version=version, era_step=era, era_term=term)
    state.unlisted = version
    return term, state


def copy_status(store: ShardStore, shard: int, replica: tuple[Term, int] | None, step: int) -> CopyStatus:
    """The best copy that this node has of a shard; `replica` is the (term, version) of the last pull."""
    fence = max(store.ownership.fence(shard), store.promised_here(shard))
    owned, backed = store.owned.get(shard), store.backed.get(shard)
    if owned is not None:
        return CopyStatus(shard, "owner", owned.term, owned.state.version, fence, step)
    if backed is not None and backed.state is not None:
        role: Role = "backup" if backed.is_active else "learner"
        return CopyStatus(shard, role, backed.term, backed.state.version, fence, step)
    superseded = store.superseded.get(shard)
    if superseded is not None and superseded.is_usable:
        return CopyStatus(shard, "backup", superseded.term, superseded.state.version, fence, step)
    stored = stored_above(store, shard, replica)
    if stored is not None:
        replica = stored.term, stored.state.version
    if replica is not None:
        return CopyStatus(shard, "replica", *replica, fence, step, stored is not None)
    return CopyStatus(shard, "none", ZERO_TERM, 0, fence, step)


def has_state(store: ShardStore, shard: int) -> bool:
    """Whether this node has a state of a shard that it does not own: as its backup or former owner, or on disk."""
    return shard in store.stored or store.unowned_copy(shard) is not None


def has_known_owner(store: ShardStore, shard: int) -> bool:
    """Whether a node owns the shard as far as this one knows. What others say that this node owned before it was
    started again does not count."""
    known = store.ownership.known_owners.get(shard)
    return shard in store.owned or (known is not None and known.owner.node_id != store.node_id)
