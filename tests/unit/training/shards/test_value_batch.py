"""Batches of updates of named values: what is encoded is decoded, and places outside of a batch are refused."""

import pytest

from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import (
    MAX_UPDATES,
    BadBatch,
    KeyResult,
    ValueBatch,
    decode_batch,
    encode_batch,
)
from tests.harness.builders.value_updates import NODE, update

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
