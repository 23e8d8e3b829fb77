"""What a node believes, owns and backs up: fences, forwards before their state, hand-over, and news that comes late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import msgspec
import numpy as np
import pytest

from overlay.peers import Contact
from overlay.transport import Address, Buffer
from training.exchange import transfer
from training.exchange.messages import ROLE_RANK, ZERO_TERM, Standing, State, StateHead, Term, Where, decode, encode
from training.exchange.store import ShardStore, Waiting
from training.frames import BadFrame, FrameReader
from training.shards import DeltaId, Rule, ShardState

SUM = Rule(outer_lr=1.0, outer_momentum=0.0)
#: Sixteen values in four shards; the last six values are buffers.
BOUNDS = [(0, 4), (4, 8), (8, 12), (12, 16)]
PARAMETERS = 10

IDS = {name: name.encode() * 20 for name in "abcdx"}


def contact(name: str) -> Contact:
    return Contact(IDS[name], Address("10.0.0.1", ord(name)))


def term(number: int, name: str) -> Term:
    return Term(number, IDS[name])


def store_of(name: str, rule: Rule = SUM) -> ShardStore:
    return ShardStore(IDS[name], BOUNDS, PARAMETERS, rule)


def delta(step: int, amount: float = 1.0, *, synchronous: bool = False, node: str = "x") -> Waiting:
    return Waiting(DeltaId(IDS[node], 1, step), 1.0, np.full(4, amount, dtype=np.float32), synchronous)


SEEN = delta(1, node="d")


def zeros(store: ShardStore, shard: int = 0) -> ShardState:
    return store.fresh_state(shard, np.zeros(store.size(shard), dtype=np.float32))


def owner_of(name: str, number: int = 1) -> ShardStore:
    store = store_of(name)
    store.own(0, zeros(store), term(number, name), contact(name), 0.0, tenured=False)
    return store


def backup_of(name: str, owner: str, number: int = 1) -> ShardStore:
    """A store that backs shard 0 of `owner` under the term (number, owner)."""
    store = store_of(name)
    assert store.learn(0, term(number - 1, owner), contact(owner))
    snapshot = zeros(store)
    snapshot.applied.add(SEEN.identity)
    assert store.take_state(0, term(number, owner), contact(owner), snapshot)
    # A delta that the snapshot has already: it adds nothing, and is the owner's first word under the new term.
    assert store.accept_forward(0, term(number, owner), SEEN, 0, IDS[owner])[0] == "ok"
    return store


def value_of(state: ShardState | None) -> float:
    assert state is not None
    return float(state.value[0])


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
    store.raise_fence(0, term(7, "d"))

    assert store.next_term(0) == term(8, "a")
    assert store.next_term(0, term(3, "b"), term(9, "b")) == term(10, "a")
    assert store.next_term(1) == term(1, "a")


def test_the_next_term_is_above_the_own_one() -> None:
    """An owner that raised its term by itself must not promise a lower one to its next backup."""
    store = owner_of("a")
    store.owned[0].term = term(3, "a")

    assert store.next_term(0) > store.owned[0].term


def test_a_fence_only_rises() -> None:
    """Lower and equal terms leave it, and leave nothing to be written to disk."""
    store = store_of("a")
    store.raise_fence(0, term(5, "b"))
    assert store.fences_changed
    store.fences_changed = False

    for lower in (term(5, "b"), term(5, "a"), term(4, "d"), ZERO_TERM):
        store.raise_fence(0, lower)

    assert store.fence(0) == term(5, "b")
    assert not store.fences_changed


def test_owning_below_the_fence_is_impossible() -> None:
    """A node that knows a higher term cannot make itself owner under a lower one, after a restart neither."""
    store = store_of("a")
    store.fences = {0: term(5, "b")}

    for lower in (term(4, "a"), term(5, "a"), ZERO_TERM):
        with pytest.raises(ValueError, match="below the fence"):
            store.own(0, zeros(store), lower, contact("a"), 0.0, tenured=False)
    assert not store.owned
    store.own(0, zeros(store), store.next_term(0), contact("a"), 0.0, tenured=False)
    assert store.fence(0) == term(6, "a")


def test_older_news_of_an_owner_change_nothing() -> None:
    """Lower terms, equal terms of another owner, and repetitions are no news."""
    store = store_of("a")
    assert store.note_owner(0, term(5, "c"), contact("b"))

    assert not store.note_owner(0, term(5, "c"), contact("b"))
    assert not store.note_owner(0, term(5, "c"), contact("d"))
    assert not store.note_owner(0, term(5, "b"), contact("d"))
    assert not store.note_owner(0, term(4, "d"), contact("d"))
    assert store.beliefs[0].owner == contact("b")
    assert store.fence(0) == term(5, "c")


def test_an_owner_that_moved_is_found_at_its_new_address() -> None:
    """The same owner under the same term from another address replaces the old address."""
    store = store_of("a")
    store.note_owner(0, term(5, "b"), contact("b"))
    moved = Contact(IDS["b"], Address("10.0.0.99", 7))

    assert store.note_owner(0, term(5, "b"), moved)
    assert store.beliefs[0].owner == moved


@pytest.mark.parametrize("shard", [-1, 4, 4095])
def test_news_of_shards_that_do_not_exist_are_passed_over(shard: int) -> None:
    """A shard index from the wire is checked against the layout."""
    store = store_of("a")

    assert not store.note_owner(shard, term(1, "b"), contact("b"))
    assert not store.learn(shard, term(1, "b"), contact("b"))
    assert store.accept_forward(shard, term(1, "b"), delta(1), 0, IDS["b"])[0] == "unknown"
    assert not store.take_state(shard, term(1, "b"), contact("b"), zeros(store))
    assert (store.beliefs, store.fences, store.backed) == ({}, {}, {})


def test_news_with_an_address_that_is_none_are_passed_over() -> None:
    """One malformed entry in a list does not cost the others."""
    store = store_of("a")
    store.note(
        [
            Where(0, 1, IDS["b"], IDS["b"], "not-an-address", 1),
            Where(1, 1, IDS["b"], IDS["b"], "", 1),
            Where(2, 1, IDS["b"], IDS["b"], "10.0.0.1", 8468),
        ]
    )

    assert list(store.beliefs) == [2]
    assert store.fence(0) == ZERO_TERM


def test_news_below_the_fence_are_not_believed() -> None:
    """After a restart the fence is all that is left; an owner that it fences off must not be believed or told on."""
    store = store_of("a")
    store.fences = {0: term(5, "b")}

    assert not store.note_owner(0, term(3, "c"), contact("c"))
    assert store.where(0) is None


def test_what_is_believed_is_told() -> None:
    """`where` gives term and owner as they were heard, and survives the wire; nothing for an unknown shard."""
    store = store_of("a")
    store.note_owner(2, term(5, "c"), contact("b"))

    where = store.where(2)

    assert store.where(0) is None
    assert where is not None
    again = decode(encode(where), Where)
    assert (again.shard, again.term, again.contact()) == (2, term(5, "c"), contact("b"))


def test_a_higher_term_ends_an_own_claim() -> None:
    """Whoever has the higher term is the owner: the state goes, and with it the right to acknowledge."""
    store = owner_of("a")

    assert store.note_owner(0, term(2, "b"), contact("b"))

    assert 0 not in store.owned
    assert store.beliefs[0].owner == contact("b")


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
    store.own(1, zeros(store, 1), term(1, "a"), contact("a"), 0.0, tenured=False)
    store.note_owner(0, term(2, "b"), contact("b"))

    assert list(store.owned) == [1]


# -- learning ---------------------------------------------------------------------------------------------------------


def test_forwards_before_the_state_are_acknowledged_and_kept() -> None:
    """A learner takes every live delta at once; the state is put under them when it comes."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    for step in (1, 2):
        assert store.accept_forward(0, term(1, "a"), delta(step), 0, IDS["a"]) == ("ok", term(1, "a"))
    assert store.standing(0, None, 0).role == "none"

    snapshot = zeros(store)
    snapshot.apply(DeltaId(IDS["x"], 1, 0), 1.0, np.full(4, 10.0, dtype=np.float32), SUM)
    assert store.take_state(0, term(2, "a"), contact("a"), snapshot)

    backed = store.backed[0]
    assert value_of(backed.state) == 12.0
    assert (backed.promised, backed.in_office) == (term(2, "a"), False)
    assert backed.term == store.fence(0) == term(1, "a")


