"""What the model of `tests.property.test_dispatch_queue` leaves out: times, order, rows, events, and a crash."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pnode.training.dispatch.answers import (
    Answer,
    BadRequestToQueue,
    Cause,
    Handout,
    Held,
    Lease,
    LeaseEnded,
    QueueRules,
    Registration,
    ReportAnswer,
    TaskDiscarded,
)
from p2pnode.training.dispatch.messages import (
    DispatchRequest,
    EndTask,
    GetTask,
    RenewTasks,
    decode_request,
    encode,
)
from p2pnode.training.dispatch.queue import DUE_AT_ONCE, MAX_TASKS, TaskQueue
from p2pnode.training.dispatch.queue_rows import StateDamaged

ANN, BOB = b"ann", b"bob"


class Bench:
    """A queue with a clock of its own, and a store that keeps the rows."""

    def __init__(self, tasks: int = 3, *, shuffle: bool = False, seed: int = 0, **rules: float) -> None:
        settings: dict[str, float] = {"lease_floor_s": 10.0, "lease_ceiling_s": 100.0, "leases_per_worker": 64}
        self.rules = QueueRules(**(settings | rules))  # type: ignore[arg-type]
        self.now = 1000.0
        self.rows: dict[str, bytes] = {}
        self.queue = TaskQueue(self.rules, self.rows, self.now)
        self.events: list[object] = []
        self.facts = Registration(
            identity=b"i" * 16, digest=b"d" * 32, tasks=tasks, chunks_per_task=1, shuffle=shuffle, seed=seed
        )
        self.commit(lambda queue: queue.register(self.facts))

    def commit(self, request):
        """One request in a write of its own."""
        self.queue.now = self.now
        value = request(self.queue)
        self.queue.expire()
        rows, events = self.queue.take()
        self.rows |= rows
        self.events += events
        status = self.queue.status()
        assert status.todo + status.leased + status.done + status.failed == status.tasks == self.facts.tasks
        return value

    def get(self, worker: bytes = ANN, **more) -> Handout:
        return self.commit(lambda queue: queue.get(worker, **{"held": self.held(worker), **more}))

    def lease(self, worker: bytes = ANN) -> Lease:
        lease = self.get(worker).lease
        assert lease is not None
        return lease

    def held(self, worker: bytes) -> list[Held]:
        return [Held(task, self.queue.row(task).attempt) for task in self.queue.held_by.get(worker, ())]

    def finish(self, lease: Lease) -> ReportAnswer:
        return self.commit(lambda queue: queue.finish(lease.worker, lease.task, lease.attempt))

    def fail(self, lease: Lease, cause: Cause = Cause.ERROR, trained: int = 0) -> ReportAnswer:
        return self.commit(lambda queue: queue.fail(lease.worker, lease.task, lease.attempt, cause, trained))

    def expire(self) -> int:
        before = len(self.events)
        self.commit(lambda queue: None)
        return sum(isinstance(event, LeaseEnded | TaskDiscarded) for event in self.events[before:])

    def restart(self, **rules: float) -> None:
        """Another process recovers what the store has."""
        changed = {name: getattr(self.rules, name) for name in self.rules.__struct_fields__} | rules
        self.rules = QueueRules(**changed)
        self.queue = TaskQueue(self.rules, self.rows, self.now)
        self.commit(lambda queue: None)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        status = self.queue.status()
        return status.todo, status.leased, status.done, status.failed


def test_golden_trace_of_a_task_that_always_fails() -> None:
    """With `max_failures` 3 the fourth error discards the only task; the job ends with ALL_FAILED, it is not stuck."""
    bench = Bench(1, passes=0, max_failures=3)

    for _ in range(4):
        assert bench.fail(bench.lease()) is ReportAnswer.RETURNED

    assert bench.counts == (0, 0, 0, 1)
    assert bench.get().answer is Answer.ALL_FAILED
    assert TaskDiscarded(0, 4, "error", 4, 0, 0) in bench.events


# -- the bugs of other queues -----------------------------------------------------------------------------------------


def test_causes_are_counted_apart() -> None:
    """Deaths and timeouts do not touch the budget of errors, releases count nothing, and both budgets are exact."""
    bench = Bench(1, max_failures=1, max_losses=3, passes=0)
    for end in ("death", "timeout", "release", "missing", "death", "error"):
        lease = bench.lease()
        if end == "death":
            bench.commit(lambda queue: queue.worker_gone(ANN))
        elif end == "timeout":
            bench.now += 101
            assert bench.expire() == 1
        else:
            bench.fail(lease, Cause(end))
    row = bench.queue.row(0)
    assert (row.errors, row.timeouts, row.deaths, row.attempt) == (1, 1, 2, 6)
    assert bench.counts == (1, 0, 0, 0)

    bench.lease()
    bench.commit(lambda queue: queue.worker_gone(ANN))
    assert TaskDiscarded(0, 7, "death", 1, 1, 3) in bench.events
    assert bench.get().answer is Answer.ALL_FAILED


# -- leases ----------------------------------------------------------------------------------------------------------


def test_leases_last_a_multiple_of_the_mean_task_time() -> None:
    """The ceiling while nothing is known, then clamp(3 × mean); a timeout raises the mean: slow tasks get through."""
    bench = Bench(60, lease_factor=3.0, lease_floor_s=10.0, lease_ceiling_s=100.0)
    lease = bench.lease()
    assert lease.duration_s == 100
    bench.now += 5
    bench.finish(lease)
    assert bench.lease(BOB).duration_s == 15
    quick = bench.lease()
    bench.now += 0.1
    bench.finish(quick)
    assert bench.queue.head.mean_task_s == pytest.approx(2.55)
    assert bench.lease().duration_s == 10

    # Now every task takes 30 s, longer than a lease: it must not time out for ever.
    attempts, lease = 0, None
    while (lease is None or lease.duration_s <= 30) and attempts < 40:
        lease = bench.lease(b"slow")
        bench.now += 30
        bench.expire()
        bench.commit(lambda queue: queue.worker_gone(b"slow"))
        attempts += 1
    assert 1 < attempts < 25


def test_due_leases_end_by_and_by() -> None:
    """Of many leases that are due at once a batch ends a bounded number, and the next ones the rest."""
    bench = Bench(DUE_AT_ONCE + 10)
    for number in range(DUE_AT_ONCE + 10):
        bench.lease(b"worker %d" % number)
    bench.now += 101
    assert bench.expire() == DUE_AT_ONCE
    assert bench.expire() == 10
    assert bench.expire() == 0


# -- order and answers -----------------------------------------------------------------------------------------------


def test_the_order_of_a_pass_is_a_permutation_of_its_own() -> None:
    """Shuffled passes hand out every task once, each pass in another order, and the same for the same seed."""

    def orders(seed: int) -> list[list[int]]:
        bench = Bench(40, shuffle=True, seed=seed, passes=3)
        found = []
        for _ in range(3):
            leases = [bench.lease(b"%d" % number) for number in range(40)]
            found.append([lease.task for lease in leases])
            for lease in leases:
                bench.finish(lease)
        return found

    once = orders(7)
    assert all(sorted(order) == list(range(40)) for order in once)
    assert len({tuple(order) for order in once}) == 3
    assert once == orders(7)
    assert once != orders(8)


def test_answers_are_distinct_and_none_means_to_wait_for_ever() -> None:
    """No data set, no task now, the end of the job, and the end without success."""
    empty = TaskQueue(QueueRules(), {}, 0.0).get(ANN)
    assert empty.answer is Answer.NO_DATASET
    assert empty.retry_after_s > 0

    bench = Bench(1, passes=2)
    bench.finish(bench.lease())
    lease = bench.lease()
    bench.now += 99.95
    assert bench.get(BOB).retry_after_s == pytest.approx(0.1)
    bench.finish(lease)
    assert bench.get().answer is Answer.JOB_DONE
    assert bench.counts == (0, 0, 1, 0)


def test_more_passes_after_the_end_of_the_job() -> None:
    """A master that restarts with more passes goes on; with fewer it ends with the pass it is in."""
    bench = Bench(2, passes=1)
    for lease in [bench.lease(), bench.lease()]:
        bench.finish(lease)
    assert bench.get().answer is Answer.JOB_DONE
    bench.restart(passes=3)
    assert bench.lease().pass_number == 2
    bench.restart(passes=1)
    for lease in [bench.queue.lease(task) for task in bench.queue.held_by[ANN]] + [bench.lease()]:
        bench.finish(lease)
    assert bench.get().answer is Answer.JOB_DONE
    assert bench.queue.status().pass_number == 2


def test_reports_about_what_was_never_handed_out() -> None:
    """Unknown tasks and attempts are answered so; an impossible cause is an error; nothing changes."""
    bench = Bench(1)
    lease = bench.lease()
    before = dict(bench.rows)
    for task, attempt in ((-1, 1), (1, 1), (0, 0), (0, 2), (0, -1)):
        assert bench.commit(lambda queue, t=task, a=attempt: queue.finish(ANN, t, a)) is ReportAnswer.UNKNOWN
        assert bench.commit(lambda queue, t=task, a=attempt: queue.fail(ANN, t, a, Cause.ERROR)) is ReportAnswer.UNKNOWN
    with pytest.raises(BadRequestToQueue):
        bench.commit(lambda queue: queue.fail(ANN, 0, 1, Cause.TIMEOUT))
    assert bench.rows == before
    assert bench.finish(lease) is ReportAnswer.ACCEPTED


@pytest.mark.parametrize(
    "request_",
    [
        RenewTasks(b"", [Held(0, 1, -1)]),
        RenewTasks(b"", [Held(-1, 1)]),
        RenewTasks(b"", [Held(0, 1)] * 65),
        GetTask(b"", [], list(range(65))),
        EndTask(b"", 0, 1, Cause.ERROR, -1),
    ],
)
def test_impossible_requests_are_refused_where_they_are_decoded(request_: DispatchRequest) -> None:
    """Negative numbers, and more leases or tasks than a worker can have."""
    with pytest.raises(msgspec.DecodeError):
        decode_request(encode(request_))


def test_the_roll_of_a_pass_writes_no_task() -> None:
    """The rows of the tasks name the pass before: a restart reads them as todo, with their attempts."""
    bench = Bench(200, passes=2)
    leases = [bench.lease(b"%d" % number) for number in range(200)]
    for lease in leases[:-1]:
        bench.finish(lease)
    before = dict(bench.rows)
    bench.finish(leases[-1])
    assert [key for key, row in bench.rows.items() if before.get(key) != row] == ["task/199", "head"]
    bench.restart()
    assert bench.counts == (200, 0, 0, 0)
    assert bench.finish(leases[0]) is ReportAnswer.ACCEPTED
    assert bench.lease().attempt == 2


def test_rows_that_contradict_each_other_are_refused() -> None:
    """A task beyond the last one, a row under another key, a state that there is not, and no row at all."""
    bench = Bench(2)
    bench.lease()
    row = bench.rows["task/0"]
    for key, bad in (("task/2", b"\x92\x02\x01"), ("task/1", row), ("task/1", b"\x93\x01\x01\x09"), ("head", b"junk")):
        with pytest.raises(StateDamaged):
            TaskQueue(bench.rules, {**bench.rows, key: bad}, 0.0)
    with pytest.raises(StateDamaged):
        TaskQueue(bench.rules, {"task/0": row}, 0.0)
    with pytest.raises(BadRequestToQueue):
        Bench(MAX_TASKS + 1)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"max_failures": -1}, "max_failures must be ≥ 0"),
        ({"lease_floor_s": 6.0, "lease_ceiling_s": 5.0}, "lease_floor_s ≤ lease_ceiling_s"),
        ({"lease_ceiling_s": float("inf")}, "lease_ceiling_s"),
        ({"lease_floor_s": float("nan")}, "lease_floor_s"),
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(rules: dict[str, Any], reason: str) -> None:
    """Scripts give some of them (`ServerOptions`); a lease has to end."""
    with pytest.raises(ValueError, match=reason):
        QueueRules(**rules)


def test_golden_trace_of_a_crash_between_write_and_answer() -> None:
    """A repeated report to a restarted master gets the answer that was lost, and counts once."""
    bench = Bench(1, passes=2)
    lease = bench.lease()
    bench.finish(lease)  # stored; the answer is lost with the master
    bench.restart()

    assert bench.finish(lease) is ReportAnswer.ACCEPTED
    assert bench.counts == (1, 0, 0, 0)
    assert bench.queue.status().pass_number == 2


def test_tasks_that_come_back_wait_behind_the_others() -> None:
    """First all tasks in the order of the pass, then the returned ones in the order of their return, each once."""
    bench = Bench(4)
    first, second = bench.lease(), bench.lease()
    bench.fail(second, Cause.RELEASE)
    bench.fail(first, Cause.RELEASE)
    order = [bench.lease().task for _ in range(4)]
    assert order == [2, 3, 1, 0]
    assert bench.get().answer is Answer.NO_TASK_NOW
    bench.restart()
    assert bench.get().answer is Answer.NO_TASK_NOW
