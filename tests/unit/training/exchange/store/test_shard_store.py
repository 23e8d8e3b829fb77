"""What a node believes of owners, and how it learns a shard: fences, terms, news that comes late, snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from tests.harness.stores import IDS, SUM, backup_of, contact, delta, owner_of, store_of, term, value_of, zeros
from training.exchange.messages import decode, encode
from training.exchange.ownership_messages import CopyStatus
from training.exchange.store.copy_status import copy_status
from training.exchange.terms import ROLE_RANK, ZERO_TERM, OwnerInfo, Term
from training.shards.applied import DeltaId

# -- shapes -----------------------------------------------------------------------------------------------------------


def test_a_fresh_state_knows_where_the_buffers_begin() -> None:
    """Parameters end inside a shard, before it, or after it: each shard has its own share."""
    store = store_of("a")

    assert len(store) == 4
    assert [zeros(store, shard).parameters for shard in range(4)] == [4, 4, 2, 0]


def test_a_fresh_state_does_not_share_its_value() -> None:
    """The replica goes on changing; the state made of it does not."""
    replica = np.zeros(16, dtype=np.float32)
    state = store_of("a").fresh_state(1, replica[4:8])
    replica += 1

    assert not state.value.any()


# -- terms and beliefs ------------------------------------------------------------------------------------------------


def test_terms_are_ordered_by_number_and_then_by_raiser() -> None:
    """A higher number always wins; two take-overs at once differ by their raisers; nothing is below zero."""
    assert term(2, "a") > term(1, "d")
    assert term(2, "b") > term(2, "a")
    assert term(0, "a") > ZERO_TERM
    assert term(1, "a") > ZERO_TERM


def test_the_next_term_is_above_all_that_was_seen() -> None:
    """Above the fence and above what a survey found, and raised by ourselves."""
    store = store_of("a")
    assert store.next_term(0) == term(1, "a")
    store.ownership.raise_fence(0, term(7, "d"))

    assert store.next_term(0) == term(8, "a")
    assert store.next_term(0, term(3, "b"), term(9, "b")) == term(10, "a")
    assert store.next_term(1) == term(1, "a")


def test_the_next_term_is_above_the_own_one() -> None:
    """An owner that raised its term by itself must not promise a lower one to its next backup."""
    store = owner_of("a")
    store.owned[0].term = term(3, "a")

    assert store.next_term(0) > store.owned[0].term


def test_owning_below_the_fence_is_impossible() -> None:
    """A node that knows a higher term cannot make itself owner under a lower one, after a restart neither."""
    store = store_of("a")
    store.ownership.fences = {0: term(5, "b")}

    for lower in (term(4, "a"), term(5, "a"), ZERO_TERM):
        with pytest.raises(ValueError, match="below the fence"):
            store.own(0, zeros(store), lower, contact("a"), 0.0, has_tenure=False)
    assert not store.owned
    store.own(0, zeros(store), store.next_term(0), contact("a"), 0.0, has_tenure=False)
    assert store.ownership.fence(0) == term(6, "a")


def test_older_news_of_an_owner_change_nothing() -> None:
    """Lower terms, equal terms of another owner, and repetitions are no news."""
    store = store_of("a")
    assert store.note_owner(0, term(5, "c"), contact("b"))

    assert not store.note_owner(0, term(5, "c"), contact("b"))
    assert not store.note_owner(0, term(5, "c"), contact("d"))
    assert not store.note_owner(0, term(5, "b"), contact("d"))
    assert not store.note_owner(0, term(4, "d"), contact("d"))
    assert store.ownership.known_owners[0].owner == contact("b")
    assert store.ownership.fence(0) == term(5, "c")


def test_an_owner_that_moved_is_found_at_its_new_address() -> None:
    """The same owner under the same term from another address replaces the old address."""
    store = store_of("a")
    store.note_owner(0, term(5, "b"), contact("b"))
    moved = Contact(IDS["b"], Address("10.0.0.99", 7))

    assert store.note_owner(0, term(5, "b"), moved)
    assert store.ownership.known_owners[0].owner == moved


@pytest.mark.parametrize("shard", [-1, 4, 4095])
def test_news_of_shards_that_do_not_exist_are_passed_over(shard: int) -> None:
    """A shard index from the wire is checked against the layout."""
    store = store_of("a")

    assert not store.note_owner(shard, term(1, "b"), contact("b"))
    assert not store.begin_catch_up(shard, term(1, "b"), contact("b"))
    assert store.accept_forward(shard, term(1, "b"), delta(1), 0, IDS["b"])[0] == "unknown"
    assert not store.take_state(shard, term(1, "b"), contact("b"), zeros(store))
    assert (store.ownership.known_owners, store.ownership.fences, store.backed) == ({}, {}, {})


def test_news_with_an_address_that_is_none_are_passed_over() -> None:
    """One malformed entry in a list does not cost the others."""
    store = store_of("a")
    store.note_owners(
        [
            OwnerInfo(0, 1, IDS["b"], IDS["b"], "not-an-address", 1),
            OwnerInfo(1, 1, IDS["b"], IDS["b"], "", 1),
            OwnerInfo(2, 1, IDS["b"], IDS["b"], "10.0.0.1", 8468),
        ]
    )

    assert list(store.ownership.known_owners) == [2]
    assert store.ownership.fence(0) == ZERO_TERM


def test_news_below_the_fence_are_not_believed() -> None:
    """After a restart the fence is all that is left; an owner that it fences off must not be believed or told on."""
    store = store_of("a")
    store.ownership.fences = {0: term(5, "b")}

    assert not store.note_owner(0, term(3, "c"), contact("c"))
    assert store.ownership.owner_info(0) is None


def test_what_is_believed_is_told() -> None:
    """`where` gives term and owner as they were heard, and survives the wire; nothing for an unknown shard."""
    store = store_of("a")
    store.note_owner(2, term(5, "c"), contact("b"))

    where = store.ownership.owner_info(2)

    assert store.ownership.owner_info(0) is None
    assert where is not None
    again = decode(encode(where), OwnerInfo)
    assert (again.shard, again.term, again.contact()) == (2, term(5, "c"), contact("b"))


def test_a_higher_term_ends_an_own_claim() -> None:
    """Whoever has the higher term is the owner: the state goes, and with it the right to acknowledge."""
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


def test_news_of_ourselves_leave_an_own_claim() -> None:
    """Our own newer term may come back to us through a learner before its answer does."""
    store = owner_of("a")

    store.note_owner(0, term(2, "a"), contact("a"))

    assert 0 in store.owned


def test_claims_of_other_shards_are_left() -> None:
    """Losing one shard loses one shard."""
    store = owner_of("a")
    store.own(1, zeros(store, 1), term(1, "a"), contact("a"), 0.0, has_tenure=False)
    store.note_owner(0, term(2, "b"), contact("b"))

    assert list(store.owned) == [1]


# -- learning ---------------------------------------------------------------------------------------------------------


def test_forwards_before_the_state_are_acknowledged_and_kept() -> None:
    """A learner takes every live delta at once; the state is put under them when it comes."""
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


def test_a_learner_takes_office_when_its_owner_first_speaks_under_the_promised_term() -> None:
    """Until then it is a learner whose claims are the old ones; then it is the backup, and what waited is let go."""
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
    """Its owner may be using that term already: the learner's own take-over, and any that asks it, goes above."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(5, "a"), contact("a"), zeros(store))

    assert store.next_term(0) == term(6, "b")
    assert copy_status(store, 0, None, 0).fence == term(5, "a")
    assert store.ownership.fence(0) == term(1, "a")


