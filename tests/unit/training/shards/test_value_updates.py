"""The batch that comes of updates: their order, room, refusals, late ones, and the results of the user's `pull`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.shards.value_batch import MAX_REASON, MAX_TIMESTAMP
from p2pnode.training.shards.value_table import ENTRY_BYTES, ValueTable
from p2pnode.training.shards.value_updates import (
    FULL,
    TOO_LARGE,
    applied,
    cut,
    is_built_in,
    pulled,
    wrong_result,
    wrong_timestamp,
)
from p2pnode.training.values.encoding import MAX_VALUE_BYTES, encode_key, encode_value
from tests.harness.builders.value_updates import ROOM, UPDATES, batches_of, update, value_of


@given(UPDATES, st.integers(1, 5))
def test_the_owner_applies_updates_one_after_the_other(rows, cut):
    """However they are cut into batches, the values are those of a loop over the updates."""
    table, _ = batches_of(rows, cut)
    expected = {}
    for key, value, reducer, stamp in rows:
        former = expected.get(key)
        if reducer == "replace" or former is None:
            expected[key] = (value, stamp)
        else:
            expected[key] = (former[0] + value, max(former[1], stamp))
    assert {key: value_of(table, key) for key in expected} == expected
    assert len(table.entries) == len(expected)


def test_what_does_not_fit_is_refused_and_the_rest_goes_on():
    """Growth is bounded by the room; a value that does not grow fits still."""
    table = ValueTable()
    table.apply(applied(table, [update(1, "a", b"x" * 500, "replace")], 1000))
    updates = [update(2, "b", b"x" * 900, "replace"), update(3, "a", b"y" * 500, "replace"), update(4, "c", 1)]
    batch = applied(table, updates, 300)
    assert batch.refused == [(0, FULL)]
    table.apply(batch)
    assert [key for key in "abc" if encode_key(key) in table.entries] == ["a", "c"]
    assert value_of(table, "a")[0] == b"y" * 500


def test_pull_gives_the_last_result_of_a_key_and_refuses_what_failed():
    """The results of the script enter whole; the updates of a key that failed are known, and change nothing."""
    table = ValueTable()
    table.apply(applied(table, [update(1, "a", 1, "replace")], ROOM))
    updates = [update(2, "a", 5, "pull"), update(3, "b", 7, "pull"), update(4, "a", 6, "pull")]
    key = encode_key("a")
    results = [(key, encode_value("a", 10), 2), (key, encode_value("a", 20), 3)]
    batch = pulled(table, updates, results, {1: "raised"}, ROOM)
    table.apply(batch)
    assert value_of(table, "a") == (20, 3)
    assert [table.fate(one.identity) for one in updates] == ["", "raised", ""]
    assert encode_key("b") not in table.entries
    huge = pulled(table, [update(5, "a", 1, "pull")], [(key, b"x" * (MAX_VALUE_BYTES + 1), 1)], {}, ROOM)
    assert (huge.results, huge.refused) == ([], [(0, TOO_LARGE)])
    assert pulled(table, [update(6, "c", 1, "pull")], [(encode_key("c"), b"\x01", 1)], {}, 10).refused == [(0, FULL)]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ((encode_key("a"), b"1", 1), ""),
        ((encode_key("zzz"), b"1", 1), "'zzz'"),
        ((encode_key("a"), b"", 1), "no encoded value"),
        ((encode_key("a"), "text", 1), "no encoded value"),
        ((encode_key("a"), b"1", 1 << 62), "timestamp"),
        ((encode_key("a"), b"1", 0.5), "timestamp 0.5"),
    ],
)
def test_a_result_that_no_backup_would_take_is_named(result, said):
    """A key outside the batch, no value, or no timestamp: before anything is sent."""
    found = wrong_result([update(1, "a")], [result])
    assert said in found
    assert bool(found) == bool(said)


def test_a_late_set_yields_to_a_higher_timestamp():
    """What was set on the other side of a split, or arrives after a later update of its origin, is known and changes
    nothing; with the same timestamp, and for other reducers, it counts."""
    table = ValueTable()
    table.apply(applied(table, [update(5, "k", 7, "replace", 3)], ROOM))
    late = [update(1, "k", 1, "replace", 2), update(2, "k", 2, "add", 1)]
    table.apply(applied(table, late, ROOM, [0, 1]))
    assert value_of(table, "k") == (9, 3)
    assert table.fate(late[0].identity) == ""
    table.apply(applied(table, [update(3, "k", 30, "replace", 3)], ROOM, [0]))
    assert value_of(table, "k") == (30, 3)
    table.apply(applied(table, [update(6, "k", 40, "replace", 0)], ROOM))
    assert value_of(table, "k") == (40, 0)


@pytest.mark.parametrize(("reducer", "built_in"), [("add", True), ("replace", True), ("pull", False)])
def test_who_applies(reducer, built_in):
    """The daemon runs the reducers it has, the script its own."""
    assert is_built_in(update(1, reducer=reducer)) is built_in


def test_no_update_makes_an_empty_batch_of_the_next_order():
    """Orders rise with every batch, so that the newer of two values is known."""
    table = ValueTable()
    batch = applied(table, [], ROOM)
    assert (batch.order, batch.updates, batch.results, batch.refused) == (table.order + 1, [], [], [])


def test_room_is_what_a_new_key_takes_and_not_a_byte_less():
    """Its key, its value, and the entry; one that fits exactly is taken."""
    one = update(1, "a", b"x" * 10, "replace")
    need = len(one.key) + len(one.update) + ENTRY_BYTES
    assert applied(ValueTable(), [one], need).refused == []
    assert applied(ValueTable(), [one], need - 1).refused == [(0, FULL)]
    assert applied(ValueTable(), [one], -5).refused == [(0, FULL)]


def test_a_key_that_shrinks_makes_room_for_the_next():
    """Within one batch too."""
    table = ValueTable()
    table.apply(applied(table, [update(1, "a", b"x" * 900, "replace")], ROOM))
    updates = [update(2, "a", b"x", "replace"), update(3, "b", b"y" * 500, "replace")]
    assert applied(table, updates, 0).refused == []
    assert applied(table, updates[::-1], 0).refused == [(0, FULL)]


def test_an_update_that_cannot_be_added_is_refused_with_its_reason():
    """The others of its key are added, before it and after it."""
    table = ValueTable()
    batch = applied(table, [update(1, "a", 1), update(2, "a", "text"), update(3, "a", 2)], ROOM)
    table.apply(batch)
    assert [place for place, _ in batch.refused] == [1]
    assert value_of(table, "a") == (3, 0)


def test_a_fault_of_one_update_refuses_that_update_alone(monkeypatch):
    """Whatever it raises: with each round it would come again, and hold up all behind it."""

    def faulty(_reducer, _value, update):
        if update == 2:
            raise KeyError("a bug")
        return update

    monkeypatch.setattr("p2pnode.training.shards.value_updates.reduced", faulty)
    batch = applied(ValueTable(), [update(1, "a", 1), update(2, "b", 2), update(3, "c", 3)], ROOM)
    assert batch.refused == [(1, "'a bug'")]
    assert [result.key for result in batch.results] == [encode_key("a"), encode_key("c")]


def test_a_long_reason_is_cut():
    """So that it fits an answer; a short one stays."""
    assert cut("short") == "short"
    assert cut("x" * MAX_REASON) == "x" * MAX_REASON
    assert cut("x" * (MAX_REASON + 1)) == "x" * (MAX_REASON - 1) + "…"


@pytest.mark.parametrize("timestamp", [0, -MAX_TIMESTAMP, MAX_TIMESTAMP - 1, True])
def test_a_timestamp_within_its_limits_can_be_sent(timestamp):
    """One beyond them is shown in the error."""
    assert wrong_timestamp(timestamp) == ""
    for wrong in (MAX_TIMESTAMP, -MAX_TIMESTAMP - 1, 1.0, None):
        assert wrong_timestamp(wrong).startswith(f"the timestamp {wrong!r:.50}")


def test_of_two_results_of_a_key_the_first_stays_where_the_second_is_too_large():
    """Its updates count as refused then, so that nobody takes them for applied; the value is not stored."""
    table, key = ValueTable(), encode_key("a")
    updates = [update(1, "a", 1, "pull"), update(2, "b", 1, "pull")]
    results = [(key, encode_value("a", 1), 1), (key, b"x" * (MAX_VALUE_BYTES + 1), 2)]
    batch = pulled(table, updates, [*results, (encode_key("b"), encode_value("b", 4), 1)], {}, ROOM)
    assert batch.refused == [(0, TOO_LARGE)]
    assert [result.key for result in batch.results] == [encode_key("b")]
