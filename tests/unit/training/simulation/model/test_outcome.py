"""The result of a run."""

from __future__ import annotations

import numpy as np

from p2pnode.training.simulation.engines.reference import ReferenceEngine
from p2pnode.training.simulation.figures.points import plan_of
from p2pnode.training.simulation.model.outcome import Moment, moment_of


def test_a_moment_sums_up_the_live_nodes() -> None:
    """Mean, standard deviation, least and most; zeros if every node has crashed."""
    assert moment_of(2.0, [1, 3, 5]) == Moment(2.0, 3.0, float(np.std([1, 3, 5])), 1, 5)
    assert moment_of(2.0, []) == Moment(2.0, 0.0, 0.0, 0, 0)


def test_events_are_completions_and_tests() -> None:
    """The work of an engine: under asp there are no tests."""
    asp, bsp = (ReferenceEngine(plan_of(name, 5, 10)).run() for name in ("asp", "bsp"))

    assert asp.events == asp.updates == int(asp.steps.sum())
    assert bsp.events == bsp.updates + bsp.tests > bsp.updates
