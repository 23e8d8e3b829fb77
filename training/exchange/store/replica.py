"""This node's replica of the vector, and which version of each shard it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from training.encoding.codecs import Vector
from training.exchange.terms import ZERO_TERM, Term


class Replica:
    """`vector` is the trainer's shared memory, `float32[total]`; pulls and the trainer write it."""

    def __init__(self, vector: Vector, bounds: Sequence[tuple[int, int]]) -> None:
        self.vector = vector
        self._bounds = bounds
        #: (term, version) of every shard; others read it, this class writes it.
        self.shard_versions: list[tuple[Term, int]] = [(ZERO_TERM, 0)] * len(bounds)

    def slice_of(self, shard: int) -> Vector:
        """The values of one shard, as a view."""
        start, stop = self._bounds[shard]
        return self.vector[start:stop]

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
