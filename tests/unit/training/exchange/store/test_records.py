"""Records of one shard: targets of an owner, terms of a backup, and what a buffered delta adds."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.encoding.codecs import encode
from p2pnode.training.exchange.store.records import Backed, BufferedDelta, Owned
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.builders.stores import IDS, SUM, contact, delta, owner_of, store_of, term, value_of, zeros

B, C = contact("b"), contact("c")


def owned() -> Owned:
    return owner_of("a").owned[0]


def test_only_the_present_learner_is_removed() -> None:
    """A message about a former learner changes nothing."""
    record = owned()
    record.learner = C

    record.remove_learner(B.node_id)
    assert record.learner == C
    record.remove_learner(C.node_id)
    assert record.learner is None


def test_a_learner_replaces_the_backup_under_a_new_term() -> None:
    """And is a learner no more."""
    store = owner_of("a")
    record = store.owned[0]
    record.backup, record.learner = B, C

    store.promote_learner(0, C, term(4, "a"), contact("a"), 9.0)

    assert (record.backup, record.learner, record.term, record.since) == (C, None, term(4, "a"), 9.0)


def test_continuing_alone_ends_the_catch_up_and_the_move() -> None:
    """The promise to the learner is below the new term."""
    store = owner_of("a")
    record = store.owned[0]
    record.backup, record.learner, record.moving = B, C, True

    store.drop_backup(0, contact("a"), term(5, "x"))

    assert (record.targets(), record.has_targets, record.moving) == ([], False, False)
    assert (record.term, record.promised) == (term(6, "a"), 6)


def test_a_take_over_ranks_as_its_copy_until_the_first_delta() -> None:
    """Afterwards it has something that no other copy has."""
    record = owned()
    record.rank_as(term(0, "b"))
    assert record.rank_term == term(0, "b")

    delta(1).add_to(record.state, SUM)
    assert record.rank_term == record.term


def test_a_learner_becomes_the_backup_with_the_promised_term() -> None:
    """A lower term of its owner leaves it a learner; a higher one of the pair is followed."""
    backed = Backed(contact("a"), term(1, "a"), state=zeros(store_of("b")), promised=term(3, "a"))
    backed.buffered += [delta(1), delta(2)]

    assert not backed.follow_term(term(2, "a"))
    assert not backed.is_active
    assert backed.follow_term(term(3, "a"))
    assert (backed.is_active, backed.buffered) == (True, [])
    assert not backed.follow_term(term(3, "a"))
    assert backed.follow_term(term(5, "a"))
    assert backed.term == term(5, "a")


def test_a_delta_is_pending_or_visible_by_rule() -> None:
    """Pending under bulk-synchronous rules."""
    for synchronous, value in ((False, 1.0), (True, 0.0)):
        state = zeros(store_of("a"))
        values = np.ones(4, np.float32)
        BufferedDelta(DeltaId(IDS["x"], 1, 1), 1.0, values, synchronous).add_to(state, SUM)
        assert value_of(state) == value
        assert state.known_count == 1


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
def test_a_sparse_delta_is_plain_wherever_it_is_added(synchronous: bool, momentum: bool) -> None:
    """At once, after its barrier, or as a repair: the codec decides, and nothing else is asked."""
    rule = Rule(outer_lr=0.5, outer_momentum=0.5)
    state = ShardState(np.zeros(2, np.float32), 2)
    delta = np.float32([2.0, 0.0])
    item = BufferedDelta(
        DeltaId(IDS["x"], 1, 1), 0.5, delta, synchronous, encode(delta, "sparse"), "sparse", momentum=momentum
    )

    item.add_to(state, rule)
    state.fold(1, rule)

    assert state.value.tolist() == [1.0, 0.0]
    assert state.momentum is None


def test_a_delta_is_logged_as_it_arrived() -> None:
    """Without a payload it is encoded in its codec."""
    arrived = BufferedDelta(DeltaId(IDS["x"], 1, 1), 1.0, np.ones(4, np.float32), False, payload=b"arrived")

    assert arrived.encoded() == b"arrived"
    assert len(bytes(delta(1).encoded())) == 16
