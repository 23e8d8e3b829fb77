"""Advice: measurements become a model, and the rule chooses a barrier."""

from __future__ import annotations

import pytest

from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.advice import Measured, Prediction, advise, candidates, choose
from p2pnode.training.simulation.step_times import Stragglers

pytest.importorskip("numba", reason="advice tries twenty barriers: pip install p2pnode[simulate]")


TRACE = tuple(0.5 + 0.05 * (number % 10) for number in range(40))


def prediction(name: str, progress: float, spread: float, queries: float = 1.0) -> Prediction:
    return Prediction(name, BarrierSettings(), progress, progress, spread, 0.5, queries, 0.0)


def test_slow_nodes_are_found_in_the_announced_medians() -> None:
    """Two of ten nodes at four times the median are 20 % stragglers ×4; the trace is scaled to the swarm's median."""
    steps, stragglers = Measured((1.0, 3.0), (1.0,) * 8 + (4.0,) * 2, 10).model()

    assert stragglers == Stragglers(0.2, 4.0)
    assert steps.trace_s == (0.5, 1.5)


def test_the_rule_takes_the_closest_of_those_that_keep_enough() -> None:
    """Too slow ones are left out; of equals the cheaper; what runs now is compared and not recommended."""
    tried = [prediction("asp", 1.0, 9.0), prediction("bsp", 0.4, 0.1), prediction("pbsp", 0.9, 1.0, 5.0),
             prediction("pssp", 0.9, 1.0, 3.0), prediction("as it runs", 0.99, 0.5)]  # fmt: skip

    assert choose(tried, 0.85).name == "pssp"
    assert choose(tried, 0.95).name == "asp"
    assert choose(tried, 0.3).name == "bsp"


def test_stragglers_are_waited_for_where_that_is_asked() -> None:
    """With a slow node no complete barrier keeps 85 %; if a quarter suffices, bsp has the least spread."""
    measured = Measured(TRACE, (0.7,) * 19 + (2.8,), 20)
    found = advise(measured)

    assert found.nodes == 20
    assert found.choice.name not in ("asp", "bsp", "ssp(4)")
    assert 0.85 <= found.choice.progress <= 1.0
    assert found.choice.spread_steps <= found.predictions[0].spread_steps
    assert advise(measured, keep=0.2).choice.name == "bsp"


def test_samples_are_below_the_population() -> None:
    """Of three workers none can sample ten; one worker alone is refused."""
    assert all(barrier.sample < 3 for barrier in candidates(3).values())
    with pytest.raises(ValueError, match="a barrier needs two"):
        advise(Measured(TRACE, (0.7,), 1))
