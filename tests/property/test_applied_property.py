"""Identities as any node or disk may send them, in any order: a set that keeps its order, and adds nothing twice."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.exchange.ownership_messages import Identities
from p2pnode.training.shards.applied import Applied, DeltaId

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


def test_no_order_of_events_applies_a_delta_twice() -> None:
    """Deltas come twice, late, and after the row of their start was dropped, and one is on its way meanwhile: each is
    applied once at most. A set of before lists nothing that the present one is taken to lack."""
    print("seeds 0 to 499")
    dropped = 0
    for seed in range(500):
        chance, applied, ever = random.Random(seed), Applied(), set[DeltaId]()
        applied.MAX_STARTS = chance.randint(1, 4)
        on_its_way: DeltaId | None = None
        for _ in range(60):
            identity = DeltaId(bytes([chance.randrange(3)]) * 20, chance.randint(1, 3), chance.randint(0, 8))
            before = applied.copy()
            if on_its_way is None and chance.random() < 0.1:
                on_its_way = None if identity in applied or applied.may_have_forgotten(identity) else identity
                continue
            if on_its_way is not None and chance.random() < 0.3:
                identity, on_its_way = on_its_way, None
                applied.add(identity)
            elif identity in applied or applied.may_have_forgotten(identity) or identity == on_its_way:
                continue
            else:
                applied.add(identity)
            assert identity not in ever, f"seed {seed}: {identity} is applied twice"
            ever.add(identity)
            assert len(applied.rows()) <= applied.MAX_STARTS
            assert not before.without(applied).count()
        dropped += applied.before > 0
    assert dropped > 250
