"""Opens the records of `[dispatch]` for a trainer; every fault becomes a `TrainerFailed`. Needs no torch."""

from __future__ import annotations

from p2pnode.training.dispatch.chunks import BadDataset
from p2pnode.training.dispatch.dataset import LocalDataset, RecordFilesMissing, read_dataset
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.records.task_source import DispatchedTasks, LocalTasks, TaskSource
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.record_messages import RecordSource


def open_tasks(source: RecordSource, node_seed: int, connection: DaemonConnection) -> TaskSource:
    """The tasks of a trainer. Raises `TrainerFailed`."""
    if source.source == "master":
        return DispatchedTasks(connection)
    try:
        return LocalTasks(source, node_seed, connection)
    except (RecordFilesMissing, BadDataset) as error:
        raise _unreadable(error) from error


def open_files(source: RecordSource) -> LocalDataset:
    """The files of this machine. Raises `TrainerFailed`."""
    try:
        return read_dataset(source.patterns, source.folder)
    except (RecordFilesMissing, BadDataset) as error:
        raise _unreadable(error) from error


def _unreadable(error: RecordFilesMissing | BadDataset) -> TrainerFailed:
    if isinstance(error, RecordFilesMissing):
        return TrainerFailed(error.reason, error.hint, fatal=True)
    return TrainerFailed(str(error), "see dispatch.records", fatal=True)
