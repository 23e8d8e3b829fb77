"""Owner and backup of a shard: forwards, bulk-synchronous deltas, appointments, hand-over, standings."""

from __future__ import annotations

import pytest

from overlay.addresses import Address
from overlay.peers import Contact
from tests.harness.stores import IDS, SUM, backup_of, contact, delta, owner_of, store_of, term, value_of, zeros
from training.exchange.terms import ZERO_TERM

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
    store.ownership.raise_fence(0, term(4, "c"))

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"]) == ("fenced", term(4, "c"))
    assert value_of(store.backed[0].state) == 0.0


def test_a_new_owner_fences_its_former_owner() -> None:
    """The backup took over; the old owner, alive after all, forwards to it and is refused."""
    store = backup_of("b", "a")
    taken = store.backed[0].state
    assert taken is not None
    store.own(0, taken, store.next_term(0), contact("b"), 1.0, has_tenure=False)

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
    assert store.backed[0].is_active


def test_a_release_ends_a_backup() -> None:
    """Under the newer term of its own owner; memory is freed, and the new term believed."""
    store = backup_of("b", "a")

    assert store.release(0, term(2, "a"), contact("a"))
    assert 0 not in store.backed
    assert store.ownership.known_owners[0].term == store.ownership.fence(0) == term(2, "a")


@pytest.mark.parametrize(("number", "sender"), [(3, "a"), (2, "a"), (5, "c")])
def test_a_release_that_is_late_or_not_the_owners_is_none(number: int, sender: str) -> None:
    """Under a term that is not newer than the office, or from somebody else: nothing happens."""
    store = backup_of("b", "a", 3)

    assert not store.release(0, term(number, sender), contact(sender))
    assert store.backed[0].is_active


def test_a_release_of_a_former_office_does_not_end_a_later_apprenticeship() -> None:
    """Released under term 2, but taught anew since, for term 3: the release was held up on the line."""
    store = store_of("b")
    store.begin_catch_up(0, term(1, "a"), contact("a"))
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
    store.begin_catch_up(0, term(1, "a"), contact("a"))
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
    store.own(0, state, store.next_term(0), contact("b"), 3.0, has_tenure=True)

    assert 0 not in store.backed
    owned = store.owned[0]
    assert (owned.since, owned.has_tenure, owned.backup, owned.learner, owned.moving) == (3.0, True, None, None, False)
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
    new.own(0, state, handed, contact("b"), 0.0, has_tenure=True)
    old.become_backup(0, contact("b"), handed)

    assert 0 not in old.owned
    assert old.accept_forward(0, handed, delta(2), 0, IDS["b"])[0] == "ok"
    new.add(0, delta(2))
    assert value_of(old.backed[0].state) == value_of(new.owned[0].state) == 2.0
    assert old.ownership.owner_info(0) == new.ownership.owner_info(0)
    assert old.ownership.fence(0) == new.ownership.fence(0) == handed


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
    assert store.owned[0].term == store.ownership.fence(0) == term(1, "a")
    assert store.next_term(0) == term(5, "a")


def test_an_appointment_puts_the_owner_under_the_promised_term() -> None:
    """New backup, no learner, the former backup to be released; tenure begins anew."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("c")
    promised = store.promise(0)

    assert store.promote_learner(0, contact("c"), promised, contact("a"), 7.0) == contact("b")

    owned = store.owned[0]
    assert (owned.backup, owned.learner, owned.term, owned.since) == (contact("c"), None, promised, 7.0)
    assert store.ownership.fence(0) == store.ownership.known_owners[0].term == promised


def test_a_dropped_backup_ranks_below_all_that_comes_after() -> None:
    """It may still hold a state of the old term: what is acknowledged without it is acknowledged under a newer one."""
    store = owner_of("a")
    store.owned[0].backup, store.owned[0].learner = contact("b"), contact("c")
    promised = store.promise(0)

    store.drop_backup(0, contact("a"))

    owned = store.owned[0]
    assert owned.targets() == []
    assert owned.term == store.ownership.fence(0) == store.ownership.known_owners[0].term > promised


def test_a_demoted_owner_refuses_its_own_old_term() -> None:
    """A forward that it sent as owner and that comes back late, or another's under the old term, is fenced."""
    store = owner_of("a")
    store.become_backup(0, contact("b"), term(2, "b"))

    assert store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["b"]) == ("fenced", term(2, "b"))


# -- standings and sizes ----------------------------------------------------------------------------------------------


def test_the_size_counts_both_roles() -> None:
    """Memory of what is owned and what is backed up; a learner without its state holds none."""
    store = owner_of("b")
    store.begin_catch_up(1, term(1, "a"), contact("a"))
    assert store.size_bytes == 16
    store.take_state(1, term(2, "a"), contact("a"), zeros(store, 1))
    assert store.size_bytes == 32


def test_a_take_over_is_worth_its_copy_until_the_first_delta() -> None:
    """Raised above a later pair's term it must not outrank that pair's copy on another disk: it has nothing new yet."""
    store = store_of("b")
    owned = store.own(0, zeros(store), term(9, "b"), contact("b"), 0.0, has_tenure=False)
    owned.first_copy = term(4, "a"), owned.state.known_count
    assert owned.rank_term == term(4, "a")

    store.add(0, delta(1))

    assert owned.rank_term == term(9, "b")


def test_of_two_said_to_own_under_one_term_the_corrected_one_is_believed() -> None:
    """Who was believed in denies it, and the other says so itself; a claim under another term corrects nothing."""
    store = store_of("c")
    store.note_owner(0, term(3, "a"), contact("b"))
    store.note_owner(0, term(3, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("b")

    store.correct_owner(0, term(2, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("b")
    store.correct_owner(0, term(3, "a"), contact("a"))
    assert store.ownership.known_owners[0].owner == contact("a")
