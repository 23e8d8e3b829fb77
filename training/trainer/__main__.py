"""The trainer process for a task class: `python -m training.trainer`, started by the daemon only.

Connects to the daemon, builds the task, and executes orders until it is stopped or the daemon ends. torch is imported
after connecting, so that a missing torch can be reported to the daemon.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon, report_failure
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello
from p2pnode.training.trainer_link.shared_memory import map_vectors

if TYPE_CHECKING:
    from p2pnode.training.tasks.task import Task
    from p2pnode.training.trainer.records.batches import RecordBatches
    from p2pnode.training.trainer.runner import TaskRunner

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
        _serve(connection, connection.receive_start())
    except (StopAsked, DaemonGone):
        return 0
    except TrainerFailed as failure:
        report_failure(connection, failure)
        return FAILED
    return 0


def _serve(connection: DaemonConnection, start: messages.Start) -> None:
    # Imported objects are never garbage; without collections the imports take an eighth less (0.96 → 0.82 s).
    gc.disable()
    try:
        import torch

        from p2pnode.training.trainer.lazy_dynamo import import_later
        from p2pnode.training.trainer.loading import build_task, resolve_device
        from p2pnode.training.trainer.memory_estimate import host_bytes
        from p2pnode.training.trainer.runner import TaskRunner
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
    device = resolve_device(start.device)
    task, spec = build_task(
        start.task,
        start.options,
        data_dir=start.data_dir,
        seed=start.seed,
        node_seed=start.node_seed,
        device=device,
    )
    runner = TaskRunner(
        start.task,
        task,
        spec,
        records=_records(start, task, connection),
        progress=connection.progress,
        warn=lambda event, message, do="": connection.send(messages.Warned(event, message, do)),
    )
    version = str(getattr(task, "version", ""))
    connection.send(
        messages.Hello(
            TrainerHello(
                layout=runner.model_vector.layout,
                task=start.task,
                task_version=version,
                frozen_digest=runner.model_vector.frozen_digest,
                device=device,
                evaluates=True,
                pid=os.getpid(),
                host_bytes=sum(map(host_bytes, runner.given.optimizers)),
                frozen=runner.model_vector.frozen,
            )
        )
    )
    _run_orders(connection, runner)


def _records(start: messages.Start, task: Task, connection: DaemonConnection) -> RecordBatches | None:
    """The records of `[dispatch]`, if the task is to train on them."""
    if start.records is None:
        return None
    from p2pnode.training.trainer.loading import user_code_errors
    from p2pnode.training.trainer.records.batches import RecordBatches
    from p2pnode.training.trainer.records.opening import open_tasks

    with user_code_errors(start.task, "decode()"):
        return RecordBatches(task, start.options, open_tasks(start.records, start.node_seed, connection))


class _Link:
    """`training.trainer.runner.TurnLink` of a daemon."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection
        self.next_step = connection.next_step
        self.news = connection.news

    def entered(self) -> None:
        self._connection.send(messages.ValuesEntered())


def _run_orders(connection: DaemonConnection, runner: TaskRunner) -> None:
    from p2pnode.training.trainer.snapshot import CannotWrite
    from p2pnode.training.trainer.state_writer import StateWriter

    memory, descriptors = connection.receive_memory()
    vector, delta, *leaders = map_vectors(descriptors, memory.total)
    runner.follow(tuple(leaders))
    runner.use(vector, delta)
    link = _Link(connection)
    if memory.initialise:
        runner.model_vector.read(vector)
    if memory.restore:
        runner.restore(Path(memory.restore))
    connection.send(messages.Ready())
    writer = StateWriter(connection.send)
    while True:
        try:
            match connection.receive():
                case messages.DeltaSent() | messages.ValuesArrived() as news:
                    runner.apply(news, link)
                case messages.Train(turn, order):
                    report = runner.train(order, connection.interrupted, link)
                    if report is not None:
                        if runner.records is not None:
                            runner.records.report(turn, order.step)
                        connection.send(messages.Trained(turn, report))
                case messages.Merge(turn, merge):
                    connection.send(messages.Merged(turn, runner.merge.merge(merge, delta)))
                case messages.Evaluate(turn, step):
                    evaluation = runner.evaluate(step, connection.interrupted)
                    if evaluation is not None:
                        connection.send(messages.Evaluated(turn, evaluation))
                case messages.Save(turn, path):
                    with runner.loads.saving():
                        writer.save(turn, Path(path), runner.state())
                case messages.Describe(turn, folder, wait):
                    connection.send(messages.Described(turn, runner.describe(folder, wait=wait)))
        except CannotWrite as error:
            connection.send(messages.NotWritten(turn, error.reason, error.hint))


if __name__ == "__main__":
    sys.exit(main())