def test_a_learner_takes_office_when_its_owner_first_speaks_under_the_promised_term() -> None:
    """Until then it is a learner whose claims are the old ones; then it is the backup, and what waited is let go."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    assert store.standing(0, None, 0).role == "learner"
    assert store.fence(0) == term(1, "a")

    assert store.accept_forward(0, term(2, "a"), delta(2), 0, IDS["a"]) == ("ok", term(2, "a"))

    backed = store.backed[0]
    assert (backed.in_office, backed.term, backed.waiting) == (True, term(2, "a"), [])
    assert store.standing(0, None, 0).role == "backup"
    assert store.fence(0) == store.beliefs[0].term == term(2, "a")
    assert value_of(backed.state) == 2.0


def test_a_newer_snapshot_of_a_learner_replaces_the_older_one() -> None:
    """What was forwarded since `learn` is added to the newer one as well; the older one never comes back."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])

    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    assert value_of(store.backed[0].state) == 1.0
    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert store.backed[0].promised == term(3, "a")


def test_a_forward_that_the_snapshot_has_already_is_not_doubled() -> None:
    """Live stream and snapshot overlap: identities tell."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
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
    assert store.fence(0) == ZERO_TERM


def test_a_state_from_another_than_the_teacher_is_refused() -> None:
    """Learning from a: what c sends is another history."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))

    assert not store.take_state(0, term(9, "c"), contact("c"), zeros(store))
    assert store.backed[0].state is None


