"""The roles of one node for a shard: what each event makes of an owner, a learner, a backup, or a node without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.store.records import BufferedDelta, RepairLog, StoredState
from p2pnode.training.exchange.store.replica import copy_status, has_known_owner, has_state, rank_copy
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, OwnerInfo
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
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

#: Something that happens to the store of node b for shard 0; returns what the method returns.
Event = Callable[[ShardStore], Any]


def claim(number: int, name: str, owner: str = "") -> Event:
    return lambda store: store.note_owner(0, term(number, name), contact(owner or name))


def fence(number: int, name: str) -> Event:
    return lambda store: store.ownership.raise_fence(0, term(number, name))


def learn(number: int, name: str = "a", attempt: int | None = None) -> Event:
    return lambda store: store.begin_catch_up(0, term(number, name), contact(name), attempt)


def state(promised: int, name: str = "a", *known: int) -> Event:
    def take(store: ShardStore) -> bool:
        snapshot = zeros(store)
        for step in known:
            snapshot.apply(delta(step).identity, 1.0, delta(step).delta, SUM)
        return store.take_state(0, term(promised, name), contact(name), snapshot)

    return take


def forward(number: int, step: int, name: str = "a", sender: str = "") -> Event:
    return lambda store: store.accept_forward(0, term(number, name), delta(step), 0, IDS[sender or name])[0]


def denies(number: int, name: str = "a", attempt: int = 0, asked: str = "a") -> Event:
    """The owner that was asked says under this term that it, or another, owns the shard without this copy."""
    info = OwnerInfo.of(0, term(number, name), contact(name))
    return lambda store: store.drop_unconfirmed(info, contact(asked), attempt)


def restarts(name: str) -> Event:
    return lambda store: store.on_restart(IDS[name], contact("b"))


def takes_over(store: ShardStore) -> None:
    backed = store.backed[0].state
    assert backed is not None
    store.own(0, backed, store.next_term(0), contact("b"), 1.0, by_handover=False)


def shown(store: ShardStore) -> str:
    """The role, its term where it has one, the promised term, and the value: "backup 2a =1"."""
    if (owned := store.owned.get(0)) is not None:
        return f"owner {owned.term.number}{_name(owned.term.node)} ={value_of(owned.state):g}"
    backed = store.backed.get(0)
    if backed is None:
        return "none"
    role = "backup" if backed.is_active else "learner"
    promised = "" if backed.promised is None else f" to {backed.promised.number}{_name(backed.promised.node)}"
    value = f"+{len(backed.buffered)}" if backed.state is None else f"={value_of(backed.state):g}"
    return f"{role} {backed.term.number}{_name(backed.term.node)}{promised} {value}"


def _name(node: bytes) -> str:
    return next(name for name, one in IDS.items() if one == node)


NONE, BACKUP, OWNER = "none", "backup", "owner"


@pytest.mark.parametrize(
    ("begins", "events", "answer", "ends"),
    [
        # A learner: it buffers, takes the state, and is the backup with the first forward under the promised term.
        (NONE, [learn(1), forward(1, 1), forward(1, 2)], "ok", "learner 1a +2"),
        (NONE, [learn(1), forward(1, 1), state(2, "a", 5)], True, "learner 1a to 2a =2"),
        (NONE, [learn(1), forward(1, 1), forward(1, 1), state(2, "a", 1)], True, "learner 1a to 2a =1"),
        (NONE, [learn(1), state(2), forward(1, 1), forward(2, 2)], "ok", "backup 2a =2"),
        (NONE, [learn(1), state(2), claim(2, "a")], True, "backup 2a =0"),  # no term is promised twice
        (NONE, [learn(1), state(2), claim(3, "a")], True, "none"),  # another was promoted: this copy may lack deltas
        (NONE, [learn(1), claim(2, "a"), state(3)], True, "learner 1a to 3a =0"),  # it had no state that could be old
        # Snapshots: a newer one replaces an older one, with what was buffered, and never the other way.
        (NONE, [learn(1), state(2), forward(1, 1), state(3)], True, "learner 1a to 3a =1"),
        (NONE, [learn(1), state(3), state(2)], False, "learner 1a to 3a =0"),
        (NONE, [learn(1), learn(1), state(3), forward(3, 1), state(2)], False, "backup 3a =1"),
        (NONE, [state(5)], False, "none"),  # without buffered deltas beside it, it has a gap
        (NONE, [learn(1), state(9, "c")], False, "learner 1a +0"),
        (NONE, [learn(1), claim(3, "c"), state(2)], False, "none"),
        (NONE, [learn(1), fence(3, "c"), state(2)], False, "learner 1a +0"),
        # Requests to learn: late ones are refused, a new attempt begins from nothing.
        (NONE, [claim(3, "c"), learn(2)], False, "none"),
        (NONE, [learn(1), forward(1, 1), learn(2, "c"), state(3, "c")], True, "learner 2c to 3c =0"),
        (NONE, [learn(1), forward(1, 1), learn(1)], True, "learner 1a +0"),
        (NONE, [learn(1, "a", 3), forward(1, 1), learn(1, "a", 2)], False, "learner 1a +1"),
        (NONE, [learn(1, "a", 3), forward(1, 1), learn(1, "a", 3)], False, "learner 1a +1"),
        (NONE, [learn(1, "a", 3), forward(1, 1), learn(1, "a", 4)], True, "learner 1a +0"),
        (NONE, [learn(2), state(3), learn(2)], True, "learner 2a +0"),  # the answer to the state was lost
        (BACKUP, [learn(1)], False, "backup 2a =0"),
        (OWNER, [learn(1, "c", 1)], False, "owner 2b =0"),
        (OWNER, [learn(3, "c")], True, "learner 3c +0"),
        # A backup: each delta once, in any order, from its owner alone.
        (BACKUP, [forward(2, 5), forward(2, 1), forward(2, 5)], "ok", "backup 2a =2"),
        (BACKUP, [forward(8, 1)], "ok", "backup 8a =1"),  # its copy must not rank below a term between
        (BACKUP, [fence(4, "c"), forward(2, 1)], "fenced", "backup 2a =0"),
        (BACKUP, [forward(9, 1, "c")], "unknown", "backup 2a =0"),
        (BACKUP, [forward(9, 1, "b")], "unknown", "backup 2a =0"),
        (NONE, [forward(1, 1)], "unknown", "none"),
        # Claims: another pair's ends the role, one of its own owner does not.
        (BACKUP, [claim(5, "c")], True, "none"),
        (BACKUP, [claim(5, "a")], True, "backup 2a =0"),
        (BACKUP, [claim(1, "c")], False, "backup 2a =0"),
        # What its owner says when it is asked ends it, unless it is late or of a catch-up before.
        (BACKUP, [denies(3)], None, "none"),
        (BACKUP, [denies(2)], None, "backup 2a =0"),
        (BACKUP, [denies(1)], None, "backup 2a =0"),
        (BACKUP, [denies(5, "c", asked="c")], None, "backup 2a =0"),
        (BACKUP, [denies(5, "c")], None, "none"),
        (NONE, [learn(1, "a", 3), state(3), denies(2)], None, "learner 1a to 3a =0"),
        (NONE, [learn(1, "a", 3), state(3), denies(1, "a", 3)], None, "none"),
        # After a split two owners have one number: what this learner was promised may be in use.
        (NONE, [learn(8, "c", 9), state(9, "c"), claim(9, "a")], True, "learner 8c to 9c =0"),
        (NONE, [learn(8, "c", 9), state(9, "c"), claim(9, "a"), learn(9, "a", 10)], False, "learner 8c to 9c =0"),
        (NONE, [learn(8, "c", 9), state(9, "c"), denies(9, "a", 9, "c")], None, "none"),
        # Owners.
        (OWNER, [claim(3, "c")], True, "none"),
        (OWNER, [claim(1, "d")], False, "owner 2b =0"),
        (OWNER, [claim(2, "a")], False, "owner 2b =0"),
        (OWNER, [claim(4, "b")], True, "owner 2b =0"),  # its own newer term comes back from a learner
        (BACKUP, [takes_over, forward(2, 1)], "fenced", "owner 3b =0"),
        # Restarts: an owner owns nothing, so its backup may take over; a learner's state never comes.
        (BACKUP, [restarts("a"), learn(2, "a", 0)], True, "learner 2a +0"),
        (NONE, [learn(1, "a", 2), restarts("a")], None, "none"),
    ],
)
def test_an_event_makes_of_a_role_what_the_history_allows(
    begins: str, events: list[Event], answer: object, ends: str
) -> None:
    """Late, repeated and foreign requests change nothing; whatever is ended keeps its fence."""
    store = {NONE: store_of("b"), BACKUP: backup_of("b", "a", 2), OWNER: owner_of("b", 2)}[begins]
    for event in events[:-1]:
        event(store)
    before = store.ownership.fence(0)
    found = events[-1](store)
    if answer is not None:
        assert found == answer
    assert shown(store) == ends
    assert store.ownership.fence(0) >= before


# -- what is kept of a role that ended ---------------------------------------------------------------------------------


def logged(name: str) -> ShardStore:
    """An owner of shard 0 under (1, name) with a log."""
    store = ShardStore(IDS[name], BOUNDS, PARAMETERS, SUM, RepairLog(1 << 20, 60.0))
    store.own(0, zeros(store), term(1, name), contact(name), 0.0, by_handover=False)
    return store


def test_a_copy_that_lost_is_kept_to_be_offered() -> None:
    """Of an owner, of a backup whose owner may have crashed, and of a backup that takes over from another copy."""
    owner, backup, other = logged("a"), backup_of("b", "a"), backup_of("b", "a")
    owner.add(0, delta(1))
    owner.note_owner(0, term(5, "c"), contact("c"))
    backup.note_owner(0, term(5, "c"), contact("c"))
    other.own(0, zeros(other), term(9, "b"), contact("b"), 0.0, by_handover=False)

    assert [store.superseded[0].term for store in (owner, backup, other)] == [term(1, "a")] * 3
    assert value_of(owner.superseded[0].state) == 1.0


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


def test_a_restarted_owner_is_known_no_more_and_a_restarted_backup_is_dropped() -> None:
    """The owner answers, but owns nothing. The backup has lost its state: the owner continues under a new term."""
    backup, owner = backup_of("b", "a"), owner_of("a")
    backup.on_restart(IDS["a"], contact("b"))
    assert backup.backed[0].owner_restarted
    assert backup.backed[0].is_active
    assert 0 not in backup.ownership.known_owners

    owner.owned[0].backup, owner.owned[0].learner = contact("b"), contact("b")
    owner.on_restart(IDS["b"], contact("a"))
    assert owner.owned[0].targets() == []
    assert owner.owned[0].term == term(2, "a")


# -- terms ------------------------------------------------------------------------------------------------------------


def test_the_next_term_is_above_all_that_was_seen_had_and_promised() -> None:
    """And no term is promised twice: those of abandoned attempts may be in transit still."""
    store = store_of("a")
    assert store.next_term(0) == term(1, "a")
    store.ownership.raise_fence(0, term(7, "d"))
    assert store.next_term(0) == term(8, "a")
    assert store.next_term(0, term(3, "b"), term(9, "b")) == term(10, "a")
    assert store.next_term(1) == term(1, "a")

    owner = owner_of("a")
    owner.owned[0].term = term(3, "a")
    assert [owner.promise(0) for _ in range(3)] == [term(4, "a"), term(5, "a"), term(6, "a")]
    assert owner.next_term(0) == term(7, "a")
    assert owner.owned[0].term == term(3, "a")

    learner = store_of("b")
    learn(1)(learner)
    state(5)(learner)
    assert learner.next_term(0) == term(6, "b")
    assert copy_status(learner, 0, None, 0).fence == term(5, "a")
    assert learner.ownership.fence(0) == term(1, "a")


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


def test_a_promotion_gives_the_owner_the_promised_term_and_a_loss_of_the_backup_a_higher_one() -> None:
    """What a dropped backup still has ranks below all that comes after, and below a fence that nobody owns."""
    store = owner_of("a")
    owned = store.owned[0]
    owned.learner = contact("c")
    assert owned.targets() == [contact("c")]
    owned.backup = contact("b")
    assert owned.targets() == [contact("b"), contact("c")]
    owned.remove_learner(IDS["b"])
    assert owned.learner == contact("c")
    promised = store.promise(0)
    store.promote_learner(0, contact("c"), promised, contact("a"), 7.0)
    assert (owned.backup, owned.learner, owned.term, owned.since) == (contact("c"), None, promised, 7.0)
    assert store.ownership.fence(0) == store.ownership.known_owners[0].term == promised

    owned.moving, late = True, store.promise(0)
    store.drop_backup(0, contact("a"), term(7, "x"))
    assert (owned.targets(), owned.moving) == ([], False)
    assert owned.term == store.ownership.fence(0) == store.ownership.known_owners[0].term == term(8, "a")
    assert owned.promised > late.number


def test_a_hand_over_turns_owner_into_backup_with_the_same_state() -> None:
    """It takes the new owner's forwards, and refuses its own old term. A report of others before the answer does the
    same; the counts of deltas show what a former owner lacks."""
    old, new = owner_of("a"), backup_of("b", "a")
    mine, theirs = old.owned[0].state, new.backed[0].state
    assert theirs is not None
    assert mine.known_count == theirs.known_count
    for step in (1, 2):
        item = delta(step)
        new.accept_forward(0, term(1, "a"), item, 0, IDS["a"])
        assert mine.known_count < theirs.known_count
        old.add(0, item)
        assert mine.known_count == theirs.known_count
    handed = term(2, "b")
    new.own(0, theirs, handed, contact("b"), 3.0, by_handover=True)
    old.become_backup(0, contact("b"), handed)
    assert old.accept_forward(0, handed, delta(3), 0, IDS["b"])[0] == "ok"
    assert old.accept_forward(0, term(1, "a"), delta(4), 0, IDS["b"]) == ("fenced", handed)
    new.add(0, delta(3))
    assert value_of(old.backed[0].state) == value_of(new.owned[0].state)
    assert old.redirect(0) == new.redirect(0)
    assert (new.owned[0].since, new.owned[0].by_handover, new.backed) == (3.0, True, {})

    told = owner_of("a")
    told.owned[0].backup, told.owned[0].moving = contact("b"), True
    assert told.note_owner(0, told.promise(0), contact("b"))
    assert (told.owned, told.superseded) == ({}, {})
    assert told.backed[0].is_active


def test_an_acknowledged_delta_is_at_the_copy_that_ranks_highest() -> None:
    """A learner whose answer was lost has the state and not the delta; its report of a switch ends no backup. A
    take-over ranks as the copy it began with, until its first delta."""
    owner, backup, learner = owner_of("a", 2), backup_of("b", "a", 2), store_of("c")
    learn(2)(learner)
    learner.take_state(0, owner.promise(0), contact("a"), owner.owned[0].state.copy())
    told = learner.redirect(0)
    assert told is not None
    backup.note_owners([told])
    assert forward(2, 1)(backup) == "ok"
    owner.add(0, delta(1))
    assert rank_copy(copy_status(backup, 0, None, 0)) > rank_copy(copy_status(learner, 0, None, 0))

    store = store_of("b")
    owned = store.own(0, zeros(store), term(9, "b"), contact("b"), 0.0, by_handover=False)
    owned.first_copy = term(4, "a"), owned.state.known_count
    assert owned.rank_term == term(4, "a")
    store.add(0, delta(1))
    assert owned.rank_term == term(9, "b")


# -- what comes from the wire -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [-1, 4, 4095])
def test_claims_of_shards_outside_the_layout_are_ignored(shard: int) -> None:
    """A shard index from the wire is checked against the layout."""
    store = store_of("a")

    assert not store.note_owner(shard, term(1, "b"), contact("b"))
    assert not store.begin_catch_up(shard, term(1, "b"), contact("b"))
    assert store.accept_forward(shard, term(1, "b"), delta(1), 0, IDS["b"])[0] == "unknown"
    assert not store.take_state(shard, term(1, "b"), contact("b"), zeros(store))
    assert (store.ownership.known_owners, store.ownership.fences, store.backed) == ({}, {}, {})


def test_one_malformed_claim_costs_no_other_and_a_claim_only_its_own_shard() -> None:
    """Addresses are checked where they are needed. A new address of the same owner ends no role."""
    store = owner_of("a")
    store.own(1, zeros(store, 1), term(1, "a"), contact("a"), 0.0, by_handover=False)
    store.note_owners(
        [
            OwnerInfo(0, term(2, "b"), IDS["b"], "10.0.0.1", 8468),
            OwnerInfo(2, term(1, "b"), IDS["b"], "not-an-address", 1),
            OwnerInfo(3, term(1, "b"), IDS["b"], "10.0.0.1", 8468),
        ]
    )
    assert (list(store.owned), sorted(store.ownership.known_owners)) == ([1], [0, 1, 3])
    assert store.ownership.fence(2) == ZERO_TERM

    backup = backup_of("b", "a", 3)
    backup.note_owner(0, term(3, "a"), Contact(IDS["a"], Address("10.0.0.9", 9)))
    assert backup.backed[0].state is not None


def test_a_wrong_owner_under_a_term_is_corrected() -> None:
    """The known one denies it and the other confirms it; under another term nothing is corrected."""
    store = store_of("c")
    store.note_owner(0, term(3, "a"), contact("b"))
    store.correct_owner(0, term(2, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("b")
    store.correct_owner(0, term(3, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("a")


# -- states and deltas ------------------------------------------------------------------------------------------------


def test_a_fresh_state_has_a_value_of_its_own_and_knows_where_the_buffers_begin() -> None:
    """The parameters may end inside a shard, before it, or after it."""
    store, values = store_of("a"), np.zeros(16, dtype=np.float32)
    assert len(store) == 4
    assert [zeros(store, shard).parameters for shard in range(4)] == [4, 4, 2, 0]
    made = store.fresh_state(1, values[4:8])
    values += 1
    assert not made.value.any()


def test_the_size_counts_both_roles() -> None:
    """The memory of owned and backed states; a learner without a state uses none."""
    store = owner_of("b")
    store.begin_catch_up(1, term(1, "a"), contact("a"))
    assert store.size_bytes == 16
    store.take_state(1, term(2, "a"), contact("a"), zeros(store, 1))
    assert store.size_bytes == 32


def test_synchronous_forwards_are_pending_until_their_owner_folds() -> None:
    """The next forward names the step that the owner has folded. A retry is known before and after."""
    store = backup_of("b", "a", synchronous=True)
    for step in (1, 2, 1):
        store.accept_forward(0, term(1, "a"), delta(step, 10.0**step), 0, IDS["a"])
    made = store.backed[0].state
    assert made is not None
    assert value_of(made) == 0.0
    for _ in range(2):
        store.accept_forward(0, term(1, "a"), delta(3), 1, IDS["a"])
        store.accept_forward(0, term(1, "a"), delta(1, 10.0), 1, IDS["a"])

    assert (value_of(made), made.folded_step, list(made.pending), made.version) == (10.0, 1, [2, 3], 1)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_delta_of_a_node_that_is_alone_is_added_as_it_is(synchronous: bool) -> None:
    """Nothing is logged, and nothing of the trainer's memory is kept."""
    store = ShardStore(IDS["a"], BOUNDS, PARAMETERS, SUM, RepairLog(1 << 20, 60.0), synchronous=synchronous)
    store.own(0, zeros(store), term(1, "a"), contact("a"), 0.0, by_handover=False)
    own = np.array([1.0 + 2.0**-20, -3.0, 0.5, 2.0**-20], dtype=np.float32)
    added = own.copy()
    store.add_alone(0, DeltaId(IDS["a"], 1, 1), 1.0, added, plain=False)
    added[:] = 0.0
    store.fold(0, 1)

    assert (store.owned[0].state.value == own).all()
    assert (store.owned[0].state.version, store.log.entries(0)) == (1, [])


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
def test_a_sparse_delta_is_plain_wherever_it_is_added(synchronous: bool, momentum: bool) -> None:
    """At once, after its barrier, or as a repair: the codec decides, and nothing else is asked."""
    rule = Rule(outer_lr=0.5, outer_momentum=0.5)
    made = ShardState(np.zeros(2, np.float32), 2)
    sparse = np.float32([2.0, 0.0])
    payload = codecs.encode(sparse, "sparse")
    identity = DeltaId(IDS["x"], 1, 1)
    item = BufferedDelta(identity, 0.5, sparse, payload, "sparse", momentum=momentum)
    item.add_to(made, rule, synchronous=synchronous)
    made.fold(1, rule)

    assert made.value.tolist() == [1.0, 0.0]
    assert made.momentum is None
