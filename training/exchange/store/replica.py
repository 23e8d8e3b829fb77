"""This node's replica of the vector, which version of each shard it holds, and how a thread writes it to disk.

The vector of a node that exchanges is of no single moment: its shards come from pulls of different moments, and those
that the node holds are written after it. So nothing is copied before it changes (`ReplicaReading`), and a checkpoint
takes the memory of one shard, with the version that it had. A shard that was written while it was read is read again.
A node that exchanges nothing adds to the whole vector at once: its checkpoint reads a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.terms import ZERO_TERM, Term


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

    def copy(self) -> Replica:
        """The vector as it is now, with its versions, for a thread to read."""
        twin = Replica(self.vector.copy(), self.bounds)
        twin.restore_versions(self.shard_versions)
        return twin

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
