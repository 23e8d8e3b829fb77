"""A real daemon whose trainer sleeps: `python -m tests.process.harness.sleeping_daemon --config node.toml`.

Everything is `p2pnode.daemon` (sockets, disk, HTTP, signals) but the trainer, which draws the step times of
`training.simulation` for the node's number, sleeps, and hands over a small delta. `[training.options]` names them:
`number`, `seed` and `mean_s`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plain_trainer import PlainTrainer
from p2pnode import daemon
from p2pnode.config.load import load
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.simulation.random_streams import DURATIONS, RandomStream
from p2pnode.training.simulation.step_times import StepTimes
from p2pnode.training.trainer_link.interface import (
    Resume,
    StepOrder,
    StepReport,
    TrainerHello,
    Vector,
)

SIZE = 64


class SleepingTrainer(PlainTrainer):
    """Implements `training.trainer_link.interface.Trainer`. Takes whatever the daemon gives a real one, and uses the
    options."""

    def __init__(self, settings: TrainingSettings, *_: Any, **__: Any) -> None:
        super().__init__(Layout((LayoutEntry("weight", (SIZE,), "float32", "parameter", 0, SIZE),)))
        options = settings.options
        self._model = StepTimes("exp", float(options["mean_s"]))
        self._stream = RandomStream(int(options["seed"]), DURATIONS, int(options["number"]))
        self.vector: Vector = np.zeros(SIZE, np.float32)
        self.delta: Vector = np.full(SIZE, 1 / 1024, np.float32)

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        self.state = "running"
        return TrainerHello(self._layout, "sleeping", "1", "", "stub", pid=0)

    async def train(self, order: StepOrder) -> StepReport:
        seconds = self._model.draw(self._stream)
        await asyncio.sleep(seconds)
        return StepReport(order.step, 1.0 / order.step, 1, order.local_steps, seconds, {})


def main(arguments: list[str]) -> int:
    config = load(Path(arguments[arguments.index("--config") + 1]), {}, []).config
    return daemon.run(config, make_trainer=SleepingTrainer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