def test_a_state_after_a_newer_term_is_refused() -> None:
    """While the state was on its way another took over: the former owner's state is no longer wanted."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.note_owner(0, term(3, "c"), contact("c"))

    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert 0 not in store.backed


def test_a_state_below_a_fence_alone_is_refused() -> None:
    """The newer term may be known without its owner (a refusal names a term only)."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.raise_fence(0, term(3, "c"))

    assert not store.take_state(0, term(2, "a"), contact("a"), zeros(store))
    assert store.backed[0].state is None


def test_learning_below_the_fence_is_refused() -> None:
    """A stale owner cannot make a backup of a node that knows better."""
    store = store_of("b")
    store.note_owner(0, term(3, "c"), contact("c"))

    assert not store.learn(0, term(2, "a"), contact("a"))
    assert 0 not in store.backed
    assert store.beliefs[0].owner == contact("c")


def test_learning_under_a_higher_term_ends_an_own_claim() -> None:
    """An owner that is asked to learn under a higher term is none any more."""
    store = owner_of("b")

    assert store.learn(0, term(2, "a"), contact("a"))
    assert 0 not in store.owned
    assert store.backed[0].state is None


def test_learning_from_a_new_owner_begins_anew() -> None:
    """Deltas that waited for one owner's state are not put upon another's."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    store.learn(0, term(2, "c"), contact("c"))

    assert store.backed[0].waiting == []
    assert store.take_state(0, term(3, "c"), contact("c"), zeros(store))
    assert value_of(store.backed[0].state) == 0.0


def test_learning_again_begins_anew() -> None:
    """What waited belongs to an attempt that was given up; the snapshot of the new one is taken later and has it all."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
    assert store.learn(0, term(1, "a"), contact("a"))

    assert (store.backed[0].state, store.backed[0].waiting) == (None, [])


def test_a_late_learn_does_not_undo_an_office() -> None:
    """A `learn` held up until its owner has spoken under the term of a later attempt has an older term: refused."""
    store = backup_of("b", "a", 2)

    assert not store.learn(0, term(1, "a"), contact("a"))
    assert store.backed[0].in_office


