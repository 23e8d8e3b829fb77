"""Windows of the trimmed mean at owner, backup, learner and new owner: all close the same ones, and lose no delta."""

from __future__ import annotations

import numpy as np

from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, contact, term
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
    """An owner `a` of shard 0 and its backup `b`."""
    owner = ShardStore(IDS["a"], BOUNDS, PARAMETERS, TRIMMED)
    owner.own(0, owner.fresh_state(0, np.zeros(4, np.float32)), term(1, "a"), contact("a"), 0.0, by_handover=False)
    backup = ShardStore(IDS["b"], BOUNDS, PARAMETERS, TRIMMED)
    catch_up(owner, backup, "b")
    return owner, backup


def catch_up(owner: ShardStore, store: ShardStore, name: str) -> None:
    owned = owner.owned[0]
    promised = owner.promise(0)
    assert store.begin_catch_up(0, owned.term, contact("a"), promised.number)
    owned.learner = contact(name)
    owned.ack_windows(IDS[name], owned.closed_count)
    assert store.take_state(0, promised, contact("a"), owned.state.copy())
    owner.promote_learner(0, contact(name), promised, contact("a"), 0.0)


def push(owner: ShardStore, backup: ShardStore, item: BufferedDelta, *, to: str = "b", workers: float = 4.0) -> None:
    """Forward, note the answer, add, close: as the replicator does."""
    owned = owner.owned[0]
    unsent, closed = owned.unsent_windows(IDS[to]), owned.closed_count
    status, _ = backup.accept_forward(0, owned.term, item, 0, IDS["a"], unsent)
    assert status == "ok"
    owned.ack_windows(IDS[to], closed)
    owner.add(0, item)
    owner.close_complete(0, workers)


def test_the_backup_closes_the_windows_of_its_owner() -> None:
    """With the next delta, and not the window it would have closed itself: it may have one delta more."""
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


def test_an_acknowledged_window_is_dropped() -> None:
    """The owner keeps a window until all its targets have it, and no longer."""
    owner, backup = pair()
    for step in range(1, 5):
        for node in range(4):
            push(owner, backup, delta(node, step))

    assert (owner.owned[0].closed_count, len(owner.owned[0].closed_windows)) == (4, 1)
    push(owner, backup, delta(0, 5))
    assert (owner.owned[0].closed_count, len(owner.owned[0].closed_windows)) == (4, 0)


def test_a_lost_answer_loses_no_window() -> None:
    """A backup whose answer was lost receives the window again, and closes it once."""
    owner, backup = pair()
    for node in range(4):
        push(owner, backup, delta(node, 1))
    owned = owner.owned[0]
    again = delta(0, 2)
    for _ in range(3):
        assert backup.accept_forward(0, owned.term, again, 0, IDS["a"], owned.unsent_windows(IDS["b"]))[0] == "ok"

    assert (backup.backed[0].state.version, backup.backed[0].state.value[0]) == (4, 1.0)


def test_a_backup_that_lacks_a_delta_of_a_window_answers_unknown() -> None:
    """It is no copy any more: the owner drops it until a new catch-up."""
    owner, backup = pair()
    window = [delta(0, 1).identity, delta(1, 1).identity]

    assert backup.accept_forward(0, owner.owned[0].term, delta(0, 1), 0, IDS["a"], [window])[0] == "unknown"


def test_a_learner_closes_the_windows_closed_during_its_catch_up() -> None:
    """The window has deltas of the snapshot and buffered ones; the learner reaches the owner's value."""
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
    assert len(owned.closed_windows) == 1  # the backup has acknowledged, the learner has not
    assert learner.take_state(0, promised, contact("a"), snapshot)
    state = learner.backed[0].state
    assert state is not None
    assert np.array_equal(state.value, owned.state.value)
    assert state.known_count == owned.state.known_count


def test_a_take_over_continues_the_window_of_the_dead_owner() -> None:
    """The backup has its deltas, and closes it with those that follow."""
    owner, backup = pair()
    for node in range(3):
        push(owner, backup, delta(node, 1))
    state = backup.backed[0].state
    assert state is not None
    backup.own(0, state, backup.next_term(0), contact("b"), 1.0, by_handover=False)

    assert not backup.close_complete(0, 4.0)
    backup.add(0, delta(3, 1))
    assert backup.close_complete(0, 4.0)
    assert (backup.owned[0].state.value[0], backup.owned[0].state.version) == (1.0, 4)


def test_windows_travel_with_a_hand_over() -> None:
    """A window closed since the last delta is closed by the new owner first."""
    owner, backup = pair()
    for node in range(4):
        push(owner, backup, delta(node, 1))

    assert backup.close_backed_windows(0, owner.owned[0].unsent_windows(IDS["b"]))
    assert np.array_equal(backup.backed[0].state.value, owner.owned[0].state.value)


def test_a_delta_from_a_split_joins_no_window() -> None:
    """The others of its step are in already: alone in a window it would wait until cancelled."""
    owner, _ = pair()
    owner.add(0, delta(0, 1, momentum=False))

    assert (owner.owned[0].state.value[0], owner.owned[0].state.pending) == (0.25, {})


def test_under_bsp_a_step_is_a_window() -> None:
    """The deltas of a step are trimmed together when its barrier passes; the backup receives their identities."""
    owner, backup = pair()
    for node in range(4):
        item = delta(node, 1, amount=-9.0 if node == 3 else 1.0, synchronous=True)
        assert backup.accept_forward(0, owner.owned[0].term, item, 0, IDS["a"])[0] == "ok"
        owner.add(0, item)
    owner.fold(0, 1)

    assert owner.owned[0].state.value[0] == 1.0
    assert backup.accept_forward(0, owner.owned[0].term, delta(0, 2, synchronous=True), 1, IDS["a"])[0] == "ok"
    assert backup.backed[0].state.value[0] == 0.0  # the step alone does not show which deltas the owner had
    assert backup.close_backed_windows(0, owner.owned[0].unsent_windows(IDS["b"]))
    assert backup.backed[0].state.value[0] == 1.0
