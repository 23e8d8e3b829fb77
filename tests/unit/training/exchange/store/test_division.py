"""What a node has of its shards, divided: parts are as their whole was."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, SUM, contact, delta, owner_of, store_of, term, zeros
from training.encoding import codecs
from training.exchange.store.division import Slices, can_divide, divide_replica, divide_store
from training.exchange.store.records import StoredState
from training.exchange.store.repair_log import RepairLog
from training.exchange.store.replica import NO_POSITION, Position, Replica
from training.exchange.store.shard_store import ShardStore
from training.layout import shard_bounds
from training.shards.applied import Applied, DeltaId

HALVES = shard_bounds(16, 8, 2)


def halved(store: ShardStore, halves: Slices = HALVES, parameters: int = PARAMETERS) -> ShardStore:
    log = RepairLog(store.log.limit_bytes, store.log.seconds)
    parts = ShardStore(store.node_id, halves, parameters, SUM, log)
    divide_store(store, parts)
    return parts


def test_an_owner_owns_the_parts_under_the_same_term_with_the_same_backup() -> None:
    """Values are cut, identities are those of the whole, and what follows goes to one part only."""
    store = owner_of("a", 5)
    store.owned[0].backup = contact("b")
    store.owned[0].promised = 9
    store.add(0, delta(3, 2.0))
    store.owned[0].state.value[:] = [1, 2, 3, 4]
    parts = halved(store)

    assert list(parts.owned) == [0, 1]
    assert [one.state.value.tolist() for one in parts.owned.values()] == [[1, 2], [3, 4]]
    for owned in parts.owned.values():
        assert (owned.term, owned.backup, owned.promised) == (term(5, "a"), contact("b"), 9)
        assert owned.state.knows(DeltaId(IDS["x"], 1, 3))
    assert parts.ownership.known_owners.keys() == {0, 1}
    assert {shard: parts.ownership.fence(shard) for shard in (0, 1)} == {0: term(5, "a"), 1: term(5, "a")}
    parts.owned[0].learner = contact("c")
    parts.owned[0].state.value += 1
    assert (parts.owned[1].learner, parts.owned[1].state.value.tolist()) == (None, [3, 4])
    assert parts.next_term(1) == term(10, "a")  # no promise is made twice


def test_a_move_under_way_stays_one_and_a_catch_up_ends() -> None:
    """Who owns a shard that moves is not known before its backup has said so: nothing is added until then."""
    store = owner_of("a", 5)
    store.owned[0].backup = contact("b")
    store.owned[0].learner = contact("c")
    store.owned[0].begin_move()

    for owned in halved(store).owned.values():
        assert owned.moving
        assert owned.learner is None


@pytest.mark.parametrize("is_active", [False, True])
def test_a_copy_that_its_owner_may_rely_on_stays(is_active: bool) -> None:
    """Also that of a learner whose owner has perhaps made it the backup. Who waits for a state is a learner no more."""
    store = store_of("b")
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 2)
    assert store.begin_catch_up(1, term(1, "a"), contact("a"), 2)
    assert store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    if is_active:
        store.accept_forward(0, term(2, "a"), delta(7), 0, IDS["a"])
    parts = halved(store)

    assert list(parts.backed) == [0, 1]
    for backed in parts.backed.values():
        assert backed.is_active == is_active
        assert (backed.promised, backed.attempt) == (None if is_active else term(2, "a"), 2)
        assert backed.state is not None
        assert backed.state.knows(delta(7).identity) == is_active
    assert parts.accept_forward(1, term(2, "a"), half(8), 0, IDS["a"])[0] == "ok"
    assert parts.backed[1].is_active


def half(step: int) -> object:
    found = delta(step)
    found.delta = found.delta[:2]
    return found


def test_copies_that_lost_and_copies_from_disk_are_divided() -> None:
    """With all that is known of them: their deltas are still to be offered."""
    store = owner_of("a", 5)
    store.add(0, delta(3))
    store.note_owner(0, term(6, "b"), contact("b"))
    store.superseded[0].earlier = Applied.of_rows([(IDS["d"], 1, [(1, 4)])])
    stored = zeros(store, 2)
    store.offer_stored({2: StoredState(term(4, "c"), stored, clean=True)})
    parts = halved(store)

    assert list(parts.superseded) == [0, 1]
    for copy in parts.superseded.values():
        assert (copy.term, copy.known().count()) == (term(5, "a"), 5)
    assert list(parts.stored) == [4, 5]
    assert all(one.term == term(4, "c") and one.clean for one in parts.stored.values())
    assert parts.ownership.fence(5) == term(4, "c")
    assert parts.ownership.known_owners[1].owner == contact("b")


def test_the_log_has_every_part_of_its_deltas() -> None:
    """As they arrived: cut, not encoded anew, in the order in which they were added."""
    store = ShardStore(IDS["a"], BOUNDS, PARAMETERS, SUM, RepairLog(1000, 60.0))
    store.own(1, zeros(store, 1), term(1, "a"), contact("a"), 0.0, by_handover=False)
    for step in (5, 6):
        item = delta(step)
        item.delta, item.codec = np.array([step, 2, 3, -4], np.float32), "int8"
        item.payload = bytes(codecs.encode(item.delta, "int8"))
        store.add(1, item)
    parts = halved(store)

    for shard, values in ((2, slice(0, 2)), (3, slice(2, 4))):
        entries = parts.log.entries(shard)
        assert [entry.identity.step for entry in entries] == [5, 6]
        for entry, whole in zip(entries, store.log.entries(1), strict=True):
            assert (entry.weight, entry.at_s, entry.codec) == (whole.weight, whole.at_s, "int8")
            decoded = codecs.decoded(entry.payload, "int8", 2)
            assert decoded.tolist() == codecs.decoded(whole.payload, "int8", 4)[values].tolist()
    assert parts.log.size_bytes == sum(len(one.payload) for shard in (2, 3) for one in parts.log.entries(shard))
    assert parts.log.reach_s == 60.0


def test_the_replica_keeps_its_vector_and_its_versions() -> None:
    """It is where it was in the owner's chain: the parts of a published value are published."""
    vector = np.arange(16, dtype=np.float32)
    whole, parts = Replica(vector, BOUNDS), Replica(vector, HALVES)
    whole.restore_versions([(term(shard, "a"), 7) for shard in range(4)])
    whole.set_version(3, term(9, "a"), 8, Position(b"chain", 2))
    divide_replica(whole, parts)

    assert parts.versions() == [*[(term(shard, "a"), 7) for shard in (0, 0, 1, 1, 2, 2)], *[(term(9, "a"), 8)] * 2]
    assert [parts.position_of(shard) for shard in (5, 6, 7)] == [NO_POSITION, *[Position(b"chain", 2)] * 2]
    assert parts.slice_of(3).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("total", "before", "after", "expected"),
    [
        (16, (4, 1), (8, 2), True),
        (16, (4, 1), (4, 1), True),
        (16, (8, 2), (4, 1), False),
        (16, (4, 1), (8, 1), True),  # the same slices by another way
        (18, (4, 1), (8, 1), False),
        (4 * 8192, (4, 1), (8, 2), True),
        (4 * 4000, (4, 1), (8, 2), False),  # blocks cannot be cut
    ],
)
def test_only_parts_of_whole_blocks_are_divided(
    total: int, before: tuple[int, int], after: tuple[int, int], expected: bool
) -> None:
    """What is on its way must be cut."""
    assert can_divide(shard_bounds(total, *before), shard_bounds(total, *after)) == expected
