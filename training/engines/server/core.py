"""What a parameter server decides: who gets a task, which updates count, and when a worker is told so.

A worker is told that its update counts when the values have it, not before, and repeats its report until then. So the
updates that a dead server had not committed are with its workers, and the next server gets them again.

A worker without a task and without an update that waits is *idle*. The barrier lets idle workers pass; the schedule
gives them tasks. A refused update leaves the worker with its task, and the worker computes it again from the new
values. A task that came back goes to any worker without one, even if its own update waits for the step to end.

The barrier of `training.barriers` is decided here for all workers (`StepGate`). The record is what the next server has
to know. It is stored before each commit and names it: either that commit is in the values then, or its workers still
have what belongs to it (`training.engines.server.record`). Pure.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from p2pnode.training.barriers.predicates import Barrier, resample_after, sample_size
from p2pnode.training.engines.server.acceptance import Commit, Contribution, EachAtOnce, ServerOptions
from p2pnode.training.engines.server.record import Failure, Pending, ServerRecord, WorkerProgress
from p2pnode.training.engines.server.tasks import LeasedTask, Name, TaskLeases, Work
from p2pnode.training.trainer_link.engine_messages import TaskCounts

#: A server numbers its tasks from its epoch on, so that no two servers give one number twice.
TASKS_PER_EPOCH = 1 << 32
#: The pace of a step is the median of so many.
PACE_OF = 32

#: What becomes of a report. `waits`: it is not committed yet. `counted`: it is in the values. `stale`: refused, to be
#: computed again from new values. `failed`: refused so often that the task goes to another worker. `superseded`:
#: another attempt counts.
Outcome = Literal["waits", "counted", "stale", "failed", "superseded"]
#: A barrier of one's own: which of the idle workers may go on, given the completed steps of all, by worker.
OwnBarrier = Callable[[Mapping[bytes, int], list[bytes]], Iterable[bytes]]


class ServerCore:
    """One server's decisions. `record` is that of the server before, whose commit is settled, or an empty one."""

    def __init__(
        self,
        options: ServerOptions,
        policy: EachAtOnce,
        rng: random.Random,
        record: ServerRecord,
        server: bytes = b"",
    ) -> None:
        self.server, self.run = server, record.run
        self.lost = record.lost
        self.epoch = record.epoch + 1
        #: That of the values, with the commit under way.
        self.version = record.version
        self.gate = StepGate(options.make_barrier(), options.sample, rng)
        self.leases = TaskLeases(options.rules(), self.epoch * TASKS_PER_EPOCH + 1)
        self.own_barrier: OwnBarrier | None = None
        self.refused = self.counted = 0
        self._policy = policy
        self._max_report_count = options.max_report_count
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

    def claim(self, lease: LeasedTask, now: float) -> None:
        """A worker holds a task that a server before gave it. It has lost it if the last server did not know it, if it
        was taken for dead since, or if another worker has the task or has finished it. The next server is to know that
        too, because the worker may never hear of it."""
        worker, name = lease.worker, lease.name
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

    def reassign(self, now: float) -> list[LeasedTask]:
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

    def give(self, worker: bytes, work: Work, now: float) -> LeasedTask:
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


class StepGate:
    """Which workers may begin their next step. `sample` 0: √P, from 1 to 10. `rng` draws the samples.

    A complete barrier (bsp, ssp) sees the steps of all workers, a sampled one (pbsp, pssp) **one common sample** of
    them: every idle worker is compared with the same ones (`pass : staleness -> sample_size -> book` of the branch
    `lda` of light_actor). The sample is drawn afresh when a step is completed, when a worker comes or goes, and after
    `resample_after`: a sample that was held until it passes would be a different, much slower algorithm.

    A task that came back is a worker that lags: whoever it is given to, its step is not complete. Without that a
    barrier would forget the work of a dead worker.
    """

    def __init__(self, barrier: Barrier, sample: int, rng: random.Random) -> None:
        self.barrier = barrier
        self.steps: dict[bytes, int] = {}
        self._sample = sample
        self._rng = rng
        self._drawn: list[bytes | int] | None = None
        self._drawn_at = 0.0
        self._base = 0

    def join(self, worker: bytes, begun: int, step: int | None = None) -> None:
        """A new worker begins where the barrier lets it: after the highest step that was `begun`, less the staleness,
        but not before the slowest worker. `step`: it is not new and has completed so many."""
        if worker in self.steps:
            return
        if step is None:
            staleness = self.barrier.staleness
            step = self.lowest() if staleness is None else max(self.lowest(), begun - staleness)
        self.steps[worker] = step
        self._drawn = None

    def leave(self, worker: bytes) -> None:
        if worker in self.steps:
            self._base = self.lowest()
            del self.steps[worker]
            self._drawn = None

    def completed(self, worker: bytes, step: int) -> None:
        """The worker has completed this step. Steps never go back."""
        if worker in self.steps and step > self.steps[worker]:
            self.steps[worker] = step
            self._drawn = None

    def lowest(self) -> int:
        """The step that all workers have completed; without any, that of the last ones."""
        return min(self.steps.values(), default=self._base)

    def passed(
        self, idle: list[bytes], orphans: list[int], now: float, step_seconds: float, own: OwnBarrier | None = None
    ) -> list[bytes]:
        """Those of the `idle` workers that may begin their next step. `orphans` are the steps of tasks that came back,
        `step_seconds` the median time of a step."""
        if own is not None:
            allowed = dict.fromkeys(own(dict(self.steps), list(idle)))
            return [worker for worker in idle if worker in allowed]
        if not self.barrier.samples:
            return list(idle)
        seen = self._seen(orphans, now, step_seconds)
        return [worker for worker in idle if self.barrier.passes(self.steps[worker], seen)]

    def _seen(self, orphans: list[int], now: float, step_seconds: float) -> list[int]:
        """Completed steps of the common sample."""
        lagging = [step - 1 for step in orphans]
        if self.barrier.complete:
            return [*self.steps.values(), *lagging]
        if self._drawn is None or now - self._drawn_at >= resample_after(step_seconds):
            population: list[bytes | int] = [*self.steps, *lagging]
            count = min(sample_size(self._sample, len(population)), len(population))
            self._drawn = self._rng.sample(population, count)
            self._drawn_at = now
        # A worker that has left meanwhile is not waited for; every departure draws afresh anyhow.
        steps = (one if isinstance(one, int) else self.steps.get(one) for one in self._drawn)
        return [step for step in steps if step is not None]
