"""Owner and backup of a shard in the store: forwards, pending deltas, promotion and hand-over."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding.codecs import encode
from p2pnode.training.exchange.store.records import BufferedDelta, Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, OwnerInfo
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.builders.stores import IDS, SUM, backup_of, contact, delta, owner_of, store_of, term, value_of, zeros

# -- forwards ---------------------------------------------------------------------------------------------------------


def test_a_backup_adds_a_forward_once() -> None:
    """A repeated forward is acknowledged again and adds nothing."""
    store = backup_of("b", "a")

    for _ in range(3):
        assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("ok", term(1, "a"))
    assert value_of(store.backed[0].state) == 1.0


def test_forwards_may_come_in_any_order() -> None:
    """A backup that required an order would stop at the first abandoned forward."""
    store = backup_of("b", "a")
    for step in (5, 2, 9, 1):
        assert store.accept_forward(0, term(1, "a"), delta(step), 0, IDS["a"])[0] == "ok"

    assert value_of(store.backed[0].state) == 4.0


def test_a_fenced_forward_names_the_higher_term_and_adds_nothing() -> None:
    """A former owner learns from its backup that it was replaced."""
    store = backup_of("b", "a")
    store.ownership.raise_fence(0, term(4, "c"))

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("fenced", term(4, "c"))
    assert value_of(store.backed[0].state) == 0.0


def test_a_new_owner_fences_its_former_owner() -> None:
    """The backup took over; the former owner, alive after all, forwards to it and is refused."""
    store = backup_of("b", "a")
    taken = store.backed[0].state
    assert taken is not None
    store.own(0, taken, store.next_term(0), contact("b"), 1.0, by_handover=False)

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("fenced", term(2, "b"))
    assert value_of(store.owned[0].state) == 0.0
    assert 0 not in store.backed


@pytest.mark.parametrize("sender", ["c", "b"])
def test_a_forward_from_another_node_than_the_owner_is_unknown(sender: str) -> None:
    """Another node's delta adds nothing, even under a high term."""
    store = backup_of("b", "a")

    assert store.accept_forward(0, term(9, sender), delta(1), 0, IDS[sender])[0] == "unknown"
    assert value_of(store.backed[0].state) == 0.0


def test_a_forward_to_a_node_that_backs_nothing_is_unknown() -> None:
    """A restarted backup has lost its state; its owner must choose a learner again."""
    store = store_of("b")

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("unknown", ZERO_TERM)
    assert not store.backed


def test_a_claim_of_another_owner_ends_the_backup_role() -> None:
    """The pair that this copy belongs to exists no more."""
    store = backup_of("b", "a")

    assert store.note_owner(0, term(5, "c"), contact("c"))
    assert 0 not in store.backed


def test_a_newer_term_of_its_owner_leaves_a_backup() -> None:
    """Only the owner knows whether it has another backup, and says so when it is asked."""
    store = backup_of("b", "a")

    assert store.note_owner(0, term(5, "a"), contact("a"))
    assert store.backed[0].is_active


def told(store: ShardStore, number: int, sender: str = "a") -> None:
    """The owner says under this term that it does not rely on the copy."""
    owner = contact(sender)
    store.drop_unconfirmed(OwnerInfo.of(0, term(number, sender), owner), owner, 0)


def test_an_owner_with_another_backup_ends_the_backup_role() -> None:
    """Under its newer term, which becomes the known one."""
    store = backup_of("b", "a")

    told(store, 2)
    assert 0 not in store.backed
    assert store.ownership.known_owners[0].term == store.ownership.fence(0) == term(2, "a")


@pytest.mark.parametrize(("number", "sender"), [(3, "a"), (2, "a"), (5, "c")])
def test_an_answer_that_is_late_or_of_another_node_is_ignored(number: int, sender: str) -> None:
    """Under a term that is not newer, or from a node that is not the owner."""
    store = backup_of("b", "a", 3)

    told(store, number, sender)
    assert store.backed[0].is_active


