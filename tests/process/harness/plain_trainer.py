"""A trainer process without torch, for tests of daemons.

`p2pnode run … -- python -m tests.process.harness.plain_trainer 0.03` sleeps so many seconds in each optimiser step, and
adds a constant, 0.001 or a second argument. The link, the shared memory and the life of the process are real.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from p2pnode.training.trainer_link.messages import StepAnswer
from tests.process.harness.torchless_trainer import TorchlessTrainer, serve_daemon

SIZE = 58


class PlainTrainer(TorchlessTrainer):
    """Rests, and moves every value by the same."""

    def __init__(self, connection: DaemonConnection, step_s: float, change: float = 0.001) -> None:
        super().__init__(connection, "plain", SIZE)
        self._step_s = step_s
        self._change = change

    def train(self, turn: int, order: StepOrder) -> StepReport | None:
        done = 0
        while (answer := self._next(order, done)) is not StepAnswer.DISTRIBUTED:
            if answer is StepAnswer.STOP:
                return None
            time.sleep(self._step_s)
            done += 1
            self.connection.progress()
        while self.is_exchanging and not order.asks:  # each step has a delta of its own, to be counted
            self.connection.progress()
            time.sleep(0.005)
            self.look()
        self.own[:] = np.float32(self._change)
        return StepReport(order.step, 1.0, 8, done, self._step_s * done, {})

    def _next(self, order: StepOrder, done: int) -> StepAnswer:
        if order.asks:
            return self.connection.next_step()
        return StepAnswer.LOCAL if done < order.local_steps else StepAnswer.DISTRIBUTED


if __name__ == "__main__":
    sys.exit(serve_daemon(lambda connection: PlainTrainer(connection, *map(float, sys.argv[1:]))))
