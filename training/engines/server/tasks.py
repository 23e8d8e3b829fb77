"""Tasks of a parameter server: who has which, until when, and what becomes of one that nobody finishes.

A task is leased to one worker under an attempt, which rises with every hand-out: a report of an older attempt has no
effect. A task whose worker dies, or whose lease ends, is given to another worker; one that fails too often is given up.
The same rules, with stored queues of known tasks, are those of `training.dispatch.queue`; here a task is made at the
moment when the schedule names it, so there is no queue to store. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from p2pnode.training.dispatch.answers import Cause, QueueRules
from p2pnode.training.dispatch.queue_rows import HeadRow

#: Keys of one task, and updates of one task, at most.
MAX_KEYS = 1 << 16
#: Task and attempt.
Name = tuple[int, int]
#: A task's keys, encoded, each with its value unless the store has it.
Work = list[tuple[bytes, bytes | None]]


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A task. `step` is the step that its worker completes with it; `worker` is empty while nobody has it.

    `errors`, `losses` and `refusals` count its attempts that ended in an error of the user's function, with their
    worker or their lease, and with a refused update. `deadline` is in monotonic seconds.
    """

    task: int
    attempt: int
    worker: bytes
    step: int
    work: Work
    leased_at: float
    deadline: float
    errors: int = 0
    losses: int = 0
    refusals: int = 0

    @property
    def name(self) -> Name:
        """The fencing token: task and attempt."""
        return self.task, self.attempt


