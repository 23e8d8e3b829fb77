"""The set of applied identities: ranges of steps per node and incarnation."""

from __future__ import annotations

import msgspec
import pytest

from p2pnode.training.shards.applied import Applied, DeltaId

NODES = [bytes([letter]) * 20 for letter in b"abcdef"]


def identity(step: int, node: int = 0, incarnation: int = 1) -> DeltaId:
    return DeltaId(NODES[node], incarnation, step)


def test_a_lookup_changes_nothing() -> None:
    """A lookup of unknown identities adds no row."""
    applied = Applied()
    assert identity(1) not in applied

    assert applied.rows() == []


def test_the_start_that_was_added_to_longest_ago_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are refused of every start that is not listed; those of one that is listed are known."""
    monkeypatch.setattr(Applied, "MAX_STARTS", 2)
    applied = Applied()
    for one in (
        identity(4, incarnation=1),
        identity(5, incarnation=2),
        identity(5, incarnation=1),
        identity(6, node=1),
    ):
        applied.add(one)

    assert [row[:2] for row in applied.rows()] == [(NODES[0], 1), (NODES[1], 1)]
    assert [applied.may_have_forgotten(identity(step, incarnation=2)) for step in (5, 6)] == [True, False]
    assert [applied.may_have_forgotten(identity(step, node=2)) for step in (5, 6)] == [True, False]
    assert [applied.may_have_forgotten(identity(step)) for step in (3, 4, 6)] == [True, False, False]


def test_a_start_that_comes_back_knows_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta was on its way while the row of its start was dropped."""
    monkeypatch.setattr(Applied, "MAX_STARTS", 1)
    applied = Applied()
    for one in (identity(7), identity(1, node=1), identity(3)):
        applied.add(one)

    assert all(identity(step) in applied for step in range(8))
    assert identity(8) not in applied


def test_what_may_be_forgotten_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair counts it neither as lacking nor as lost."""
    monkeypatch.setattr(Applied, "MAX_STARTS", 1)
    whole, other = Applied(), Applied()
    for step in (1, 2, 5):
        whole.add(identity(step))
    other.add(identity(2))
    other.add(identity(9, node=1))

    assert whole.without(other).rows() == [(NODES[0], 1, [(5, 5)])]


def test_rows_survive_the_wire() -> None:
    """The rebuilt set is equal, and shares no memory with the former."""
    applied = Applied()
    for step in (1, 2, 5, 9):
        applied.add(identity(step, node=step % 2))
    packed = msgspec.msgpack.encode(applied.rows())
    rows = msgspec.msgpack.decode(packed, type=list[tuple[bytes, int, list[tuple[int, int]]]])

    again = Applied.of_rows(rows)

    assert again.rows() == applied.rows()
    again.add(identity(3, node=1))
    assert identity(3, node=1) not in applied


def test_a_copy_of_the_set_is_independent() -> None:
    """Additions to one do not change the other."""
    applied = Applied()
    applied.add(identity(1))
    twin = applied.copy()
    twin.add(identity(2))
    applied.add(identity(9))

    assert identity(2) not in applied
    assert identity(9) not in twin


def test_applied_sets_subtract_and_merge_by_ranges() -> None:
    """By ranges, not step by step."""
    one, other = Applied(), Applied()
    for step in (1, 2, 3, 4, 7, 8, 9):
        one.add(DeltaId(NODES[0], 1, step))
    for step in (2, 3, 8):
        other.add(DeltaId(NODES[0], 1, step))
    one.add(DeltaId(NODES[1], 2, 5))

    assert one.without(other).rows() == [(NODES[0], 1, [(1, 1), (4, 4), (7, 7), (9, 9)]), (NODES[1], 2, [(5, 5)])]
    assert other.without(one).rows() == []
    other.merge(one)
    assert sorted(other.rows()) == sorted(one.rows())


def test_beyond_the_most_ranges_the_lowest_gap_closes() -> None:
    """Memory is bounded: the two oldest of 65 separate steps are joined, the newer gaps stay."""
    applied = Applied()
    steps = range(0, 2 * (Applied.MAX_RANGES + 1), 2)
    for step in steps:
        applied.add(identity(step))

    assert len(applied.rows()[0][2]) == Applied.MAX_RANGES
    assert all(identity(step) in applied for step in steps)
    assert identity(1) in applied  # the closed gap
    assert all(identity(step + 1) not in applied for step in steps if step >= 2)
