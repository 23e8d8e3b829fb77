"""A daemon process for tests to stop or kill: starts one trainer, prints its process id and trains until killed.

Run as `python -m tests.process.harness.trainer_daemon STATE_DIR SECONDS_PER_STEP`; prints one line per finished order.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from p2pnode.overlay.system import SystemClock
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer_link.interface import StepOrder
from tests.process.harness.trainer_world import QuietLog


async def main(state_dir: Path, seconds: float) -> None:
    trainer = ProcessTrainer(
        TrainingSettings(task="tests.harness.trainers.tasks:Slow", options={"seconds": seconds}, threads=1),
        command=None,
        node=NodeStart(b"d" * 20, 1),
        state_dir=state_dir,
        log=QuietLog(),
        clock=SystemClock(),
    )
    hello = await trainer.start()
    print("pid", hello.pid, flush=True)
    step = 0
    while True:
        step += 1
        report = await trainer.train(StepOrder(step, 2, 1.0, True))
        print("step", report.step, trainer.state, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
