"""Transitions of the task queue, computed on top of the stored state without touching it.

A `Draft` is one batch: it answers several requests, each of which sees the effect of those before it, and collects what
they change. Its answers may be given only when the store has `changes()` and the queue has applied them. When the store
fails, the draft is dropped, and nothing has happened.

Where the pass ends is judged in one place, `_judge`, after every transition that may close a task. A report about an
attempt that was superseded has no effect. An attempt that timed out, or whose worker was declared dead, may still
finish its task while nobody else has it: its records were trained, and handing them out again would train them twice.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from training.dispatch.answers import (
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
    Registration,
    ReportAnswer,
    SaveAnswer,
    TaskDiscarded,
)
from training.dispatch.changes import SaveRow, TaskRow, TaskState
from training.dispatch.chunks import DatasetDiffers
from training.dispatch.queue import TaskQueue, holder_of, lease_duration_s
from training.dispatch.queue_overlay import QueueOverlay

#: From so many task times on, a new one has this share in the mean.
MEAN_OF = 20
#: Leases that end in one transition at most; the rest follow in the next one.
DUE_AT_ONCE = 256
RETRY_FLOOR_S, RETRY_CEILING_S = 0.1, 5.0
MAX_WORKER_BYTES = 64
MAX_SAVE_S = 86400.0


class Draft(QueueOverlay):
    """A batch of transitions at one instant, `now`, in monotonic seconds. Every method leaves the draft as it was when
    it raises `BadRequestToQueue`."""

    def __init__(self, queue: TaskQueue, now: float) -> None:
        super().__init__(queue)
        self._rules = queue.rules
        self._now = now
        self.events: list[QueueEvent] = []

    # -- the data set ----------------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> Registration:
        """The first registration counts and is answered; later ones get the first. Raises `DatasetDiffers`."""
        first = self._registration or self._queue.registration
        if first is None:
            if registration.tasks < 1 or registration.chunks_per_task < 1:
                raise BadRequestToQueue("a data set must have tasks, and a task chunks")
            self._registration = first = registration
            self._counts = [registration.tasks, 0, 0, 0, 0]
            self._order = self._order_of_pass()
            self.events.append(DatasetRegistered(registration.tasks, registration.chunks_per_task))
        elif first.digest != registration.digest:
            raise DatasetDiffers("this run has another data set")
        return first

    def resume(self) -> None:
        """After a recovery: go on where `passes` is higher than when the job ended."""
        if self._head.end == End.DONE and not self._is_last():
            self._head.end = End.NO
            self._begin_pass()

    # -- handing out -----------------------------------------------------------------------------------------------

    def get(
        self, worker: bytes, held: Sequence[Held] = (), avoid: Sequence[int] = (), pass_number: int | None = None
    ) -> Handout:
        """A task for a worker, which names the leases it knows and tasks that it cannot read.

        A lease that the worker does not know is handed out again under its attempt: the answer was lost. So a worker
        must not ask twice at once.
        """
        self._check(worker, len(held), len(avoid))
        current = self._head.pass_number
        if not self._tasks():
            return Handout(Answer.NO_DATASET, current, retry_after_s=RETRY_CEILING_S)
        if self._head.end:
            return Handout(Answer.JOB_DONE if self._head.end == End.DONE else Answer.ALL_FAILED, current)
        if pass_number is not None and pass_number != current:
            return Handout(Answer.PASS_OVER, current)
        mine = self._held_by(worker)
        known = {(one.task, one.attempt) for one in held}
        for task in mine:
            lease = self._lease(task)
            if lease is not None and (task, lease.attempt) not in known and task not in avoid:
                return Handout(Answer.TASK, current, self._prolong(lease, lease.trained))
        task_found = None if len(mine) >= self._rules.leases_per_worker else self._take(avoid)
        if task_found is None:
            return Handout(Answer.NO_TASK_NOW, current, retry_after_s=self._retry_after_s())
        return Handout(Answer.TASK, current, self._hand_out(task_found, worker))

    def _hand_out(self, task: int, worker: bytes) -> Lease:
        row = self._row(task)
        self._move(row, TaskState.LEASED)
        row.attempt += 1
        row.holder = holder_of(worker)
        duration_s = lease_duration_s(self._rules, self._head)
        lease = Lease(
            task=task,
            attempt=row.attempt,
            worker=worker,
            pass_number=self._head.pass_number,
            duration_s=duration_s,
            deadline=self._now + duration_s,
            leased_at=self._now,
            rearmed=False,
            skip=self._skip(task),
            trained=0,
        )
        self._keep(lease)
        return lease

    def _take(self, avoid: Sequence[int]) -> int | None:
        """The next todo task that is not avoided; the avoided ones go to the end. None where there is none."""
        before = (self._head.cursor, self._taken, self._returned.copy()) if avoid else None
        passed: list[int] = []
        while len(passed) < self._counts[TaskState.TODO] + self._counts[TaskState.REOPENED]:
            task = self._next()
            if task not in avoid:
                self._returned.extend(passed)
                return task
            passed.append(task)
        if before is not None:
            self._head.cursor, self._taken, self._returned = before
        return None

    def _next(self) -> int:
        while True:
            if self._head.cursor < self._tasks():
                task = self._order(self._head.cursor)
                self._head.cursor += 1
            elif not self._rolled and self._taken < len(self._queue.returned):
                task = self._queue.returned[self._taken]
                self._taken += 1
            else:
                task = self._returned.popleft()
            if self._peek(task).state in (TaskState.TODO, TaskState.REOPENED):
                return task

    def _retry_after_s(self) -> float:
        wait_s = self._head.mean_task_s / 2 if self._head.observed else 1.0
        deadline = self._queue.next_deadline()
        if deadline is not None:
            wait_s = min(wait_s, deadline - self._now)
        return min(max(wait_s, RETRY_FLOOR_S), RETRY_CEILING_S)

    # -- reports ---------------------------------------------------------------------------------------------------

    def finish(self, worker: bytes, task: int, attempt: int) -> ReportAnswer:
        """A worker has trained the task, and what it trained is safe."""
        self._check(worker)
        refusal = self._refusal(worker, task, attempt)
        row = self._peek(task) if refusal is not ReportAnswer.UNKNOWN else None
        if row is not None and attempt == row.finished and refusal is not ReportAnswer.NOT_HOLDER:
            return ReportAnswer.ACCEPTED
        if refusal is not None or row is None:
            return refusal or ReportAnswer.UNKNOWN
        lease = self._lease(task)
        if lease is None and row.state != TaskState.REOPENED:
            return ReportAnswer.SUPERSEDED
        row = self._row(task)
        self._move(row, TaskState.DONE)
        row.finished = attempt
        self._set_skip(task, 0)
        if lease is not None:
            self._observe(lease, self._now - lease.leased_at)
            self._drop(lease)
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
        lease = None if refusal else self._lease(task)
        if lease is not None:
            self._end(replace(lease, trained=max(lease.trained, trained)), cause)
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
            lease = None if answer else self._lease(one.task)
            if lease is not None:
                self._prolong(lease, max(lease.trained, one.trained))
                answer = ReportAnswer.RENEWED
            answers.append(answer or ReportAnswer.SUPERSEDED)
        return answers

    def worker_gone(self, worker: bytes) -> int:
        """A worker died or left without a word: its leases end at once. Returns how many."""
        self._check(worker)
        ended = 0
        for task in list(self._held_by(worker)):
            lease = self._lease(task)
            if lease is not None:
                self._end(lease, Cause.DEATH)
                ended += 1
        self._judge()
        if self._saver().holder == worker:
            self._set_saver(b"", 0.0)
        return ended

    def expire(self) -> int:
        """End the leases whose deadline has passed, at most `DUE_AT_ONCE`. Returns how many."""
        ended = 0
        for due in self._queue.due(self._now, DUE_AT_ONCE):
            lease = self._lease(due.task)
            if lease is not None and lease.attempt == due.attempt and lease.deadline <= self._now:
                # At least so long such a task takes. Without it, tasks that become slower would never finish in time.
                self._observe(lease, lease.deadline - lease.leased_at)
                self._end(lease, Cause.TIMEOUT)
                ended += 1
        self._judge()
        return ended

    def discard(self, task: int, reason: str) -> bool:
        """Give up an open task for this pass; false where it is finished or discarded already, or does not exist."""
        if not 0 <= task < self._tasks() or self._peek(task).state in (TaskState.DONE, TaskState.FAILED):
            return False
        lease = self._lease(task)
        if lease is not None:
            self._drop(lease)
        self._fail(self._row(task), reason)
        self._judge()
        return True

    def _refusal(self, worker: bytes, task: int, attempt: int) -> ReportAnswer | None:
        """Why a report about an attempt has no effect; None for the newest attempt of this worker."""
        if not 0 <= task < self._tasks():
            return ReportAnswer.UNKNOWN
        row = self._peek(task)
        if not 1 <= attempt <= row.attempt:
            return ReportAnswer.UNKNOWN
        if attempt < row.attempt:
            return ReportAnswer.SUPERSEDED
        return None if row.holder == holder_of(worker) else ReportAnswer.NOT_HOLDER

    # -- the save lease --------------------------------------------------------------------------------------------

    def request_save(self, holder: bytes, seconds: float) -> SaveAnswer:
        """Who may save the model. The holder's own request renews its lease and keeps its token."""
        self._check(holder)
        if not 0 < seconds <= MAX_SAVE_S:
            raise BadRequestToQueue(f"a save lease lasts up to {MAX_SAVE_S:.0f} s, not {seconds} s")
        row = self._saver()
        if row.holder != holder or self.save_until <= self._now:
            if row.holder and self.save_until > self._now:
                return SaveAnswer(False, row.holder, row.token, self.save_until - self._now)
            row = SaveRow(b"", row.token + 1, 0.0)
        self._save = row
        self._set_saver(holder, seconds)
        return SaveAnswer(True, holder, row.token, seconds)

    def release_save(self, holder: bytes, token: int) -> bool:
        """The holder has saved. False where it no longer held the lease."""
        self._check(holder)
        row = self._saver()
        if (row.holder, row.token) != (holder, token):
            return False
        self._set_saver(b"", 0.0)
        return True

    def _saver(self) -> SaveRow:
        return self._queue.save if self._save is None else self._save

    def _set_saver(self, holder: bytes, seconds: float) -> None:
        self._save = SaveRow(holder, self._saver().token, seconds)
        self.save_until = self._now + seconds

    # -- transitions -----------------------------------------------------------------------------------------------

    def _end(self, lease: Lease, cause: Cause) -> None:
        """A lease ends without a finished task."""
        row = self._row(lease.task)
        self._drop(lease)
        self._set_skip(lease.task, max(self._skip(lease.task), lease.trained))
        lost = cause in (Cause.TIMEOUT, Cause.DEATH)
        row.errors += cause is Cause.ERROR
        row.timeouts += cause is Cause.TIMEOUT
        row.deaths += cause is Cause.DEATH
        if row.errors > self._rules.max_failures or row.timeouts + row.deaths > self._rules.max_losses:
            self._fail(row, str(cause))
        else:
            self._move(row, TaskState.REOPENED if lost else TaskState.TODO)
            self._returned.append(lease.task)
            self.events.append(LeaseEnded(lease.task, lease.attempt, lease.worker, cause))

    def _fail(self, row: TaskRow, reason: str) -> None:
        self._move(row, TaskState.FAILED)
        self._set_skip(row.task, 0)
        self.events.append(TaskDiscarded(row.task, row.attempt, reason, row.errors, row.timeouts, row.deaths))

    def _judge(self) -> None:
        """The one place where a pass ends: when nothing is todo or leased, whatever emptied them."""
        todo, leased, done, failed, reopened = self._counts
        if todo or leased or reopened or not self._tasks() or self._head.end:
            return
        if not done:
            self._head.end = End.ALL_FAILED
        elif self._is_last():
            self._head.end = End.DONE
        self.events.append(PassEnded(self._head.pass_number, done, failed, End(self._head.end)))
        if not self._head.end:
            self._begin_pass()

    def _is_last(self) -> bool:
        return 0 < self._rules.passes <= self._head.pass_number

    def _prolong(self, lease: Lease, trained: int) -> Lease:
        limit = lease.leased_at + self._rules.holds * self._rules.lease_ceiling_s
        deadline = max(lease.deadline, min(self._now + lease.duration_s, limit))
        prolonged = replace(lease, deadline=deadline, trained=trained)
        self._keep(prolonged)
        return prolonged

    def _observe(self, lease: Lease, seconds: float) -> None:
        """A task took so long. A clock that jumped counts as a ceiling, a lease from before a restart not at all."""
        if lease.rearmed:
            return
        seconds = min(seconds, self._rules.lease_ceiling_s)
        head = self._head
        head.observed = min(head.observed + 1, MEAN_OF)
        head.mean_task_s += (seconds - head.mean_task_s) / head.observed

    def _check(self, worker: bytes, held: int = 0, avoided: int = 0) -> None:
        if not 1 <= len(worker) <= MAX_WORKER_BYTES:
            raise BadRequestToQueue(f"the name of a worker has 1 to {MAX_WORKER_BYTES} bytes, not {len(worker)}")
        if held > MAX_HELD or avoided > MAX_AVOIDED:
            raise BadRequestToQueue(f"{held} leases and {avoided} avoided tasks; {MAX_HELD} and {MAX_AVOIDED} at most")