def test_an_answer_to_a_former_backup_does_not_end_a_later_catch_up() -> None:
    """It was none under term 2, but is a learner for term 3 before the answer arrives."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"), 3)
    store.take_state(0, term(3, "a"), contact("a"), zeros(store))

    told(store, 2)
    assert store.backed[0].promised == term(3, "a")


def test_a_learner_that_was_promised_more_than_a_claim_keeps_its_role() -> None:
    """After a split two owners raise their terms to one number. The learner of the higher one may be its backup by now:
    nobody else takes the copy from it, and it learns from nobody else. What its own owner says ends that."""
    store = store_of("b")
    store.begin_catch_up(0, term(8, "c"), contact("c"), 9)
    store.take_state(0, term(9, "c"), contact("c"), zeros(store))
    state = store.backed[0].state

    assert store.note_owner(0, term(9, "a"), contact("a"))
    assert not store.begin_catch_up(0, term(9, "a"), contact("a"), 10)
    assert store.backed[0].state is state
    store.drop_unconfirmed(OwnerInfo.of(0, term(9, "a"), contact("a")), contact("c"), 9)
    assert not store.backed
    assert store.superseded[0].state is state

    store.begin_catch_up(0, term(9, "c"), contact("c"), 10)
    store.note_owner(0, term(11, "a"), contact("a"))
    assert not store.backed


def test_a_claim_under_its_own_term_leaves_a_backup() -> None:
    """Only the owner's address has changed."""
    store = backup_of("b", "a", 3)
    store.note_owner(0, term(3, "a"), Contact(IDS["a"], Address("10.0.0.9", 9)))

    assert store.backed[0].state is not None


def test_a_higher_term_of_its_owner_leaves_a_learner() -> None:
    """It has no state yet that could be old."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.note_owner(0, term(2, "a"), contact("a"))

    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))


# -- bulk-synchronous -------------------------------------------------------------------------------------------------


def test_synchronous_forwards_are_pending_until_their_owner_folds() -> None:
    """The next forward names the step that the owner has folded."""
    store = backup_of("b", "a")
    for step in (1, 2):
        store.accept_forward(0, term(1, "a"), delta(step, 10.0**step, synchronous=True), 0, IDS["a"])
    state = store.backed[0].state
    assert value_of(state) == 0.0

    store.accept_forward(0, term(1, "a"), delta(3, synchronous=True), 1, IDS["a"])

    assert value_of(state) == 10.0
    assert state is not None
    assert state.folded_step == 1
    assert list(state.pending) == [2, 3]


def test_a_pending_delta_is_not_added_twice() -> None:
    """A retry under bulk-synchronous rules is recognised before and after the fold."""
    store = backup_of("b", "a")
    for folded in (0, 0, 5, 5):
        store.accept_forward(0, term(1, "a"), delta(1, synchronous=True), folded, IDS["a"])

    state = store.backed[0].state
    assert value_of(state) == 1.0
    assert state is not None
    assert state.version == 1


# -- promotion and hand-over ------------------------------------------------------------------------------------------


def test_an_owner_adds_once_and_counts_versions() -> None:
    """A repetition changes neither value nor version."""
    store, versions = owner_of("a"), []
    for step in (1, 2, 2, 3):
        store.add(0, delta(step))
        versions.append(store.owned[0].state.version)

    assert versions == [1, 2, 2, 3]
    assert value_of(store.owned[0].state) == 3.0


def test_an_owner_is_no_backup() -> None:
    """A take-over ends the backup role: one state, one role."""
    store = backup_of("b", "a")
    state = store.backed[0].state
    assert state is not None
    store.own(0, state, store.next_term(0), contact("b"), 3.0, by_handover=True)

    assert 0 not in store.backed
    owned = store.owned[0]
    assert (owned.since, owned.by_handover, owned.backup, owned.learner, owned.moving) == (3.0, True, None, None, False)
    assert owned.targets() == []


def test_targets_are_backup_and_learner() -> None:
    """Every delta goes to both during a catch-up."""
    owned = owner_of("a").owned[0]
    owned.learner = contact("c")
    assert owned.targets() == [contact("c")]
    owned.backup = contact("b")
    assert owned.targets() == [contact("b"), contact("c")]


def test_a_hand_over_turns_owner_into_backup_with_the_same_state() -> None:
    """The former owner keeps the state, takes the new owner's forwards, and adds nothing by itself."""
    old, new = owner_of("a"), backup_of("b", "a")
    for store in (old, new):
        state = store.owned[0].state if store is old else store.backed[0].state
        assert state is not None
        state.apply(delta(1).identity, 1.0, delta(1).delta, SUM)
    handed = term(2, "b")
    state = new.backed[0].state
    assert state is not None
    new.own(0, state, handed, contact("b"), 0.0, by_handover=True)
    old.become_backup(0, contact("b"), handed)

    assert 0 not in old.owned
    assert old.accept_forward(0, handed, delta(2), 0, IDS["b"])[0] == "ok"
    new.add(0, delta(2))
    assert value_of(old.backed[0].state) == value_of(new.owned[0].state) == 2.0
    assert old.ownership.owner_info(0) == new.ownership.owner_info(0)
    assert old.ownership.fence(0) == new.ownership.fence(0) == handed


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_hand_over_shows_what_the_former_owner_lacks(synchronous: bool) -> None:
    """The backup has a delta that the owner never added, for its answer was lost: the counts of deltas differ.

    The new owner must not take the former one for a complete backup then.
    """
    old, new = owner_of("a"), backup_of("b", "a")
    mine, state = old.owned[0].state, new.backed[0].state
    assert state is not None
    assert mine.known_count == state.known_count
    new.accept_forward(0, term(1, "a"), delta(1, synchronous=synchronous), 0, IDS["a"])
    assert mine.known_count < state.known_count
    old.add(0, delta(1, synchronous=synchronous))
    assert mine.known_count == state.known_count


