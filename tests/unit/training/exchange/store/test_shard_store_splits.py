"""Superseded copies, fences and restarts in the store: what a node keeps when another one owns its shard."""

from __future__ import annotations

import numpy as np

from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.store.records import BufferedDelta
from p2pnode.training.exchange.store.repair_log import RepairLog
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM
from p2pnode.training.shards.applied import DeltaId
from tests.harness.builders.stores import (
    BOUNDS,
    IDS,
    PARAMETERS,
    SUM,
    backup_of,
    contact,
    delta,
    owner_of,
    store_of,
    term,
    value_of,
    zeros,
)


def logged(name: str, *, limit_bytes: int = 1 << 20, seconds: float = 60.0) -> ShardStore:
    """An owner of shard 0 under (1, name) with a log."""
    store = ShardStore(IDS[name], BOUNDS, PARAMETERS, SUM, RepairLog(limit_bytes, seconds))
    store.own(0, zeros(store), term(1, name), contact(name), 0.0, by_handover=False)
    return store


def identities(store: ShardStore) -> list[int]:
    return [entry.identity.step for entry in store.log.entries(0)]


def test_a_delta_without_a_payload_is_added_exactly_and_logged_in_its_codec() -> None:
    """A node's own delta: the value gets every bit, the log two or four bytes of each value."""
    own = np.array([1.0 + 2.0**-20, -3.0, 0.5, 2.0**-20], dtype=np.float32)
    for codec, per_value, rounded in (("float32", 4, own), ("bfloat16", 2, [1.0, -3.0, 0.5, 2.0**-20])):
        store = logged("a")
        store.add(0, BufferedDelta(DeltaId(IDS["a"], 1, 1), 1.0, own.copy(), False, codec=codec))  # type: ignore[arg-type]

        (entry,) = store.log.entries(0)
        assert (store.owned[0].state.value == own).all()
        assert (entry.codec, len(entry.payload)) == (codec, 4 * per_value)
        assert (codecs.decoded(entry.payload, entry.codec, 4) == rounded).all()


def test_an_unlogged_delta_is_added_once() -> None:
    """For a node that has never met another: exact, counted, and known by its identity."""
    store = logged("a")
    own = np.array([1.0 + 2.0**-20, -3.0, 0.5, 2.0**-20], dtype=np.float32)
    identity = DeltaId(IDS["a"], 1, 1)

    for _ in range(2):
        store.add_unlogged(0, identity, 1.0, own)

    state = store.owned[0].state
    assert (state.value == own).all()
    assert state.knows(identity)
    assert identities(store) == []


def test_an_owner_that_loses_keeps_its_copy_to_offer() -> None:
    """Deltas that this side acknowledged may be in no other copy."""
    store = logged("a")
    store.add(0, delta(1))

    assert store.note_owner(0, term(5, "c"), contact("c"))

    assert 0 not in store.owned
    assert store.superseded[0].term == term(1, "a")
    assert value_of(store.superseded[0].state) == 1.0


def test_a_backup_whose_shard_another_pair_took_keeps_its_copy() -> None:
    """Its owner may have crashed during the split: then this is the only copy of that side."""
    store = backup_of("b", "a")
    store.note_owner(0, term(5, "c"), contact("c"))

    assert 0 not in store.backed
    assert store.superseded[0].term == term(1, "a")


def test_of_two_copies_the_later_stays_and_the_identities_of_both() -> None:
    """The shard was lost twice before the first copy was settled."""
    store = logged("a")
    store.add(0, delta(1))
    store.note_owner(0, term(5, "c"), contact("c"))
    store.own(0, zeros(store), term(6, "a"), contact("a"), 0.0, by_handover=False)
    store.add(0, delta(2))
    store.note_owner(0, term(7, "c"), contact("c"))

    known = store.superseded[0].known()
    assert store.superseded[0].term == term(6, "a")
    assert all(DeltaId(IDS["x"], 1, step) in known for step in (1, 2))


def test_a_take_over_from_another_copy_keeps_the_own_one() -> None:
    """The own copy may have deltas that the other lacks."""
    store = backup_of("b", "a")
    store.own(0, zeros(store), term(9, "b"), contact("b"), 0.0, by_handover=False)

    assert store.superseded[0].term == term(1, "a")


def test_the_report_of_the_own_hand_over_makes_this_node_the_backup() -> None:
    """The new owner relies on it. Found by the model: the copy was forgotten instead."""
    store = owner_of("a")
    owned = store.owned[0]
    owned.backup, owned.moving = contact("b"), True
    handed = store.promise(0)

    assert store.note_owner(0, handed, contact("b"))

    assert 0 not in store.owned
    assert 0 not in store.superseded
    assert store.backed[0].is_active
    assert store.backed[0].owner == contact("b")


def test_an_owner_rises_above_a_fence() -> None:
    """`drop_backup` raises the term above a fence without an owner, and voids the promise to a learner."""
    store = owner_of("a")
    promised = store.promise(0)
    store.drop_backup(0, contact("a"), term(7, "x"))

    assert store.owned[0].term == store.ownership.fence(0) == term(8, "a")
    assert store.owned[0].promised > promised.number


def test_a_backup_follows_its_owner_to_a_higher_term() -> None:
    """The same pair under a newer term: its copy must not rank below one of the terms between."""
    store = backup_of("b", "a")
    store.accept_forward(0, term(8, "a"), delta(1), 0, IDS["a"])

    assert store.backed[0].term == store.ownership.fence(0) == term(8, "a")


def test_a_late_request_for_a_catch_up_is_ignored() -> None:
    """It would discard the deltas buffered for the present one. Found by the model."""
    store = store_of("b")
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 3)
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])

    assert not store.begin_catch_up(0, term(1, "a"), contact("a"), 2)
    assert not store.begin_catch_up(0, term(1, "a"), contact("a"), 3)
    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    assert value_of(store.backed[0].state) == 1.0
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 4)


def test_an_owner_does_not_become_a_learner() -> None:
    """Not by a request under a lower term."""
    store = owner_of("a")

    assert not store.begin_catch_up(0, term(1, "a"), contact("b"), 1)
    assert 0 in store.owned
    assert 0 not in store.backed


def test_the_backup_of_a_restarted_owner_may_take_over() -> None:
    """The owner answers, but owns nothing. Found by the model, where no node took over."""
    store = backup_of("b", "a")
    store.on_restart(IDS["a"], contact("b"))

    assert store.backed[0].owner_restarted
    assert store.backed[0].is_active
    assert 0 not in store.ownership.known_owners
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 0)


def test_a_restarted_backup_is_no_backup() -> None:
    """It has lost its state: the owner continues under a new term."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("b")
    store.on_restart(IDS["b"], contact("a"))

    assert store.owned[0].targets() == []
    assert store.owned[0].term == term(2, "a") > ZERO_TERM


def test_a_learner_without_a_state_forgets_a_restarted_owner() -> None:
    """The state will never arrive."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"), 2)
    store.on_restart(IDS["a"], contact("b"))

    assert not store.backed
