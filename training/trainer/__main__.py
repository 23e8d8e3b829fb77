"""The trainer process for a task class: `python -m training.trainer`, started by the daemon only.

Connects to the daemon, builds the task, and trains it until it is stopped or the daemon ends. torch is imported
after connecting, so that a missing torch can be reported to the daemon.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from p2pnode.training.trainer.connection import (
    DaemonConnection,
    DaemonGone,
    StopAsked,
    SwarmLost,
    end_with_daemon,
    report_failure,
)
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed

#: The exit code after a failure that was reported over the link.
FAILED = 3


def main() -> int:
    """Serve one daemon; returns the exit code."""
    path = os.environ.get(messages.SOCKET_VARIABLE, "")
    if not path:
        print("python -m p2pnode.training.trainer is started by p2pnode; use `p2pnode start`", file=sys.stderr)  # noqa: T201
        return 2
    # Without its daemon the trainer must end at once, whatever it is doing.
    connection = DaemonConnection.connect(path, on_lost=lambda: os._exit(0))
    end_with_daemon(signal.SIGKILL)
    try:
        return _serve(connection, connection.receive_start())
    except (StopAsked, DaemonGone):
        return 0
    except TrainerFailed as failure:
        report_failure(connection, failure)
        return FAILED


def _serve(connection: DaemonConnection, start: messages.Start) -> int:
    # Imported objects are never garbage; without collections the imports take an eighth less (0.96 → 0.82 s).
    gc.disable()
    try:
        import torch

        from p2pnode.training.trainer.lazy_dynamo import import_later
        from p2pnode.training.trainer.loading import build_task, resolve_device
        from p2pnode.training.trainer.model.contract import ModelChanged
        from p2pnode.training.trainer.task_loop import TaskLoop
    except ImportError as error:
        raise TrainerFailed(
            f"the trainer cannot import what it needs: {error}",
            'install PyTorch: pip install "p2pnode[torch]"',
            fatal=True,
        ) from error
    gc.freeze()
    gc.enable()
    import_later()
    if start.threads:
        torch.set_num_threads(start.threads)
    task, spec = build_task(
        start.task,
        start.options,
        data_dir=start.data_dir,
        seed=start.seed,
        node_seed=start.node_seed,
        device=resolve_device(start.device),
    )
    records_options = start.options if start.records is not None else None
    loop = TaskLoop(start.task, task, spec, connection, records_options)
    try:
        loop.join(start)
        loop.run()
    except SwarmLost:
        pass
    except ModelChanged:  # which the daemon has been told
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
