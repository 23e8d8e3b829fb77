"""The clocks that tell whether anybody stands still."""

from __future__ import annotations

import numpy as np

from tests.harness.histories.progress_clocks import BOUND_S, STEP_MOST_S, ProgressClocks, retries_s

LIMIT_S = ProgressClocks(2).limit_s()
BOUNDS = [(0, 2), (2, 4)]


def started(*names: str) -> tuple[ProgressClocks, np.ndarray]:
    clocks, replica = ProgressClocks(2), np.zeros(4, np.float32)
    for name in names:
        clocks.start(name, 0.0, replica)
    return clocks, replica


def got(clocks: ProgressClocks, name: str, now: float, *shards: int) -> None:
    """A node got an acknowledgement and a fresh value of these shards."""
    fresh = np.full(4, -1.0, np.float32)
    for shard in (0, 1):
        clocks_of = clocks._seen[name][slice(*BOUNDS[shard])]
        fresh[slice(*BOUNDS[shard])] = now if shard in shards else clocks_of
    for shard in shards:
        clocks.acknowledged(name, shard, now)
    clocks.pulled(name, fresh, BOUNDS, now)


def test_a_node_without_an_acknowledgement_is_late_after_the_bound() -> None:
    """One shard is enough, and steps and other shards do not help."""
    clocks, _ = started("a", "b")
    got(clocks, "b", LIMIT_S - 1, 0, 1)
    got(clocks, "a", LIMIT_S - 1, 0)

    assert clocks.late(LIMIT_S - 0.1) == ""
    assert "a stood still" in clocks.late(LIMIT_S + 0.1)
    assert "no acknowledged delta of shard 1" in clocks.late(LIMIT_S + 0.1)


def test_pulls_that_bring_the_same_bits_are_not_fresh() -> None:
    """A pull that writes nothing sets no clock, whatever it reports."""
    clocks, replica = started("a")
    for shard in (0, 1):
        clocks.acknowledged("a", shard, LIMIT_S)
    clocks.pulled("a", replica, BOUNDS, LIMIT_S)

    assert "no fresh version of shard 0" in clocks.late(LIMIT_S + 0.1)


def test_a_fault_sets_no_clock() -> None:
    """The first fault is what the bound is for, a further one of this node or shard allows the bound once more, and one
    elsewhere nothing."""
    clocks, _ = started("a", "b")
    clocks.struck(["b"], [], 0.0)
    clocks.struck([], [0], 0.0)
    assert "a stood still" in clocks.late(LIMIT_S + 0.1)

    clocks.struck([], [0], 0.0)
    got(clocks, "a", LIMIT_S, 1)
    got(clocks, "b", LIMIT_S, 0, 1)
    assert clocks.late(LIMIT_S + 0.1) == ""
    assert "a stood still" in clocks.late(LIMIT_S + BOUND_S + 0.1)


def test_a_fault_after_an_exchange_that_others_held_up_allows_what_they_took() -> None:
    """A node waits for other shards with a delta of this one acknowledged, and is paused then: it may stand still for
    both. Without a fault of its own the bound is for the others, and a shard that did not come allows nothing."""
    clocks, _ = started("a")
    for shard in (0, 1):
        clocks.fresh("a", shard, BOUND_S)
    clocks.exchanged("a", 0.0, [1], BOUND_S)
    assert "acknowledged delta of shard 0" in clocks.late(LIMIT_S + 0.1)

    clocks.struck(["a"], [], BOUND_S)
    assert "acknowledged delta of shard 1" in clocks.late(LIMIT_S + 0.1)
    clocks.acknowledged("a", 1, LIMIT_S)
    assert clocks.late(LIMIT_S + BOUND_S - 0.1) == ""
    assert "acknowledged delta of shard 0" in clocks.late(LIMIT_S + BOUND_S + 0.1)


def test_a_fault_during_an_exchange_that_others_hold_up_allows_what_they_took() -> None:
    """A node has waited for other shards, and is cut off then. Without the fault the bound holds."""
    clocks, _ = started("a")
    clocks.exchanging("a", 2.0)
    assert "a stood still" in clocks.late(LIMIT_S + 0.1)

    clocks.struck(["a"], [], 9.0)
    assert clocks.late(LIMIT_S + 6.9) == ""
    assert "a stood still" in clocks.late(LIMIT_S + 7.1)


def test_after_the_last_step_only_deltas_on_their_way_are_waited_for() -> None:
    """A node whose deltas all have their answers does not wait."""
    clocks, _ = started("a", "b")

    assert clocks.late(LIMIT_S + 0.1, {"a": [], "b": []}) == ""
    assert "b stood still" in clocks.late(LIMIT_S + 0.1, {"a": [], "b": [1]})


def test_the_limit_allows_for_requests_that_are_lost_in_a_row() -> None:
    """Without loss for one slow request; with it for two or three, each of which is waited for longer."""
    assert LIMIT_S == BOUND_S + STEP_MOST_S + 3.5
    assert [round(retries_s(loss), 2) for loss in (0.0, 0.01, 0.05)] == [3.5, 7.0, 12.0]
    assert ProgressClocks(2, 0.05).limit_s(2) == 2 * BOUND_S + STEP_MOST_S + retries_s(0.05)
