"""Known owners and catch-up in the store: late and repeated claims, states, snapshots, and promised terms."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.exchange.ownership_messages import CopyStatus
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.replica import copy_status, has_known_owner, has_state
from p2pnode.training.exchange.terms import ROLE_RANK, ZERO_TERM, OwnerInfo, Term
from p2pnode.training.shards.applied import DeltaId
from tests.harness.builders.stores import IDS, SUM, backup_of, contact, delta, owner_of, store_of, term, value_of, zeros

# -- shapes -----------------------------------------------------------------------------------------------------------


def test_a_fresh_state_knows_where_the_buffers_begin() -> None:
    """The parameters may end inside a shard, before it, or after it."""
    store = store_of("a")

    assert len(store) == 4
    assert [zeros(store, shard).parameters for shard in range(4)] == [4, 4, 2, 0]


def test_a_fresh_state_does_not_share_its_value() -> None:
    """The replica changes later; the state made from it does not."""
    replica = np.zeros(16, dtype=np.float32)
    state = store_of("a").fresh_state(1, replica[4:8])
    replica += 1

    assert not state.value.any()


# -- terms and known owners -------------------------------------------------------------------------------------------


def test_the_next_term_is_above_all_that_was_seen() -> None:
    """Above the fence and above what a survey found, with this node's id."""
    store = store_of("a")
    assert store.next_term(0) == term(1, "a")
    store.ownership.raise_fence(0, term(7, "d"))

    assert store.next_term(0) == term(8, "a")
    assert store.next_term(0, term(3, "b"), term(9, "b")) == term(10, "a")
    assert store.next_term(1) == term(1, "a")


def test_the_next_term_is_above_the_own_one() -> None:
    """An owner that raised its own term must not promise a lower one to its next backup."""
    store = owner_of("a")
    store.owned[0].term = term(3, "a")

    assert store.next_term(0) > store.owned[0].term


def test_owning_below_the_fence_is_impossible() -> None:
    """A node that knows a higher term cannot own under a lower one, not even after a restart."""
    store = store_of("a")
    store.ownership.fences = {0: term(5, "b")}

    for lower in (term(4, "a"), term(5, "a"), ZERO_TERM):
        with pytest.raises(ValueError, match="below the fence"):
            store.own(0, zeros(store), lower, contact("a"), 0.0, by_handover=False)
    assert not store.owned
    store.own(0, zeros(store), store.next_term(0), contact("a"), 0.0, by_handover=False)
    assert store.ownership.fence(0) == term(6, "a")


@pytest.mark.parametrize("shard", [-1, 4, 4095])
def test_claims_of_shards_outside_the_layout_are_ignored(shard: int) -> None:
    """A shard index from the wire is checked against the layout."""
    store = store_of("a")

    assert not store.note_owner(shard, term(1, "b"), contact("b"))
    assert not store.begin_catch_up(shard, term(1, "b"), contact("b"))
    assert store.accept_forward(shard, term(1, "b"), delta(1), 0, IDS["b"])[0] == "unknown"
    assert not store.take_state(shard, term(1, "b"), contact("b"), zeros(store))
    assert (store.ownership.known_owners, store.ownership.fences, store.backed) == ({}, {}, {})


def test_claims_with_a_malformed_address_are_skipped() -> None:
    """One malformed entry in a list does not cost the others."""
    store = store_of("a")
    store.note_owners(
        [
            OwnerInfo(0, term(1, "b"), IDS["b"], "not-an-address", 1),
            OwnerInfo(1, term(1, "b"), IDS["b"], "", 1),
            OwnerInfo(2, term(1, "b"), IDS["b"], "10.0.0.1", 8468),
        ]
    )

    assert list(store.ownership.known_owners) == [2]
    assert store.ownership.fence(0) == ZERO_TERM


def test_a_higher_term_ends_an_own_claim() -> None:
    """The node with the higher term is the owner: this one gives up state and role."""
    store = owner_of("a")

    assert store.note_owner(0, term(2, "b"), contact("b"))

    assert 0 not in store.owned
    assert store.ownership.known_owners[0].owner == contact("b")


def test_a_lower_or_equal_term_leaves_an_own_claim() -> None:
    """A stale owner's claim does not take a shard away."""
    store = owner_of("c", 4)

    for lower in (term(3, "d"), term(4, "a"), term(4, "c")):
        assert not store.note_owner(0, lower, contact("b"))
    assert store.owned[0].term == term(4, "c")


def test_the_own_claim_under_a_newer_term_is_no_loss() -> None:
    """This node's own newer term may come back from a learner before that one's answer."""
    store = owner_of("a")

    store.note_owner(0, term(2, "a"), contact("a"))

    assert 0 in store.owned


