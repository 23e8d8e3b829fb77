"""The task queue: what is todo, leased, done and failed in the current pass, and the one way in which that changes.

`TaskQueue` holds the stored state. A `Draft` computes transitions on top of it (`training/dispatch/draft.py`); the
store writes their changes; `apply` takes them over, and so does a recovery. So memory never shows what is not stored,
and a failed write leaves it as it was. Twenty bytes per task; the roll of a pass swaps four arrays of bytes.

Pure.
"""

from __future__ import annotations

import heapq
import zlib
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from training.dispatch.answers import End, Lease, QueueRules, QueueStatus, Registration
from training.dispatch.changes import FORMAT, Changes, HeadRow, LeaseRow, SaveRow, StateDamaged, TaskRow, TaskState

#: Tasks are counted in 32 bits; the arrays of so many take 5 GB.
MAX_TASKS = 1 << 28


class Times(NamedTuple):
    """When a lease was given and when it ends, on the clock of this process; never stored."""

    leased_at: float
    deadline: float
    rearmed: bool


class QueueImage(msgspec.Struct, array_like=True):
    """The whole state, copied in milliseconds: `encode_image` compresses it elsewhere."""

    format: int
    registration: Registration | None
    head: HeadRow
    save: SaveRow
    leases: list[LeaseRow]
    returned: list[int]
    skips: list[tuple[int, int]]
    columns: list[bytes]


def holder_of(worker: bytes) -> int:
    """Four bytes that stand for a worker in the row of a task."""
    return int.from_bytes(blake2b(worker, digest_size=4).digest(), "little")