def test_an_older_snapshot_does_not_replace_a_newer_one() -> None:
    """The first attempt's state was held up on the line; the second made us backup, and we have acknowledged since."""
    owner, store = owner_of("a"), store_of("b")
    first = owner.owned[0].state.copy()
    store.learn(0, term(1, "a"), contact("a"))
    first_term = owner.promise(0)
    owner.add(0, delta(1))  # the owner gave the attempt up; its former backup has this one
    store.learn(0, term(1, "a"), contact("a"))
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
    learner.learn(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    backup.accept_forward(0, term(2, "a"), delta(1), 0, IDS["a"])
    owner.add(0, delta(1))

    def rank(standing: Standing) -> tuple[Term, int, int]:
        return standing.term, ROLE_RANK[standing.role], standing.version

    assert rank(backup.standing(0, None, 0)) > rank(learner.standing(0, None, 0))


def test_a_learner_whose_answer_was_lost_can_be_taught_again() -> None:
    """As above, and the owner lives: its second attempt comes under the term it really has."""
    owner, learner = owner_of("a", 2), store_of("c")
    learner.learn(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())

    assert learner.learn(0, owner.owned[0].term, contact("a"))


def test_gossip_of_a_switch_that_did_not_happen_keeps_the_backup() -> None:
    """As above; the learner tells others what it believes. The backup must go on: its owner still forwards to it."""
    owner, backup, learner = owner_of("a", 2), backup_of("b", "a", 2), store_of("c")
    learner.learn(0, term(2, "a"), contact("a"))
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    told = learner.where(0)
    assert told is not None
    backup.note([told])

    status, _ = backup.accept_forward(0, owner.owned[0].term, delta(1), 0, IDS["a"])

    assert status == "ok"


# -- forwards ---------------------------------------------------------------------------------------------------------


def test_a_backup_adds_a_forward_once() -> None:
    """A repeated forward is acknowledged again and adds nothing."""
    store = backup_of("b", "a")

    for _ in range(3):
        assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("ok", term(1, "a"))
    assert value_of(store.backed[0].state) == 1.0


def test_forwards_may_come_in_any_order() -> None:
    """A backup that insisted on the order would stop for ever at the first abandoned forward."""
    store = backup_of("b", "a")
    for step in (5, 2, 9, 1):
        assert store.accept_forward(0, term(1, "a"), delta(step), 0, IDS["a"])[0] == "ok"

    assert value_of(store.backed[0].state) == 4.0


def test_a_fenced_forward_is_told_the_higher_term_and_adds_nothing() -> None:
    """A former owner learns from its backup that it is none any more."""
    store = backup_of("b", "a")
    store.raise_fence(0, term(4, "c"))

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("fenced", term(4, "c"))
    assert value_of(store.backed[0].state) == 0.0


def test_a_new_owner_fences_its_former_owner() -> None:
    """The backup took over; the old owner, alive after all, forwards to it and is refused."""
    store = backup_of("b", "a")
    taken = store.backed[0].state
    assert taken is not None
    store.own(0, taken, store.next_term(0), contact("b"), 1.0, tenured=False)

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("fenced", term(2, "b"))
    assert value_of(store.owned[0].state) == 0.0
    assert 0 not in store.backed


@pytest.mark.parametrize("sender", ["c", "b"])
def test_a_forward_from_a_node_we_do_not_back_is_unknown(sender: str) -> None:
    """Only the owner forwards; anybody else's delta, also under a high term, adds nothing."""
    store = backup_of("b", "a")

    assert store.accept_forward(0, term(9, sender), delta(1), 0, IDS[sender])[0] == "unknown"
    assert value_of(store.backed[0].state) == 0.0


def test_a_forward_to_a_node_that_backs_nothing_is_unknown() -> None:
    """A restarted backup has forgotten its state: the owner must choose and teach another, or it again."""
    store = store_of("b")

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("unknown", ZERO_TERM)
    assert not store.backed


def test_another_owner_ends_a_backup() -> None:
    """Somebody took over without us: what we have belongs to no pair any more."""
    store = backup_of("b", "a")

    assert store.note_owner(0, term(5, "c"), contact("c"))
    assert 0 not in store.backed


def test_news_of_the_own_owner_leave_a_backup() -> None:
    """Only the owner knows whether it has another backup now, and says so by `release`; gossip does not."""
    store = backup_of("b", "a")

    assert store.note_owner(0, term(5, "a"), contact("a"))
    assert store.backed[0].in_office


def test_a_release_ends_a_backup() -> None:
    """Under the newer term of its own owner; memory is freed, and the new term believed."""
    store = backup_of("b", "a")

    assert store.release(0, term(2, "a"), contact("a"))
    assert 0 not in store.backed
    assert store.beliefs[0].term == store.fence(0) == term(2, "a")


@pytest.mark.parametrize(("number", "sender"), [(3, "a"), (2, "a"), (5, "c")])
def test_a_release_that_is_late_or_not_the_owners_is_none(number: int, sender: str) -> None:
    """Under a term that is not newer than the office, or from somebody else: nothing happens."""
    store = backup_of("b", "a", 3)

    assert not store.release(0, term(number, sender), contact(sender))
    assert store.backed[0].in_office


def test_a_release_of_a_former_office_does_not_end_a_later_apprenticeship() -> None:
    """Released under term 2, but taught anew since, for term 3: the release was held up on the line."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.take_state(0, term(3, "a"), contact("a"), zeros(store))

    assert not store.release(0, term(2, "a"), contact("a"))
    assert store.backed[0].promised == term(3, "a")


def test_news_of_the_own_pair_leave_a_backup() -> None:
    """Hearing the term under which we are the backup is no reason to forget the state."""
    store = backup_of("b", "a", 3)
    store.note_owner(0, term(3, "a"), Contact(IDS["a"], Address("10.0.0.9", 9)))

    assert store.backed[0].state is not None


def test_a_higher_term_of_the_teacher_leaves_a_learner() -> None:
    """A learner has no state that could be old; its snapshot is still to come."""
    store = store_of("b")
    store.learn(0, term(1, "a"), contact("a"))
    store.note_owner(0, term(2, "a"), contact("a"))

    assert store.take_state(0, term(3, "a"), contact("a"), zeros(store))


# -- bulk-synchronous -------------------------------------------------------------------------------------------------


def test_synchronous_forwards_are_held_and_folded_with_the_owner() -> None:
    """A backup holds a step's deltas until a forward tells that its owner has folded them."""
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


def test_a_held_delta_is_not_held_twice() -> None:
    """A retry under bulk-synchronous rules is recognised before and after the fold."""
    store = backup_of("b", "a")
    for folded in (0, 0, 5, 5):
        store.accept_forward(0, term(1, "a"), delta(1, synchronous=True), folded, IDS["a"])

    state = store.backed[0].state
    assert value_of(state) == 1.0
    assert state is not None
    assert state.version == 1


# -- owning and handing over ------------------------------------------------------------------------------------------


def test_an_owner_adds_once_and_counts_versions() -> None:
    """`add` gives the version that the puller will see; a repetition gives the same."""
    store = owner_of("a")

    assert [store.add(0, delta(step)) for step in (1, 2, 2, 3)] == [1, 2, 2, 3]
    assert value_of(store.owned[0].state) == 3.0


def test_an_owner_is_no_backup() -> None:
    """Taking over ends the role of backup: one state, one role."""
    store = backup_of("b", "a")
    state = store.backed[0].state
    assert state is not None
    store.own(0, state, store.next_term(0), contact("b"), 3.0, tenured=True)

    assert 0 not in store.backed
    owned = store.owned[0]
    assert (owned.since, owned.tenured, owned.backup, owned.learner, owned.moving) == (3.0, True, None, None, False)
    assert owned.targets() == []


def test_targets_are_backup_and_learner() -> None:
    """Every delta goes to both while a new backup is learning."""
    owned = owner_of("a").owned[0]
    owned.learner = contact("c")
    assert owned.targets() == [contact("c")]
    owned.backup = contact("b")
    assert owned.targets() == [contact("b"), contact("c")]


def test_a_hand_over_turns_owner_into_backup_with_the_same_state() -> None:
    """The former owner keeps the state, takes the new owner's forwards, and cannot add by itself."""
    old, new = owner_of("a"), backup_of("b", "a")
    for store in (old, new):
        state = store.owned[0].state if store is old else store.backed[0].state
        assert state is not None
        state.apply(delta(1).identity, 1.0, delta(1).delta, SUM)
    handed = term(2, "b")
    state = new.backed[0].state
    assert state is not None
    new.own(0, state, handed, contact("b"), 0.0, tenured=True)
    old.demote(0, contact("b"), handed)

    assert 0 not in old.owned
    assert old.accept_forward(0, handed, delta(2), 0, IDS["b"])[0] == "ok"
    new.add(0, delta(2))
    assert value_of(old.backed[0].state) == value_of(new.owned[0].state) == 2.0
    assert old.where(0) == new.where(0)
    assert old.fence(0) == new.fence(0) == handed


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_hand_over_shows_what_the_former_owner_lacks(synchronous: bool) -> None:
    """The backup took a delta, its answer was lost, the owner added nothing: the counts of known deltas tell.

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
    """Attempts to teach that came to nothing have left their terms on the line; those of a hand-over lie above them."""
    store = owner_of("a")

    promised = [store.promise(0) for _ in range(3)]

    assert promised == [term(2, "a"), term(3, "a"), term(4, "a")]
    assert store.owned[0].term == store.fence(0) == term(1, "a")
    assert store.next_term(0) == term(5, "a")


def test_an_appointment_puts_the_owner_under_the_promised_term() -> None:
    """New backup, no learner, the former backup to be released; tenure begins anew."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("c")
    promised = store.promise(0)

    assert store.appoint(0, contact("c"), promised, contact("a"), 7.0) == contact("b")

    owned = store.owned[0]
    assert (owned.backup, owned.learner, owned.term, owned.since) == (contact("c"), None, promised, 7.0)
    assert store.fence(0) == store.beliefs[0].term == promised


def test_a_demoted_owner_refuses_its_own_old_term() -> None:
    """A forward that it sent as owner and that comes back late, or another's under the old term, is fenced."""
    store = owner_of("a")
    store.demote(0, contact("b"), term(2, "b"))

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["b"]) == ("fenced", term(2, "b"))


