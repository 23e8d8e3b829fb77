"""Windows of the trimmed mean at owner, backup, learner and heir: none loses a delta, none closes another window."""

from __future__ import annotations

import numpy as np

from tests.harness.stores import BOUNDS, IDS, PARAMETERS, contact, term
from training.exchange.store.records import BufferedDelta
from training.exchange.store.shard_store import ShardStore
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule

TRIMMED = Rule(outer_lr=1.0, outer_momentum=0.0, robust="trimmed-mean")
NODES = [bytes([number]) * 20 for number in range(1, 9)]


def delta(
    node: int, step: int, amount: float = 1.0, *, momentum: bool = True, synchronous: bool = False
) -> BufferedDelta:
    values = np.full(4, amount, dtype=np.float32)
    return BufferedDelta(DeltaId(NODES[node], 1, step), 0.25, values, synchronous, momentum=momentum)


def pair() -> tuple[ShardStore, ShardStore]:
    """An owner `a` and its backup in office `b`, of shard 0."""
    owner = ShardStore(IDS["a"], BOUNDS, PARAMETERS, TRIMMED)
    owner.own(0, owner.fresh_state(0, np.zeros(4, np.float32)), term(1, "a"), contact("a"), 0.0, has_tenure=False)
    backup = ShardStore(IDS["b"], BOUNDS, PARAMETERS, TRIMMED)
    teach(owner, backup, "b")
    return owner, backup


def teach(owner: ShardStore, store: ShardStore, name: str) -> None:
    owned = owner.owned[0]
    promised = owner.promise(0)
    assert store.begin_catch_up(0, owned.term, contact("a"), promised.number)
    owned.learner = contact(name)
    owned.ack_windows(IDS[name], owned.closed_count)
    assert store.take_state(0, promised, contact("a"), owned.state.copy())
    owner.promote_learner(0, contact(name), promised, contact("a"), 0.0)


def push(owner: ShardStore, backup: ShardStore, item: BufferedDelta, *, to: str = "b", workers: float = 4.0) -> None:
    """Forward, hear the answer, add, close: as `exchange.serving` does."""
    owned = owner.owned[0]
    untold, closed = owned.unsent_windows(IDS[to]), owned.closed_count
    status, _ = backup.accept_forward(0, owned.term, item, 0, IDS["a"], untold)
    assert status == "ok"
    owned.ack_windows(IDS[to], closed)
    owner.add(0, item)
    owner.close_complete(0, workers)


def test_the_backup_closes_what_the_owner_has_closed() -> None:
    """With the next delta, and not what it would have closed itself: it may have one more."""
    owner, backup = pair()
    for node in range(4):
        push(owner, backup, delta(node, 1, amount=float(node)))
    early = delta(7, 1, amount=100.0)
    assert backup.accept_forward(0, owner.owned[0].term, early, 0, IDS["a"])[0] == "ok"

    assert owner.owned[0].state.value[0] == 1.5  # rows 0, ¼, ½, ¾: the middle two, times two
    assert backup.backed[0].state.value[0] == 0.0
    push(owner, backup, delta(5, 2))
    assert backup.backed[0].state.value[0] == 1.5
    assert [held.identity.node for held in backup.backed[0].state.pending_deltas()] == [NODES[5], NODES[7]]


def test_what_the_backup_knows_is_forgotten() -> None:
    """The owner keeps windows until all that must hear of them have, and no longer."""
    owner, backup = pair()
    for step in range(1, 5):
        for node in range(4):
            push(owner, backup, delta(node, step))

    assert (owner.owned[0].closed_count, len(owner.owned[0].closed_windows)) == (4, 1)
    push(owner, backup, delta(0, 5))
    assert (owner.owned[0].closed_count, len(owner.owned[0].closed_windows)) == (4, 0)


def test_a_lost_answer_loses_no_window() -> None:
    """A backup that has heard of a window and could not say so hears of it again, and closes it once."""
    owner, backup = pair()
    for node in range(4):
        push(owner, backup, delta(node, 1))
    owned = owner.owned[0]
    again = delta(0, 2)
    for _ in range(3):
        assert backup.accept_forward(0, owned.term, again, 0, IDS["a"], owned.unsent_windows(IDS["b"]))[0] == "ok"

    assert (backup.backed[0].state.version, backup.backed[0].state.value[0]) == (4, 1.0)