def test_a_claim_ends_ownership_of_its_own_shard_only() -> None:
    """The other shards keep their owner."""
    store = owner_of("a")
    store.own(1, zeros(store, 1), term(1, "a"), contact("a"), 0.0, by_handover=False)
    store.note_owner(0, term(2, "b"), contact("b"))

    assert list(store.owned) == [1]


# -- catch-up ---------------------------------------------------------------------------------------------------------


def test_forwards_before_the_state_are_acknowledged_and_kept() -> None:
    """A learner buffers every live delta, and adds them to the state when it arrives."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    for step in (1, 2):
        assert store.accept_forward(0, term(1, "a"), delta(step), 0, IDS["a"]) == ("ok", term(1, "a"))
    assert copy_status(store, 0, None, 0).role == "none"

    snapshot = zeros(store)
    snapshot.apply(DeltaId(IDS["x"], 1, 0), 1.0, np.full(4, 10.0, dtype=np.float32), SUM)
    assert store.take_state(0, term(2, "a"), contact("a"), snapshot)

    backed = store.backed[0]
    assert value_of(backed.state) == 12.0
    assert (backed.promised, backed.is_active) == (term(2, "a"), False)
    assert backed.term == store.ownership.fence(0) == term(1, "a")


def test_a_learner_becomes_the_backup_with_the_first_forward_under_the_promised_term() -> None:
    """Until then its term is the old one; from then on it is the backup, and its buffer is empty."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    assert copy_status(store, 0, None, 0).role == "learner"
    assert store.ownership.fence(0) == term(1, "a")

    assert store.accept_forward(0, term(2, "a"), delta(2), 0, IDS["a"]) == ("ok", term(2, "a"))

    backed = store.backed[0]
    assert (backed.is_active, backed.term, backed.buffered) == (True, term(2, "a"), [])
    assert copy_status(store, 0, None, 0).role == "backup"
    assert store.ownership.fence(0) == store.ownership.known_owners[0].term == term(2, "a")
    assert value_of(backed.state) == 2.0


def test_a_take_over_is_above_the_term_promised_to_a_learner() -> None:
    """Its owner may use that term already, so the learner's own take-over, and any that surveys it, is above."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(5, "a"), contact("a"), zeros(store))

    assert store.next_term(0) == term(6, "b")
    assert copy_status(store, 0, None, 0).fence == term(5, "a")
    assert store.ownership.fence(0) == term(1, "a")


def test_a_learner_whose_owner_promoted_another_drops_its_copy() -> None:
    """A term of its owner above the promised one went to a later learner: this copy may lack deltas."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))

    assert store.note_owner(0, term(3, "a"), contact("a"))
    assert 0 not in store.backed


def test_a_claim_under_the_promised_term_makes_a_learner_the_backup() -> None:
    """No term is promised twice, so the claim proves the promotion; else a replica of that term would rank higher."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))

    assert store.note_owner(0, term(2, "a"), contact("a"))
    assert store.backed[0].is_active
    assert store.backed[0].term == term(2, "a")


def test_a_newer_snapshot_of_a_learner_replaces_the_older_one() -> None:
    """Deltas buffered since the catch-up began are added to the newer one too; the older one never returns."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])

    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    assert value_of(store.backed[0].state) == 1.0
    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert store.backed[0].promised == term(3, "a")


def test_a_forward_that_the_snapshot_has_already_is_added_once() -> None:
    """Live deltas and snapshot overlap; identities separate them."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    snapshot = zeros(store)
    snapshot.apply(delta(1).identity, 1.0, delta(1).delta, SUM)
    store.take_state(0, term(2, "a"), contact("a"), snapshot)

    assert value_of(store.backed[0].state) == 1.0


def test_a_state_without_a_catch_up_is_refused() -> None:
    """Without buffered deltas beside it, the state would have a gap."""
    store = store_of("b")

    assert not store.take_state(0, term(5, "a"), contact("a"), zeros(store))
    assert not store.backed
    assert store.ownership.fence(0) == ZERO_TERM


def test_a_state_from_a_node_that_is_not_the_owner_is_refused() -> None:
    """The state of another node has another history."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))

    assert not store.take_state(0, term(9, "c"), contact("c"), zeros(store))
    assert store.backed[0].state is None


def test_a_state_after_a_newer_term_is_refused() -> None:
    """While the state was in transit, another node took over."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.note_owner(0, term(3, "c"), contact("c"))

    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert 0 not in store.backed


def test_a_state_below_a_fence_alone_is_refused() -> None:
    """The newer term may be known without its owner, as from the refusal of a forward."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.ownership.raise_fence(0, term(3, "c"))

    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert store.backed[0].state is None