def test_a_learner_whose_owner_went_on_with_another_has_nothing() -> None:
    """A term of its owner above the promised one was given to a later learner: what is here may lack deltas."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))

    assert store.note_owner(0, term(3, "a"), contact("a"))
    assert 0 not in store.backed


def test_news_of_an_owner_under_the_promised_term_put_a_learner_into_office() -> None:
    """No term is promised twice: somebody's replica of that term outranked the learner until it took this for proof."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))

    assert store.note_owner(0, term(2, "a"), contact("a"))
    assert store.backed[0].is_active
    assert store.backed[0].term == term(2, "a")


def test_a_newer_snapshot_of_a_learner_replaces_the_older_one() -> None:
    """What was forwarded since `learn` is added to the newer one as well; the older one never comes back."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])

    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    assert value_of(store.backed[0].state) == 1.0
    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert store.backed[0].promised == term(3, "a")


def test_a_forward_that_the_snapshot_has_already_is_not_doubled() -> None:
    """Live stream and snapshot overlap: identities tell."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    snapshot = zeros(store)
    snapshot.apply(delta(1).identity, 1.0, delta(1).delta, SUM)
    store.take_state(0, term(2, "a"), contact("a"), snapshot)

    assert value_of(store.backed[0].state) == 1.0


def test_a_state_nobody_asked_for_is_refused() -> None:
    """Without `learn` there is no live stream beside the state, so it would have a gap."""
    store = store_of("b")

    assert not store.take_state(0, term(5, "a"), contact("a"), zeros(store))
    assert not store.backed
    assert store.ownership.fence(0) == ZERO_TERM


