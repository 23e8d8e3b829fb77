"""Transitions of the task queue: the golden traces of task queues, the failure budgets, and the save lease."""

from __future__ import annotations

from training.dispatch import changes as log
from training.dispatch.answers import (
    Answer,
    Cause,
    End,
    Handout,
    Held,
    Lease,
    LeaseEnded,
    PassEnded,
    QueueRules,
    Registration,
    ReportAnswer,
    TaskDiscarded,
)
from training.dispatch.chunks import ChunkTable, DatasetChunk
from training.dispatch.draft import Draft
from training.dispatch.queue import TaskQueue

ANN, BOB = b"ann", b"bob"


class Bench:
    """A queue with a clock of its own, and a store that keeps every entry."""

    def __init__(self, tasks: int = 3, *, shuffle: bool = False, seed: int = 0, **rules: float) -> None:
        settings: dict[str, float] = {"lease_floor_s": 10.0, "lease_ceiling_s": 100.0, "leases_per_worker": 64}
        self.rules = QueueRules(**(settings | rules))  # type: ignore[arg-type]
        self.queue = TaskQueue(self.rules)
        self.now = 1000.0
        self.entries: list[bytes] = []
        self.events: list[object] = []
        self.facts = Registration(
            identity=b"i" * 16, digest=b"d" * 32, tasks=tasks, chunks_per_task=1, shuffle=shuffle, seed=seed
        )
        self.commit(lambda draft: draft.register(self.facts))

    def commit(self, request):
        """One request in a batch of its own, stored and applied."""
        draft = Draft(self.queue, self.now)
        value = request(draft)
        draft.expire()
        entry = draft.changes()
        if entry:
            self.entries.append(log.encode(entry))
        self.queue.apply(log.decode(log.encode(entry)), draft.times, draft.save_until)
        self.events += draft.events
        status = self.queue.status()
        assert status.todo + status.leased + status.done + status.failed == status.tasks == self.facts.tasks
        return value

    def get(self, worker: bytes = ANN, **more) -> Handout:
        return self.commit(lambda draft: draft.get(worker, **{"held": self.held(worker), **more}))

    def lease(self, worker: bytes = ANN) -> Lease:
        lease = self.get(worker).lease
        assert lease is not None
        return lease

    def held(self, worker: bytes) -> list[Held]:
        return [Held(one.task, one.attempt) for one in self.queue.leases.values() if one.worker == worker]

    def finish(self, lease: Lease) -> ReportAnswer:
        return self.commit(lambda draft: draft.finish(lease.worker, lease.task, lease.attempt))

    def fail(self, lease: Lease, cause: Cause = Cause.ERROR, trained: int = 0) -> ReportAnswer:
        return self.commit(lambda draft: draft.fail(lease.worker, lease.task, lease.attempt, cause, trained))

    def expire(self) -> int:
        before = len(self.events)
        self.commit(lambda draft: None)
        return sum(isinstance(event, LeaseEnded | TaskDiscarded) for event in self.events[before:])

    def restart(self, **rules: float) -> None:
        """Another process recovers what the store has."""
        changed = {name: getattr(self.rules, name) for name in self.rules.__struct_fields__} | rules
        self.rules = QueueRules(**changed)
        self.queue = TaskQueue(self.rules)
        for entry in self.entries:
            self.queue.apply(log.decode(entry))
        self.queue.rearm(self.now)
        self.commit(lambda draft: draft.resume())

    @property
    def counts(self) -> tuple[int, int, int, int]:
        status = self.queue.status()
        return status.todo, status.leased, status.done, status.failed


def test_golden_trace_of_25_chunks() -> None:
    """25 chunks in tasks of 10 are tasks of 10, 10 and 5; then there is no task now; the finished pass rolls over."""
    table = ChunkTable(DatasetChunk("a", index, 20 * index, 1) for index in range(25))
    bench = Bench(table.tasks(10), passes=2)

    leases = [bench.lease() for _ in range(3)]
    refused = bench.get()

    assert [len(table.of_task(lease.task, 10)) for lease in leases] == [10, 10, 5]
    assert refused.answer is Answer.NO_TASK_NOW
    assert 0 < refused.retry_after_s <= 5
    assert [bench.finish(lease) for lease in leases] == [ReportAnswer.ACCEPTED] * 3
    assert bench.counts == (3, 0, 0, 0)
    assert bench.get().pass_number == 2
    assert PassEnded(1, 3, 0, End.NO) in bench.events


def test_golden_trace_of_a_task_that_always_fails() -> None:
    """With `max_failures` 3 the fourth error discards the only task; the job ends with ALL_FAILED, it is not stuck."""
    bench = Bench(1, passes=0, max_failures=3)

    for _ in range(4):
        assert bench.fail(bench.lease()) is ReportAnswer.RETURNED

    assert bench.counts == (0, 0, 0, 1)
    assert bench.get().answer is Answer.ALL_FAILED
    assert TaskDiscarded(0, 4, "error", 4, 0, 0) in bench.events


def test_golden_trace_of_a_late_finisher() -> None:
    """A finish of attempt 1 after attempt 2 was handed out is superseded, and that of attempt 2 counts once."""
    bench = Bench(2)
    first = bench.lease(ANN)
    bench.lease(ANN)
    bench.now += 101
    assert bench.expire() == 2

    second = bench.lease(BOB)
    assert (second.task, second.attempt) == (first.task, 2)
    assert bench.finish(first) is ReportAnswer.SUPERSEDED
    assert bench.counts == (1, 1, 0, 0)
    assert bench.finish(second) is ReportAnswer.ACCEPTED
    assert bench.finish(second) is ReportAnswer.ACCEPTED
    assert bench.finish(first) is ReportAnswer.SUPERSEDED
    assert bench.counts == (1, 0, 1, 0)


def test_golden_trace_of_a_crash_between_write_and_answer() -> None:
    """A repeated report to a restarted master gets the answer that was lost, and counts once."""
    bench = Bench(1, passes=2)
    lease = bench.lease()
    bench.finish(lease)  # stored; the answer is lost with the master
    bench.restart()

    assert bench.finish(lease) is ReportAnswer.ACCEPTED
    assert bench.counts == (1, 0, 0, 0)
    assert bench.queue.status().pass_number == 2
