"""Reads the replica for a checkpoint while it changes: every shard as a whole, with the version that it had. Pure.

The vector of a node that exchanges is of no single moment: its shards come from pulls of different moments, and those
that the node holds are written after it. So nothing is copied before it changes, and a checkpoint takes the memory of
one shard. A shard that was written while it was read is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from training.encoding.codecs import Vector
from training.exchange.store.replica import Replica
from training.exchange.store.vector_snapshot import SnapshotClosed
from training.exchange.terms import Term

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
        """The values of each shard, in order. A slice is valid until the next one. Raises `SnapshotClosed`."""
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
                raise SnapshotClosed
            if attempt:
                self._pause()
            before = self._replica.stamp(shard)
            np.copyto(into, self._replica.slice_of(shard))
            if before is not None and self._replica.stamp(shard) == before:
                return before.version
        return self._replica.version_of(shard)[0], 0
