"""The phases of a node and its steps."""

from __future__ import annotations

from p2pnode.training.exchange.run_state import Phase, RunState


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
