"""The rows of a queue of tasks as its store has them, and the times of its leases. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec

from p2pnode.training.dispatch.answers import Cause, End, QueueRules, ReportAnswer
from p2pnode.training.errors import TrainingError

T = TypeVar("T")

#: The mean task time is a plain mean of this many times. After them each new time has a weight of 1/`MEAN_OF`.
MEAN_OF = 20


class StateDamaged(TrainingError):
    """A stored row cannot be read, or contradicts the other rows; the text names it."""


class TaskState(IntEnum):
    """The state of a task. `REOPENED` is todo too, but its newest attempt may still finish it.

    That attempt timed out, or its worker was declared dead.
    """

    TODO = 0
    LEASED = 1
    DONE = 2
    FAILED = 3
    REOPENED = 4


OPEN = frozenset({TaskState.TODO, TaskState.REOPENED})


class TaskRow(msgspec.Struct, array_like=True):
    """A task. In a row of an older pass only `attempt`, `worker` and `finished` are valid, and the task is todo.

    `attempt` is the number of the newest attempt, and `worker` is its worker. `finished` is the number of the last
    attempt that finished the task. The first `trained` records of the task are trained in this pass. `errors`,
    `timeouts` and `deaths` count the leases of this pass that ended so. `duration_s` is the duration of the lease, if
    the task is leased.
    """

    task: int
    pass_number: int
    state: TaskState = TaskState.TODO
    attempt: int = 0
    worker: bytes = b""
    finished: int = 0
    errors: int = 0
    timeouts: int = 0
    deaths: int = 0
    trained: int = 0
    duration_s: float = 0.0

    def in_pass(self, pass_number: int) -> TaskRow:
        """The row in this pass: one of an older pass is replaced by a todo row."""
        if self.pass_number == pass_number:
            return self
        return TaskRow(self.task, pass_number, TaskState.TODO, self.attempt, self.worker, self.finished)

    def refusal(self, worker: bytes, attempt: int) -> ReportAnswer | None:
        """Why a report about an attempt has no effect; None if it is the newest attempt and this worker has it."""
        if not 1 <= attempt <= self.attempt:
            return ReportAnswer.UNKNOWN
        if attempt < self.attempt:
            return ReportAnswer.SUPERSEDED
        return None if self.worker == worker else ReportAnswer.NOT_HOLDER

    def fails(self, cause: Cause, rules: QueueRules) -> bool:
        """Count a lease that ended for this cause. Whether the task has failed too often."""
        self.errors += cause is Cause.ERROR
        self.timeouts += cause is Cause.TIMEOUT
        self.deaths += cause is Cause.DEATH
        return self.errors > rules.max_failures or self.timeouts + self.deaths > rules.max_losses


class HeadRow(msgspec.Struct, array_like=True):
    """The current pass, whether the job has ended, and the mean task time.

    `observed` counts the task times in the mean, up to `MEAN_OF`; 0: the mean is not known.
    """

    pass_number: int = 1
    end: End = End.NO
    mean_task_s: float = 0.0
    observed: int = 0

    def lease_s(self, rules: QueueRules) -> float:
        """The duration of a lease that begins now."""
        if not self.observed:
            return rules.lease_ceiling_s
        return min(max(rules.lease_factor * self.mean_task_s, rules.lease_floor_s), rules.lease_ceiling_s)

    def with_time(self, seconds: float, rules: QueueRules) -> HeadRow:
        """The row after one more task time. One above the longest lease counts as that: the clock may have jumped."""
        observed = min(self.observed + 1, MEAN_OF)
        mean_s = self.mean_task_s + (min(seconds, rules.lease_ceiling_s) - self.mean_task_s) / observed
        return msgspec.structs.replace(self, mean_task_s=mean_s, observed=observed)


@dataclass(slots=True)
class Times:
    """When a lease began and when it ends, on the monotonic clock of this process; never stored.

    `rearmed`: the lease is from before a restart of the master, so `leased_at` is not its real beginning.
    """

    leased_at: float
    deadline: float
    rearmed: bool = False


def read_row(rows: Mapping[str, bytes], key: str, kind: type[T]) -> T | None:
    """The decoded row; None if there is none. Raises `StateDamaged`."""
    if key not in rows:
        return None
    try:
        return msgspec.msgpack.decode(rows[key], type=kind)
    except msgspec.MsgspecError as error:
        raise StateDamaged(f"the stored row {key} cannot be read: {error}") from error