def test_no_term_is_promised_twice() -> None:
    """Terms of abandoned attempts may still be in transit; the term of a hand-over is above them."""
    store = owner_of("a")

    promised = [store.promise(0) for _ in range(3)]

    assert promised == [term(2, "a"), term(3, "a"), term(4, "a")]
    assert store.owned[0].term == store.ownership.fence(0) == term(1, "a")
    assert store.next_term(0) == term(5, "a")


def test_a_promotion_gives_the_owner_the_promised_term() -> None:
    """A new backup, no learner, and a new tenure."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("c")
    promised = store.promise(0)

    store.promote_learner(0, contact("c"), promised, contact("a"), 7.0)

    owned = store.owned[0]
    assert (owned.backup, owned.learner, owned.term, owned.since) == (contact("c"), None, promised, 7.0)
    assert store.ownership.fence(0) == store.ownership.known_owners[0].term == promised


def test_a_dropped_backup_ranks_below_all_that_comes_after() -> None:
    """It may still have a state of the old term; what it lacks is acknowledged under a newer one."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("c")
    store.owned[0].moving = True
    promised = store.promise(0)

    store.drop_backup(0, contact("a"))

    owned = store.owned[0]
    assert (owned.targets(), owned.moving) == ([], False)
    assert owned.term == store.ownership.fence(0) == store.ownership.known_owners[0].term > promised


def test_a_former_owner_refuses_its_own_old_term() -> None:
    """A forward of its own that returns late, or another's under the old term, is fenced."""
    store = owner_of("a")
    store.become_backup(0, contact("b"), term(2, "b"))

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["b"]) == ("fenced", term(2, "b"))


# -- sizes, ranks and corrections -------------------------------------------------------------------------------------


def test_the_size_counts_both_roles() -> None:
    """The memory of owned and backed states; a learner without a state uses none."""
    store = owner_of("b")
    store.begin_catch_up(1, term(1, "a"), contact("a"))
    assert store.size_bytes == 16
    store.take_state(1, term(2, "a"), contact("a"), zeros(store, 1))
    assert store.size_bytes == 32


def test_a_take_over_ranks_as_its_copy_until_the_first_delta() -> None:
    """Raised above a later pair's term, it must not outrank that pair's copy on another disk."""
    store = store_of("b")
    owned = store.own(0, zeros(store), term(9, "b"), contact("b"), 0.0, by_handover=False)
    owned.first_copy = term(4, "a"), owned.state.known_count
    assert owned.rank_term == term(4, "a")

    store.add(0, delta(1))

    assert owned.rank_term == term(9, "b")


def test_a_wrong_owner_under_a_term_is_corrected() -> None:
    """The known one denies it and the other confirms it; under another term nothing is corrected."""
    store = store_of("c")
    store.note_owner(0, term(3, "a"), contact("b"))
    store.note_owner(0, term(3, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("b")

    store.correct_owner(0, term(2, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("b")
    store.correct_owner(0, term(3, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("a")


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
