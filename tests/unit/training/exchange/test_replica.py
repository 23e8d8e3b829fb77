"""The replica, its versions, and the copies of a shard: their ranks, and the states that a take-over makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.ownership_messages import CopyStatus
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.replica import (
    ATTEMPTS,
    NO_POSITION,
    Position,
    ReadingClosed,
    Replica,
    ReplicaReading,
    copy_status,
    rank_copy,
    replica_copy,
)
from p2pnode.training.exchange.terms import ZERO_TERM, Role, Term
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.builders.stores import BOUNDS, IDS, contact, delta, store_of, term, zeros


def test_a_shard_that_was_never_pulled_has_no_version() -> None:
    """After a pull it has the term and version that came with it."""
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    assert replica.pulled_version(1) is None
    assert replica.version_of(1) == (ZERO_TERM, 0)

    replica.set_version(1, term(3, "b"), 7)
    assert replica.pulled_version(1) == replica.version_of(1) == (term(3, "b"), 7)
    assert replica.pulled_version(0) is None


def test_a_slice_is_the_trainers_memory() -> None:
    """What is written into a slice is in the vector, without a copy."""
    vector = np.zeros(16, np.float32)
    replica = Replica(vector, BOUNDS)
    replica.slice_of(2)[:] = 1.0
    assert vector.tolist() == [0.0] * 8 + [1.0] * 4 + [0.0] * 4


def test_the_versions_of_a_checkpoint_are_adopted_if_they_fit() -> None:
    """A checkpoint with another number of shards is ignored; the returned list is a copy."""
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    replica.restore_versions([(term(1, "a"), 1)] * 3)
    assert replica.versions() == [(ZERO_TERM, 0)] * 4

    versions = [(term(1, "a"), shard) for shard in range(4)]
    replica.restore_versions(versions)
    replica.versions()[0] = (term(9, "x"), 9)
    assert replica.versions() == versions


def test_a_position_in_a_publication_ends_with_whatever_else_is_recorded() -> None:
    """A version without a position, a doubt, the versions of a checkpoint."""
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    assert replica.position_of(1) == NO_POSITION
    place = Position(b"c" * 8, 3)

    replica.set_version(1, term(2, "a"), 7, place)
    assert (replica.position_of(1), replica.position_of(0)) == (place, NO_POSITION)
    replica.set_version(1, term(2, "a"), 7)
    assert replica.position_of(1) == NO_POSITION

    replica.set_version(1, term(2, "a"), 7, place)
    replica.invalidate(1)
    assert (replica.position_of(1), replica.version_of(1)) == (NO_POSITION, (term(2, "a"), 0))

    replica.set_version(1, term(2, "a"), 7, place)
    replica.restore_versions([(term(1, "a"), 1)] * 4)
    assert replica.position_of(1) == NO_POSITION


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
    with pytest.raises(ReadingClosed):
        next(slices)

    writing = replica.writing(0)
    writing.__enter__()
    waiting = ReplicaReading(replica, lambda: waiting.close())
    with pytest.raises(ReadingClosed):
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


def copy(role: Role, held: Term, version: int = 0, *, fence: Term = ZERO_TERM, is_stored: bool = False) -> CopyStatus:
    return CopyStatus(0, role, held, version, fence, 0, is_stored)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (copy("replica", term(3, "a"), 1), copy("owner", term(2, "b"), 9)),
        (copy("owner", term(2, "a")), copy("backup", term(2, "a"), 9)),
        (copy("backup", term(2, "a")), copy("learner", term(2, "a"), 9)),
        (copy("learner", term(2, "a")), copy("replica", term(2, "a"), 9)),
        (copy("replica", term(2, "a"), 5), copy("replica", term(2, "a"), 4)),
        (copy("replica", term(2, "a"), 5, is_stored=True), copy("replica", term(2, "a"), 5)),
        (copy("learner", term(2, "a"), fence=term(4, "a")), copy("learner", term(2, "a"), 9, fence=term(3, "a"))),
        # Two sides of a split: the history decides, not the node id.
        (copy("backup", term(2, "a")), copy("replica", term(2, "b"), 9)),
    ],
)
def test_the_better_copy_ranks_higher(better: CopyStatus, worse: CopyStatus) -> None:
    """Terms come first, then roles, promises and versions; a state from disk ranks above a bare value."""
    assert rank_copy(better) > rank_copy(worse)


def test_a_learner_whose_promised_term_is_in_use_is_the_backup() -> None:
    """Its owner acknowledged deltas under that term: they may be in this copy only."""
    learner = copy("learner", term(2, "a"), fence=term(3, "a"))
    assert rank_copy(learner, {term(3, "a"): None}) == rank_copy(copy("backup", term(3, "a")))
    assert rank_copy(learner, {term(4, "a"): None}) < rank_copy(copy("backup", term(2, "a")))


def test_of_two_sides_of_a_split_the_history_ranks_above_a_replica() -> None:
    """Under one number a replica cannot be later than the state, whatever the ids; under a later number it may be."""
    whole, beside = copy("backup", term(7, "a"), 41), copy("replica", term(7, "c"), 41)
    after = copy("replica", term(8, "b"), 41)

    assert rank_copy(beside) < rank_copy(whole) < rank_copy(after)
    assert not rank_copy(after).has_history


def test_the_status_of_every_role() -> None:
    """Owner, backup, learner, replica, none; a learner without its state offers its replica."""
    store = store_of("b")
    mark = (term(1, "d"), 9)
    fence = (0, b"")
    assert copy_status(store, 0, None, 5) == CopyStatus(0, "none", ZERO_TERM, 0, fence, 5)
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "replica", term(1, "d"), 9, fence, 5)

    store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "replica", term(1, "d"), 9, term(2, "a"), 5)

    store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    learner = copy_status(store, 0, mark, 5)
    assert (learner.role, learner.term, learner.version) == ("learner", term(2, "a"), 0)

    store.accept_forward(0, term(3, "a"), delta(1), 0, IDS["a"])
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "backup", term(3, "a"), 1, term(3, "a"), 5)

    state = store.backed[0].state
    assert state is not None
    store.own(0, state, term(4, "b"), contact("b"), 0.0, by_handover=False)
    store.ownership.raise_fence(0, term(6, "c"))
    status = copy_status(store, 0, mark, 5)
    assert status == CopyStatus(0, "owner", term(4, "b"), 1, term(6, "c"), 5)
    assert (status.term, status.fence) == (term(4, "b"), term(6, "c"))


SUM = Rule(outer_lr=1.0, outer_momentum=0.0)


def pulled(value: float = 3.0) -> Replica:
    return Replica(np.full(BOUNDS[-1][1], value, np.float32), BOUNDS)


def test_a_replica_becomes_the_state_of_a_new_era() -> None:
    """Value and version are the replica's; the era begins at this node's step, and is that of its term."""
    store, replica = store_of("a"), pulled()
    replica.set_version(1, term(4, "b"), 17)

    copied, state = replica_copy(store, replica, 12, 1) or (None, None)

    assert state is not None
    assert (copied, state.version, state.era_step, state.era_term) == (term(4, "b"), 17, 12, term(4, "b"))
    assert state.value.tolist() == [3.0] * 4
    replica.vector[:] = 0.0
    assert state.value.tolist() == [3.0] * 4


def test_an_era_is_never_zero() -> None:
    """Zero means that a state has the whole history."""
    replica = pulled()
    replica.set_version(0, term(1, "b"), 1)

    found = replica_copy(store_of("a"), replica, 0, 0)
    assert found is not None
    assert found[1].era_step == 1


def test_a_shard_that_was_never_pulled_has_no_copy() -> None:
    """The vector's initial values are no replica."""
    assert replica_copy(store_of("a"), pulled(), 5, 0) is None


def test_a_state_from_disk_is_preferred_unless_the_replica_is_newer() -> None:
    """It has identities; its era is the next one, so that a copy with the whole history replaces it."""
    store, replica = store_of("a"), pulled()
    stored = zeros(store)
    delta(1).add_to(stored, SUM, synchronous=False)
    store.offer_stored({0: StoredState(term(4, "b"), stored, clean=True)})

    replica.set_version(0, term(4, "b"), 1)
    copied, state = replica_copy(store, replica, 5, 0) or (None, None)
    assert state is not None
    assert (copied, state.era_step, state.era_term) == (term(4, "b"), 1, term(4, "b"))
    assert state.knows(delta(1).identity)

    replica.set_version(0, term(4, "b"), 2)
    _, state = replica_copy(store, replica, 5, 0) or (None, None)
    assert state is not None
    assert (state.version, state.era_step) == (2, 5)
