"""Plans that are refused, and the daemon's barrier of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.plan import Churn, Plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"duration_s": 0.0},
        {"repoll_s": 0.0},
        {"pool_size": 0},
        {"pool_renewal_s": -1.0},
        {"population_error": -0.1},
        {"delay_s": -0.1},
        {"churn": Churn(-0.1)},
        {"seed": -1},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_by_name(wrong: dict[str, Any]) -> None:
    """The message names the field."""
    usual: dict[str, Any] = {"nodes": 5, "barrier": BarrierSettings(), "duration_s": 10.0}

    with pytest.raises(ValueError, match=next(iter(wrong))):
        Plan(**(usual | wrong))


def test_the_barrier_is_the_daemons() -> None:
    """pssp with a lag of 2 passes exactly when no sampled node is more than two steps behind."""
    plan = Plan(nodes=5, barrier=BarrierSettings(method="pssp", staleness=2), duration_s=10.0)
    barrier = plan.made_barrier()

    assert barrier.passes(5, [3, 9])
    assert not barrier.passes(5, [2, 9])