# -- standings and sizes ----------------------------------------------------------------------------------------------


def test_standings_of_all_roles() -> None:
    """Owner, backup, learner, replica, none; a learner without its state has nothing to offer but its replica."""
    store = store_of("b")
    mark = (term(1, "d"), 9)
    fence = (0, b"")
    assert store.standing(0, None, 5) == Standing(0, "none", *ZERO_TERM, 0, *fence, 5)
    assert store.standing(0, mark, 5) == Standing(0, "replica", 1, IDS["d"], 9, *fence, 5)

    store.learn(0, term(2, "a"), contact("a"))
    assert store.standing(0, mark, 5) == Standing(0, "replica", 1, IDS["d"], 9, 2, IDS["a"], 5)

    store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    learner = store.standing(0, mark, 5)
    assert (learner.role, learner.term, learner.version) == ("learner", term(2, "a"), 0)

    store.accept_forward(0, term(3, "a"), delta(1), 0, IDS["a"])
    assert store.standing(0, mark, 5) == Standing(0, "backup", 3, IDS["a"], 1, 3, IDS["a"], 5)

    state = store.backed[0].state
    assert state is not None
    store.own(0, state, term(4, "b"), contact("b"), 0.0, tenured=False)
    store.raise_fence(0, term(6, "c"))
    standing = store.standing(0, mark, 5)
    assert standing == Standing(0, "owner", 4, IDS["b"], 1, 6, IDS["c"], 5)
    assert (standing.term, standing.fence) == (term(4, "b"), term(6, "c"))


