"""A trainer process without torch that rests in each optimiser step and notes when: `wan` measures by its clock.

`p2pnode run … -- python -m benchmarks.wan_trainer …`. The link, the shared memory and the life of the process are real.
The delta is noise of the size of a real one, another for every step. Each turn is a JSON line in `--notes`: when its
local training began and ended (monotonic seconds), and how old the values of the shards were that it began with, in
turns since they last changed. A change is looked for in some values of each shard.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from p2pnode.training.layout import shard_bounds
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer_link.interface import StepOrder, StepReport, Vector
from tests.process.harness.torchless_trainer import TorchlessTrainer, serve_daemon

DELTA_SCALE = 1e-3
#: The noise of a step begins at one of so many places.
OFFSETS = 1 << 16
#: Values of each shard that are compared: of the 3 % that a sparse delta changes, these have some.
WATCHED = 1024


class Ages:
    """How many turns ago each shard last changed, by some of its values."""

    def __init__(self, vector: Vector, shards: int) -> None:
        self._vector = vector
        self._places = [
            np.unique(np.linspace(start, stop - 1, WATCHED).astype(np.int64))
            for start, stop in shard_bounds(len(vector), shards)
        ]
        self._seen = [vector[places] for places in self._places]
        self.turns = [0] * len(self._places)

    def look(self) -> None:
        """A turn begins."""
        for shard, places in enumerate(self._places):
            now = self._vector[places]
            is_new = not np.array_equal(now, self._seen[shard])
            self._seen[shard] = now
            self.turns[shard] = 0 if is_new else self.turns[shard] + 1


class RestingTrainer(TorchlessTrainer):
    """Rests as long as a step trains, and writes noise."""

    def __init__(self, given: argparse.Namespace, connection: DaemonConnection) -> None:
        self._step_s = given.step_s
        self._notes = given.notes
        self._random = np.random.default_rng(given.seed)
        self._noise = self._random.standard_normal(given.parameters + OFFSETS, np.float32)
        self._noise *= np.float32(DELTA_SCALE)
        super().__init__(connection, "resting", given.parameters)
        self._ages = Ages(self.vector, given.shards)

    def initial(self, total: int) -> Vector:
        return self._noise[:total]

    def train(self, turn: int, order: StepOrder) -> StepReport | None:  # noqa: ARG002
        step, local_steps = order.step, order.local_steps
        self._ages.look()
        began_s = time.monotonic()
        for done in range(1, local_steps + 1):
            time.sleep(max(0.0, began_s + self._step_s * done / local_steps - time.monotonic()))
            self.connection.progress()
            self.look()
        ended_s = time.monotonic()
        offset = int(self._random.integers(OFFSETS))
        self.own[:] = self._noise[offset : offset + len(self.own)]
        ages = self._ages.turns
        note = {"step": step, "began_s": began_s, "ended_s": ended_s, "oldest": max(ages), "age": sum(ages) / len(ages)}
        with self._notes.open("a") as file:
            file.write(json.dumps(note) + "\n")
        return StepReport(step, 1.0, 8, local_steps, ended_s - began_s, {})


def main() -> int:
    """Serve one daemon; returns the exit code."""
    line = argparse.ArgumentParser()
    line.add_argument("--parameters", type=int, required=True)
    line.add_argument("--step-s", type=float, required=True)
    line.add_argument("--shards", type=int, required=True)
    line.add_argument("--seed", type=int, required=True)
    line.add_argument("--notes", type=Path, required=True)
    given = line.parse_args()
    return serve_daemon(lambda connection: RestingTrainer(given, connection))


if __name__ == "__main__":
    sys.exit(main())
