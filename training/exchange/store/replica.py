"""This node's replica of the vector, and which version of each shard it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from training.encoding.codecs import Vector
from training.exchange.store.vector_snapshot import VectorSnapshot
from training.exchange.terms import ZERO_TERM, Term


class Position(NamedTuple):
    """A place in a chain of changes: its name, and a published version."""

    chain: bytes
    published: int


#: Of a shard that is in no chain: the next answer of an owner that publishes one brings the whole.
NO_POSITION = Position(b"", 0)


class Replica:
    """`vector` is the trainer's shared memory, `float32[total]`. Pulls change it, through `writable` and `changing`
    only, so that a snapshot which is being written to disk stays as it was.

    A shard has a position in a chain while it holds that published value to the bit. Whatever else is recorded of it,
    a version or a doubt, ends that.
    """

    def __init__(self, vector: Vector, bounds: Sequence[tuple[int, int]]) -> None:
        self.vector = vector
        self._bounds = bounds
        #: (term, version) of every shard; others read it, this class writes it.
        self.shard_versions: list[tuple[Term, int]] = [(ZERO_TERM, 0)] * len(bounds)
        self._positions: list[Position] = [NO_POSITION] * len(bounds)
        self._snapshot: VectorSnapshot | None = None

    def slice_of(self, shard: int) -> Vector:
        """The values of one shard, as a view to be read."""
        start, stop = self._bounds[shard]
        return self.vector[start:stop]

    def writable(self, shard: int) -> Vector:
        """The values of one shard, as a view that is about to be overwritten."""
        self.changing(*self._bounds[shard])
        return self.slice_of(shard)

    def changing(self, start: int, stop: int) -> None:
        """The values from `start` to `stop` are about to be overwritten."""
        if self._snapshot is not None:
            self._snapshot.preserve(start, stop)

    def snapshot(self, lock: AbstractContextManager[object]) -> VectorSnapshot:
        """The vector as it is now, for a thread to read. The former snapshot is closed."""
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = VectorSnapshot(self.vector, lock)
        return self._snapshot

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
        """The shard holds this version now and, if it was pulled from a chain, is in this position of it."""
        self.shard_versions[shard] = (term, version)
        self._positions[shard] = position

    def position_of(self, shard: int) -> Position:
        """Where the shard is in its owner's chain; `NO_POSITION` if what it holds is not a published value."""
        return self._positions[shard]

    def doubt(self, shard: int) -> None:
        """The shard is being written, or has other bits than it should: it has no version, and the next pull brings
        the whole. As a copy it ranks lowest under its term."""
        self.set_version(shard, self.shard_versions[shard][0], 0)

    def restore_versions(self, versions: list[tuple[Term, int]]) -> None:
        """Adopt the versions of a checkpoint; those of another number of shards are ignored."""
        if len(versions) == len(self.shard_versions):
            self.shard_versions[:] = versions
            self._positions[:] = [NO_POSITION] * len(versions)