class TaskQueue:
    """The state that the store has. Only `apply`, `restore` and `rearm` change it."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.registration: Registration | None = None
        self.head = HeadRow()
        self.save = SaveRow()
        self.save_until = 0.0
        self.leases: dict[int, Lease] = {}
        self.held_by: dict[bytes, dict[int, None]] = {}
        #: Tasks that came back, in the order of their next hand-out. One that finished late meanwhile is skipped.
        self.returned: deque[int] = deque()
        self.skips: dict[int, int] = {}
        self.counts = [0] * 5
        self._deadlines: list[tuple[float, int, int]] = []
        self._size(0)

    def _size(self, tasks: int) -> None:
        self.states, self.errors, self.timeouts, self.deaths = (bytearray(tasks) for _ in range(4))
        self.attempts, self.holders, self.finished = (array("I", bytes(4 * tasks)) for _ in range(3))
        self.counts = [tasks, 0, 0, 0, 0]

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        return len(self.states)

    @property
    def end(self) -> End:
        return End(self.head.end)

    def row(self, task: int) -> TaskRow:
        """The row of a task, a copy."""
        return TaskRow(
            task,
            self.states[task],
            self.attempts[task],
            self.holders[task],
            self.finished[task],
            self.errors[task],
            self.timeouts[task],
            self.deaths[task],
        )

    def due(self, now: float, limit: int) -> list[Lease]:
        """Leases whose deadline has passed, at most `limit`, in no particular order; O(that many)."""
        found: dict[int, Lease] = {}
        heap = self._deadlines
        reached = [0]
        while reached and len(found) < limit:
            place = reached.pop()
            if place >= len(heap) or heap[place][0] > now:
                continue
            if self._in_force(heap[place]):
                found[heap[place][1]] = self.leases[heap[place][1]]
            reached += (2 * place + 1, 2 * place + 2)
        return list(found.values())

    def next_deadline(self) -> float | None:
        """When the next lease ends, or None while nothing is leased."""
        return self._deadlines[0][0] if self._deadlines else None

    def status(self) -> QueueStatus:
        """The counts, for people."""
        todo, leased, done, failed, reopened = self.counts
        return QueueStatus(
            pass_number=self.head.pass_number,
            passes=self.rules.passes,
            tasks=self.tasks,
            todo=todo + reopened,
            leased=leased,
            done=done,
            failed=failed,
            end=self.end,
            lease_s=lease_duration_s(self.rules, self.head),
            mean_task_s=self.head.mean_task_s if self.head.observed else None,
            workers=len(self.held_by),
        )

    # -- changing --------------------------------------------------------------------------------------------------

    def apply(self, changes: Changes, times: Mapping[int, Times] = {}, save_until: float = 0.0) -> None:
        """Take over stored changes. `times` has those of the leases in `changes`, and new ones of renewed leases; a
        replay has none, and calls `rearm` at its end. Raises `StateDamaged` where a change contradicts the state."""
        if changes.registration is not None:
            if not 1 <= changes.registration.tasks <= MAX_TASKS or self.registration is not None:
                raise StateDamaged("the log registers an impossible or a second data set")
            self.registration = changes.registration
            self._size(changes.registration.tasks)
        if changes.rolled:
            self._roll()
        for _ in range(changes.taken):
            if not self.returned:
                raise StateDamaged("the log takes more returned tasks than there are")
            self.returned.popleft()
        for row in changes.rows:
            self._set(row)
        if changes.head is not None:
            self.head = changes.head
        for held in changes.leases:
            self._lease(held)
        for task, limits in times.items():
            self._set_times(task, limits)
        self.returned.extend(changes.returned)
        for task, records in changes.skips:
            if records:
                self.skips[task] = records
            else:
                self.skips.pop(task, None)
        if changes.save is not None:
            self.save, self.save_until = changes.save, save_until
        self._trim()

    def _roll(self) -> None:
        for task in list(self.leases):
            self._drop(task)
        attempts, holders, finished = self.attempts, self.holders, self.finished
        self._size(self.tasks)
        self.attempts, self.holders, self.finished = attempts, holders, finished
        self.returned.clear()
        self.skips.clear()

    def _set(self, row: TaskRow) -> None:
        task = row.task
        if not 0 <= task < self.tasks or not 0 <= row.state < len(self.counts):
            raise StateDamaged(f"the log has task {task} in state {row.state}, of {self.tasks} tasks")
        self.counts[self.states[task]] -= 1
        self.counts[row.state] += 1
        self.states[task] = row.state
        self.attempts[task], self.holders[task], self.finished[task] = row.attempt, row.holder, row.finished
        self.errors[task], self.timeouts[task], self.deaths[task] = row.errors, row.timeouts, row.deaths
        if task in self.leases:
            self._drop(task)

    def _drop(self, task: int) -> None:
        worker = self.leases.pop(task).worker
        tasks = self.held_by[worker]
        del tasks[task]
        if not tasks:
            del self.held_by[worker]

    def _lease(self, row: LeaseRow) -> None:
        if not 0 <= row.task < self.tasks or self.states[row.task] != TaskState.LEASED:
            raise StateDamaged(f"the log has a lease of task {row.task}, which is not leased")
        before = self.leases.get(row.task)
        self.leases[row.task] = Lease(
            task=row.task,
            attempt=self.attempts[row.task],
            worker=row.worker,
            pass_number=self.head.pass_number,
            duration_s=row.duration_s,
            deadline=0.0 if before is None else before.deadline,
            leased_at=0.0 if before is None else before.leased_at,
            rearmed=before is None or before.rearmed,
            skip=self.skips.get(row.task, 0),
            trained=row.trained,
        )
        self.held_by.setdefault(row.worker, {})[row.task] = None

    def _set_times(self, task: int, times: Times) -> None:
        lease = self.leases.get(task)
        if lease is not None:
            self.leases[task] = replace(lease, **times._asdict())
            heapq.heappush(self._deadlines, (times.deadline, task, lease.attempt))

    def _in_force(self, entry: tuple[float, int, int]) -> bool:
        deadline, task, attempt = entry
        lease = self.leases.get(task)
        return lease is not None and lease.attempt == attempt and lease.deadline == deadline

    def _trim(self) -> None:
        """Keep the first deadline one in force, and the ended ones fewer than those."""
        heap = self._deadlines
        while heap and not self._in_force(heap[0]):
            heapq.heappop(heap)
        if len(heap) > 2 * len(self.leases) + 64:
            heap[:] = [(lease.deadline, task, lease.attempt) for task, lease in self.leases.items()]
            heapq.heapify(heap)

    def rearm(self, now: float) -> None:
        """After a recovery: every lease runs for its full time again. The time that passed without a master is not
        the workers' fault, and nobody knows how long it was."""
        self._deadlines.clear()
        for task, lease in list(self.leases.items()):
            self._set_times(task, Times(now, now + lease.duration_s, rearmed=True))
        self.save_until = now + self.save.duration_s

    # -- the snapshot ----------------------------------------------------------------------------------------------

    def image(self) -> QueueImage:
        """A copy of the state: 20 MB and a few milliseconds for a million tasks."""
        return QueueImage(
            format=FORMAT,
            registration=self.registration,
            head=self.head,
            save=self.save,
            leases=[LeaseRow(one.task, one.worker, one.duration_s, one.trained) for one in self.leases.values()],
            returned=list(self.returned),
            skips=list(self.skips.items()),
            columns=[bytes(column) for column in self._bytes()] + [column.tobytes() for column in self._words()],
        )

    def restore(self, image: QueueImage) -> None:
        """Begin with a stored image; the queue must be new. Raises `StateDamaged`."""
        facts = image.registration
        tasks = 0 if facts is None else facts.tasks
        sizes = [len(column) for column in image.columns]
        if not 0 <= tasks <= MAX_TASKS or sizes != [tasks] * 4 + [4 * tasks] * 3:
            raise StateDamaged(f"the snapshot has columns of {sizes} bytes for {tasks} tasks")
        self.registration, self.head, self.save = facts, image.head, image.save
        self._size(tasks)
        for own, stored in zip(self._bytes(), image.columns[:4], strict=True):
            own[:] = stored
        for words, stored in zip(self._words(), image.columns[4:], strict=True):
            words[:] = array("I", stored)
        self.counts = [self.states.count(state) for state in range(len(self.counts))]
        if sum(self.counts) != tasks or self.counts[TaskState.LEASED] != len(image.leases):
            raise StateDamaged(f"the snapshot has tasks in states {self.counts} and {len(image.leases)} leases")
        self.returned.extend(image.returned)
        self.skips.update(image.skips)
        for row in image.leases:
            self._lease(row)

    def _bytes(self) -> tuple[bytearray, ...]:
        return self.states, self.errors, self.timeouts, self.deaths

    def _words(self) -> tuple[array[int], ...]:
        return self.attempts, self.holders, self.finished


def lease_duration_s(rules: QueueRules, head: HeadRow) -> float:
    """How long a lease given now lasts."""
    if not head.observed:
        return rules.lease_ceiling_s
    return min(max(rules.lease_factor * head.mean_task_s, rules.lease_floor_s), rules.lease_ceiling_s)


def encode_image(image: QueueImage) -> bytes:
    """The snapshot for a store. Takes tens of milliseconds per million tasks, mostly without the GIL."""
    columns = [zlib.compress(column, 1) for column in image.columns]
    return msgspec.msgpack.encode(msgspec.structs.replace(image, columns=columns))


def decode_image(data: bytes) -> QueueImage:
    """Raises `StateDamaged`."""
    try:
        image = msgspec.msgpack.decode(data, type=QueueImage)
        columns = [zlib.decompress(column) for column in image.columns]
    except (msgspec.MsgspecError, zlib.error) as error:
        raise StateDamaged(f"the snapshot cannot be read: {error}") from error
    if image.format != FORMAT:
        raise StateDamaged(f"the snapshot has format {image.format}, this program reads {FORMAT}")
    return msgspec.structs.replace(image, columns=columns)