def test_the_size_counts_both_roles() -> None:
    """Memory of what is owned and what is backed up; a learner without its state holds none."""
    store = owner_of("b")
    store.learn(1, term(1, "a"), contact("a"))
    assert store.size_bytes == 16
    store.take_state(1, term(2, "a"), contact("a"), zeros(store, 1))
    assert store.size_bytes == 32


# -- a state on the wire ----------------------------------------------------------------------------------------------


async def stream(buffers: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    for buffer in buffers:
        yield buffer


def rich_state(store: ShardStore, shard: int, rule: Rule) -> ShardState:
    """A state with everything in it: momentum, gaps, held deltas of two steps, an era."""
    rng = np.random.default_rng(shard)
    state = store.fresh_state(shard, rng.normal(size=4))
    for step in (1, 2, 4):
        state.apply(DeltaId(IDS["x"], 2, step), 0.4, rng.normal(size=4).astype(np.float32), rule)
    for step, node in ((6, "b"), (5, "c"), (5, "a")):
        state.hold(DeltaId(IDS[node], 1, step), 0.25, rng.normal(size=4).astype(np.float32))
    state.era_step, state.folded_step = 3, 4
    return state


def transferred(states: dict[int, ShardState], into: ShardStore) -> dict[int, ShardState]:
    heads = [transfer.describe(shard, term(7, "a"), state) for shard, state in states.items()]
    payload = encode(State(b"g", heads))
    body = list(transfer.body([(head, states[head.shard]) for head in heads]))

    async def receive() -> dict[int, ShardState]:
        reader = FrameReader(stream(body))
        found = {head.shard: await transfer.read_state(reader, head, into) for head in decode(payload, State).states}
        assert await reader.next() is None
        return found

    return asyncio.run(receive())


@pytest.mark.parametrize("rule", [SUM, Rule(0.7, 0.9)], ids=["plain", "momentum"])
def test_a_state_survives_the_wire_whole(rule: Rule) -> None:
    """Every part arrives, for shards of parameters, of both, and of buffers; and both go on to the same bits."""
    store = store_of("a", rule)
    states = {shard: rich_state(store, shard, rule) for shard in range(4)}

    arrived = transferred(states, store_of("b", rule))

    for shard, state in states.items():
        again = arrived[shard]
        assert sorted(again.applied.rows()) == sorted(state.applied.rows())
        assert (again.version, again.sum_weight, again.era_step, again.folded_step, again.parameters) == (
            state.version,
            state.sum_weight,
            state.era_step,
            state.folded_step,
            state.parameters,
        )
        for one in (state, again):
            one.fold(9, rule)
            one.apply(DeltaId(IDS["d"], 1, 1), 0.9, np.ones(4, dtype=np.float32), rule)
        assert again.value.tobytes() == state.value.tobytes()
        assert (again.momentum is None) == (state.momentum is None)


def test_a_state_of_a_shard_that_does_not_exist_is_refused() -> None:
    """The head is checked against the layout before anything is allocated."""
    store = store_of("a")
    head = transfer.describe(4, term(1, "a"), zeros(store))

    with pytest.raises(ValueError, match="shard 4 of 4"):
        asyncio.run(transfer.read_state(FrameReader(stream([])), head, store))


def test_a_state_with_parts_missing_is_a_bad_frame() -> None:
    """Cut before any of its arrays, a state is not taken for one with fewer of them."""
    rule = Rule(0.7, 0.9)
    store = store_of("a", rule)
    state = rich_state(store, 2, rule)
    head = transfer.describe(2, term(7, "a"), state)
    buffers = list(transfer.body([(head, state)]))

    for kept in range(0, len(buffers), 2):
        with pytest.raises(BadFrame):
            asyncio.run(transfer.read_state(FrameReader(stream(buffers[:kept])), head, store))


def test_arrays_in_another_order_are_a_bad_frame() -> None:
    """Momentum is not taken for accumulated deltas, though both have the same size."""
    rule = Rule(0.7, 0.9)
    store = store_of("a", rule)
    state = rich_state(store, 0, rule)
    head = transfer.describe(0, term(7, "a"), state)
    buffers = list(transfer.body([(head, state)]))
    buffers[2:4], buffers[4:6] = buffers[4:6], buffers[2:4]

    with pytest.raises(BadFrame):
        asyncio.run(transfer.read_state(FrameReader(stream(buffers)), head, store))


@pytest.mark.parametrize(
    "change",
    [{"shard": 4096}, {"shard": -1}, {"term_number": -1}, {"version": -1}, {"applied": [(b"x", 1)]}, {"held": [1]}],
    ids=str,
)
def test_a_malformed_head_is_refused_when_it_is_decoded(change: dict[str, object]) -> None:
    """Impossible numbers and shapes end at the decoder, not in the store."""
    store = store_of("a")
    head = msgspec.structs.replace(transfer.describe(0, term(1, "a"), zeros(store)), **change)

    with pytest.raises(msgspec.DecodeError):
        decode(encode(head), StateHead)
