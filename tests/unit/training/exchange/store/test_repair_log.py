"""What ends a split: fences that are answered, copies that are kept, a log that says how far it reaches."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.stores import (
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
from training.encoding import codecs
from training.exchange.ownership_messages import CopyStatus
from training.exchange.recovery.copy_rank import rank_copy
from training.exchange.store.records import BufferedDelta
from training.exchange.store.repair_log import RepairLog, SupersededCopy, compare
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM
from training.shards.applied import Applied, DeltaId
from training.shards.outer_rule import Rule


def logged(name: str, *, limit_bytes: int = 1 << 20, seconds: float = 60.0) -> ShardStore:
    """An owner of shard 0 under (1, name) with a log."""
    store = ShardStore(IDS[name], BOUNDS, PARAMETERS, SUM, RepairLog(limit_bytes, seconds))
    store.own(0, zeros(store), term(1, name), contact(name), 0.0, has_tenure=False)
    return store


def identities(store: ShardStore) -> list[int]:
    return [entry.identity.step for entry in store.log.entries(0)]


def test_a_delta_without_a_payload_is_added_exactly_and_logged_in_its_codec() -> None:
    """What a node adds of its own: the value gets every bit of it, the log two bytes of each value or four."""
    own = np.array([1.0 + 2.0**-20, -3.0, 0.5, 2.0**-20], dtype=np.float32)
    for codec, per_value, rounded in (("float32", 4, own), ("bfloat16", 2, [1.0, -3.0, 0.5, 2.0**-20])):
        store = logged("a")
        store.add(0, BufferedDelta(DeltaId(IDS["a"], 1, 1), 1.0, own.copy(), False, codec=codec))  # type: ignore[arg-type]

        (entry,) = store.log.entries(0)
        assert (store.owned[0].state.value == own).all()
        assert (entry.codec, len(entry.payload)) == (codec, 4 * per_value)
        assert (codecs.decoded(entry.payload, entry.codec, 4) == rounded).all()


def test_what_nobody_else_will_ask_for_is_added_once_and_not_logged() -> None:
    """A delta of a node that never met another: exact, counted, known by its identity; again it changes nothing."""
    store = logged("a")
    own = np.array([1.0 + 2.0**-20, -3.0, 0.5, 2.0**-20], dtype=np.float32)
    identity = DeltaId(IDS["a"], 1, 1)

    assert [store.add_unlogged(0, identity, 1.0, own) for _ in range(2)] == [1, 1]

    state = store.owned[0].state
    assert (state.value == own).all()
    assert state.knows(identity)
    assert identities(store) == []


# -- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_keeps_what_was_added_once() -> None:
    """Owner's and backup's additions alike, by identity, with the weight they had."""
    store = logged("a")
    for step in (1, 2, 2):
        store.add(0, delta(step))

    assert identities(store) == [1, 2]
    assert store.log.size_bytes == 2 * 16
    assert [entry.weight for entry in store.log.entries(0)] == [1.0, 1.0]


def test_the_log_forgets_by_age_but_not_what_is_being_offered() -> None:
    """After `seconds` an entry goes, unless a remnant of its shard still waits to be settled."""
    store = logged("a", seconds=10.0)
    store.log.tick(100.0, 4.0, {})
    store.add(0, delta(1))
    store.log.tick(105.0, 5.0, {})
    store.add(0, delta(2))

    store.log.tick(112.0, 5.0, {0: None})
    assert identities(store) == [1, 2]
    assert [entry.workers for entry in store.log.entries(0)] == [4.0, 5.0]
    store.log.tick(112.0, 5.0, {})
    assert identities(store) == [2]
    assert store.log.reach_s == 10.0
    store.log.tick(200.0, 5.0, {})
    assert (len(store.log), store.log.size_bytes) == (0, 0)


def test_the_log_says_how_far_it_really_reaches() -> None:
    """When bytes run out the oldest entry goes, and the reach is the time since then, not the time asked for."""
    store = logged("a", limit_bytes=3 * 16)
    for number in range(1, 6):
        store.log.tick(100.0 + number, 1.0, {})
        store.add(0, delta(number))

    assert identities(store) == [3, 4, 5]
    assert store.log.reach_s == pytest.approx(3.0)  # the delta of 102 s has gone, and it is 105 s


def test_a_log_of_no_seconds_keeps_nothing() -> None:
    """`log_seconds = 0` costs no memory and repairs nothing."""
    store = logged("a", seconds=0.0)
    store.add(0, delta(1))

    assert len(store.log) == 0
    assert store.log.reach_s == 0.0


def test_applied_sets_subtract_and_merge_by_ranges() -> None:
    """What one side has and the other has not, without walking through every step."""
    one, other = Applied(), Applied()
    for step in (1, 2, 3, 4, 7, 8, 9):
        one.add(DeltaId(IDS["x"], 1, step))
    for step in (2, 3, 8):
        other.add(DeltaId(IDS["x"], 1, step))
    one.add(DeltaId(IDS["b"], 2, 5))

    assert one.without(other).rows() == [(IDS["x"], 1, [(1, 1), (4, 4), (7, 7), (9, 9)]), (IDS["b"], 2, [(5, 5)])]
    assert other.without(one).rows() == []
    other.merge(one)
    assert sorted(other.rows()) == sorted(one.rows())


def test_a_comparison_offers_what_the_log_has_and_names_what_it_has_not() -> None:
    """Of five deltas the winner has two, the log two more: the fifth is lost, and said to be."""
    store = logged("a", limit_bytes=2 * 16)
    for step in (1, 2, 3, 4, 5):
        store.add(0, delta(step))
    winner = Applied()
    for step in (2, 3):
        winner.add(DeltaId(IDS["x"], 1, step))

    found = compare(SupersededCopy(term(1, "a"), store.owned[0].state), winner, store.log.entries(0))

    assert [entry.identity.step for entry in found.wanted] == [4, 5]
    assert found.lost == [(IDS["x"], 1, 1, 1)]


# -- copies -----------------------------------------------------------------------------------------------------------


def test_an_owner_that_loses_keeps_its_copy_to_offer() -> None:
    """Somebody took over: what this side acknowledged since may be nowhere else."""
    store = logged("a")
    store.add(0, delta(1))

    assert store.note_owner(0, term(5, "c"), contact("c"))

    assert 0 not in store.owned
    assert store.superseded[0].term == term(1, "a")
    assert value_of(store.superseded[0].state) == 1.0


def test_a_backup_whose_shard_another_pair_took_keeps_its_copy() -> None:
    """Its owner may have died in the split: then this copy is all there is of that side."""
    store = backup_of("b", "a")
    store.note_owner(0, term(5, "c"), contact("c"))

    assert 0 not in store.backed
    assert store.superseded[0].term == term(1, "a")


def test_of_two_copies_the_later_stays_and_the_identities_of_both() -> None:
    """Lost twice before the first was settled: nothing is forgotten."""
    store = logged("a")
    store.add(0, delta(1))
    store.note_owner(0, term(5, "c"), contact("c"))
    store.own(0, zeros(store), term(6, "a"), contact("a"), 0.0, has_tenure=False)
    store.add(0, delta(2))
    store.note_owner(0, term(7, "c"), contact("c"))

    known = store.superseded[0].known()
    assert store.superseded[0].term == term(6, "a")
    assert all(DeltaId(IDS["x"], 1, step) in known for step in (1, 2))


def test_taking_anothers_copy_keeps_the_own_one() -> None:
    """A take-over that goes on from what another node had."""
    store = backup_of("b", "a")
    store.own(0, zeros(store), term(9, "b"), contact("b"), 0.0, has_tenure=False)

    assert store.superseded[0].term == term(1, "a")


def test_news_of_the_own_hand_over_make_a_backup() -> None:
    """The new owner counts on the former one as its backup; found by the model: it forgot its copy instead."""
    store = owner_of("a")
    owned = store.owned[0]
    owned.backup, owned.moving = contact("b"), True
    handed = store.promise(0)

    assert store.note_owner(0, handed, contact("b"))

    assert 0 not in store.owned
    assert 0 not in store.superseded
    assert store.backed[0].is_active
    assert store.backed[0].owner == contact("b")


def test_a_delta_out_of_a_split_moves_the_value_only() -> None:
    """Momentum is the direction of now; a delta of another time is added without it."""
    rule = Rule(outer_lr=0.5, outer_momentum=0.5)
    state = zeros(store_of("a", rule))
    state.apply(DeltaId(IDS["x"], 1, 1), 1.0, delta(1).delta, rule, momentum=False)

    assert value_of(state) == 0.5
    assert state.momentum is None
    state.add_pending(DeltaId(IDS["x"], 1, 2), 1.0, delta(2).delta, momentum=False)
    state.fold(2, rule)
    assert value_of(state) == 1.0
    assert state.momentum is None


# -- fences and terms -------------------------------------------------------------------------------------------------


def test_an_owner_rises_above_a_fence() -> None:
    """`drop_backup` above a term that nobody owns any more, and no lesson under way survives it."""
    store = owner_of("a")
    lesson = store.promise(0)
    store.drop_backup(0, contact("a"), term(7, "x"))

    assert store.owned[0].term == store.ownership.fence(0) == term(8, "a")
    assert store.owned[0].promised > lesson.number


def test_a_node_knows_which_of_its_fences_to_show() -> None:
    """Those above the term of the owner it believes in, and those for which it believes in none."""
    store = store_of("b")
    store.note_owner(0, term(5, "a"), contact("a"))
    store.note_owner(1, term(5, "a"), contact("a"))
    store.ownership.raise_fence(1, term(7, "c"))
    store.ownership.raise_fence(2, term(3, "c"))

    assert [(fence.shard, fence.term) for fence in store.ownership.stale_fences(range(4))] == [
        (1, term(7, "c")),
        (2, term(3, "c")),
    ]


def test_a_backup_follows_its_owner_to_a_higher_term() -> None:
    """The same pair under a newer term: its copy must not rank below one of the terms between."""
    store = backup_of("b", "a")
    store.accept_forward(0, term(8, "a"), delta(1), 0, IDS["a"])

    assert store.backed[0].term == store.ownership.fence(0) == term(8, "a")


def test_a_call_to_learn_that_comes_late_is_not_heard() -> None:
    """It would throw away the deltas that were taken for the lesson under way; found by the model."""
    store = store_of("b")
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 3)
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])

    assert not store.begin_catch_up(0, term(1, "a"), contact("a"), 2)
    assert not store.begin_catch_up(0, term(1, "a"), contact("a"), 3)
    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    assert value_of(store.backed[0].state) == 1.0
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 4)


def test_an_owner_learns_from_nobody() -> None:
    """A lower term's call to learn does not make a backup of an owner."""
    store = owner_of("a")

    assert not store.begin_catch_up(0, term(1, "a"), contact("b"), 1)
    assert 0 in store.owned
    assert 0 not in store.backed


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restarted_owner_leaves_a_bereft_backup() -> None:
    """It answers, and owns nothing: found by the model, where nobody ever took over."""
    store = backup_of("b", "a")
    store.on_restart(IDS["a"], contact("b"))

    assert store.backed[0].owner_restarted
    assert store.backed[0].is_active
    assert 0 not in store.ownership.known_owners
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 0)


def test_a_restarted_backup_is_no_backup() -> None:
    """It has forgotten the state: the owner goes on under a new term, and teaches again."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("b")
    store.on_restart(IDS["b"], contact("a"))

    assert store.owned[0].targets() == []
    assert store.owned[0].term == term(2, "a") > ZERO_TERM


def test_a_learner_without_a_state_forgets_a_restarted_owner() -> None:
    """The state will never come."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"), 2)
    store.on_restart(IDS["a"], contact("b"))

    assert not store.backed


def test_of_two_sides_of_a_split_the_history_is_worth_more_than_a_replica() -> None:
    """Under one number a replica cannot come after the state, whosever id is higher; under a later number it may."""
    whole = CopyStatus(0, "backup", *term(7, "a"), 41, *ZERO_TERM, 9)
    beside = CopyStatus(0, "replica", *term(7, "c"), 41, *ZERO_TERM, 9)
    after = CopyStatus(0, "replica", *term(8, "b"), 41, *ZERO_TERM, 9)

    assert rank_copy(beside) < rank_copy(whole) < rank_copy(after)
    assert not rank_copy(after).has_history
