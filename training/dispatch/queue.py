"""The queue of tasks that a master leases to workers. A task is a part of the records; a pass goes through all tasks.

Words: each hand-out of a task to a worker is an *attempt*, and it has a *lease*, which ends at a deadline. A task is
todo, leased, done or failed in the current pass.

Storage: the queue is in memory, and a store has a copy of it as rows. Its owner, the master, calls a method for each
request, writes the rows that `take` returns to the store, and then answers the request. If the store refuses the rows,
the owner drops the queue and makes a new one from the rows in the store. Each row has the number of its pass. A row of
an older pass means that the task is todo, so a new pass writes no rows of tasks.

Reports: a report about an attempt has no effect when a newer attempt exists. An attempt that timed out, or whose worker
was declared dead, may still finish its task until another worker gets the task. Its records were trained, so another
attempt would train them twice.

End of a pass: only `_end_pass_if_complete` decides it. Each method that may close a task calls it. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from p2pnode.training.dispatch.answers import (
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
from p2pnode.training.dispatch.queue_rows import OPEN, HeadRow, StateDamaged, TaskRow, TaskState, Times, read_row

#: Each task has a row, and a new pass shuffles all tasks on the event loop.
MAX_TASKS = 100_000
#: Most leases that one call of `expire` ends, to bound the rows of one write to the store. The next call ends others.
DUE_AT_ONCE = 16
#: A worker that gets no task asks again after at least and at most this long.
RETRY_FLOOR_S, RETRY_CEILING_S = 0.1, 5.0


class TaskQueue:
    """The queue that the store has as `rows`. The owner sets `now` (monotonic seconds) before each call.

    Stored leases begin again with their full duration. The queue does not know how long there was no master, and
    workers could not renew leases in that time. Raises `StateDamaged`. A request that raises `BadRequestToQueue` has
    changed nothing.
    """

    def __init__(self, rules: QueueRules, rows: Mapping[str, bytes], now: float) -> None:
        self.rules = rules
        self.now = now
        self.registration = read_row(rows, "registration", Registration)
        self.head = read_row(rows, "head", HeadRow) or HeadRow()
        #: Worker → its leased tasks, in the order in which it got them. The dicts serve as ordered sets.
        self.held_by: dict[bytes, dict[int, None]] = {}
        self._rows: dict[int, TaskRow] = {}
        self._times: dict[int, Times] = {}
        #: No lease ends before this time.
        self._next_due = math.inf
        self._changed: dict[str, msgspec.Struct | bytes] = {}
        self._events: list[QueueEvent] = []
        #: Number of tasks by `TaskState`.
        self._counts = [self.tasks, 0, 0, 0, 0]
        for key in rows:
            if key.startswith("task/"):
                self._restore(key, rows)
        current = {row.task: row for row in self._rows.values() if row.pass_number == self.head.pass_number}
        #: All todo tasks, in the order in which they are handed out. May also have tasks that were closed meanwhile.
        self._open = deque(task for task in self._order if task not in current)
        self._open.extend(row.task for row in current.values() if row.state in OPEN)
        if self.head.end == End.DONE and not self._is_last_pass():  # the user has raised `passes` since
            self._set_head(end=End.NO)
            self._begin_pass()

    def _restore(self, key: str, rows: Mapping[str, bytes]) -> None:
        """Read the row of one task."""
        row = read_row(rows, key, TaskRow)
        if row is None or key != f"task/{row.task}" or not 0 <= row.task < self.tasks:
            raise StateDamaged(f"the store has {key}, of {self.tasks} tasks")
        self._rows[row.task] = row
        if row.pass_number == self.head.pass_number:
            self._counts[TaskState.TODO] -= 1
            self._counts[row.state] += 1
            if row.state == TaskState.LEASED:
                self._begin_lease(row, Times(self.now, self.now + row.duration_s, rearmed=True))

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        return 0 if self.registration is None else self.registration.tasks

    @property
    def _order(self) -> list[int]:
        """All tasks in the order of this pass."""
        return [] if self.registration is None else self.registration.order(self.head.pass_number)

    def row(self, task: int) -> TaskRow:
        """The row of a task, in this pass."""
        row = self._rows.get(task) or TaskRow(task, self.head.pass_number)
        row = self._rows[task] = row.in_pass(self.head.pass_number)
        return row

    def lease(self, task: int) -> Lease:
        """The lease of a leased task."""
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

    # -- rows for the store ----------------------------------------------------------------------------------------

    @property
    def changed(self) -> int:
        """How many rows have changed since the last `take`."""
        return len(self._changed)

    def take(self) -> tuple[dict[str, bytes], list[QueueEvent]]:
        """The rows that have changed since the last call, for one atomic write, and the events since then."""
        rows = {
            key: row if isinstance(row, bytes) else msgspec.msgpack.encode(row) for key, row in self._changed.items()
        }
        events = self._events
        self._changed, self._events = {}, []
        return rows, events

    def keep(self, key: str, row: bytes) -> None:
        """Add a row of the owner to the next `take`."""
        self._changed[key] = row

    def _note(self, row: TaskRow) -> None:
        self._changed[f"task/{row.task}"] = row

    def _set_head(self, **values: object) -> None:
        self._changed["head"] = self.head = msgspec.structs.replace(self.head, **values)

    # -- the data set ----------------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        """Register the data set that the tasks are parts of.

        Raises `BadRequestToQueue` if there is one already, and for a number of tasks out of bounds.
        """
        if self.registration is not None or not 1 <= registration.tasks <= MAX_TASKS:
            raise BadRequestToQueue(f"{registration.tasks} tasks cannot be registered")
        self.registration = self._changed["registration"] = registration
        self._counts = [registration.tasks, 0, 0, 0, 0]
        self._open = deque(registration.order(self.head.pass_number))
        self._events.append(DatasetRegistered(registration.tasks, registration.chunks_per_task))

    # -- handing out -----------------------------------------------------------------------------------------------

    def get(self, worker: bytes, held: Sequence[Held] = (), avoid: Sequence[int] = ()) -> Handout:
        """A task for a worker, which names the leases that it knows (`held`) and tasks that it cannot read (`avoid`).

        If the worker has a lease that it does not know, the answer with that lease was lost. The worker then gets the
        same lease again, with the same attempt. So a worker must not send two of these requests at a time.
        """
        if not self.tasks:
            return Handout(Answer.NO_DATASET, retry_after_s=RETRY_CEILING_S)
        if self.head.end:
            return Handout(Answer.JOB_DONE if self.head.end == End.DONE else Answer.ALL_FAILED)
        leased_tasks = self.held_by.get(worker, {})
        known = {(lease.task, lease.attempt) for lease in held}
        for task in leased_tasks:
            if (task, self._rows[task].attempt) not in known and task not in avoid:
                self._prolong(task)
                return Handout(Answer.TASK, self.lease(task))
        new_task = None if len(leased_tasks) >= self.rules.leases_per_worker else self._take_open(avoid)
        if new_task is None:
            return Handout(Answer.NO_TASK_NOW, retry_after_s=self._retry_after_s())
        return Handout(Answer.TASK, self._hand_out(new_task, worker))

    def _hand_out(self, task: int, worker: bytes) -> Lease:
        """Lease an open task to a worker, as a new attempt."""
        row = self.row(task)
        self._move(row, TaskState.LEASED)
        row.attempt += 1
        row.worker = worker
        row.duration_s = self.head.lease_s(self.rules)
        self._begin_lease(row, Times(self.now, self.now + row.duration_s))
        return self.lease(task)

    def _begin_lease(self, row: TaskRow, times: Times) -> None:
        self.held_by.setdefault(row.worker, {})[row.task] = None
        self._times[row.task] = times
        self._next_due = min(self._next_due, times.deadline)

    def _take_open(self, avoid: Sequence[int]) -> int | None:
        """Remove the next todo task that the worker does not avoid, and return it; None if there is none.

        The avoided tasks before it keep their places, for other workers.
        """
        avoided: list[int] = []
        next_task = None
        while self._open and next_task is None:
            task = self._open.popleft()
            if self.row(task).state not in OPEN:
                continue
            if task in avoid:
                avoided.append(task)
            else:
                next_task = task
        self._open.extendleft(reversed(avoided))
        return next_task

    def _retry_after_s(self) -> float:
        """Half a mean task time, but not later than the next lease can end, and within the bounds."""
        wait_s = self.head.mean_task_s / 2 if self.head.observed else 1.0
        return min(max(min(wait_s, self._next_due - self.now), RETRY_FLOOR_S), RETRY_CEILING_S)

    # -- reports ---------------------------------------------------------------------------------------------------

    def finish(self, worker: bytes, task: int, attempt: int) -> ReportAnswer:
        """A worker reports that all records of the task are trained.

        A repeated report about the attempt that finished the task is accepted again.
        """
        refusal = self._refusal(worker, task, attempt)
        if refusal in (ReportAnswer.UNKNOWN, ReportAnswer.NOT_HOLDER):
            return refusal
        row = self.row(task)
        if attempt == row.finished:
            return ReportAnswer.ACCEPTED
        if refusal is not None or row.state not in (TaskState.LEASED, TaskState.REOPENED):
            return ReportAnswer.SUPERSEDED
        if row.state == TaskState.LEASED:
            times = self._drop_lease(row)
            self._add_to_mean(times, self.now - times.leased_at)
        self._move(row, TaskState.DONE)
        row.finished = attempt
        self._end_pass_if_complete()
        return ReportAnswer.ACCEPTED

    def fail(self, worker: bytes, task: int, attempt: int, cause: Cause, trained: int = 0) -> ReportAnswer:
        """A worker returns an unfinished task: `cause` is one of `REPORTED_CAUSES`, `trained` as in `Held`."""
        if cause not in REPORTED_CAUSES:
            raise BadRequestToQueue(f"a worker cannot report the cause {cause!r}")
        refusal = self._refusal(worker, task, attempt)
        if refusal in (ReportAnswer.UNKNOWN, ReportAnswer.NOT_HOLDER):
            return refusal
        row = self.row(task)
        if refusal is None and row.state == TaskState.LEASED:
            row.trained = max(row.trained, trained)
            self._end_unfinished(row, cause)
            self._end_pass_if_complete()
        return ReportAnswer.RETURNED

    def renew(self, worker: bytes, held: Sequence[Held]) -> list[ReportAnswer]:
        """Extend leases of a worker and note how many records it has trained of each; returns one answer per lease."""
        answers = []
        for lease in held:
            answer = self._refusal(worker, lease.task, lease.attempt)
            if answer is None and (row := self.row(lease.task)).state == TaskState.LEASED:
                self._prolong(lease.task)
                if lease.trained > row.trained:
                    row.trained = lease.trained
                    self._note(row)
                answer = ReportAnswer.RENEWED
            answers.append(answer or ReportAnswer.SUPERSEDED)
        return answers

    def worker_gone(self, worker: bytes) -> int:
        """A worker was declared dead, or left without a report: end its leases. Returns how many ended."""
        tasks = list(self.held_by.get(worker, ()))
        for task in tasks:
            self._end_unfinished(self.row(task), Cause.DEATH)
        self._end_pass_if_complete()
        return len(tasks)

    def expire(self) -> int:
        """End the leases whose deadline has passed, at most `DUE_AT_ONCE`. Returns how many ended."""
        if self.now < self._next_due:
            return 0
        due = [task for task, times in self._times.items() if times.deadline <= self.now][:DUE_AT_ONCE]
        for task in due:
            times = self._times[task]
            # The task takes at least this long. If only finished tasks counted, the mean and with it the leases would
            # stay short when tasks become slower, and all of them would time out.
            self._add_to_mean(times, times.deadline - times.leased_at)
            self._end_unfinished(self.row(task), Cause.TIMEOUT)
        self._next_due = min((times.deadline for times in self._times.values()), default=math.inf)
        self._end_pass_if_complete()
        return len(due)

    def discard(self, task: int, reason: str) -> bool:
        """Give up a todo or leased task for this pass. False if the task is done or failed, or does not exist."""
        if not 0 <= task < self.tasks or (row := self.row(task)).state in (TaskState.DONE, TaskState.FAILED):
            return False
        if row.state == TaskState.LEASED:
            self._drop_lease(row)
        self._give_up(row, reason)
        self._end_pass_if_complete()
        return True

    def _refusal(self, worker: bytes, task: int, attempt: int) -> ReportAnswer | None:
        """Why a report about an attempt has no effect; None if it is the newest attempt and this worker has it."""
        return self.row(task).refusal(worker, attempt) if 0 <= task < self.tasks else ReportAnswer.UNKNOWN

    # -- changes of a task -----------------------------------------------------------------------------------------

    def _move(self, row: TaskRow, state: TaskState) -> None:
        self._counts[row.state] -= 1
        self._counts[state] += 1
        row.state = state
        self._note(row)

    def _drop_lease(self, row: TaskRow) -> Times:
        """Forget the lease of a task; returns its times. The caller changes the state of the task."""
        leased_tasks = self.held_by[row.worker]
        del leased_tasks[row.task]
        if not leased_tasks:
            del self.held_by[row.worker]
        return self._times.pop(row.task)

    def _end_unfinished(self, row: TaskRow, cause: Cause) -> None:
        """End a lease whose task is not finished: the task is open again, or given up after too many failures."""
        self._drop_lease(row)
        if row.fails(cause, self.rules):
            self._give_up(row, str(cause))
            return
        self._move(row, TaskState.REOPENED if cause in (Cause.TIMEOUT, Cause.DEATH) else TaskState.TODO)
        self._open.append(row.task)
        self._events.append(LeaseEnded(row.task, row.attempt, row.worker, cause))

    def _give_up(self, row: TaskRow, reason: str) -> None:
        self._move(row, TaskState.FAILED)
        self._events.append(TaskDiscarded(row.task, row.attempt, reason, row.errors, row.timeouts, row.deaths))

    # -- the end of a pass -----------------------------------------------------------------------------------------

    def _end_pass_if_complete(self) -> None:
        """End the pass if no task is todo or leased; then end the job or begin the next pass."""
        todo, leased, done, failed, reopened = self._counts
        if todo or leased or reopened or not self.tasks or self.head.end:
            return
        if not done:
            self._set_head(end=End.ALL_FAILED)
        elif self._is_last_pass():
            self._set_head(end=End.DONE)
        self._events.append(PassEnded(self.head.pass_number, done, failed, self.head.end))
        if not self.head.end:
            self._begin_pass()

    def _begin_pass(self) -> None:
        """Every task is todo again and has no failures. The numbers of attempts continue."""
        self._set_head(pass_number=self.head.pass_number + 1)
        self._counts = [self.tasks, 0, 0, 0, 0]
        self._open = deque(self._order)

    def _is_last_pass(self) -> bool:
        return 0 < self.rules.passes <= self.head.pass_number

    # -- times -----------------------------------------------------------------------------------------------------

    def _prolong(self, task: int) -> None:
        """Let a lease last its duration from now on, within the limit for all its renewals."""
        times = self._times[task]
        times.deadline = self.rules.renewed(times.leased_at, times.deadline, self.now + self._rows[task].duration_s)

    def _add_to_mean(self, times: Times, seconds: float) -> None:
        """Add a task time to the mean. That of a lease from before a restart is not known."""
        if not times.rearmed:
            self._changed["head"] = self.head = self.head.with_time(seconds, self.rules)
