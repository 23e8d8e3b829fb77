"""Identities as any node or disk may send them: no exception, and a set that keeps its order."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from training.exchange.ownership_messages import Identities
from training.shards.applied import Applied, DeltaId

LARGEST = (1 << 48) - 1
NODES = st.sampled_from([b"a" * 20, b"b" * 20, b"c" * 20])
NUMBERS = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, LARGEST - 1, LARGEST]), st.integers(0, LARGEST))
ROWS = st.lists(st.tuples(NODES, NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6)), max_size=8)


def as_received(rows: list[tuple[bytes, int, list[tuple[int, int]]]]) -> Applied:
    """The rows as a message brings them."""
    return Applied.of_rows(msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=Identities))


@settings(max_examples=300, deadline=None)
@given(ROWS, ROWS, st.lists(st.tuples(NODES, NUMBERS, NUMBERS), max_size=6))
def test_hostile_rows_make_a_set_like_any_other(
    rows: list[tuple[bytes, int, list[tuple[int, int]]]],
    others: list[tuple[bytes, int, list[tuple[int, int]]]],
    added: list[tuple[bytes, int, int]],
) -> None:
    """Empty, reversed, overlapping and extreme ranges: everything that is computed from the set works, and it can be
    written and read again."""
    found, other = as_received(rows), as_received(others)
    for node, incarnation, step in added:
        found.add(DeltaId(node, incarnation, step))
        assert DeltaId(node, incarnation, step) in found
    for _, _, ranges in found.rows():
        assert ranges
        assert all(low <= high for low, high in ranges)
        assert all(first[1] + 1 < second[0] for first, second in pairwise(ranges))
    assert not found.without(found).count()
    assert found.without(other).count() <= found.count()
    merged = found.copy()
    merged.merge(other)
    assert not found.without(merged).count()
    assert as_received([(node, inc, ranges[:64]) for node, inc, ranges in found.rows()]).count() <= found.count()