def test_a_catch_up_below_the_fence_is_refused() -> None:
    """A stale owner cannot make a node with a higher fence its backup."""
    store = store_of("b")
    store.note_owner(0, term(3, "c"), contact("c"))

    assert not store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert 0 not in store.backed
    assert store.ownership.known_owners[0].owner == contact("c")


def test_a_catch_up_under_a_higher_term_ends_an_own_claim() -> None:
    """An owner that is asked under a higher term has lost the shard."""
    store = owner_of("b")

    assert store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert 0 not in store.owned
    assert store.backed[0].state is None


def test_a_catch_up_from_a_new_owner_starts_from_nothing() -> None:
    """Deltas buffered for one owner's state are not added to another's."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    store.begin_catch_up(0, term(2, "c"), contact("c"))

    assert store.backed[0].buffered == []
    assert store.take_state(0, term(3, "c"), contact("c"), zeros(store))
    assert value_of(store.backed[0].state) == 0.0


def test_a_repeated_catch_up_starts_from_nothing() -> None:
    """The buffer belongs to an attempt that was given up; the new one brings a later snapshot."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    assert store.begin_catch_up(0, term(1, "a"), contact("a"))

    assert (store.backed[0].state, store.backed[0].buffered) == (None, [])


def test_a_late_request_does_not_end_the_backup_role() -> None:
    """A request from before the promotion has an older term, and is refused."""
    store = backup_of("b", "a", 2)

    assert not store.begin_catch_up(0, term(1, "a"), contact("a"))
    assert store.backed[0].is_active


def test_an_older_snapshot_does_not_replace_a_newer_one() -> None:
    """The first attempt's state arrives after the second made this node the backup."""
    owner, store = owner_of("a"), store_of("b")
    first = owner.owned[0].state.copy()
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    first_term = owner.promise(0)
    owner.add(0, delta(1))  # the owner gave the attempt up; its former backup has this one
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    second_term = owner.promise(0)
    store.take_state(0, second_term, contact("a"), owner.owned[0].state.copy())
    assert store.accept_forward(0, second_term, delta(2), 0, IDS["a"])[0] == "ok"

    assert not store.take_state(0, first_term, contact("a"), first)

    assert value_of(store.backed[0].state) == 2.0


def test_a_learner_whose_answer_was_lost_does_not_outrank_the_backup() -> None:
    """The state has arrived, but not the answer: the owner continues with its backup, and then crashes.

    A take-over ranks by (term, role, version): the acknowledged delta is at the backup only.
    """
    owner, backup, learner = owner_of("a", 2), backup_of("b", "a", 2), store_of("c")
    learner.begin_catch_up(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    backup.accept_forward(0, term(2, "a"), delta(1), 0, IDS["a"])
    owner.add(0, delta(1))

    def rank(status: CopyStatus) -> tuple[Term, int, int]:
        return status.term, ROLE_RANK[status.role], status.version

    assert rank(copy_status(backup, 0, None, 0)) > rank(copy_status(learner, 0, None, 0))


def test_a_learner_whose_answer_was_lost_can_catch_up_again() -> None:
    """The owner is up, and its second attempt comes under its present term."""
    owner, learner = owner_of("a", 2), store_of("c")
    learner.begin_catch_up(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())

    assert learner.begin_catch_up(0, owner.owned[0].term, contact("a"))


def test_gossip_of_a_switch_that_did_not_happen_keeps_the_backup() -> None:
    """The learner reports a promotion that was never made. The backup stays, for its owner still forwards to it."""
    owner, backup, learner = owner_of("a", 2), backup_of("b", "a", 2), store_of("c")
    learner.begin_catch_up(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    told = learner.ownership.owner_info(0)
    assert told is not None
    backup.note_owners([told])

    status, _ = backup.accept_forward(0, owner.owned[0].term, delta(1), 0, IDS["a"])

    assert status == "ok"


def test_what_a_node_owned_before_its_restart_has_no_owner() -> None:
    """Others say that it is the owner; it is not, and may have a state from its disk."""
    store = store_of("a")
    store.note_owner(0, term(2, "a"), contact("a"))
    store.note_owner(1, term(2, "b"), contact("b"))
    assert [has_known_owner(store, shard) for shard in range(3)] == [False, True, False]
    assert not has_state(store, 0)
    store.stored = {0: StoredState(term(2, "a"), zeros(store), clean=False)}
    assert has_state(store, 0)
    store.own(2, zeros(store, 2), term(3, "a"), contact("a"), 0.0, by_handover=False)
    assert has_known_owner(store, 2)
