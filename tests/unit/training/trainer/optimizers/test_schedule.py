"""The learning rate's schedule follows the swarm's step."""

from __future__ import annotations

import pytest

from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.trainers.task_node import TaskNode as Node

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_late_joiner_has_the_learning_rate_of_the_others() -> None:
    """A cosine schedule depends only on the swarm's step: a node that starts at step 9 has the rate of the others."""
    founder, joiner = Node("Adaptive"), Node("Adaptive")
    reports = founder.train(range(1, 10))

    (report,) = joiner.train(range(9, 10))

    assert report.metrics == reports[-1].metrics
    assert report.metrics["learning_rate"] < 0.01


def test_a_schedule_goes_back_with_the_swarm() -> None:
    """A node that resumes at an earlier step has that step's learning rate again."""
    node = Node("Adaptive")
    first, *_ = node.train(range(1, 6))

    (again,) = node.train(range(1, 2))

    assert again.metrics["learning_rate"] == pytest.approx(first.metrics["learning_rate"])


def test_a_schedule_that_has_an_end_is_left_there() -> None:
    """OneCycleLR raises when it is stepped beyond its end: one warning, and training continues."""
    node = Node("OneCycle")

    node.train(range(1, 4))

    assert node.warnings == ["schedule_over"]


def test_a_schedule_by_loss_is_refused() -> None:
    """Every node has another loss, and a schedule must be the same everywhere."""
    with pytest.raises(TrainerFailed, match="ReduceLROnPlateau") as failure:
        Node("Plateau")
    assert failure.value.fatal
