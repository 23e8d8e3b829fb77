"""The vector as it was at one moment, for a thread that writes it to disk while training goes on. Pure.

Copy on write: whoever is about to change values calls `preserve`, which copies those that the thread has not read yet.
The thread reads one slice after the other into a buffer of its own. Between two pulls the vector does not change, so a
disk that is faster than a step costs no copy at all; a slower one costs a copy of what it has not written yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np

from training.encoding.codecs import Vector
from training.exchange.terms import Term

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
