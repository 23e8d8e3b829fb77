"""The repair log: what it keeps and for how long, and which deltas an owner lacks of a superseded copy."""

from __future__ import annotations

import pytest

from p2pnode.training.exchange.store.repair_log import RepairLog, SupersededCopy, compare
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.shards.applied import Applied, DeltaId
from tests.harness.builders.stores import (
    BOUNDS,
    IDS,
    PARAMETERS,
    SUM,
    contact,
    delta,
    term,
    zeros,
)


def logged(name: str, *, limit_bytes: int = 1 << 20, seconds: float = 60.0) -> ShardStore:
    """An owner of shard 0 under (1, name) with a log."""
    store = ShardStore(IDS[name], BOUNDS, PARAMETERS, SUM, RepairLog(limit_bytes, seconds))
    store.own(0, zeros(store), term(1, name), contact(name), 0.0, by_handover=False)
    return store


def identities(store: ShardStore) -> list[int]:
    return [entry.identity.step for entry in store.log.entries(0)]


def test_the_log_has_each_added_delta_once() -> None:
    """By identity, with its weight."""
    store = logged("a")
    for step in (1, 2, 2):
        store.add(0, delta(step))

    assert identities(store) == [1, 2]
    assert store.log.size_bytes == 2 * 16
    assert [entry.weight for entry in store.log.entries(0)] == [1.0, 1.0]


def test_old_entries_are_dropped_unless_they_are_being_offered() -> None:
    """After `seconds` an entry goes, unless its shard has a superseded copy to settle."""
    store = logged("a", seconds=10.0)
    store.log.tick(100.0, 4.0, {})
    store.add(0, delta(1))
    store.log.tick(105.0, 5.0, {})
    store.add(0, delta(2))

    store.log.tick(112.0, 5.0, {0: None})
    assert identities(store) == [1, 2]
    assert [entry.workers for entry in store.log.entries(0)] == [4.0, 5.0]
    store.log.tick(112.0, 5.0, {})
    assert identities(store) == [2]
    assert store.log.reach_s == 10.0
    store.log.tick(200.0, 5.0, {})
    assert (len(store.log), store.log.size_bytes) == (0, 0)


def test_the_reach_is_shorter_when_bytes_run_out() -> None:
    """The oldest entry goes, and the reach is the time since it was added."""
    store = logged("a", limit_bytes=3 * 16)
    for number in range(1, 6):
        store.log.tick(100.0 + number, 1.0, {})
        store.add(0, delta(number))

    assert identities(store) == [3, 4, 5]
    assert store.log.reach_s == pytest.approx(3.0)  # the delta of 102 s has gone, and it is 105 s


def test_a_log_of_no_seconds_keeps_nothing() -> None:
    """`log_seconds = 0` uses no memory and repairs nothing."""
    store = logged("a", seconds=0.0)
    store.add(0, delta(1))

    assert len(store.log) == 0
    assert store.log.reach_s == 0.0


def test_a_comparison_separates_logged_deltas_from_lost_ones() -> None:
    """Of five deltas the owner has two and the log two more: the fifth is lost."""
    store = logged("a", limit_bytes=2 * 16)
    for step in (1, 2, 3, 4, 5):
        store.add(0, delta(step))
    winner = Applied()
    for step in (2, 3):
        winner.add(DeltaId(IDS["x"], 1, step))

    found = compare(SupersededCopy(term(1, "a"), store.owned[0].state), winner, store.log.entries(0))

    assert [entry.identity.step for entry in found.wanted] == [4, 5]
    assert found.lost.rows() == [(IDS["x"], 1, [(1, 1)])]


def test_the_entries_that_another_node_lists_are_found() -> None:
    """By rows of any order, also two of one start; those of other nodes and starts are passed over."""
    store = logged("a")
    for step in (1, 2, 3, 7):
        store.add(0, delta(step))
    entries = store.log.entries(0)
    node, start = entries[0].identity[:2]

    rows = [(IDS["c"], 1, [(1, 9)]), (node, start, [(7, 7)]), (node, start + 1, [(3, 3)]), (node, start, [(0, 2)])]
    assert [entry.identity.step for entry in store.log.those_of(entries, rows)] == [1, 2, 7]
    assert store.log.those_of(entries, rows[::2]) == []
