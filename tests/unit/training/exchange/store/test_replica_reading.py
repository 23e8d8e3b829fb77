"""Reading the replica for a checkpoint while pulls change it: whole shards, each with the version that it had."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.harness.builders.stores import BOUNDS, term
from training.encoding.codecs import Vector
from training.exchange.store.replica import ATTEMPTS, Replica, ReplicaReading, SnapshotClosed


def no_pause() -> None:
    """Where nothing is written, nothing is waited for."""
    raise AssertionError("no shard was being written")


def replica_of(shards: int, size: int) -> Replica:
    bounds = [(shard * size, (shard + 1) * size) for shard in range(shards)]
    return Replica(np.zeros(shards * size, np.float32), bounds)


def write(replica: Replica, shard: int, version: int) -> None:
    with replica.writing(shard) as values:
        values[:] = float(version)
        replica.set_version(shard, term(1, "a"), version)


def test_every_shard_is_read_when_its_turn_comes() -> None:
    """What was pulled before the turn of a shard is in it, with its version; what comes later is not."""
    replica = replica_of(3, 4)
    for shard in range(3):
        write(replica, shard, 1)
    reading = ReplicaReading(replica, no_pause)
    slices = reading.slices()

    read = [next(slices).tolist()]
    for shard in range(3):
        write(replica, shard, 2)
    read += [values.tolist() for values in slices]

    assert read == [[1.0] * 4, [2.0] * 4, [2.0] * 4]
    assert reading.versions == [(term(1, "a"), 1), (term(1, "a"), 2), (term(1, "a"), 2)]


def test_a_reading_takes_the_memory_of_one_shard() -> None:
    """Each slice is in the same buffer, and no change before it is copied."""
    replica = Replica(np.arange(16, dtype=np.float32), BOUNDS)
    seen = [
        (values.size, values.__array_interface__["data"][0]) for values in ReplicaReading(replica, no_pause).slices()
    ]

    assert [size for size, _ in seen] == [stop - start for start, stop in BOUNDS]
    assert len({place for _, place in seen}) == 1


def test_a_shard_that_is_being_written_is_waited_for() -> None:
    """The pull yields in the middle of a shard; the reading goes on when it has ended."""
    replica = replica_of(1, 4)
    writing = replica.writing(0)
    values = writing.__enter__()
    values[:2] = 5.0
    pauses = []

    def pause() -> None:
        pauses.append(replica.stamp(0))
        if len(pauses) == 3:
            values[2:] = 5.0
            replica.set_version(0, term(1, "a"), 5)
            writing.__exit__(None, None, None)

    reading = ReplicaReading(replica, pause)

    assert next(reading.slices()).tolist() == [5.0] * 4
    assert reading.versions == [(term(1, "a"), 5)]
    assert pauses == [None] * 3


def test_a_shard_that_was_written_while_it_was_read_is_read_again() -> None:
    """A whole pull of it fits into the time of the copy."""

    class Pulled(Replica):
        pulls = 0

        def slice_of(self, shard: int) -> Vector:
            found = super().slice_of(shard)
            self.pulls += 1
            if self.pulls != 2:  # 1: the test's own
                return found
            torn = found.copy()  # what the copy has of it: one half of before and one of after
            write(self, shard, 2)
            torn[2:] = found[2:]
            return torn

    replica = Pulled(np.zeros(4, np.float32), [(0, 4)])
    with replica.writing(0) as values:
        values[:] = 1.0
        replica.set_version(0, term(1, "a"), 2)  # the same version, from another node
    pauses: list[None] = []
    reading = ReplicaReading(replica, lambda: pauses.append(None))

    assert next(reading.slices()).tolist() == [2.0] * 4
    assert (reading.versions, pauses) == ([(term(1, "a"), 2)], [None])


def test_a_shard_that_two_pulls_write_is_whole_only_after_both() -> None:
    """A joiner may be sent a shard by its owner and by another node."""
    replica = replica_of(1, 4)
    first, second = replica.writing(0), replica.writing(0)
    first.__enter__()
    second.__enter__()
    assert replica.stamp(0) is None
    first.__exit__(None, None, None)
    assert replica.stamp(0) is None
    second.__exit__(None, None, None)
    assert replica.stamp(0) is not None


def test_a_shard_that_stays_half_written_counts_as_no_version() -> None:
    """After some attempts it is taken as it is: as a copy it ranks lowest."""
    replica = replica_of(2, 4)
    write(replica, 0, 7)
    writing = replica.writing(0)
    writing.__enter__()
    pauses: list[None] = []
    reading = ReplicaReading(replica, lambda: pauses.append(None))

    assert len([values.copy() for values in reading.slices()]) == 2
    assert reading.versions[0] == (term(1, "a"), 0)
    assert len(pauses) == ATTEMPTS - 1


def test_a_reading_that_was_closed_ends() -> None:
    """Between two shards, and while it waits for one."""
    replica = replica_of(2, 4)
    reading = ReplicaReading(replica, no_pause)
    slices = reading.slices()
    next(slices)
    reading.close()
    with pytest.raises(SnapshotClosed):
        next(slices)

    writing = replica.writing(0)
    writing.__enter__()
    waiting = ReplicaReading(replica, lambda: waiting.close())
    with pytest.raises(SnapshotClosed):
        next(waiting.slices())


def test_a_thread_reads_whole_shards_while_this_one_writes_them() -> None:
    """A thousand pulls of four shards, in pieces, beside thirty checkpoints: each shard has the values of one version,
    and that is the one that is noted."""
    replica = replica_of(4, 1 << 12)
    found: list[tuple[float, float, int]] = []
    ended = threading.Event()

    def read() -> None:
        for _ in range(30):
            reading = ReplicaReading(replica, lambda: time.sleep(1e-4))
            ranges = [(float(values.min()), float(values.max())) for values in reading.slices()]
            found.extend((*one, version) for one, (_, version) in zip(ranges, reading.versions, strict=True))
        ended.set()

    async def pull(shard: int, version: int) -> None:
        with replica.writing(shard) as values:
            for start in range(0, values.size, 1 << 10):
                values[start : start + (1 << 10)] = float(version)
                await asyncio.sleep(0)
            replica.set_version(shard, term(1, "a"), version)

    async def pulls() -> None:
        for version in range(2, 1 << 24):
            await asyncio.gather(*(pull(shard, version) for shard in range(4)))
            await asyncio.sleep(5e-4)
            if ended.is_set():
                break

    for shard in range(4):
        write(replica, shard, 1)
    with _switching_often():
        reader = threading.Thread(target=read)
        reader.start()
        asyncio.run(pulls())
        reader.join()

    whole = [(low, high, version) for low, high, version in found if version]
    assert whole
    assert all(low == high == version for low, high, version in whole)


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Threads take turns after each microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