class TaskLeases:
    """All open tasks. A worker has one at most. `first_task` is the lowest number of a task made here."""

    def __init__(self, rules: QueueRules, first_task: int = 1) -> None:
        self.rules = rules
        self.issued = self.done = self.again = 0
        #: Tasks that were given up, and why.
        self.given_up: list[tuple[LeasedTask, str]] = []
        self._next = first_task
        self._open: dict[int, LeasedTask] = {}
        self._of: dict[bytes, int] = {}
        self._orphans: dict[int, None] = {}
        #: By worker, the attempts that it lost; it may still be at work on them, and no server takes them up.
        self._outdated: dict[bytes, dict[Name, None]] = {}
        self._head = HeadRow()

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._open)

    def of(self, worker: bytes) -> LeasedTask | None:
        """The task that this worker has."""
        task = self._of.get(worker)
        return None if task is None else self._open[task]

    def orphans(self) -> list[LeasedTask]:
        """Tasks that came back, in the order of their next hand-out."""
        return [self._open[task] for task in self._orphans]

    def open_steps(self) -> list[int]:
        """The steps of all open tasks."""
        return [lease.step for lease in self._open.values()]

    def outdated(self, worker: bytes) -> list[Name]:
        """The attempts that this worker has lost, and perhaps does not know to have lost."""
        return list(self._outdated.get(worker, ()))

    def note_outdated(self, worker: bytes, attempts: Iterable[Name]) -> None:
        """These are its outdated attempts, as far as it has not heard."""
        self._outdated[worker] = dict.fromkeys(attempts)
        if not self._outdated[worker]:
            del self._outdated[worker]

    @property
    def lease_s(self) -> float:
        """How long a lease lasts that is given or renewed now."""
        return self._head.lease_s(self.rules)

    def held(self, worker: bytes, task: int, attempt: int) -> LeasedTask | None:
        """The lease of this worker, if it is the newest attempt of an open task. Other reports have no effect."""
        lease = self._open.get(task)
        return lease if lease is not None and (lease.worker, lease.attempt) == (worker, attempt) else None

    # -- handing out -----------------------------------------------------------------------------------------------

    def issue(self, worker: bytes, step: int, work: Work, now: float) -> LeasedTask:
        """Make a task and lease it to a worker that has none."""
        task = self._next
        self._next += 1
        self.issued += 1
        return self._lease(LeasedTask(task, 0, b"", step, work, now, now), worker, now)

    def adopt(self, lease: LeasedTask, now: float) -> bool:
        """Take over the lease of a former server, which its worker holds, for a full time. False for a task that is
        open here, which stays as it is, and for a worker that has another one."""
        if lease.task in self._open or lease.worker in self._of:
            return False
        self.issued += 1
        self._lease(replace(lease, attempt=lease.attempt - 1), lease.worker, now)
        return True

    def take(self, task: int, worker: bytes, now: float) -> LeasedTask:
        """Lease a task that came back to another worker."""
        self.again += 1
        del self._orphans[task]
        return self._lease(self._open[task], worker, now)

    def _lease(self, lease: LeasedTask, worker: bytes, now: float) -> LeasedTask:
        if worker in self._of:
            raise ValueError("a worker has one task at a time")
        deadline = now + self.lease_s
        leased = replace(lease, attempt=lease.attempt + 1, worker=worker, leased_at=now, deadline=deadline)
        self._open[lease.task] = leased
        self._of[worker] = lease.task
        return leased

    def renew(self, worker: bytes, task: int, attempt: int, now: float) -> None:
        """The worker is at work: its lease, if it has one, lasts on from now, up to `holds` ceilings in all."""
        lease = self.held(worker, task, attempt)
        if lease is not None:
            deadline = self.rules.renewed(lease.leased_at, lease.deadline, now + self.lease_s)
            self._open[task] = replace(lease, deadline=deadline)

    # -- endings ---------------------------------------------------------------------------------------------------

    def finish(self, lease: LeasedTask, now: float) -> None:
        """The worker's update counts."""
        self._head = self._head.with_time(now - lease.leased_at, self.rules)
        self._close(lease.task)
        self.done += 1

    def refuse(self, lease: LeasedTask, max_refusals: int) -> bool:
        """The update of this lease came too late for the model. Whether the worker may try again with a fresh one;
        otherwise the task has failed by it, and goes to the next worker."""
        refused = self._open[lease.task] = replace(lease, refusals=lease.refusals + 1)
        if refused.refusals < max_refusals:
            return True
        self._open[lease.task] = replace(refused, refusals=0)
        self._end(lease.task, Cause.ERROR, f"{refused.refusals} of its updates in a row were refused as stale")
        return False

    def fail(self, worker: bytes, task: int, attempt: int, reason: str) -> None:
        """The user's function raised."""
        if self.held(worker, task, attempt) is not None:
            self._end(task, Cause.ERROR, reason)

    def worker_gone(self, worker: bytes) -> None:
        """It died or left: another worker gets its task."""
        task = self._of.get(worker)
        if task is not None:
            self._end(task, Cause.DEATH, "its worker ended")
        self._outdated.pop(worker, None)

    def expire(self, now: float) -> None:
        """End the leases whose deadline has passed. Their workers stay, and may still be at work."""
        due = [lease for lease in self._open.values() if lease.worker and lease.deadline <= now]
        for lease in due:
            self._head = self._head.with_time(lease.deadline - lease.leased_at, self.rules)
            self._end(lease.task, Cause.TIMEOUT, "its lease ended")

    def _end(self, task: int, cause: Cause, reason: str) -> None:
        lease = self._open[task]
        is_loss = cause is not Cause.ERROR
        ended = replace(lease, worker=b"", errors=lease.errors + (not is_loss), losses=lease.losses + is_loss)
        self._of.pop(lease.worker, None)
        if cause is not Cause.DEATH:
            self._outdated.setdefault(lease.worker, {})[lease.name] = None
        self._open[task] = ended
        if ended.errors > self.rules.max_failures or ended.losses > self.rules.max_losses:
            self._close(task)
            self.given_up.append((lease, reason))
        else:
            self._orphans[task] = None

    def _close(self, task: int) -> None:
        lease = self._open.pop(task)
        self._of.pop(lease.worker, None)
        self._orphans.pop(task, None)
