"""A snapshot of the vector: it stays as it was, whatever changes before it has been read."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.store.replica import SnapshotClosed, VectorSnapshot

TOTAL, SLICE = 23, 4


def snapshot_of(vector: np.ndarray) -> VectorSnapshot:
    return VectorSnapshot(vector, contextlib.nullcontext(), slice_values=SLICE)


#: Before each slice is read, these ranges change.
CHANGES = st.lists(
    st.lists(st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)).map(sorted), max_size=3), min_size=6, max_size=6
)


@given(CHANGES)
def test_the_values_are_those_of_the_beginning(changes: list[list[list[int]]]) -> None:
    """However changes and reads alternate, the slices together are the vector as it was, and only what changed before
    it was read has been copied."""
    vector = np.arange(TOTAL, dtype=np.float32)
    before = vector.copy()
    snapshot = snapshot_of(vector)
    slices = snapshot.slices()
    read = []
    for number, ranges in enumerate(changes):
        for start, stop in ranges:
            snapshot.preserve(start, stop)
            vector[start:stop] = -1.0
        unread = number * SLICE
        changed = [
            value for before_it in changes[: number + 1] for start, stop in before_it for value in range(start, stop)
        ]
        copied = {value // SLICE for value in changed}
        assert snapshot.preserved_bytes <= 4 * SLICE * len({one for one in copied if one * SLICE >= unread})
        read.append(next(slices).copy())

    np.testing.assert_array_equal(np.concatenate(read), before)
    assert snapshot.preserved_bytes == 0


def test_a_change_after_the_reading_copies_nothing() -> None:
    """What has been read, and everything once it is closed, may change for nothing."""
    vector = np.zeros(TOTAL, np.float32)
    snapshot = snapshot_of(vector)
    slices = snapshot.slices()
    next(slices)
    snapshot.preserve(0, SLICE)
    assert snapshot.preserved_bytes == 0

    snapshot.preserve(0, TOTAL)
    assert snapshot.preserved_bytes == 4 * (TOTAL - SLICE)
    snapshot.close()
    assert snapshot.preserved_bytes == 0
    snapshot.preserve(0, TOTAL)
    assert snapshot.preserved_bytes == 0
    with pytest.raises(SnapshotClosed):
        next(slices)


def test_a_thread_reads_what_the_loop_changes() -> None:
    """A million values in another thread while this one overwrites them from both ends."""
    total = 1 << 20
    vector = np.arange(total, dtype=np.float32)
    before = vector.copy()
    snapshot = VectorSnapshot(vector, threading.Lock(), slice_values=1 << 12)
    read: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: read.extend(values.copy() for values in snapshot.slices()))
    reader.start()
    for start in range(0, total // 2, 1 << 13):
        for first in (start, total - start - (1 << 13)):
            snapshot.preserve(first, first + (1 << 13))
            vector[first : first + (1 << 13)] = -1.0
    reader.join()

    np.testing.assert_array_equal(np.concatenate(read), before)
