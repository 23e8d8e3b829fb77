"""This node's replica of the vector, and which version of each shard it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from training.encoding.codecs import Vector
from training.exchange.store.vector_snapshot import VectorSnapshot
from training.exchange.terms import ZERO_TERM, Term


class Replica:
    """`vector` is the trainer's shared memory, `float32[total]`. Pulls change it, through `writable` and `changing`
    only, so that a snapshot which is being written to disk stays as it was."""

    def __init__(self, vector: Vector, bounds: Sequence[tuple[int, int]]) -> None:
        self.vector = vector
        self._bounds = bounds
        #: (term, version) of every shard; others read it, this class writes it.
        self.shard_versions: list[tuple[Term, int]] = [(ZERO_TERM, 0)] * len(bounds)
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

    def set_version(self, shard: int, term: Term, version: int) -> None:
        self.shard_versions[shard] = (term, version)

    def restore_versions(self, versions: list[tuple[Term, int]]) -> None:
        """Adopt the versions of a checkpoint; those of another number of shards are ignored."""
        if len(versions) == len(self.shard_versions):
            self.shard_versions[:] = versions
