"""A trainer process without torch, for tests of daemons.

`p2pnode run … -- python -m tests.process.harness.plain_trainer 0.03` sleeps so many seconds in each optimiser step, and
adds a constant. The link, the shared memory and the life of the process are real. Only the import of torch is missing:
two seconds of processor time per process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from training.layout import Layout, LayoutEntry
from training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon
from training.trainer_link import messages
from training.trainer_link.interface import ModelDescription, StepReport, TensorSource, TrainerHello
from training.trainer_link.shared_memory import map_vectors

SIZE = 58
LAYOUT = Layout((LayoutEntry("weight", (SIZE,), "float32", "parameter", 0, SIZE),))
DESCRIPTION = ModelDescription(
    layout_digest=LAYOUT.digest(),
    fixed_digest="",
    tensors=(TensorSource("weight", "float32", (SIZE,), "vector", "weight"),),
    local={},
)


def main() -> int:
    """Serve one daemon; returns the exit code."""
    step_s = float(sys.argv[1])
    connection = DaemonConnection.connect(os.environ[messages.SOCKET_VARIABLE], on_lost=lambda: os._exit(0))
    end_with_daemon(signal.SIGKILL)
    try:
        connection.receive_start()
        connection.send(messages.Hello(TrainerHello(LAYOUT, "plain", "1", "", "cpu", evaluates=False, pid=os.getpid())))
        memory, descriptors = connection.receive_memory()
        vector, delta = map_vectors(descriptors, memory.total)
        if memory.initialise:
            vector[:] = 0.0
        connection.send(messages.Ready())
        while True:
            _serve(connection, delta, step_s)
    except (StopAsked, DaemonGone):
        return 0


def _serve(connection: DaemonConnection, delta: np.ndarray, step_s: float) -> None:
    match connection.receive():
        case messages.Train(turn, order):
            if order.carry:
                connection.send(messages.BuffersLoaded(turn))
            for done in range(order.local_steps):
                time.sleep(step_s)
                connection.progress(done + 1)
            if order.carry and not connection.wait_for_free_delta():
                return
            delta[:] = np.float32(0.001)
            report = StepReport(order.step, 1.0, 8, order.local_steps, step_s * order.local_steps, {})
            connection.send(messages.Trained(turn, report))
        case messages.Evaluate(turn, _):
            connection.send(messages.Evaluated(turn, None))
        case messages.Save(turn, path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps({}))
            connection.send(messages.Copied(turn))
            connection.send(messages.Written(turn))
        case messages.Describe(turn, _, _):
            connection.send(messages.Described(turn, DESCRIPTION))


if __name__ == "__main__":
    sys.exit(main())
