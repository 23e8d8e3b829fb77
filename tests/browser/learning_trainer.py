"""A trainer process without torch whose loss falls and whose accuracy rises, for pages that show them.

`p2pnode run … -- python -m tests.browser.learning_trainer 0.05` rests so many seconds in each optimiser step.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.process.harness.torchless_trainer import TorchlessTrainer, serve_daemon

SIZE = 4096
#: Steps in which the loss falls to a third.
FALL = 120.0


class LearningTrainer(TorchlessTrainer):
    """Rests, moves every value by the same, and reports what a model that learns would."""

    def __init__(self, connection: DaemonConnection, step_s: float) -> None:
        super().__init__(connection, "learning", SIZE)
        self._step_s = step_s

    def train(self, turn: int, order: StepOrder) -> StepReport | None:
        for _ in range(order.local_steps):
            time.sleep(self._step_s)
            self.connection.progress()
        self.own[:] = np.float32(0.001)
        left = math.exp(-order.step / FALL)
        wave = 0.03 * math.sin(order.step * 2.399)
        figures = {"accuracy": 0.98 - 0.88 * left + wave / 4}
        seconds = self._step_s * order.local_steps
        return StepReport(
            order.step, 0.08 + (2.2 + wave) * left, 64 * order.local_steps, order.local_steps, seconds, figures
        )


if __name__ == "__main__":
    sys.exit(serve_daemon(lambda connection: LearningTrainer(connection, float(sys.argv[1]))))
