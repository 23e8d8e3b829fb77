"""Where a trainer gets its tasks: from the master, through the daemon, or all chunks of the files of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec

from p2pnode.training.dispatch.chunks import BadDataset, DatasetChunk, LocalDataset, RecordFilesMissing, read_dataset
from p2pnode.training.dispatch.permutation import EpochOrder
from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import SignOfLife
from p2pnode.training.trainer_link.record_messages import (
    RecordsGranted,
    RecordsOpened,
    RecordSource,
    RecordsTrained,
    RecordsUnreadable,
    RecordsWanted,
    RecordTask,
    TaskTrained,
)

#: A trainer that has something to report waits no longer for an answer than this.
NOT_NOW_S = 2.0
#: One that has nothing to do looks so often whether there is something.
IDLE_S = 0.1


class _Connected:
    """What both kinds of sources do with the connection."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection

    @property
    def stopped(self) -> bool:
        """Whether the node ends."""
        return self._connection.stopping or self._connection.lost

    def idle(self) -> None:
        """Wait a moment, as a trainer that has nothing to do."""
        with contextlib.suppress(DaemonGone):
            self._connection.send(SignOfLife())
        time.sleep(IDLE_S)


class DispatchedTasks(_Connected):
    """The master's, through the daemon. The daemon keeps the position."""

    def __init__(self, connection: DaemonConnection) -> None:
        super().__init__(connection)
        self._number = 0
        self._is_asking = False
        with contextlib.suppress(DaemonGone):
            connection.send(RecordsOpened())

    def next_task(self, *, wait: bool) -> RecordTask | None:
        """The next task; None: there is none now, or the order under way was cancelled. A request that was not answered
        before stays the one that is waited for, because the daemon may have granted a task by it."""
        connection = self._connection
        began_s = time.monotonic()

        def gives_up() -> bool:
            return connection.interrupted() or (not wait and time.monotonic() - began_s >= NOT_NOW_S)

        try:
            if not self._is_asking:
                self._number += 1
                self._is_asking = True
                connection.send(RecordsWanted(self._number, wait))
            answer = connection.answer(RecordsGranted, self._number, gives_up)
        except DaemonGone:
            answer = None
        if answer is None:
            return None
        self._is_asking = False
        return answer.task

    def give_up(self, task: RecordTask, reason: str, *, missing: bool) -> None:
        """No more of this task is drawn, because it cannot be read or decoded. Raises `DaemonGone`."""
        self._connection.send(RecordsUnreadable(task.task, task.attempt, reason[:4096], missing))

    def report(self, turn: int, step: int, trained: Sequence[TaskTrained]) -> None:
        """The delta of this turn is about to be reported. Raises `DaemonGone`."""
        if trained:
            self._connection.send(RecordsTrained(turn, step, list(trained)))

    def state(self) -> str | None:
        """The position, for a checkpoint."""
        return None

    def restore(self, state: str) -> None:
        """The daemon has the position."""


class _LocalPosition(msgspec.Struct, frozen=True):
    """The first task that is not wholly trained, of all passes, and its records that are. `chunks`: of the files."""

    chunks: int
    number: int
    trained: int


class LocalTasks(_Connected):
    """All chunks of the files of this machine, pass after pass, in an order of this node's own; a task is a chunk.

    `node_seed` differs on each node. Raises `TrainerFailed`.
    """

    def __init__(self, source: RecordSource, node_seed: int, connection: DaemonConnection) -> None:
        super().__init__(connection)
        self._dataset = open_files(source)
        self._source = source
        self._seed = node_seed
        self._number = self._skip = 0
        self._position = _LocalPosition(len(self._dataset.table), 0, 0)

    def next_task(self, *, wait: bool) -> RecordTask | None:  # noqa: ARG002 - they are all here
        table = self._dataset.table
        is_over = self._source.passes and self._number >= self._source.passes * len(table)
        if is_over or self.stopped:
            return None
        number, (before, position) = self._number, divmod(self._number, len(table))
        order = EpochOrder(len(table), self._seed, before, shuffle=self._source.shuffle)
        chunk = table[order.samples(position, position + 1)[0]]
        path = self._dataset.paths[chunk.path]
        skip, self._skip = self._skip, 0
        self._number += 1
        seed = (self._seed ^ number) | 1 if self._source.shuffle else 0
        found = DatasetChunk(path, chunk.index, chunk.offset, chunk.records)
        return RecordTask(number, 1, before + 1, seed, skip, [found])

    def give_up(self, task: RecordTask, reason: str, *, missing: bool) -> None:  # noqa: ARG002 - nobody else has it
        raise OSError(f"cannot go on in {task.chunks[0].path}: {reason}")

    def report(self, turn: int, step: int, trained: Sequence[TaskTrained]) -> None:  # noqa: ARG002 - no one counts
        if trained:
            last = max(trained, key=lambda one: one.task)
            self._position = _LocalPosition(len(self._dataset.table), last.task, last.trained)

    def state(self) -> str | None:
        return msgspec.json.encode(self._position).decode()

    def restore(self, state: str) -> None:
        """Go on from a saved position. Raises `ValueError` for one of other files."""
        try:
            position = msgspec.json.decode(state, type=_LocalPosition)
        except msgspec.DecodeError as error:
            raise ValueError(f"this is no position in records: {error}") from error
        if position.chunks != len(self._dataset.table):
            raise ValueError(
                f"the saved position is of records with {position.chunks} chunks, and these have "
                f"{len(self._dataset.table)}; it begins with the first pass"
            )
        self._position = position
        self._number, self._skip = position.number, position.trained


TaskSource = DispatchedTasks | LocalTasks


def open_tasks(source: RecordSource, node_seed: int, connection: DaemonConnection) -> TaskSource:
    """The tasks of a trainer. Raises `TrainerFailed`."""
    return DispatchedTasks(connection) if source.source == "master" else LocalTasks(source, node_seed, connection)


def open_files(source: RecordSource) -> LocalDataset:
    """The files of this machine. Raises `TrainerFailed`."""
    try:
        return read_dataset(source.patterns, source.folder)
    except RecordFilesMissing as error:
        raise TrainerFailed(error.reason, error.hint, fatal=True) from error
    except BadDataset as error:
        raise TrainerFailed(str(error), "see dispatch.records", fatal=True) from error
