"""The task queue against a plain model: late and repeated reports, dead workers, failed writes, restarts.

The model keeps a dictionary per task and copies all of it for each batch. It predicts every answer but which task is
handed out, of which it asks that it was open. A batch ends in one of three ways: stored; the master gone before the
write; gone after it, before any answer. Whatever the end, memory is what a recovery reads.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from p2pnode.training.dispatch.answers import (
    Answer,
    Cause,
    End,
    Handout,
    Held,
    Lease,
    QueueRules,
    Registration,
    ReportAnswer,
)
from p2pnode.training.dispatch.queue import TaskQueue

WORKERS = (b"a", b"b", b"c")
RULES = {
    "max_failures": 1,
    "max_losses": 3,
    "lease_floor_s": 10.0,
    "lease_ceiling_s": 100.0,
    "holds": 2.0,
    "leases_per_worker": 3,
}


CAUSES = st.sampled_from([Cause.ERROR, Cause.ERROR, Cause.RELEASE, Cause.MISSING])
KINDS = (("todo", "reopened"), ("leased",), ("done",), ("failed",))


class Entry:
    """A task in the model."""

    def __init__(self) -> None:
        self.state = "todo"
        self.attempt = self.finished = self.errors = self.losses = self.trained = 0
        self.worker = b""
        self.since = self.deadline = 0.0
        self.rearmed = False
        self.duration = 0.0


class Model:
    """The whole truth, copied for each batch."""

    def __init__(self, tasks: int, passes: int) -> None:
        self.passes = passes
        self.tasks = [Entry() for _ in range(tasks)]
        self.pass_number = 1
        self.end = End.NO
        #: (pass, task) → how often it counted as finished.
        self.counted: dict[tuple[int, int], int] = {}

    def in_state(self, *states: str) -> list[int]:
        return [number for number, one in enumerate(self.tasks) if one.state in states]

    def held(self, worker: bytes) -> list[int]:
        return [task for task in self.in_state("leased") if self.tasks[task].worker == worker]

    def judge(self) -> None:
        if self.in_state("todo", "reopened", "leased") or self.end:
            return
        if not self.in_state("done"):
            self.end = End.ALL_FAILED
        elif self.passes and self.pass_number >= self.passes:
            self.end = End.DONE
        else:
            self.pass_number += 1
            for one in self.tasks:
                one.state, one.errors, one.losses, one.trained = "todo", 0, 0, 0

    def end_lease(self, task: int, cause: Cause) -> None:
        one = self.tasks[task]
        one.errors += cause is Cause.ERROR
        lost = cause in (Cause.TIMEOUT, Cause.DEATH)
        one.losses += lost
        if one.errors > RULES["max_failures"] or one.losses > RULES["max_losses"]:
            one.state = "failed"
        else:
            one.state = "reopened" if lost else "todo"

    def mine(self, worker: bytes, task: int, attempt: int) -> ReportAnswer | None:
        one = self.tasks[task]
        if attempt > one.attempt:
            return ReportAnswer.UNKNOWN
        if attempt < one.attempt:
            return ReportAnswer.SUPERSEDED
        return None if one.worker == worker else ReportAnswer.NOT_HOLDER

    def finish(self, worker: bytes, task: int, attempt: int) -> ReportAnswer:
        one, refusal = self.tasks[task], self.mine(worker, task, attempt)
        if attempt == one.finished and refusal is not ReportAnswer.NOT_HOLDER:
            return ReportAnswer.ACCEPTED
        if refusal:
            return refusal
        if one.state not in ("leased", "reopened"):
            return ReportAnswer.SUPERSEDED
        one.state, one.finished = "done", attempt
        self.counted[self.pass_number, task] = self.counted.get((self.pass_number, task), 0) + 1
        self.judge()
        return ReportAnswer.ACCEPTED

    def fail(self, worker: bytes, task: int, attempt: int, cause: Cause, trained: int) -> ReportAnswer:
        one, refusal = self.tasks[task], self.mine(worker, task, attempt)
        if refusal in (ReportAnswer.UNKNOWN, ReportAnswer.NOT_HOLDER):
            return refusal
        if refusal is None and one.state == "leased":
            one.trained = max(one.trained, trained)
            self.end_lease(task, cause)
            self.judge()
        return ReportAnswer.RETURNED

    def renew(self, worker: bytes, held: Held, now: float) -> ReportAnswer:
        one, refusal = self.tasks[held.task], self.mine(worker, held.task, held.attempt)
        if refusal or one.state != "leased":
            return refusal or ReportAnswer.SUPERSEDED
        one.trained = max(one.trained, held.trained)
        self.prolong(one, now)
        return ReportAnswer.RENEWED

    def prolong(self, one: Entry, now: float) -> None:
        limit = one.since + RULES["holds"] * RULES["lease_ceiling_s"]
        one.deadline = max(one.deadline, min(now + one.duration, limit))


class QueueMachine(RuleBasedStateMachine):
    given = Bundle("given")

    @initialize(tasks=st.integers(1, 5), passes=st.integers(0, 3), shuffle=st.booleans(), seed=st.integers(0, 9))
    def begin(self, tasks: int, passes: int, shuffle: bool, seed: int) -> None:
        self.rules = QueueRules(passes=passes, **RULES)
        self.now = 50.0
        self.rows: dict[str, bytes] = {}
        self.queue = TaskQueue(self.rules, self.rows, self.now)
        self.model = Model(tasks, passes)
        facts = Registration(identity=b"i", digest=b"d", tasks=tasks, chunks_per_task=1, shuffle=shuffle, seed=seed)
        self.open_batch()
        self.queue.register(facts)
        self.commit("stored")

    # -- batches ---------------------------------------------------------------------------------------------------

    def open_batch(self) -> None:
        self.queue.now = self.now
        self.tentative = copy.deepcopy(self.model)

    @rule(end=st.sampled_from(["stored", "stored", "stored", "lost before", "lost after"]))
    def commit(self, end: str) -> None:
        """The batch ends. Leases that are due end with it, after the reports in it."""
        due = [task for task in self.tentative.in_state("leased") if self.tentative.tasks[task].deadline <= self.now]
        assert self.queue.expire() == len(due)
        for task in due:
            self.tentative.end_lease(task, Cause.TIMEOUT)
        self.tentative.judge()
        rows, _ = self.queue.take()
        if end != "lost before":
            self.rows |= rows
            self.model = self.tentative
        if end != "stored":
            self.recover()
        self.open_batch()

    def recover(self) -> None:
        """Another master reads the store."""
        self.queue = TaskQueue(self.rules, self.rows, self.now)
        for task in self.model.in_state("leased"):
            one = self.model.tasks[task]
            one.since, one.deadline, one.rearmed = self.now, self.now + one.duration, True

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 11.0, 101.0, 201.0, 1e6]))
    def wait(self, seconds: float) -> None:
        """Time passes, or jumps, between two batches."""
        self.commit("stored")
        self.now += seconds
        self.open_batch()

    # -- requests --------------------------------------------------------------------------------------------------

    @rule(
        target=given,
        worker=st.sampled_from(WORKERS),
        knows=st.sampled_from(["all", "all", "all", "one less", "none"]),
        avoid=st.one_of(st.just(set()), st.sets(st.integers(0, 4), max_size=3)),
    )
    def get(self, worker: bytes, knows: str, avoid: set[int]) -> Any:
        model = self.tentative
        mine = model.held(worker)
        known = {"all": mine, "one less": mine[1:], "none": []}[knows]
        held = [Held(task, model.tasks[task].attempt) for task in known]
        handout = self.queue.get(worker, held, sorted(avoid))
        if model.end:
            assert handout.answer is (Answer.JOB_DONE if model.end is End.DONE else Answer.ALL_FAILED)
        elif lost := [task for task in mine if task not in known and task not in avoid]:
            assert handout.lease is not None
            assert handout.lease.task in lost
            assert handout.lease.attempt == model.tasks[handout.lease.task].attempt
            model.prolong(model.tasks[handout.lease.task], self.now)
        elif len(mine) >= RULES["leases_per_worker"] or not set(model.in_state("todo", "reopened")) - avoid:
            assert handout.answer is Answer.NO_TASK_NOW
            assert 0 < handout.retry_after_s <= 5
        else:
            self.handed_out(handout, worker, avoid)
        return multiple() if handout.lease is None else handout.lease

    def handed_out(self, handout: Handout, worker: bytes, avoid: set[int]) -> None:
        lease = handout.lease
        assert lease is not None
        assert lease.task not in avoid
        one = self.tentative.tasks[lease.task]
        assert one.state in ("todo", "reopened")
        one.attempt += 1
        one.state, one.worker, one.since, one.duration = "leased", worker, self.now, lease.duration_s
        one.deadline, one.rearmed = self.now + lease.duration_s, False
        assert (lease.attempt, lease.trained, lease.worker, lease.deadline) == (
            one.attempt,
            one.trained,
            worker,
            one.deadline,
        )
        assert RULES["lease_floor_s"] <= lease.duration_s <= RULES["lease_ceiling_s"]

    @rule(lease=given, worker=st.sampled_from([None, None, None, *WORKERS]))
    def finish(self, lease: Lease, worker: bytes | None) -> None:
        """A report in time, late, repeated, by somebody else, or about an attempt whose hand-out was never stored."""
        worker = worker or lease.worker
        expected = self.tentative.finish(worker, lease.task, lease.attempt)
        assert self.queue.finish(worker, lease.task, lease.attempt) is expected

    @rule(
        lease=given,
        cause=st.sampled_from([Cause.ERROR, Cause.ERROR, Cause.RELEASE, Cause.MISSING]),
        n=st.integers(0, 9),
    )
    def fail(self, lease: Lease, cause: Cause, n: int) -> None:
        expected = self.tentative.fail(lease.worker, lease.task, lease.attempt, cause, n)
        assert self.queue.fail(lease.worker, lease.task, lease.attempt, cause, n) is expected

    @rule(lease=given, n=st.integers(0, 9))
    def renew(self, lease: Lease, n: int) -> None:
        held = Held(lease.task, lease.attempt, n)
        expected = self.tentative.renew(lease.worker, held, self.now)
        assert self.queue.renew(lease.worker, [held]) == [expected]

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: bytes) -> None:
        mine = self.tentative.held(worker)
        for task in mine:
            self.tentative.end_lease(task, Cause.DEATH)
        self.tentative.judge()
        assert self.queue.worker_gone(worker) == len(mine)

    @rule(task=st.integers(-1, 5))
    def discard(self, task: int) -> None:
        model = self.tentative
        is_open = 0 <= task < len(model.tasks) and model.tasks[task].state in ("todo", "reopened", "leased")
        if is_open:
            model.tasks[task].state = "failed"
            model.judge()
        assert self.queue.discard(task, "nobody can read it") is is_open

    # -- what holds between the batches ----------------------------------------------------------------------------

    @invariant()
    def memory_is_what_the_model_says(self) -> None:
        """So is what a recovery reads after a batch."""
        if not hasattr(self, "queue"):
            return
        self.compare(self.queue, self.tentative)
        self.compare(TaskQueue(self.rules, self.rows, self.now), self.model)

    def compare(self, queue: TaskQueue, model: Model) -> None:
        status = queue.status()
        counts = [
            len(model.in_state(*states)) for states in (("todo", "reopened"), ("leased",), ("done",), ("failed",))
        ]
        assert [status.todo, status.leased, status.done, status.failed] == counts
        assert sum(counts) == status.tasks == len(model.tasks)
        assert (status.pass_number, status.end) == (model.pass_number, model.end)
        for number, one in enumerate(model.tasks):
            row = queue.row(number)
            assert (row.attempt, row.finished, row.errors) == (one.attempt, one.finished, one.errors)
            assert row.timeouts + row.deaths == one.losses
            if one.state == "leased":
                assert row.worker == one.worker
                assert number in queue.held_by[one.worker]
                assert queue is not self.queue or queue.lease(number).deadline == one.deadline
        assert sum(map(len, queue.held_by.values())) == counts[1]
        assert max(model.counted.values(), default=1) == 1


class LongQueueMachine(QueueMachine):
    """The same with more and longer sequences."""


QueueMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=75, stateful_step_count=60
)
LongQueueMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=150, stateful_step_count=80
)
TestQueue = QueueMachine.TestCase
TestQueueForLong = pytest.mark.long(LongQueueMachine.TestCase)
