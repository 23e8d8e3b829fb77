"""How long a barrier waits for a peer that does not move: by the others' steps, not by what it announces."""

from __future__ import annotations

from overlay.peers import STALL_FLOOR_S, STALL_STEPS
from training.barriers.patience import LONGEST_UNPROVEN_S, longest_first_step_s, longest_idle_s


def test_the_steps_of_the_others_are_the_measure() -> None:
    """Four of their median, and ten seconds at least; neither the peer itself nor one other prolongs it."""
    assert longest_idle_s(1.0, [1.0, 2.0, 1.5], 1e9) == STALL_FLOOR_S
    assert longest_idle_s(30.0, [40.0, 50.0], 1e9) == STALL_STEPS * 40.0
    assert longest_idle_s(5.0, [6.0, 5.0, 1e9], 5.0) == STALL_STEPS * 6.0
    assert longest_idle_s(1.0, [0.0, 0.0, 2.0], 1e9) == STALL_FLOOR_S


def test_of_two_nodes_the_slower_one_counts_within_a_bound() -> None:
    """No third node shows what a step may take."""
    assert longest_idle_s(1.0, [], 60.0) == STALL_STEPS * 60.0
    assert longest_idle_s(60.0, [], 1.0) == STALL_STEPS * 60.0
    assert longest_idle_s(1.0, [0.0], 1e9) == LONGEST_UNPROVEN_S


def test_first_steps_are_compared_with_first_steps() -> None:
    """Where all compile, all take minutes. With one alone that has ended, it is unknown whether the others compile."""
    assert longest_first_step_s([0.5]) == LONGEST_UNPROVEN_S
    assert longest_first_step_s([0.5, 1.0]) == STALL_FLOOR_S
    assert longest_first_step_s([100.0, 120.0, 90.0]) == STALL_STEPS * 100.0
