"""A trainer process without torch that rests in each optimiser step and notes when: `wan` measures by its clock.

`p2pnode run … -- python -m benchmarks.wan_trainer …`. The link, the shared memory and the life of the process are real.
The delta is noise of the size of a real one, another for every step. Each turn is a JSON line in `--notes`: when its
local training began and ended (monotonic seconds), and how old the values of the shards were that it began with, in
turns since they last changed. A change is looked for in some values of each shard.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from training.layout import Layout, LayoutEntry, shard_bounds
from training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon
from training.trainer_link import messages
from training.trainer_link.interface import (
    ModelDescription,
    StepOrder,
    StepReport,
    TensorSource,
    TrainerHello,
    Vector,
)
from training.trainer_link.shared_memory import map_vectors

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


class RestingTrainer:
    """Answers one daemon's orders."""

    def __init__(self, given: argparse.Namespace, connection: DaemonConnection) -> None:
        self._step_s = given.step_s
        self._notes = given.notes
        self._connection = connection
        self._random = np.random.default_rng(given.seed)
        self._noise = self._random.standard_normal(given.parameters + OFFSETS, np.float32)
        self._noise *= np.float32(DELTA_SCALE)
        entry = LayoutEntry("weight", (given.parameters,), "float32", "parameter", 0, given.parameters)
        self._layout = Layout((entry,))
        hello = TrainerHello(self._layout, "resting", "1", "", "cpu", evaluates=False, pid=os.getpid())
        connection.send(messages.Hello(hello))
        memory, descriptors = connection.receive_memory()
        self._vector, self._delta = map_vectors(descriptors, memory.total)
        if memory.initialise:
            self._vector[:] = self._noise[: memory.total]
        connection.send(messages.Ready())
        self._ages = Ages(self._vector, given.shards)
        self._weights = np.empty_like(self._vector)

    def serve(self) -> None:
        """One order."""
        connection = self._connection
        match connection.receive():
            case messages.Train(turn, order):
                report = self._train(turn, order)
                if report is not None:
                    connection.send(messages.Trained(turn, report))
            case messages.Evaluate(turn, _):
                connection.send(messages.Evaluated(turn, None))
            case messages.Save(turn, path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps({}))
                connection.send(messages.Copied(turn))
                connection.send(messages.Written(turn))
            case messages.Describe(turn, _, _):
                tensor = TensorSource("weight", "float32", (len(self._vector),), "vector", "weight")
                description = ModelDescription(self._layout.digest(), "", (tensor,), {})
                connection.send(messages.Described(turn, description))

    def _train(self, turn: int, order: StepOrder) -> StepReport | None:
        """None where the turn is cancelled."""
        step, local_steps = order.step, order.local_steps
        self._ages.look()
        np.copyto(self._weights, self._vector)
        if order.carry:  # it begins while the last delta is still exchanged, and goes on from what that delta made
            self._weights += self._delta
            self._connection.send(messages.BuffersLoaded(turn))
        began_s = time.monotonic()
        for done in range(1, local_steps + 1):
            time.sleep(max(0.0, began_s + self._step_s * done / local_steps - time.monotonic()))
            self._connection.progress(done)
        ended_s = time.monotonic()
        if order.carry and not self._connection.wait_for_free_delta():
            return None
        offset = int(self._random.integers(OFFSETS))
        self._delta[:] = self._noise[offset : offset + len(self._delta)]
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
    connection = DaemonConnection.connect(os.environ[messages.SOCKET_VARIABLE], on_lost=lambda: os._exit(0))
    end_with_daemon(signal.SIGKILL)
    try:
        connection.receive_start()
        trainer = RestingTrainer(given, connection)
        while True:
            trainer.serve()
    except (StopAsked, DaemonGone):
        return 0


if __name__ == "__main__":
    sys.exit(main())
