"""A real daemon whose trainer has a vector and nothing else: `python -m benchmarks.vector_daemon --config node.toml`.

Everything is `p2pnode.daemon` but the trainer. It shares vector and delta as a real one does, turns its delta round in
every step, so that all of it is written, and then sleeps. It resumes from checkpoints. `[training.options]`:
`parameters`, `seed`, `rest_s` (seconds that a step sleeps).
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gated_daemon import DELTA_SCALE
from benchmarks.plain_trainer import PlainTrainer
from p2pnode import daemon
from p2pnode.config.load import load
from training.layout import Layout, LayoutEntry
from training.settings import TrainingSettings
from training.trainer_link.handshake import BufferHandshake
from training.trainer_link.interface import Resume, StepOrder, StepReport, TrainerHello, Vector
from training.trainer_link.shared_memory import SharedVectors

#: Values written at a time, in a thread.
PART_VALUES = 1 << 20


class VectorTrainer(PlainTrainer):
    """Implements `training.trainer_link.interface.Trainer`. Takes whatever the daemon gives a real one, and uses the
    options."""

    def __init__(self, settings: TrainingSettings, *_: Any, state_dir: Path | None = None, **__: Any) -> None:
        options = settings.options
        self._total = int(options["parameters"])
        super().__init__(Layout((LayoutEntry("weight", (self._total,), "float32", "parameter", 0, self._total),)))
        self._seed, self._rest_s = int(options.get("seed", 0)), float(options.get("rest_s", 0.0))
        self._delta_folder = state_dir if settings.delta_on_disk else None
        self.vector: Vector = np.empty(0, np.float32)
        self.delta: Vector = np.empty(0, np.float32)

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:  # noqa: ARG002
        self._shared = shared = await asyncio.to_thread(SharedVectors, self._total, self._delta_folder)
        self.vector, self.delta = shared.vector, shared.delta
        hello = TrainerHello(self._layout, "vector", "1", "", "stub", evaluates=False, pid=0)
        restored = resume is not None and (await resume(hello, self.vector)).has_vector
        await asyncio.to_thread(self._fill, has_vector=restored)
        self.state = "running"
        return hello

    def _fill(self, *, has_vector: bool) -> None:
        random = np.random.default_rng(self._seed)
        for first in range(0, self._total, PART_VALUES):
            if not has_vector:
                random.standard_normal(out=self.vector[first : first + PART_VALUES], dtype=np.float32)
            part = self.delta[first : first + PART_VALUES]
            random.standard_normal(out=part, dtype=np.float32)
            part *= np.float32(DELTA_SCALE)

    async def train(self, order: StepOrder, handshake: BufferHandshake | None = None) -> StepReport:
        if handshake is not None:
            handshake.loaded.set()  # it does not look at the vector
            await handshake.delta_taken.wait()
        began_s = time.monotonic()
        await asyncio.to_thread(self._turn)
        await asyncio.sleep(self._rest_s)
        return StepReport(order.step, 0.0, 1, order.local_steps, time.monotonic() - began_s, {})

    def _turn(self) -> None:
        for first in range(0, self._total, PART_VALUES):
            part = self.delta[first : first + PART_VALUES]
            np.negative(part, out=part)


def main(arguments: list[str]) -> int:
    config = load(Path(arguments[arguments.index("--config") + 1]), {}, []).config
    return daemon.run(config, make_trainer=VectorTrainer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