def test_a_backup_that_lacks_a_delta_of_a_window_says_so() -> None:
    """Then it is no copy any more: `unknown` makes the owner go on without it and teach it anew."""
    owner, backup = pair()
    window = [delta(0, 1).identity, delta(1, 1).identity]

    assert backup.accept_forward(0, owner.owned[0].term, delta(0, 1), 0, IDS["a"], [window])[0] == "unknown"


def test_a_learner_closes_what_was_closed_while_its_state_was_on_the_way() -> None:
    """The window has deltas of the snapshot and live ones; the learner comes to the owner's value."""
    owner, backup = pair()
    for node in (0, 1):
        push(owner, backup, delta(node, 1, amount=float(node)))
    owned, learner = owner.owned[0], ShardStore(IDS["c"], BOUNDS, PARAMETERS, TRIMMED)
    promised = owner.promise(0)
    assert learner.begin_catch_up(0, owned.term, contact("a"), promised.number)
    owned.learner = contact("c")
    owned.ack_windows(IDS["c"], owned.closed_count)
    snapshot = owned.state.copy()
    for node in (2, 3, 4):
        item, windows = delta(node, 1, amount=float(node)), owned.unsent_windows(IDS["c"])
        assert learner.accept_forward(0, owned.term, item, 0, IDS["a"], windows)[0] == "ok"
        push(owner, backup, item)

    assert owned.closed_count == 1
    assert len(owned.closed_windows) == 1  # the backup knows, the learner has not said so
    assert learner.take_state(0, promised, contact("a"), snapshot)
    state = learner.backed[0].state
    assert state is not None
    assert np.array_equal(state.value, owned.state.value)
    assert state.known_count == owned.state.known_count


def test_an_heir_has_what_its_owner_had_collected() -> None:
    """The backup of an owner that died mid-window owns all of it, and closes it with what comes then."""
    owner, backup = pair()
    for node in range(3):
        push(owner, backup, delta(node, 1))
    state = backup.backed[0].state
    assert state is not None
    backup.own(0, state, backup.next_term(0), contact("b"), 1.0, has_tenure=False)

    assert not backup.close_complete(0, 4.0)
    backup.add(0, delta(3, 1))
    assert backup.close_complete(0, 4.0)
    assert (backup.owned[0].state.value[0], backup.owned[0].state.version) == (1.0, 4)


def test_windows_travel_with_a_hand_over() -> None:
    """A window that was closed since the last delta is closed by the new owner too, before it begins."""
    owner, backup = pair()
    for node in range(4):
        push(owner, backup, delta(node, 1))

    assert backup.close_backed_windows(0, owner.owned[0].unsent_windows(IDS["b"]))
    assert np.array_equal(backup.backed[0].state.value, owner.owned[0].state.value)


def test_what_comes_out_of_a_split_is_not_voted_on() -> None:
    """Its fellows of that time are in already: alone in a window it would wait for nobody."""
    owner, _ = pair()
    owner.add(0, delta(0, 1, momentum=False))

    assert (owner.owned[0].state.value[0], owner.owned[0].state.pending) == (0.25, {})


def test_under_bsp_a_step_is_a_window() -> None:
    """The deltas of a step are trimmed together when its barrier passes, and the backup is told which they were."""
    owner, backup = pair()
    for node in range(4):
        item = delta(node, 1, amount=-9.0 if node == 3 else 1.0, synchronous=True)
        assert backup.accept_forward(0, owner.owned[0].term, item, 0, IDS["a"])[0] == "ok"
        owner.add(0, item)
    owner.fold(0, 1)

    assert owner.owned[0].state.value[0] == 1.0
    assert backup.accept_forward(0, owner.owned[0].term, delta(0, 2, synchronous=True), 1, IDS["a"])[0] == "ok"
    assert backup.backed[0].state.value[0] == 0.0  # the step alone does not tell which deltas the owner had
    assert backup.close_backed_windows(0, owner.owned[0].unsent_windows(IDS["b"]))
    assert backup.backed[0].state.value[0] == 1.0
