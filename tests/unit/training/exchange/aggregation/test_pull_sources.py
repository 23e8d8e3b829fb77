"""Whom a node asks for values, how old they may be, and who is found to hand down what is not true."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.addresses import Address
from overlay.ids import ID_BYTES
from overlay.peers import Contact
from tests.harness.builders.stores import IDS, term
from training.exchange.aggregation.pull_sources import (
    GRACE_S,
    SLOW,
    WAIT_LEAST_S,
    WAIT_MOST_S,
    PullSources,
    behind_steps,
    divide,
    drawn,
    is_quick,
    oldest_s,
    tick_s,
    wait_s,
    without_shard,
)
from training.exchange.aggregation.routes import RouteTable
from training.exchange.messages import PullResult

TERM = term(3, "b")


def contact_of(node: bytes) -> Contact:
    return Contact(node, Address("10.0.0.1", 1))


def said(published: int, status: Any = "changes", **changes: Any) -> PullResult:
    result = PullResult(1, status, *TERM, 40 + published, chain=b"c" * 8, published=published)
    return msgspec.structs.replace(result, **changes)


# -- whom to ask


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 120), bits=st.integers(1, 5))
def test_each_shard_is_asked_for_once(seed: int, nodes: int, bits: int) -> None:
    """At its owner, or at the node on the way to it; never at a node that is to be left out, nor one that cannot be
    reached."""
    chance = random.Random(seed)
    ids = [chance.randbytes(ID_BYTES) for _ in range(nodes)]
    me, others = ids[0], ids[1:]
    table = RouteTable(me, others, nodes, bits)
    groups = [(contact_of(owner), [2 * number, 2 * number + 1]) for number, owner in enumerate(others)]
    hold = {shard for _, shards in groups for shard in shards if chance.random() < 0.7}
    left_out, gone = chance.choice(others), chance.choice(others)
    direct, ways = divide(groups, table, hold, (left_out,), lambda node: None if node == gone else contact_of(node))

    asked = [shard for _, shards in (*direct, *ways) for shard in shards]
    assert sorted(asked) == sorted(shard for _, shards in groups for shard in shards)
    owners = {shard: owner.node_id for owner, shards in groups for shard in shards}
    assert all(owners[shard] == to.node_id for to, shards in direct for shard in shards)
    for to, shards in ways:
        assert to.node_id not in (left_out, gone)
        assert set(shards) <= hold
        assert all(table.hop(owners[shard], (left_out,)) == to.node_id for shard in shards)
    assert len({to.node_id for to, _ in ways}) == len(ways)


def test_the_second_closest_is_asked_where_the_first_has_been() -> None:
    """And the owner where there is no second."""
    me, first, second = bytes(20), b"\xf0" + bytes(19), b"\xf0" + bytes(18) + b"\x01"
    owner = contact_of(b"\xf7" + bytes(19))
    table = RouteTable(me, [second, first], 1000, 4)
    asked = []
    for without in ((), (first,), (first, second)):
        direct, ways = divide([(owner, [0])], table, (0,), without, contact_of)
        asked.append((direct or ways)[0][0].node_id)
    assert asked == [first, second, owner.node_id]


def test_a_check_is_drawn_of_each_way_as_often() -> None:
    """However many shards go it; not of what the node that is asked owns. The shard is taken from its way."""
    ways = [(contact_of(IDS["a"]), list(range(90))), (contact_of(IDS["b"]), [90]), (contact_of(IDS["c"]), [91])]
    owner_of = dict.fromkeys(range(91), IDS["d"]) | {91: IDS["c"]}
    chance = random.Random(1)
    found = [drawn(ways, owner_of, chance) for _ in range(400)]
    assert 150 <= found.count(90) <= 250
    assert 91 not in found
    assert drawn([], {}, chance) is None
    assert drawn(ways[2:], owner_of, chance) is None
    assert without_shard(ways, 90) == [ways[0], ways[2]]
    assert without_shard(ways, 5)[0][1] == [shard for shard in range(90) if shard != 5]


# -- how old


def test_only_nodes_of_about_the_median_speed_hand_down() -> None:
    """One whose step time is not known yet does too; and all where no median is."""
    assert is_quick(0.0, 10.0)
    assert is_quick(SLOW * 10.0, 10.0)
    assert not is_quick(SLOW * 10.0 + 0.1, 10.0)
    assert is_quick(1000.0, 0.0)


def test_a_value_may_be_older_the_more_nodes_hand_it_down() -> None:
    """What a node accepts and the longest step of one that hands down are together what the next one accepts, so that
    an honest chain of nodes is never refused."""
    for step_s in (0.0, 1.0, 60.0):
        assert oldest_s(0, step_s) == GRACE_S
        for relays in range(5):
            assert oldest_s(relays, step_s) + SLOW * step_s <= oldest_s(relays + 1, step_s)
    assert oldest_s(2, 60.0) == 180.5


@pytest.mark.parametrize(
    ("age_s", "step_s", "behind"),
    [(0.0, 10.0, 0), (1.0, 10.0, 0), (2.0, 10.0, 1), (11.0, 10.0, 1), (29.0, 10.0, 3), (5.0, 0.0, 0)],
)
def test_a_base_is_as_many_steps_old_as_its_oldest_value(age_s: float, step_s: float, behind: int) -> None:
    """A step that has begun counts, but for the time of a request."""
    assert behind_steps(age_s, step_s) == behind


def test_a_node_waits_a_part_of_a_step_for_its_own_pull() -> None:
    """Between two bounds."""
    assert [wait_s(step_s) for step_s in (0.0, 1.0, 100.0)] == [WAIT_LEAST_S, 0.25, WAIT_MOST_S]


# -- whom not to ask


def test_a_node_is_avoided_until_its_time_is_over() -> None:
    """The longest time counts."""
    sources = PullSources()
    sources.avoid(IDS["a"], 100.0)
    sources.avoid(IDS["a"], 50.0)
    assert sources.is_avoided(IDS["a"], 99.0)
    assert not sources.is_avoided(IDS["a"], 100.0)
    assert not sources.is_avoided(IDS["b"], 0.0)
    sources.drop_past(100.0)
    assert not sources.is_avoided(IDS["a"], 99.0)


def test_wrong_bits_are_those_of_the_node_that_gave_them() -> None:
    """Not where the owner has said something itself since, nor where it was another one then; and only once."""
    sources = PullSources()
    sources.took(said(5), IDS["a"], 1.0)
    sources.took(said(5, "same"), IDS["c"], 1.0)
    assert sources.giver(said(7)) == IDS["a"]
    assert sources.giver(said(7)) is None
    sources.took(said(5), IDS["a"], 1.0)
    sources.heard(said(6), 10.0)
    assert sources.giver(said(7)) is None
    sources.took(said(7), IDS["a"], 1.0)
    assert sources.giver(said(8, term_number=9)) is None


def test_a_date_after_a_later_value_is_not_true() -> None:
    """The owner has said that it had version 6 before. Of another chain or term that says nothing, nor does a date
    before, nor that version itself."""
    sources = PullSources()
    assert not sources.is_untrue(said(5), 100.0)
    sources.heard(said(6), 10.0)
    assert sources.is_untrue(said(5), 10.0)
    assert sources.is_untrue(said(5, "retry"), 10.0)
    assert not sources.is_untrue(said(5), 9.9)
    assert not sources.is_untrue(said(6), 100.0)
    assert not sources.is_untrue(said(5, term_number=9), 100.0)
    assert not sources.is_untrue(said(5, chain=b"d" * 8), 100.0)


def test_an_owner_makes_no_more_values_than_it_can() -> None:
    """Twelve more, of which it makes one in half a step at most, were not made in two steps: whoever has said that it
    had none of them then was wrong. Of another chain, or where no step time is known, that says nothing."""
    assert tick_s(0.53, 10.0) == pytest.approx(4.42, abs=0.01)
    assert (tick_s(4.0, 10.0), tick_s(0.0, 12.0)) == (5.0, pytest.approx(0.5))

    def found(later: int, age_s: float, **changes: Any) -> bytes | None:
        sources = PullSources()
        sources.took(said(5, "same"), IDS["a"], 100.0 - age_s)
        return sources.heard(said(5 + later, **changes), 100.0, tick_s(1.0, 10.0), 10.0)

    assert found(12, 17.0) == IDS["a"]
    assert found(12, 18.0) is None
    assert found(5, 0.0) is None
    assert found(6, 0.0) == IDS["a"]
    assert found(12, 0.0, chain=b"d" * 8) is None
    sources = PullSources()
    sources.took(said(5), IDS["a"], 100.0)
    assert sources.heard(said(99), 100.0) is None
    assert sources.heard(said(199), 100.0, 5.0, 10.0) is None
