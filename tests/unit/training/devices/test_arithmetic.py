"""The arithmetic of the distributed step: weights, means, the leader, pulls, and the report of a node."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.devices.arithmetic import combined, leader_of, pull
from p2pnode.training.trainer_link.interface import StepReport, Vector


def values(*numbers: float) -> Vector:
    return np.array(numbers, np.float32)


@pytest.mark.parametrize(
    ("losses", "leader"),
    [
        ({0: 0.5, 1: 0.25, 2: 0.75}, 1),
        ({0: float("nan"), 1: 0.5}, 1),
        ({0: float("-inf"), 1: 0.5}, 1),
        ({2: 0.5, 1: 0.5}, 1),
        ({0: None, 1: 0.5}, 1),
        ({0: None, 1: float("nan")}, None),
    ],
)
def test_the_lowest_finite_loss_leads(losses: dict[int, float | None], leader: int | None) -> None:
    """No loss that is missing or not finite leads, and of equal ones the first does."""
    assert leader_of(losses) == leader


def test_pulls_compose_as_in_lsgd() -> None:
    """A pull of 1 copies the leader, one of 0 changes nothing, and the leader stays where it is."""
    position, leader = values(1.0, 2.0), values(3.0, 6.0)
    pull(position, leader, 0.0)
    assert position.tolist() == [1.0, 2.0]
    pull(position, leader, 0.25)
    assert position.tolist() == [1.5, 3.0]
    pull(leader, leader, 0.5)
    assert leader.tolist() == [3.0, 6.0]
    pull(position, leader, 1.0)
    assert position.tolist() == [3.0, 6.0]


def test_the_report_of_a_node_counts_all_and_weights_by_samples() -> None:
    """Samples and steps add up; a trainer without a step changes neither loss nor metrics."""
    idle = StepReport(3, float("nan"), 0, 0, 0.0, {"learning_rate": 9.0})
    first = StepReport(3, 1.0, 30, 3, 1.0, {"learning_rate": 0.1})
    second = StepReport(3, 2.0, 10, 1, 1.0, {"learning_rate": 0.1})
    whole = combined(3, [idle, first, second], 2.0)
    assert (whole.loss, whole.samples, whole.optimizer_steps, whole.seconds) == (1.25, 40, 4, 2.0)
    assert whole.metrics == {"learning_rate": pytest.approx(0.1)}
