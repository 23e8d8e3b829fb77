"""What a parameter server decides: who gets a task, which updates count, and when a worker is told so.

A worker is told that its update counts when the values have it, not before, and repeats its report until then. So the
updates that a dead server had not committed are with its workers, and the next server gets them again.

A worker without a task and without an update that waits is *idle*. The barrier lets idle workers pass; the schedule
gives them tasks. A refused update leaves the worker with its task, and the worker computes it again from the new
values. A task that came back goes to any worker without one, even if its own update waits for the step to end.

The record is what the next server has to know (`ServerRecord`). It is stored before each commit and names it: either
that commit is in the values then, or its workers still have what belongs to it (`training.engines.server.takeover`).
Pure.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Collection
from typing import Literal

import msgspec

from p2pnode.training.barriers.predicates import Barrier
from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.engines.server.acceptance import Commit, Contribution, EachAtOnce
from p2pnode.training.engines.server.gate import OwnBarrier, StepGate
from p2pnode.training.engines.server.tasks import LeasedTask, TaskLeases
from p2pnode.training.trainer_link.engine_messages import TaskCounts
from p2pnode.training.values.store import Stamped

#: A server numbers its tasks from its epoch on, so that no two servers give one number twice.
TASKS_PER_EPOCH = 1 << 32
#: The pace of a step is the median of so many.
PACE_OF = 32
#: How often a worker tries a refused update again before its task has failed.
MAX_REPORT_COUNT = 64

#: What becomes of a report. `waits`: it is not committed yet. `kept`: it waits too, and its name is enough from now on.
#: `counted`: it is in the values. `stale`: refused, to be computed again from new values. `failed`: refused so often
#: that the task goes to another worker. `superseded`: another attempt counts. `unknown`: only its name came, and the
#: update is not here; it is to be sent whole.
Outcome = Literal["waits", "kept", "counted", "stale", "failed", "superseded", "unknown"]
#: Keys of one task, and updates of one task, at most.
MAX_KEYS = 1 << 16
#: The key of the record. No key of a program: it is refused by `checked_key`.
RECORD_KEY = b"\0p2pnode server"
#: Task and attempt.
Name = tuple[int, int]
#: A task's keys, encoded, each with its value unless the store has it.
Work = list[tuple[bytes, bytes | None]]


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """A worker in the record: its completed steps, and its last committed updates, of which it may not know.
    `outdated`: attempts that it has lost, perhaps without knowing, of tasks that others have or that are finished."""

    worker: bytes
    step: int
    counted: list[Name] = []
    outdated: list[Name] = []


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """A contribution to the commit that the record was stored for."""

    worker: bytes
    step: int
    name: Name


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A function of the user that ended the run."""

    verb: str
    keys: list[bytes]
    node: str
    step: int
    cause: str


class ServerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a server stores before a commit. `epoch` rises with each server, `run` counts the
    starts of the program; `pending` leads from `version` to
    `pending_version`. `ended`: the run is over,
    with a `failure` by an error. `lost` counts the contributions to earlier commits that died with worker and server,
    `stored` the records. `done`: tasks of servers before this one that are finished, while workers have not asked that
    may have later attempts of them."""

    epoch: int = 0
    server: bytes = b""
    run: int = 0
    version: int = 0
    workers: list[WorkerProgress] = []
    pending: list[Pending] = []
    pending_version: int = 0
    ended: str = ""
    failure: Failure | None = None
    lost: int = 0
    stored: int = 0
    done: list[int] = []


class ServerReplaced(Exception):
    """Another server has a higher epoch, or has stored a record that this one has not read: it gives no tasks."""

    def __init__(self, record: ServerRecord) -> None:
        super().__init__(f"the server {record.server.hex()[:8]} serves since epoch {record.epoch}")
        self.record = record


def encode_record(record: ServerRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_record(found: Stamped | None) -> ServerRecord:
    """The record in the store; an empty one where there is none."""
    return ServerRecord() if found is None else msgspec.msgpack.decode(found.value, type=ServerRecord)


class ServerCore:
    """One server's decisions. `record` is that of the server before, whose commit is settled, or an empty one."""

    def __init__(
        self,
        barrier: Barrier,
        policy: EachAtOnce,
        rules: QueueRules,
        rng: random.Random,
        record: ServerRecord,
        *,
        server: bytes = b"",
        sample: int = 0,
        max_report_count: int = MAX_REPORT_COUNT,
    ) -> None:
        self.server, self.run = server, record.run
        self.lost = record.lost
        self.epoch = record.epoch + 1
        #: That of the values, with the commit under way.
        self.version = record.version
        self.gate = StepGate(barrier, sample, rng)
        self.leases: TaskLeases[Work] = TaskLeases(rules, self.epoch * TASKS_PER_EPOCH + 1)
        self.own_barrier: OwnBarrier | None = None
        self.refused = self.counted = 0
        self._policy = policy
        self._max_report_count = max_report_count
        self._waiting: dict[bytes, dict[Name, Contribution]] = {}
        self._counted: dict[bytes, dict[Name, None]] = {}
        self._in_flight: Commit | None = None
        self._version_before = record.version
        self._begun = max((one.step for one in record.workers), default=0)
        self._pace_s: deque[float] = deque(maxlen=PACE_OF)
        #: Workers of the server before. They count for the barrier, and get tasks when they have asked.
        self._before = {one.worker: one for one in record.workers}
        self._unheard = dict.fromkeys(self._before)
        self._done_before = dict.fromkeys(record.done)
        for one in record.workers:
            self.gate.join(one.worker, 0, one.step)
            self._counted[one.worker] = dict.fromkeys(one.counted)
            self.leases.note_outdated(one.worker, one.outdated)

    # -- workers ---------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> dict[bytes, int]:
        """The live workers and their completed steps."""
        return self.gate.steps

    def join(self, worker: bytes) -> None:
        """A worker has asked."""
        self._unheard.pop(worker, None)
        self.gate.join(worker, self._begun)

    @property
    def unheard(self) -> list[bytes]:
        """Workers of the server before that have not asked yet: they may hold tasks and updates."""
        return list(self._unheard)

    def leave(self, worker: bytes) -> None:
        """A worker died or left: its task comes back. An update of it that was accepted still counts."""
        self._before.pop(worker, None)
        self._unheard.pop(worker, None)
        self.leases.worker_gone(worker)
        self.gate.leave(worker)
        self._waiting.pop(worker, None)
        self._counted.pop(worker, None)

    def claim(self, lease: LeasedTask[Work], now: float) -> None:
        """A worker holds a task that a server before gave it. It has lost it if the last server did not know it, if it
        was taken for dead since, or if another worker has the task or has finished it. The next server is to know that
        too, because the worker may never hear of it."""
        worker, name = lease.worker, _name(lease)
        outdated = self.leases.outdated(worker)
        if name in outdated or self._is_known(worker, name):
            return
        may_be = worker in self._before and self._is_of_before(lease.task) and lease.task not in self._done_before
        if may_be and self.leases.adopt(lease, now):
            self._begun = max(self._begun, lease.step)
        else:
            self.leases.note_outdated(worker, [*outdated, name])

    def _is_known(self, worker: bytes, name: Name) -> bool:
        """Whether this attempt is the worker's here: at work, or reported and accepted."""
        is_reported = name in self._counted.get(worker, ()) or name in self._waiting.get(worker, ())
        return is_reported or self.leases.held(worker, *name) is not None

    def _is_of_before(self, task: int) -> bool:
        return task <= self.epoch * TASKS_PER_EPOCH

    # -- reports ---------------------------------------------------------------------------------------------------

    def report(self, contribution: Contribution, now: float) -> Outcome:
        """A worker's update, perhaps for the second time."""
        worker, name = contribution.worker, contribution.name
        if name in self._counted.get(worker, ()):
            return "counted"
        if name in self._waiting.get(worker, ()):
            return "waits"
        lease = self.leases.held(worker, *name)
        if lease is None:
            return "superseded"
        verdict = self._policy.judge(contribution, self.version)
        if verdict == "waits":
            return "waits"
        if verdict == "stale":
            self.refused += 1
            return "stale" if self.leases.refuse(lease, self._max_report_count) else "failed"
        self._pace_s.append(now - lease.leased_at)
        self.leases.finish(lease, now)
        if self._is_of_before(contribution.task):
            self._done_before[contribution.task] = None
        self.gate.completed(worker, contribution.step)
        self._waiting.setdefault(worker, {})[name] = contribution
        return "waits"

    def repeated(self, worker: bytes, name: Name) -> Outcome:
        """A worker repeats a report by its name."""
        if name in self._counted.get(worker, ()):
            return "counted"
        return "kept" if name in self._waiting.get(worker, ()) else "unknown"

    def told(self, worker: bytes, repeated: Collection[Name]) -> None:
        """The worker has these attempts only, to report or at work: it has been told of all others that are committed
        or lost."""
        counted = self._counted.get(worker, {})
        self._counted[worker] = {name: None for name in counted if name in repeated}
        self.leases.note_outdated(worker, [name for name in self.leases.outdated(worker) if name in repeated])

    # -- tasks -----------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """The median time of the last tasks."""
        return statistics.median(self._pace_s) if self._pace_s else 0.0

    def idle(self) -> list[bytes]:
        """Workers without a task and without an update that waits, in the order of their ids."""
        return [worker for worker in self._free() if not self._waiting.get(worker)]

    def _free(self) -> list[bytes]:
        return sorted(
            worker for worker in self.gate.steps if worker not in self._unheard and self.leases.of(worker) is None
        )

    def reassign(self, now: float) -> list[LeasedTask[Work]]:
        """Give the tasks that came back to workers without one: to idle ones first, and of those to the furthest. They
        pass no barrier for it: others have begun the step of such a task before."""
        given = []
        for lease in self.leases.orphans():
            free = self._free()
            if not free:
                break
            worker = max(free, key=lambda one: (not self._waiting.get(one), self.gate.steps[one], one))
            given.append(self.leases.take(lease.task, worker, now))
        return given

    def passed(self, now: float) -> list[bytes]:
        """The idle workers that the schedule may give a task to."""
        orphans = [lease.step for lease in self.leases.orphans()]
        return self.gate.passed(self.idle(), orphans, now, self.step_seconds, self.own_barrier)

    def give(self, worker: bytes, work: Work, now: float) -> LeasedTask[Work]:
        """A task of the schedule for a worker that has passed."""
        step = self.gate.steps[worker] + 1
        self._begun = max(self._begun, step)
        return self.leases.issue(worker, step, work, now)

    def skip(self, worker: bytes) -> None:
        """The schedule has no task for a worker that has passed: it completes the step without one."""
        step = self.gate.steps[worker] + 1
        self._begun = max(self._begun, step)
        self.gate.completed(worker, step)

    # -- commits ---------------------------------------------------------------------------------------------------

    def due(self) -> Commit | None:
        """The next commit, if none is under way. From now on updates are judged by its version."""
        if self._in_flight is not None:
            return None
        commit = self._policy.due(self.version, self.leases.open_steps(), self.gate.lowest())
        if commit is not None:
            self._in_flight, self.version = commit, commit.version
        return commit

    @property
    def made(self) -> int:
        """The version that all values have, whatever becomes of the commit under way."""
        return self._version_before

    def committed(self, commit: Commit) -> None:
        """The values have it."""
        assert commit is self._in_flight
        self._in_flight = None
        self._version_before = commit.version
        self.counted += len(commit.contributions)
        for one in commit.contributions:
            waiting = self._waiting.get(one.worker, {})
            if waiting.get(one.name) is one:
                del waiting[one.name]
                self._counted.setdefault(one.worker, {})[one.name] = None

    def record(self, ended: str = "", failure: Failure | None = None) -> ServerRecord:
        """What is to be stored before the commit under way, or without one."""
        pending = () if self._in_flight is None else self._in_flight.contributions
        workers = [
            WorkerProgress(one, self._safe_step(one), list(self._counted.get(one, ())), self.leases.outdated(one))
            for one in self.gate.steps
        ]
        return ServerRecord(
            epoch=self.epoch,
            server=self.server,
            run=self.run,
            version=self._version_before,
            workers=workers,
            pending=[Pending(one.worker, one.step, one.name) for one in pending],
            pending_version=self.version if pending else 0,
            ended=ended,
            failure=failure,
            lost=self.lost,
            done=list(self._done_before) if self._unheard else [],
        )

    def _safe_step(self, worker: bytes) -> int:
        """The completed steps of a worker as the values have them: those of updates that wait are not."""
        waiting = [one.step for one in self._waiting.get(worker, {}).values()]
        return min([self.gate.steps[worker], *(step - 1 for step in waiting)])

    def end(self) -> None:
        """The run has ended: the updates that were accepted and are in no commit reach the values no more."""
        self._waiting.clear()

    def counts(self) -> TaskCounts:
        """What has become of the tasks, since this server serves."""
        leases, waiting = self.leases, len(self.leases.orphans())
        return TaskCounts(
            version=self.version,
            workers=len(self.workers),
            given=leases.issued,
            done=leases.done,
            held=len(leases) - waiting,
            waiting=waiting,
            again=leases.again,
            refused=self.refused,
            lost=self.lost,
        )


def _name(lease: LeasedTask[Work]) -> Name:
    return lease.task, lease.attempt
