"""The state of the queue as a draft sees it: the stored state, with the draft's own changes on top. Pure."""

from __future__ import annotations

from collections import deque

import msgspec

from training.dispatch.answers import Lease, Registration
from training.dispatch.changes import Changes, LeaseRow, SaveRow, TaskRow, TaskState
from training.dispatch.permutation import PassOrder
from training.dispatch.queue import TaskQueue, Times


class QueueOverlay:
    """Reads through to the queue, writes to itself. `changes` says what differs."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self.times: dict[int, Times] = {}
        self.save_until = queue.save_until
        self._registration: Registration | None = None
        self._rolled = False
        self._taken = 0
        self._rows: dict[int, TaskRow] = {}
        self._leases: dict[int, Lease | None] = {}
        self._held: dict[bytes, dict[int, None]] = {}
        self._returned: deque[int] = deque()
        self._skips: dict[int, int] = {}
        self._head = msgspec.structs.replace(queue.head)
        self._save: SaveRow | None = None
        self._counts = list(queue.counts)
        self._order = self._order_of_pass()

    # -- what the store gets ---------------------------------------------------------------------------------------

    def changes(self) -> Changes:
        """What the batch changes; false where it changes nothing that is stored."""
        return Changes(
            registration=self._registration,
            rolled=self._rolled,
            taken=self._taken,
            rows=list(self._rows.values()),
            leases=[
                LeaseRow(one.task, one.worker, one.duration_s, one.trained)
                for one in self._leases.values()
                if one is not None and self._is_news(one)
            ],
            returned=list(self._returned),
            skips=list(self._skips.items()),
            head=None if self._head == self._queue.head else self._head,
            save=self._save,
        )

    @property
    def size(self) -> int:
        """How many tasks have changed."""
        return len(self._rows) + len(self._leases)

    def _is_news(self, lease: Lease) -> bool:
        stored = self._queue.leases.get(lease.task)
        return lease.task in self._rows or stored is None or stored.trained != lease.trained

    # -- the state as this draft sees it ---------------------------------------------------------------------------

    def _order_of_pass(self) -> PassOrder:
        facts = self._registration or self._queue.registration
        if facts is None:
            return PassOrder(0, 0, 0, shuffle=False)
        return PassOrder(facts.tasks, facts.seed, self._head.pass_number, shuffle=facts.shuffle)

    def _tasks(self) -> int:
        facts = self._registration or self._queue.registration
        return 0 if facts is None else facts.tasks

    def _peek(self, task: int) -> TaskRow:
        """The row of a task, to be read only."""
        row = self._rows.get(task)
        if row is not None:
            return row
        if self._registration is not None:
            return TaskRow(task, TaskState.TODO, 0, 0, 0, 0, 0, 0)
        row = self._queue.row(task)
        if self._rolled:
            row.state = TaskState.TODO
            row.errors = row.timeouts = row.deaths = 0
        return row

    def _row(self, task: int) -> TaskRow:
        """The row of a task, to be changed: it becomes part of the changes."""
        return self._rows.setdefault(task, self._peek(task))

    def _move(self, row: TaskRow, state: TaskState) -> None:
        self._counts[row.state] -= 1
        self._counts[state] += 1
        row.state = state

    def _lease(self, task: int) -> Lease | None:
        return self._leases[task] if task in self._leases else self._queue.leases.get(task)

    def _held_by(self, worker: bytes) -> dict[int, None]:
        if worker not in self._held:
            self._held[worker] = dict(self._queue.held_by.get(worker, ()))
        return self._held[worker]

    def _keep(self, lease: Lease) -> None:
        self._leases[lease.task] = lease
        self._held_by(lease.worker)[lease.task] = None
        self.times[lease.task] = Times(lease.leased_at, lease.deadline, lease.rearmed)

    def _drop(self, lease: Lease) -> None:
        self._leases[lease.task] = None
        del self._held_by(lease.worker)[lease.task]
        self.times.pop(lease.task, None)

    def _begin_pass(self) -> None:
        """Every task is todo and open again, with its failures forgotten; attempts go on."""
        self._rolled = True
        self._head.pass_number += 1
        self._head.cursor = 0
        self._taken = 0
        self._returned.clear()
        self._skips.clear()
        for row in self._rows.values():
            row.state = TaskState.TODO
            row.errors = row.timeouts = row.deaths = 0
        self._counts = [self._tasks(), 0, 0, 0, 0]
        self._order = self._order_of_pass()

    def _skip(self, task: int) -> int:
        if task in self._skips:
            return self._skips[task]
        return 0 if self._rolled else self._queue.skips.get(task, 0)

    def _set_skip(self, task: int, records: int) -> None:
        if records != self._skip(task):
            self._skips[task] = records
