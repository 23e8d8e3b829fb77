"""The phases of a node and its steps."""

from __future__ import annotations

import math

from training.exchange.run_state import FASTER, Phase, RunState


def test_a_phase_includes_the_earlier_ones_and_is_never_left_backwards() -> None:
    """A drained node is closed and leaving too; a late call for an earlier phase changes nothing."""
    run = RunState(incarnation=1)
    assert not run.is_leaving

    run.enter(Phase.LEAVING)
    assert (run.is_leaving, run.is_closed, run.is_drained) == (True, False, False)
    run.enter(Phase.DRAINED)
    run.enter(Phase.CLOSED)
    assert (run.is_leaving, run.is_closed, run.is_drained) == (True, True, True)


def test_the_last_barrier_passed_never_goes_back() -> None:
    """A pull for an older step does not undo a later one."""
    run = RunState(incarnation=1)
    run.pass_barrier(5)
    run.pass_barrier(3)
    assert run.passed_step == 5


def test_what_another_node_can_have_reached_is_explained_by_the_own_pace() -> None:
    """Ten times as fast, at most; a pause of this node makes its steps no longer. Before two steps nothing is known."""
    run = RunState(incarnation=1)
    assert run.explained_step(50.0) == math.inf
    run.advance(1, 100.0)
    assert run.explained_step(100.0) == math.inf
    for step in (2, 3, 4):
        run.advance(step, 98.0 + 2.0 * step)
    assert (run.pace_s, run.explained_step(106.0)) == (2.0, 4 + FASTER * 4.0)
    assert run.explained_step(166.0) == 4 + FASTER * 34.0
    run.advance(5, 166.0)
    assert run.pace_s == 4.0
    assert run.explained_step(166.0) > 5 + FASTER * 16.0  # after a pause, also at its next steps
