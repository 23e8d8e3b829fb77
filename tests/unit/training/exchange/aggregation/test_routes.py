"""Routes: every delta comes to its owner, and nobody has many next nodes, whatever each node knows of the others."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.ids import ID_BITS, ID_BYTES
from training.exchange.aggregation.routes import MAX_LEVELS, RouteTable, comes_closer, levels


def ids_of(seed: int, count: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(ID_BYTES) for _ in range(count)]


def shared_digits(one: bytes, other: bytes, bits: int) -> int:
    differs = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return (ID_BITS - differs.bit_length()) // bits


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(2, 150),
    bits=st.integers(1, 8),
    knows=st.floats(0.0, 1.0),
    estimate=st.floats(0.5, 2.0),
)
def test_a_delta_comes_closer_with_every_node_that_hands_it_on(
    seed: int, nodes: int, bits: int, knows: float, estimate: float
) -> None:
    """Each node knows a part of the others, and has an estimate of its own of how many there are. Every delta comes
    to its owner all the same, sharing a digit more with it after each node, and passes fewer nodes than there are
    digits."""
    ids, chance = ids_of(seed, nodes), random.Random(seed + 1)
    tables = {
        one: RouteTable(
            one,
            [other for other in ids if other != one and chance.random() < knows],
            nodes * estimate * chance.uniform(0.7, 1.4),
            bits,
        )
        for one in ids
    }
    for owner in chance.sample(ids, min(8, nodes)):
        for origin in ids:
            at, passed, before = origin, 0, b""
            while at != owner and (hop := tables[at].hop(owner)) is not None:
                assert shared_digits(hop, owner, bits) > shared_digits(at, owner, bits)
                assert not before or comes_closer(at, before, hop)
                at, passed, before = hop, passed + 1, at
                assert passed < max(table.levels for table in tables.values())
            assert at == owner or not before or comes_closer(at, before, owner)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 40))
def test_nodes_that_come_closer_each_time_are_never_the_same_again(seed: int, nodes: int) -> None:
    """Whomever each of them takes for the owner, and in digits of how many bits: no request waits for itself."""
    ids, chance = ids_of(seed, nodes), random.Random(seed)
    before, at = chance.sample(ids, 2)
    passed = {(before, at): None}
    while closer := [one for one in ids if comes_closer(at, before, one) and one != at]:
        before, at = at, chance.choice(closer)
        assert (before, at) not in passed
        passed[before, at] = None
    assert len(passed) <= ID_BITS


@pytest.mark.parametrize(("nodes", "bits"), [(300, 5), (1000, 5), (1000, 3), (3000, 3)])
def test_a_node_has_few_next_nodes(nodes: int, bits: int) -> None:
    """At most 2**bits - 1 for each digit but the last, and about as many owners that it sends to without others."""
    ids = ids_of(nodes, nodes)
    for me in ids[:20]:
        table = RouteTable(me, [one for one in ids if one != me], nodes, bits)
        direct = sum(table.hop(owner) is None for owner in ids if owner != me)
        assert len(table.next_nodes()) <= (levels(nodes, bits) - 1) * (2**bits - 1)
        assert direct <= 2 * 2**bits


def test_nothing_is_handed_on_among_few() -> None:
    """As many nodes as one digit tells apart send to each other."""
    ids = ids_of(1, 32)
    table = RouteTable(ids[0], ids[1:], 32, 5)

    assert table.levels == 1
    assert all(table.hop(owner) is None for owner in ids)
    assert table.next_nodes() == []


def test_an_owner_whose_digits_nobody_known_has_is_sent_to_directly() -> None:
    """There is nobody to hand its deltas to. One that is next itself gets them with what it is to hand on."""
    me, other, far = bytes(20), b"\x01" + bytes(19), b"\xf0" + bytes(19)
    table = RouteTable(me, [other, far], 1000, 4)

    assert table.hop(b"\x70" + bytes(19)) is None
    assert table.hop(other) == other
    assert table.hop(far) == far
    assert table.hop(b"\xf7" + bytes(19)) == far


def test_of_several_the_one_closest_to_this_node_is_next() -> None:
    """So the nodes that begin with other digits choose others."""
    near, far = bytes.fromhex("f0" + "11" * 19), bytes.fromhex("f0" + "e1" * 19)
    owner = bytes.fromhex("f" + "5" * 39)

    assert RouteTable(bytes.fromhex("00" + "10" * 19), [near, far], 1000, 4).hop(owner) == near
    assert RouteTable(bytes.fromhex("00" + "e0" * 19), [near, far], 1000, 4).hop(owner) == far


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(3, 100), bits=st.integers(1, 5))
def test_the_second_is_the_closest_of_the_others(seed: int, nodes: int, bits: int) -> None:
    """Without the closest node a table says what one says that does not know it, in whatever order it is built."""
    ids = ids_of(seed, nodes)
    me, others = ids[0], ids[1:]
    table = RouteTable(me, others, nodes, bits)
    for owner in ids[1:20]:
        first = table.hop(owner)
        without = RouteTable(me, [other for other in others if other != first], nodes, bits)
        assert table.hop(owner, (first or b"",)) == (None if first is None else without.hop(owner))


def test_a_node_knows_how_many_hand_on_and_for_whom_it_does() -> None:
    """Up to one node for each digit but the last that differs; others ask for an owner that shares a digit."""
    me = bytes(20)
    table = RouteTable(me, [b"\xf0" + bytes(19)], 4000, 4)
    assert table.levels == 3
    owners = [b"\xf0" + bytes(19), b"\x0f" + bytes(19), b"\x00\xf0" + bytes(18)]
    assert [table.relays_to(owner) for owner in owners] == [2, 1, 0]
    assert [table.is_on_the_way(owner) for owner in owners] == [False, True, True]
    assert not RouteTable(me, [], 10, 4).is_on_the_way(owners[2])


def test_digits_tell_so_many_nodes_apart() -> None:
    """The levels of some swarms; digits of no bits are refused."""
    assert [levels(nodes, 5) for nodes in (1, 32, 33, 1000, 1024, 1025, 10_000)] == [1, 1, 2, 2, 2, 3, 3]
    assert levels(1e300, 1) == MAX_LEVELS
    with pytest.raises(ValueError, match="0 bits"):
        levels(10, 0)
