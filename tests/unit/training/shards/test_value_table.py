"""The table of values of a shard: the same batches give the same table, in any order."""

import gc
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import MAX_UPDATES, BadBatch, KeyResult, ValueBatch, decode_batch, encode_batch
from p2pnode.training.shards.value_table import MAX_REFUSED, PIECE_BYTES, ValueTable
from p2pnode.training.shards.value_updates import applied
from p2pnode.training.values.encoding import encode_key, encode_value
from tests.harness.builders.value_updates import NODE, ROOM, UPDATES, batches_of, update, value_of


def test_the_collector_does_not_know_the_entries_of_a_table():
    """Nor the updates that wait: it would look through a hundred thousand of them again and again."""
    one = update(1)
    table = ValueTable()
    table.apply(applied(table, [one], ROOM))
    (entry,) = table.entries.values()
    assert not gc.is_tracked(entry)
    assert not gc.is_tracked(one)
    assert not gc.is_tracked(table.entries)


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


# -- batches of updates of named values


WRONG = [ValueBatch(1, [], [KeyResult(b"sk", 0, None, 0)]), ValueBatch(1, [update(1)], [], [(1, "no")])]


@pytest.mark.parametrize("raw", [b"", b"\x90", *map(encode_batch, WRONG)])
def test_a_malformed_batch_is_refused(raw):
    """Also one whose places point outside its updates."""
    with pytest.raises(BadBatch):
        decode_batch(raw)


def test_a_batch_comes_back_as_it_was():
    """Empty, and with results of both kinds."""
    whole = ValueBatch(
        7, [update(1), update(2)], [KeyResult(b"sk", 3, b"v"), KeyResult(b"sl", 4, None, 1)], [(0, "no")]
    )
    for batch in (ValueBatch(1, [], []), whole):
        assert decode_batch(encode_batch(batch)) == batch


def test_the_value_of_a_result_is_its_own_or_that_of_its_update():
    """An update that replaces a value travels once."""
    first, second = update(1, value=1), update(2, value=2)
    batch = ValueBatch(1, [first, second], [])
    assert batch.value_of(KeyResult(b"sk", 0, b"own", 1)) == b"own"
    assert batch.value_of(KeyResult(b"sk", 0, None, 1)) == second.update


def test_a_batch_has_so_many_updates_at_most():
    """One more is refused where it is decoded."""
    updates = [update(number) for number in range(MAX_UPDATES + 1)]
    assert len(decode_batch(encode_batch(ValueBatch(1, updates[1:], []))).updates) == MAX_UPDATES
    with pytest.raises(BadBatch, match="no batch of values"):
        decode_batch(encode_batch(ValueBatch(1, updates, [])))


def test_an_update_is_known_by_its_origin_and_its_number():
    """Its size is that of key and value."""
    one = update(5, "key", 1)
    assert one.identity == DeltaId(NODE, 1, 5)
    assert one.size_bytes == len(one.key) + len(one.update)
