"""A task and its runner in this process, with a vector of its own: a trainer without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.messages import DeltaEncoded, ValuesArrived


class TaskNode:
    """A task with a vector of its own; deltas are added as they are."""

    def __init__(self, kind: str, node_seed: int = 11, **options: Any) -> None:
        self.warnings: list[str] = []
        #: One for each sign of life.
        self.beats = 0
        task, spec = build_task(
            f"tests.harness.trainers.tasks:{kind}", options, data_dir="", seed=3, node_seed=node_seed, device="cpu"
        )
        self.spec = spec
        self.runner = TaskRunner(
            kind,
            task,
            spec,
            progress=self._beat,
            warn=lambda event, *_: self.warnings.append(event),
        )
        self.vector = np.zeros(self.runner.model_vector.layout.total, np.float32)
        self.delta = np.zeros_like(self.vector)
        self.runner.model_vector.read(self.vector)
        self.runner.use(self.vector, self.delta)

    def _beat(self) -> None:
        self.beats += 1

    def save(self, path: Path) -> None:
        """Write the trainer's own state to a file."""
        with self.runner.loads.saving():
            snapshot.write(path, snapshot.content_of(self.runner.state()))

    def train(self, steps: range, local_steps: int = 5) -> list[Any]:
        reports = []
        for step in steps:
            reports.append(self.runner.train(StepOrder(step, local_steps, 1.0, True)))
            self.vector += self.delta
            self.runner.apply(DeltaEncoded())
            self.runner.apply(ValuesArrived(step))
        return reports
