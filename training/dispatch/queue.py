"""The task queue: what is todo, leased, done and failed in the current pass, as rows that a store keeps.

A request changes the queue in memory and is answered when the store has the rows that `take` gives. Where the store
does not take them, the queue is dropped, and what the store has is read anew. Rows name their pass, so a new pass
writes none of them again.

Where the pass ends is judged in one place, `_judge`, after every change that may close a task. A report about an
attempt that was superseded has no effect. An attempt that timed out, or whose worker was declared dead, may still
finish its task while nobody else has it: its records were trained, and handing them out again would train them twice.
Pure.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec

from p2pnode.training.dispatch.answers import (
    MAX_AVOIDED,
    MAX_HELD,
    REPORTED_CAUSES,
    Answer,
    BadRequestToQueue,
    Cause,
    DatasetRegistered,
    End,
    Handout,
    Held,
    Lease,
    LeaseEnded,
    PassEnded,
    QueueEvent,
    QueueRules,
    QueueStatus,
    Registration,
    ReportAnswer,
    TaskDiscarded,
)
from p2pnode.training.errors import TrainingError

#: Each has a row, and the roll of a pass orders all of them on the event loop.
MAX_TASKS = 100_000
#: From so many task times on, a new one has this share in the mean.
MEAN_OF = 20
#: Leases that end by their time in one write at most; the rest follow in the next one.
DUE_AT_ONCE = 16
RETRY_FLOOR_S, RETRY_CEILING_S = 0.1, 5.0
MAX_WORKER_BYTES = 64

T = TypeVar("T")


class StateDamaged(TrainingError):
    """A stored row cannot be read, or contradicts the others; the text says what."""


class TaskState(IntEnum):
    """Where a task is. `REOPENED` is todo too: its newest attempt timed out or its worker died, and may finish late."""

    TODO = 0
    LEASED = 1
    DONE = 2
    FAILED = 3
    REOPENED = 4


OPEN = frozenset({TaskState.TODO, TaskState.REOPENED})


class TaskRow(msgspec.Struct, array_like=True):
    """A task. Of a row of an older pass only `attempt`, `worker` and `finished` count; the task is todo.

    `attempt` is the newest one, `worker` had it, `finished` is the last one that counted. The first `trained` records
    are trained. `duration_s` is that of the lease, if the task is leased.
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


class HeadRow(msgspec.Struct, array_like=True):
    """The pass, and the mean of `observed` task times, the later ones with a weight of 1/20."""

    pass_number: int = 1
    end: End = End.NO
    mean_task_s: float = 0.0
    observed: int = 0


@dataclass(slots=True)
class Times:
    """When a lease was given and when it ends, on the clock of this process; never stored. `rearmed`: it was given
    before a restart."""

    leased_at: float
    deadline: float
    rearmed: bool = False


