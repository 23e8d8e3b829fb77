"""Arrays and payloads in memory that is mapped from a file, in extents of whatever sizes come and go.

An extent is free again when nothing refers to its memory any more: no array, no view of one, no memoryview. So whoever
still sends what is in it keeps it, and nothing is ever written over it. Free extents that touch are one: when shards
are divided, their parts fit where the wholes were. Where none is large enough the caller keeps what it has in memory:
the file is as large as what is normal. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from weakref import finalize

import numpy as np
import numpy.typing as npt

from training.encoding.codecs import Vector

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview
#: Extents begin at multiples of so many bytes: a page of memory.
UNIT_BYTES = 4096


class MappedExtents:
    """Extents in `memory`: the first free one that is large enough is taken."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        #: Begin and end of the free extents, in their order; no two of them touch.
        self._free = [(0, len(memory))] if len(memory) else []
        #: Those that became free since the last look. An array may be dropped in any thread.
        self._dropped: deque[tuple[int, int]] = deque()

    @property
    def used_bytes(self) -> int:
        """Of the extents in use."""
        self._collect()
        return len(self._memory) - sum(end - begin for begin, end in self._free)

    def take(self, size_bytes: int) -> Bytes | None:
        """An extent of this size, with any bytes in it; None if no free one is large enough."""
        self._collect()
        needed = -(-size_bytes // UNIT_BYTES) * UNIT_BYTES
        for place, (begin, end) in enumerate(self._free):
            taken = min(begin + needed, end)
            if taken - begin >= size_bytes:
                self._free[place : place + 1] = [(taken, end)] if taken < end else []
                found = np.frombuffer(self._memory, np.uint8, size_bytes, begin)
                finalize(found, self._dropped.append, (begin, taken)).atexit = False
                return found
        return None

    def _collect(self) -> None:
        """Make what was dropped free, as one extent with its neighbours."""
        while self._dropped:
            insort(self._free, self._dropped.popleft())
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            touches = bool(joined) and joined[-1][1] == begin
            joined.append((joined.pop()[0] if touches else begin, end))
        self._free = joined


class PayloadFile:
    """Copies of payloads, one after the other in an extent of `chunk_bytes`, which is free again when all of them are
    gone."""

    def __init__(self, memory: memoryview, chunk_bytes: int) -> None:
        self._extents = MappedExtents(memory)
        self._chunk_bytes = chunk_bytes
        self._chunk: Bytes | None = None
        self._end = 0

    @property
    def used_bytes(self) -> int:
        """Memory of the extents in use."""
        return self._extents.used_bytes

    def kept(self, payload: Buffer) -> Buffer:
        """A copy of the payload in the file, or the payload itself where no extent has room for it."""
        size = len(payload)
        if self._chunk is None or self._end + size > self._chunk_bytes:
            chunk = self._extents.take(self._chunk_bytes) if size <= self._chunk_bytes else None
            if chunk is None:
                return payload
            self._chunk, self._end = chunk, 0
        place = self._chunk[self._end : self._end + size]
        place[:] = np.frombuffer(payload, np.uint8)
        self._end += size
        return place.data.toreadonly()


class ArraySpace:
    """Arrays of float32, each in an extent of its own."""

    def __init__(self, memory: memoryview) -> None:
        self._extents = MappedExtents(memory)
        #: The arrays that are in the file, by id, while they are there.
        self._arrays: dict[int, None] = {}

    @property
    def used_bytes(self) -> int:
        """Memory of the extents in use."""
        return self._extents.used_bytes

    def has(self, array: Vector) -> bool:
        """Whether this array, no view of it, is in the file."""
        return id(array) in self._arrays

    def moved(self, array: Vector) -> Vector:
        """A copy of the array in the file, or the array itself where it is there already or nothing free has room."""
        if self.has(array) or not array.nbytes:
            return array
        extent = self._extents.take(array.nbytes)
        if extent is None:
            return array
        found = extent.view(np.float32)
        np.copyto(found, array)
        self._arrays[id(found)] = None
        finalize(found, self._arrays.pop, id(found)).atexit = False
        return found
