"""The learning rate's schedule follows the swarm's step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from training.trainer.loading import build_task
from training.trainer.runner import TaskRunner
from training.trainer_link.interface import StepOrder, TrainerFailed


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums over threads are not reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Node:
    """A task with a vector of its own; deltas are added as they are."""

    def __init__(self, kind: str, node_seed: int = 11, **options: Any) -> None:
        self.warnings: list[str] = []
        self.beats: list[int] = []
        task, spec = build_task(
            f"tests.harness.tasks:{kind}", options, data_dir="", seed=3, node_seed=node_seed, device="cpu"
        )
        self.spec = spec
        self.runner = TaskRunner(
            kind, task, spec, progress=self.beats.append, warn=lambda event, _: self.warnings.append(event)
        )
        self.vector = np.zeros(self.runner.model_vector.layout.total, np.float32)
        self.delta = np.zeros_like(self.vector)
        self.runner.model_vector.read(self.vector)

    def train(self, steps: range, local_steps: int = 5) -> list[Any]:
        reports = []
        for step in steps:
            reports.append(self.runner.train(StepOrder(step, local_steps, 1.0, True), self.vector, self.delta))
            self.vector += self.delta
        return reports


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