class TaskQueue:
    """The queue that `rows` say, at the time `now`, in monotonic seconds, which the owner moves on.

    Leases run for their full time again: the time without a master is not the workers' fault, and nobody knows how long
    it was. Raises `StateDamaged`. A request that raises `BadRequestToQueue` has changed nothing.
    """

    def __init__(self, rules: QueueRules, rows: Mapping[str, bytes], now: float) -> None:
        self.rules = rules
        self.now = now
        self.registration = _read(rows, "registration", Registration)
        self.head = _read(rows, "head", HeadRow) or HeadRow()
        #: Worker → its leased tasks, in the order in which it got them.
        self.held_by: dict[bytes, dict[int, None]] = {}
        self._rows: dict[int, TaskRow] = {}
        self._times: dict[int, Times] = {}
        #: No lease ends before.
        self._next_due = math.inf
        self._changed: dict[str, msgspec.Struct | bytes] = {}
        self._events: list[QueueEvent] = []
        self._counts = [self.tasks, 0, 0, 0, 0]
        for key in rows:
            if key.startswith("task/"):
                self._restore(key, rows)
        touched = {row.task: row for row in self._rows.values() if row.pass_number == self.head.pass_number}
        #: Todo tasks in the order of their next hand-out, and some that were closed meanwhile.
        self._open = deque(task for task in self._order() if task not in touched)
        self._open.extend(row.task for row in touched.values() if row.state in OPEN)
        if self.head.end == End.DONE and not self._is_last():  # `passes` is higher than it was
            self._set_head(end=End.NO)
            self._begin_pass()

    def _restore(self, key: str, rows: Mapping[str, bytes]) -> None:
        row = _read(rows, key, TaskRow)
        if row is None or key != f"task/{row.task}" or not 0 <= row.task < self.tasks:
            raise StateDamaged(f"the store has {key}, of {self.tasks} tasks")
        self._rows[row.task] = row
        if row.pass_number == self.head.pass_number:
            self._counts[TaskState.TODO] -= 1
            self._counts[row.state] += 1
            if row.state == TaskState.LEASED:
                self._arm(row, Times(self.now, self.now + row.duration_s, rearmed=True))

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        return 0 if self.registration is None else self.registration.tasks

    def row(self, task: int) -> TaskRow:
        """The task in this pass."""
        row = self._rows.get(task)
        if row is None:
            row = self._rows[task] = TaskRow(task, self.head.pass_number)
        elif row.pass_number != self.head.pass_number:
            row = TaskRow(task, self.head.pass_number, TaskState.TODO, row.attempt, row.worker, row.finished)
            self._rows[task] = row
        return row

    def lease(self, task: int) -> Lease:
        """The lease of a task that is leased."""
        row = self._rows[task]
        deadline = self._times[task].deadline
        return Lease(task, row.attempt, row.worker, row.pass_number, row.duration_s, deadline, row.trained)

    def status(self) -> QueueStatus:
        """The counts, for people."""
        todo, leased, done, failed, reopened = self._counts
        return QueueStatus(
            pass_number=self.head.pass_number,
            passes=self.rules.passes,
            tasks=self.tasks,
            todo=todo + reopened,
            leased=leased,
            done=done,
            failed=failed,
            end=self.head.end,
        )

    # -- what the store gets ---------------------------------------------------------------------------------------

    @property
    def changed(self) -> int:
        """How many rows have changed."""
        return len(self._changed)

    def take(self) -> tuple[dict[str, bytes], list[QueueEvent]]:
        """The rows that have changed since the last call, to be written together, and what has happened."""
        rows = {
            key: row if isinstance(row, bytes) else msgspec.msgpack.encode(row) for key, row in self._changed.items()
        }
        events = self._events
        self._changed, self._events = {}, []
        return rows, events

    def keep(self, key: str, row: bytes) -> None:
        """A row of the owner's, to be written with the others."""
        self._changed[key] = row

    def _note(self, row: TaskRow) -> None:
        self._changed[f"task/{row.task}"] = row

    def _set_head(self, **values: object) -> None:
        self._changed["head"] = self.head = msgspec.structs.replace(self.head, **values)

    # -- the data set ----------------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        """The data set that the tasks are of; there is none yet."""
        if self.registration is not None or not 1 <= registration.tasks <= MAX_TASKS:
            raise BadRequestToQueue(f"{registration.tasks} tasks cannot be registered")
        self.registration = self._changed["registration"] = registration
        self._counts = [registration.tasks, 0, 0, 0, 0]
        self._open = deque(self._order())
        self._events.append(DatasetRegistered(registration.tasks, registration.chunks_per_task))

    def _order(self) -> list[int]:
        """All tasks in the order of the pass."""
        order = list(range(self.tasks))
        facts = self.registration
        if facts is not None and facts.shuffle:
            random.Random(f"{facts.seed}/{self.head.pass_number}").shuffle(order)
        return order

    # -- handing out -----------------------------------------------------------------------------------------------

    def get(self, worker: bytes, held: Sequence[Held] = (), avoid: Sequence[int] = ()) -> Handout:
        """A task for a worker, which names the leases it knows and tasks that it cannot read.

        A lease that the worker does not know is handed out again under its attempt: the answer was lost. So a worker
        must not ask twice at once.
        """
        self._check(worker, len(held), len(avoid))
        if not self.tasks:
            return Handout(Answer.NO_DATASET, retry_after_s=RETRY_CEILING_S)
        if self.head.end:
            return Handout(Answer.JOB_DONE if self.head.end == End.DONE else Answer.ALL_FAILED)
        mine = self.held_by.get(worker, {})
        known = {(one.task, one.attempt) for one in held}
        for task in mine:
            if (task, self._rows[task].attempt) not in known and task not in avoid:
                self._prolong(task)
                return Handout(Answer.TASK, self.lease(task))
        found = None if len(mine) >= self.rules.leases_per_worker else self._take_open(avoid)
        if found is None:
            return Handout(Answer.NO_TASK_NOW, retry_after_s=self._retry_after_s())
        return Handout(Answer.TASK, self._hand_out(found, worker))

    def _hand_out(self, task: int, worker: bytes) -> Lease:
        row = self.row(task)
        self._move(row, TaskState.LEASED)
        row.attempt += 1
        row.worker = worker
        row.duration_s = lease_duration_s(self.rules, self.head)
        self._arm(row, Times(self.now, self.now + row.duration_s))
        return self.lease(task)

    def _arm(self, row: TaskRow, times: Times) -> None:
        self.held_by.setdefault(row.worker, {})[row.task] = None
        self._times[row.task] = times
        self._next_due = min(self._next_due, times.deadline)

    def _take_open(self, avoid: Sequence[int]) -> int | None:
        """The next todo task that is not avoided; None where there is none."""
        avoided: list[int] = []
        found = None
        while self._open and found is None:
            task = self._open.popleft()
            if self.row(task).state not in OPEN:
                continue
            if task in avoid:
                avoided.append(task)
            else:
                found = task
        self._open.extendleft(reversed(avoided))
        return found

    def _retry_after_s(self) -> float:
        wait_s = self.head.mean_task_s / 2 if self.head.observed else 1.0
        return min(max(min(wait_s, self._next_due - self.now), RETRY_FLOOR_S), RETRY_CEILING_S)

    # -- reports ---------------------------------------------------------------------------------------------------

    def finish(self, worker: bytes, task: int, attempt: int) -> ReportAnswer:
        """All records of the attempt are trained. A repeated report of the attempt that counted is accepted again."""
        self._check(worker)
        refusal = self._refusal(worker, task, attempt)
        if refusal in (ReportAnswer.UNKNOWN, ReportAnswer.NOT_HOLDER):
            return refusal
        row = self.row(task)
        if attempt == row.finished:
            return ReportAnswer.ACCEPTED
        if refusal is not None or row.state not in (TaskState.LEASED, TaskState.REOPENED):
            return ReportAnswer.SUPERSEDED
        if row.state == TaskState.LEASED:
            times = self._drop(row)
            self._observe(times, self.now - times.leased_at)
        self._move(row, TaskState.DONE)
        row.finished = attempt
        self._judge()
        return ReportAnswer.ACCEPTED

    def fail(self, worker: bytes, task: int, attempt: int, cause: Cause, trained: int = 0) -> ReportAnswer:
        """A worker gives a task back: `cause` is one of `REPORTED_CAUSES`, `trained` as in `Held`."""
        self._check(worker)
        if cause not in REPORTED_CAUSES or trained < 0:
            raise BadRequestToQueue(f"a worker cannot report the cause {cause!r} with {trained} records trained")
        refusal = self._refusal(worker, task, attempt)
        if refusal in (ReportAnswer.UNKNOWN, ReportAnswer.NOT_HOLDER):
            return refusal
        row = self.row(task)
        if refusal is None and row.state == TaskState.LEASED:
            row.trained = max(row.trained, trained)
            self._end(row, cause)
            self._judge()
        return ReportAnswer.RETURNED

    def renew(self, worker: bytes, held: Sequence[Held]) -> list[ReportAnswer]:
        """Extend leases of a worker, each from now on; what it has trained of them is kept. One answer each."""
        self._check(worker, len(held))
        if any(one.trained < 0 for one in held):
            raise BadRequestToQueue("a worker cannot have trained a negative number of records")
        answers = []
        for one in held:
            answer = self._refusal(worker, one.task, one.attempt)
            if answer is None and (row := self.row(one.task)).state == TaskState.LEASED:
                self._prolong(one.task)
                if one.trained > row.trained:
                    row.trained = one.trained
                    self._note(row)
                answer = ReportAnswer.RENEWED
            answers.append(answer or ReportAnswer.SUPERSEDED)
        return answers

    def worker_gone(self, worker: bytes) -> int:
        """A worker died or left without a word: its leases end at once. Returns how many."""
        self._check(worker)
        tasks = list(self.held_by.get(worker, ()))
        for task in tasks:
            self._end(self.row(task), Cause.DEATH)
        self._judge()
        return len(tasks)

    def expire(self) -> int:
        """End the leases whose deadline has passed, at most `DUE_AT_ONCE`. Returns how many."""
        if self.now < self._next_due:
            return 0
        due = [task for task, times in self._times.items() if times.deadline <= self.now][:DUE_AT_ONCE]
        for task in due:
            times = self._times[task]
            # At least so long such a task takes. Without it, tasks that become slower would never finish in time.
            self._observe(times, times.deadline - times.leased_at)
            self._end(self.row(task), Cause.TIMEOUT)
        self._next_due = min((times.deadline for times in self._times.values()), default=math.inf)
        self._judge()
        return len(due)

    def discard(self, task: int, reason: str) -> bool:
        """Give up an open task for this pass; false where it is finished or discarded already, or does not exist."""
        if not 0 <= task < self.tasks or (row := self.row(task)).state in (TaskState.DONE, TaskState.FAILED):
            return False
        if row.state == TaskState.LEASED:
            self._drop(row)
        self._give_up(row, reason)
        self._judge()
        return True

    def _refusal(self, worker: bytes, task: int, attempt: int) -> ReportAnswer | None:
        """Why a report about an attempt has no effect; None for the newest attempt of this worker."""
        if not 0 <= task < self.tasks:
            return ReportAnswer.UNKNOWN
        row = self.row(task)
        if not 1 <= attempt <= row.attempt:
            return ReportAnswer.UNKNOWN
        if attempt < row.attempt:
            return ReportAnswer.SUPERSEDED
        return None if row.worker == worker else ReportAnswer.NOT_HOLDER

    # -- changes ---------------------------------------------------------------------------------------------------

    def _move(self, row: TaskRow, state: TaskState) -> None:
        self._counts[row.state] -= 1
        self._counts[state] += 1
        row.state = state
        self._note(row)

    def _drop(self, row: TaskRow) -> Times:
        """The lease is over."""
        mine = self.held_by[row.worker]
        del mine[row.task]
        if not mine:
            del self.held_by[row.worker]
        return self._times.pop(row.task)

    def _end(self, row: TaskRow, cause: Cause) -> None:
        """A lease ends without a finished task."""
        self._drop(row)
        row.errors += cause is Cause.ERROR
        row.timeouts += cause is Cause.TIMEOUT
        row.deaths += cause is Cause.DEATH
        if row.errors > self.rules.max_failures or row.timeouts + row.deaths > self.rules.max_losses:
            self._give_up(row, str(cause))
            return
        self._move(row, TaskState.REOPENED if cause in (Cause.TIMEOUT, Cause.DEATH) else TaskState.TODO)
        self._open.append(row.task)
        self._events.append(LeaseEnded(row.task, row.attempt, row.worker, cause))

    def _give_up(self, row: TaskRow, reason: str) -> None:
        self._move(row, TaskState.FAILED)
        self._events.append(TaskDiscarded(row.task, row.attempt, reason, row.errors, row.timeouts, row.deaths))

    def _judge(self) -> None:
        """The one place where a pass ends: when nothing is todo or leased, whatever emptied them."""
        todo, leased, done, failed, reopened = self._counts
        if todo or leased or reopened or not self.tasks or self.head.end:
            return
        if not done:
            self._set_head(end=End.ALL_FAILED)
        elif self._is_last():
            self._set_head(end=End.DONE)
        self._events.append(PassEnded(self.head.pass_number, done, failed, self.head.end))
        if not self.head.end:
            self._begin_pass()

    def _begin_pass(self) -> None:
        """Every task is todo, with its failures forgotten; attempts go on."""
        self._set_head(pass_number=self.head.pass_number + 1)
        self._counts = [self.tasks, 0, 0, 0, 0]
        self._open = deque(self._order())

    def _is_last(self) -> bool:
        return 0 < self.rules.passes <= self.head.pass_number

    def _prolong(self, task: int) -> None:
        times = self._times[task]
        limit = times.leased_at + self.rules.holds * self.rules.lease_ceiling_s
        times.deadline = max(times.deadline, min(self.now + self._rows[task].duration_s, limit))

    def _observe(self, times: Times, seconds: float) -> None:
        """A task took so long. A clock that jumped counts as a ceiling, a lease from before a restart not at all."""
        if times.rearmed:
            return
        observed = min(self.head.observed + 1, MEAN_OF)
        mean_s = self.head.mean_task_s
        mean_s += (min(seconds, self.rules.lease_ceiling_s) - mean_s) / observed
        self._set_head(mean_task_s=mean_s, observed=observed)

    def _check(self, worker: bytes, held: int = 0, avoided: int = 0) -> None:
        if not 1 <= len(worker) <= MAX_WORKER_BYTES:
            raise BadRequestToQueue(f"the name of a worker has 1 to {MAX_WORKER_BYTES} bytes, not {len(worker)}")
        if held > MAX_HELD or avoided > MAX_AVOIDED:
            raise BadRequestToQueue(f"{held} leases and {avoided} avoided tasks; {MAX_HELD} and {MAX_AVOIDED} at most")


def lease_duration_s(rules: QueueRules, head: HeadRow) -> float:
    """How long a lease given now lasts."""
    if not head.observed:
        return rules.lease_ceiling_s
    return min(max(rules.lease_factor * head.mean_task_s, rules.lease_floor_s), rules.lease_ceiling_s)


def _read(rows: Mapping[str, bytes], key: str, kind: type[T]) -> T | None:
    if key not in rows:
        return None
    try:
        return msgspec.msgpack.decode(rows[key], type=kind)
    except msgspec.MsgspecError as error:
        raise StateDamaged(f"the stored row {key} cannot be read: {error}") from error
