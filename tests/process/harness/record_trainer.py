"""A trainer process without torch that trains dispatched records, for tests of daemons.

`p2pnode run … -- python -m tests.process.harness.record_trainer LOG SECONDS BATCH` takes so many records in each
optimiser step, and so many seconds. When it reports a turn it writes a line for each of its records to LOG: the pass,
and the text of the record.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from tests.process.harness.plain_trainer import DESCRIPTION, LAYOUT
from training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon
from training.trainer.records.record_draws import RecordDraws
from training.trainer.records.task_source import DispatchedTasks
from training.trainer_link import messages
from training.trainer_link.interface import StepOrder, StepReport, TrainerHello
from training.trainer_link.shared_memory import map_vectors


def main() -> int:
    """Serve one daemon; returns the exit code."""
    log, step_s, batch = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    connection = DaemonConnection.connect(os.environ[messages.SOCKET_VARIABLE], on_lost=lambda: os._exit(0))
    end_with_daemon(signal.SIGKILL)
    try:
        connection.receive_start()
        connection.send(messages.Hello(TrainerHello(LAYOUT, "plain", "1", "", "cpu", evaluates=False, pid=os.getpid())))
        memory, descriptors = connection.receive_memory()
        _, delta = map_vectors(descriptors, memory.total)
        connection.send(messages.Ready())
        draws = RecordDraws(DispatchedTasks(connection))
        trainer = _Trainer(connection, draws, delta, log, step_s, batch)
        while True:
            trainer.serve()
    except (StopAsked, DaemonGone):
        return 0


class _Trainer:
    def __init__(
        self, connection: DaemonConnection, draws: RecordDraws, delta: np.ndarray, log: Path, step_s: float, batch: int
    ) -> None:
        self._connection = connection
        self._draws = draws
        self._delta = delta
        self._log = log
        self._step_s = step_s
        self._batch = batch

    def serve(self) -> None:
        connection = self._connection
        match connection.receive():
            case messages.Train(turn, order):
                self._train(turn, order)
            case messages.Evaluate(turn, _):
                connection.send(messages.Evaluated(turn, None))
            case messages.Save(turn, path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps({}))
                connection.send(messages.Copied(turn))
                connection.send(messages.Written(turn))
            case messages.Describe(turn, _, _):
                connection.send(messages.Described(turn, DESCRIPTION))

    def _train(self, turn: int, order: StepOrder) -> None:
        connection, lines, steps = self._connection, [], 0
        if order.carry:
            connection.send(messages.BuffersLoaded(turn))
        while steps < order.local_steps:
            drawn = self._take(wait=not lines)
            if not drawn:
                if lines:
                    break
                if connection.interrupted():
                    return
                self._draws.tasks.idle()
                continue
            lines += drawn
            steps += 1
            time.sleep(self._step_s)
            connection.progress(steps)
        if order.carry and not connection.wait_for_free_delta():
            return
        self._delta[:] = np.float32(0.001)
        self._draws.count(len(lines))
        self._draws.report(turn, order.step)
        connection.send(messages.Trained(turn, StepReport(order.step, 1.0, len(lines), steps, self._step_s, {})))
        with self._log.open("ab", buffering=0) as file:
            file.write("".join(lines).encode())

    def _take(self, *, wait: bool) -> list[str]:
        lines: list[str] = []
        while len(lines) < self._batch and (found := self._draws.draw(wait=wait and not lines)) is not None:
            lines.append(f"{self._draws.pass_number} {found[0].decode()}\n")
        return lines


if __name__ == "__main__":
    sys.exit(main())