def test_a_state_from_another_than_the_teacher_is_refused() -> None:
    """Learning from a: what c sends is another history."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))

    assert not store.take_state(0, term(9, "c"), contact("c"), zeros(store))
    assert store.backed[0].state is None


def test_a_state_after_a_newer_term_is_refused() -> None:
    """While the state was on its way another took over: the former owner's state is no longer wanted."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.note_owner(0, term(3, "c"), contact("c"))

    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert 0 not in store.backed


def test_a_state_below_a_fence_alone_is_refused() -> None:
    """The newer term may be known without its owner (a refusal names a term only)."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.ownership.raise_fence(0, term(3, "c"))

    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert store.backed[0].state is None


def test_learning_below_the_fence_is_refused() -> None:
    """A stale owner cannot make a backup of a node that knows better."""
    store = store_of("b")
    store.note_owner(0, term(3, "c"), contact("c"))

    assert not store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert 0 not in store.backed
    assert store.ownership.known_owners[0].owner == contact("c")


def test_learning_under_a_higher_term_ends_an_own_claim() -> None:
    """An owner that is asked to learn under a higher term is none any more."""
    store = owner_of("b")

    assert store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert 0 not in store.owned
    assert store.backed[0].state is None


def test_learning_from_a_new_owner_begins_anew() -> None:
    """Deltas that waited for one owner's state are not put upon another's."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    store.begin_catch_up(0, term(2, "c"), contact("c"))

    assert store.backed[0].buffered == []
    assert store.take_state(0, term(3, "c"), contact("c"), zeros(store))
    assert value_of(store.backed[0].state) == 0.0


def test_learning_again_begins_anew() -> None:
    """What waited belongs to an attempt that was given up; the new one brings a later snapshot."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    assert store.begin_catch_up(0, term(1, "a"), contact("a"))

    assert (store.backed[0].state, store.backed[0].buffered) == (None, [])


def test_a_late_learn_does_not_undo_an_office() -> None:
    """A `learn` held up until its owner has spoken under the term of a later attempt has an older term: refused."""
    store = backup_of("b", "a", 2)

    assert not store.begin_catch_up(0, term(1, "a"), contact("a"))
    assert store.backed[0].is_active


def test_an_older_snapshot_does_not_replace_a_newer_one() -> None:
    """The first attempt's state was held up on the line; the second made us backup, and we have acknowledged since."""
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
    """The state is in, the answer never reaches the owner, which goes on with its backup and then dies alone.

    A take-over ranks by (term, role, version): the acknowledged delta is at the backup only.
    """
    owner, backup, learner = owner_of("a", 2), backup_of("b", "a", 2), store_of("c")
    learner.begin_catch_up(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    backup.accept_forward(0, term(2, "a"), delta(1), 0, IDS["a"])
    owner.add(0, delta(1))

    def rank(standing: CopyStatus) -> tuple[Term, int, int]:
        return standing.term, ROLE_RANK[standing.role], standing.version

    assert rank(copy_status(backup, 0, None, 0)) > rank(copy_status(learner, 0, None, 0))


def test_a_learner_whose_answer_was_lost_can_be_taught_again() -> None:
    """As above, and the owner lives: its second attempt comes under the term it really has."""
    owner, learner = owner_of("a", 2), store_of("c")
    learner.begin_catch_up(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())

    assert learner.begin_catch_up(0, owner.owned[0].term, contact("a"))


def test_gossip_of_a_switch_that_did_not_happen_keeps_the_backup() -> None:
    """As above; the learner tells others what it believes. The backup must go on: its owner still forwards to it."""
    owner, backup, learner = owner_of("a", 2), backup_of("b", "a", 2), store_of("c")
    learner.begin_catch_up(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    told = learner.ownership.owner_info(0)
    assert told is not None
    backup.note_owners([told])

    status, _ = backup.accept_forward(0, owner.owned[0].term, delta(1), 0, IDS["a"])

    assert status == "ok"
