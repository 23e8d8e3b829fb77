"""The table of values of a shard: the same batches give the same table, in any order."""

import gc
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.shards.value_batch import BadBatch, KeyResult, KeyUpdate, ValueBatch, decode_batch, encode_batch
from training.shards.value_table import MAX_REFUSED, PIECE_BYTES, ValueTable
from training.shards.value_updates import FULL, TOO_LARGE, applied, is_built_in, pulled, wrong_result
from training.values.encoding import MAX_VALUE_BYTES, decode_value, encode_key, encode_value

NODE, OTHER = b"n" * 20, b"o" * 20
ROOM = 1 << 30


def update(number, key="k", value=1, reducer="add", stamp=0, node=NODE):
    return KeyUpdate(node, 1, number, encode_key(key), reducer, encode_value(key, value), stamp)


def value_of(table, key):
    entry = table.entries[encode_key(key)]
    return decode_value(entry.value), entry.timestamp


def test_the_collector_does_not_know_the_entries_of_a_table():
    """Nor the updates that wait: it would look through a hundred thousand of them again and again."""
    one = update(1)
    table = ValueTable()
    table.apply(applied(table, [one], ROOM))
    (entry,) = table.entries.values()
    assert not gc.is_tracked(entry)
    assert not gc.is_tracked(one)
    assert not gc.is_tracked(table.entries)


UPDATES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-5, 5), st.sampled_from(["add", "replace"]), st.integers(0, 9)),
    max_size=24,
)


def batches_of(rows, cut):
    """The batches of an owner that applies these updates, `cut` at a time, and its table."""
    table, batches = ValueTable(), []
    updates = [update(number, key, value, reducer, stamp) for number, (key, value, reducer, stamp) in enumerate(rows)]
    for first in range(0, len(updates), cut):
        batches.append(applied(table, updates[first : first + cut], ROOM))
        table.apply(batches[-1])
    return table, batches


@given(UPDATES, st.integers(1, 5), st.randoms())
def test_batches_in_any_order_and_twice_give_the_owner_s_table(rows, cut, random):
    """A backup that receives late, out of order and again has what the owner has."""
    owner, batches = batches_of(rows, cut)
    arrived = batches + random.sample(batches, len(batches) // 2)
    random.shuffle(arrived)
    backup = ValueTable()
    for batch in arrived:
        backup.apply(decode_batch(encode_batch(batch)))
    assert backup == owner


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


@given(UPDATES)
def test_a_table_returns_whole_from_its_pieces(rows):
    """On the wire and on disk: values, known updates, refusals, and its size."""
    table, _ = batches_of(rows, 3)
    table.apply(ValueBatch(table.order + 1, [update(99)], [], [(0, "no")]))
    found = ValueTable()
    for piece in table.pieces():
        found.add_piece(piece)
    assert found == table


def test_a_large_table_is_cut_into_pieces():
    """No piece has more than its bytes, except for one value that is larger."""
    table = ValueTable()
    updates = [update(number, f"k{number}", b"x" * 60_000, "replace") for number in range(20)]
    table.apply(applied(table, [*updates, update(20, "big", b"x" * 600_000, "replace")], ROOM))
    pieces = list(table.pieces())
    assert len(pieces) == 6
    assert sorted(len(piece) > PIECE_BYTES for piece in pieces) == [False] * 5 + [True]


def test_the_fate_of_an_update_is_remembered():
    """None, applied, or the reason of its refusal; bounded."""
    table = ValueTable()
    batch = applied(table, [update(1), update(2, value="text")], ROOM)
    assert table.fate(update(1).identity) is None
    table.apply(batch)
    assert table.fate(update(1).identity) == ""
    assert "numbers and arrays" in table.fate(update(2).identity)
    for number in range(3, MAX_REFUSED + 10):
        table.apply(ValueBatch(table.order + 1, [update(number)], [], [(0, "no")]))
    assert len(table.refused) == MAX_REFUSED


def test_the_size_follows_the_values():
    """A replaced value counts once."""
    table = ValueTable()
    sizes = []
    for number, count in enumerate((10, 1000, 10)):
        table.apply(applied(table, [update(number, "k", b"x" * count, "replace")], ROOM))
        sizes.append(table.size_bytes)
    assert sizes[0] == sizes[2]
    assert sizes[1] - sizes[0] == len(encode_value("k", b"x" * 1000)) - len(encode_value("k", b"x" * 10))


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


WRONG = [ValueBatch(1, [], [KeyResult(b"sk", 0, None, 0)]), ValueBatch(1, [update(1)], [], [(1, "no")])]


@pytest.mark.parametrize("raw", [b"", b"\x90", *map(encode_batch, WRONG)])
def test_a_malformed_batch_is_refused(raw):
    """Also one whose places point outside its updates."""
    with pytest.raises(BadBatch):
        decode_batch(raw)


@pytest.mark.parametrize(
    "piece",
    [
        b"\x00",
        ([(b"sk", b"1", 0, 1 << 48)],),
        ([(b"sk", b"1", 1 << 62, 1)],),
        ([], 1 << 48),
        ([], 0, [(NODE, 1, [(0, 1 << 48)])]),
        ([], 0, [(b"short", 1, [(0, 1)])]),
        ([], 0, [], [(NODE, 1, 1 << 48, "no")]),
    ],
)
def test_a_malformed_piece_is_refused(piece):
    """Also one with counts that no run reaches: what follows them would fit no message. Nothing of it enters."""
    table = ValueTable()
    with pytest.raises(BadBatch):
        table.add_piece(piece if isinstance(piece, bytes) else msgspec.msgpack.encode(piece))
    assert table == ValueTable()


def test_the_newer_of_two_values_stays_whatever_their_timestamps():
    """The order of batches decides, not the timestamp, which is the user's."""
    for batches in itertools.permutations([applied_one(1, 9), applied_one(2, 1)]):
        table = ValueTable()
        for batch in batches:
            table.apply(batch)
        assert value_of(table, "k") == (2, 1)


def applied_one(order, stamp):
    return ValueBatch(order, [update(order, "k", order, "replace", stamp)], [KeyResult(encode_key("k"), stamp)])
