"""How long a trainer may be silent, by what its orders took before."""

from __future__ import annotations

from p2pnode.training.supervisor.silence import Limits, OrderPace
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import StepOrder

TRAIN = messages.Train(1, StepOrder(1, 1, 1.0, True))
EVALUATE = messages.Evaluate(2, 1)


def test_the_limits_follow_the_longest_median_of_turns_and_evaluations() -> None:
    """The first order of a kind in a process has no pace; later ones have that of the slower kind."""
    pace = OrderPace(2.0)
    assert not pace.has_trained
    assert pace.limits(TRAIN) == Limits.of(2.0, None, writes_file=False)
    for seconds in (1.0, 9.0, 3.0):
        pace.note(TRAIN, seconds)
    assert pace.has_trained
    assert pace.limits(TRAIN) == Limits.of(2.0, 3.0, writes_file=False)
    assert pace.limits(EVALUATE) == Limits.of(2.0, None, writes_file=False)
    pace.note(EVALUATE, 5.0)
    assert pace.limits(TRAIN) == pace.limits(EVALUATE) == Limits.of(2.0, 5.0, writes_file=False)


def test_a_new_process_may_be_slow_at_first_again() -> None:
    """What was measured is kept, but the first order of each kind may take long."""
    pace = OrderPace(2.0)
    pace.note(TRAIN, 3.0)
    pace.new_process()
    assert pace.limits(TRAIN) == Limits.of(2.0, None, writes_file=False)
    assert pace.has_trained


def test_an_order_that_writes_a_file_has_no_pace() -> None:
    """A disk may be slow at any time, and what it takes is no measure of a turn."""
    pace = OrderPace(2.0)
    save = messages.Save(3, "/state")
    pace.note(save, 100.0)
    assert pace.limits(save) == Limits.of(2.0, None, writes_file=True)
    assert not pace.has_trained
