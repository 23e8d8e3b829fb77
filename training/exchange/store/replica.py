"""This node's replica of the vector, which version of each shard it holds, and how a thread writes it to disk.

A node that exchanges nothing writes the vector of one moment (`VectorSnapshot`). Copy on write: whoever is about to
change values calls `preserve`, which copies those that the thread has not read yet. The thread reads one slice after
the other into a buffer of its own. Between two steps the vector does not change, so a disk that is faster than a step
costs no copy at all; a slower one costs a copy of what it has not written yet.

The vector of a node that exchanges is of no single moment: its shards come from pulls of different moments, and those
that the node holds are written after it. So nothing is copied before it changes (`ReplicaReading`), and a checkpoint
takes the memory of one shard, with the version that it had. A shard that was written while it was read is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np

from training.encoding.codecs import Vector
from training.exchange.terms import ZERO_TERM, Term

#: Values copied under the lock at a time: 4 MB, a millisecond.
SLICE_VALUES = 1 << 20


class SnapshotClosed(Exception):
    """The snapshot was given up while it was being read."""


class VectorSnapshot:
    """`vector` is `float32[total]`. `preserve` and `close` may be called while another thread reads `slices`: `lock` is
    held while a slice is copied."""

    def __init__(
        self,
        vector: Vector,
        lock: AbstractContextManager[object],
        slice_values: int = SLICE_VALUES,
        versions: Sequence[tuple[Term, int]] = (),
    ) -> None:
        #: (term, version) of each shard, as it was.
        self.versions = list(versions)
        self._vector = vector
        self._slice_values = slice_values
        self._lock = lock
        self._preserved: dict[int, Vector] = {}
        #: The first slice that was not read yet.
        self._next = 0
        self._count = -(-vector.size // slice_values)
        self._is_closed = False

    @property
    def preserved_bytes(self) -> int:
        """Memory of the copies."""
        with self._lock:
            return sum(values.nbytes for values in self._preserved.values())

    def preserve(self, start: int, stop: int) -> None:
        """The values from `start` to `stop` are about to change."""
        if self._next >= self._count or start >= stop:
            return
        for number in range(start // self._slice_values, -(-stop // self._slice_values)):
            with self._lock:
                if self._next <= number < self._count and number not in self._preserved:
                    self._preserved[number] = self._of(number).copy()

    def slices(self) -> Iterator[Vector]:
        """All values in order, once. A slice is valid until the next one. Raises `SnapshotClosed`."""
        buffer = np.empty(min(self._slice_values, self._vector.size), dtype=np.float32)
        for number in range(self._count):
            with self._lock:
                if self._is_closed:
                    raise SnapshotClosed
                values = self._preserved.pop(number, None)
                if values is None:
                    live = self._of(number)
                    values = buffer[: live.size]
                    np.copyto(values, live)
                self._next = number + 1
            yield values

    def close(self) -> None:
        """Nobody reads it any more; the copies are freed."""
        with self._lock:
            self._is_closed = True
            self._next = self._count
            self._preserved.clear()

    def _of(self, number: int) -> Vector:
        return self._vector[number * self._slice_values : (number + 1) * self._slice_values]


class Position(NamedTuple):
    """A place in a chain of changes: its name, and a published version."""

    chain: bytes
    published: int


class Stamp(NamedTuple):
    """What a shard holds at a moment at which nobody writes it. Equal stamps: it was not written in between."""

    version: tuple[Term, int]
    writes: int


#: Of a shard that is in no chain: the next answer of an owner that publishes one brings the whole.
NO_POSITION = Position(b"", 0)


class Replica:
    """`vector` is the trainer's shared memory, `float32[total]`. Pulls change it through `writing`, so that a thread
    that reads a shard for a checkpoint knows whether it has changed (`training.exchange.store.replica`). A node
    that exchanges nothing changes it through `changing`, so that a snapshot stays as it was.

    A shard has a position in a chain while it holds that published value to the bit. Whatever else is recorded of it,
    a version or a doubt, ends that.
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
        self._snapshot: VectorSnapshot | None = None

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

    def changing(self, start: int, stop: int) -> None:
        """The values from `start` to `stop` are about to be overwritten."""
        if self._snapshot is not None:
            self._snapshot.preserve(start, stop)

    def snapshot(self, lock: AbstractContextManager[object]) -> VectorSnapshot:
        """The vector as it is now, for a thread to read. The former snapshot is closed."""
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = VectorSnapshot(self.vector, lock, versions=self.versions())
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
