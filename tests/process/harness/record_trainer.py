"""A trainer process without torch that trains dispatched records, for tests of daemons.

`p2pnode run … -- python -m tests.process.harness.record_trainer LOG SECONDS BATCH` takes so many records in each
optimiser step, and so many seconds. Before it reports a turn it writes a line for each of its records to LOG: the pass,
and the text of the record. A trainer that is killed between the two has trained records that nobody knows of, and they
are trained again. The other way round its daemon could finish the task, and LOG lack it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.records.record_draws import RecordDraws
from p2pnode.training.trainer.records.task_source import DispatchedTasks
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.process.harness.plain_trainer import SIZE
from tests.process.harness.torchless_trainer import TorchlessTrainer, serve_daemon


class RecordTrainer(TorchlessTrainer):
    """Draws records, and writes down which it has trained."""

    def __init__(self, connection: DaemonConnection, log: Path, step_s: float, batch: int) -> None:
        super().__init__(connection, "plain", SIZE)
        self._draws = RecordDraws(DispatchedTasks(connection))
        end_torn_line(log)
        self._log = log
        self._step_s = step_s
        self._batch = batch

    def train(self, turn: int, order: StepOrder) -> StepReport | None:
        connection, lines, steps = self.connection, [], 0
        while steps < order.local_steps:
            drawn = self._take(wait=not lines and not self.has_rest)
            if not drawn:
                if lines:
                    break
                if connection.interrupted():
                    return None
                self.look()
                if self.has_rest and not self.is_exchanging:
                    break  # its master waits for a delta that has the last records
                self._draws.tasks.idle()
                continue
            lines += drawn
            steps += 1
            time.sleep(self._step_s)
            connection.progress()
        self.own[:] = np.float32(0.001)
        with self._log.open("ab", buffering=0) as file:
            file.write("".join(lines).encode())
        self._draws.count(len(lines))
        self._draws.report(turn, order.step)
        return StepReport(order.step, 1.0, len(lines), steps, self._step_s, {})

    def _take(self, *, wait: bool) -> list[str]:
        lines: list[str] = []
        while len(lines) < self._batch and (found := self._draws.draw(wait=wait and not lines)) is not None:
            assert self._draws._present is not None
            _, task, _ = self._draws._present
            lines.append(f"{task.pass_number} {found[0].decode()}\n")
        return lines


def end_torn_line(log: Path) -> None:
    """Cut off what a killed trainer had written of a line: what follows would be read as its end."""
    if log.exists():
        os.truncate(log, log.read_bytes().rfind(b"\n") + 1)


if __name__ == "__main__":
    log, seconds, batch = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    sys.exit(serve_daemon(lambda connection: RecordTrainer(connection, log, seconds, batch)))
