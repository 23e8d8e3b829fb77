"""The task queue as it is stored: counts, leases and deadlines, contradictions that are refused, and the snapshot."""

from __future__ import annotations

import msgspec
import pytest

from training.dispatch.answers import End, QueueRules, Registration
from training.dispatch.changes import Changes, HeadRow, LeaseRow, SaveRow, StateDamaged, TaskRow, TaskState
from training.dispatch.queue import (
    MAX_TASKS,
    TaskQueue,
    Times,
    decode_image,
    encode_image,
    holder_of,
    lease_duration_s,
)

RULES = QueueRules(passes=2, lease_factor=3.0, lease_floor_s=10.0, lease_ceiling_s=100.0)
ANN, BOB = b"ann", b"bob"


def registered(tasks: int) -> Registration:
    return Registration(identity=b"i" * 16, digest=b"d" * 32, tasks=tasks, chunks_per_task=1, shuffle=False, seed=0)


def queue_of(tasks: int) -> TaskQueue:
    queue = TaskQueue(RULES)
    queue.apply(Changes(registration=registered(tasks)))
    return queue


def row(task: int, state: TaskState, attempt: int = 1, worker: bytes = ANN) -> TaskRow:
    return TaskRow(task, state, attempt, holder_of(worker), 0, 0, 0, 0)


def lease(queue: TaskQueue, task: int, deadline: float, *, attempt: int = 1, worker: bytes = ANN) -> None:
    """Hand a task out, as a draft does."""
    changes = Changes(rows=[row(task, TaskState.LEASED, attempt, worker)], leases=[LeaseRow(task, worker, 5.0, 0)])
    queue.apply(changes, {task: Times(deadline - 5.0, deadline, rearmed=False)})


def end(queue: TaskQueue, task: int, state: TaskState, attempt: int = 1) -> None:
    queue.apply(Changes(rows=[row(task, state, attempt)]))


def test_counts_follow_every_state() -> None:
    """Each task is counted once, and one that was reopened as todo."""
    queue = queue_of(5)
    assert (queue.tasks, queue.status().todo, queue.end) == (5, 5, End.NO)

    for task, state in enumerate((TaskState.LEASED, TaskState.DONE, TaskState.FAILED, TaskState.REOPENED)):
        queue.apply(Changes(rows=[row(task, state)]))

    status = queue.status()
    assert (status.todo, status.leased, status.done, status.failed) == (2, 1, 1, 1)
    assert queue.row(3) == row(3, TaskState.REOPENED)


def test_a_lease_ends_with_the_state_of_its_task() -> None:
    """A worker counts while it holds a lease, and no longer."""
    queue = queue_of(3)
    lease(queue, 0, 15.0)
    lease(queue, 1, 16.0)
    lease(queue, 2, 17.0, worker=BOB)
    assert (queue.status().workers, list(queue.held_by[ANN])) == (2, [0, 1])

    end(queue, 0, TaskState.DONE)
    assert (queue.status().workers, list(queue.held_by[ANN])) == (2, [1])
    end(queue, 1, TaskState.REOPENED)
    assert (queue.status().workers, sorted(queue.leases)) == (1, [2])


def test_due_leases_are_those_whose_deadline_has_passed() -> None:
    """None, the first of several, all, and never more than the limit."""
    queue = queue_of(20)
    for task in range(20):
        lease(queue, task, 100.0 + task)

    assert queue.due(99.9, 20) == []
    assert [one.task for one in queue.due(100.0, 20)] == [0]
    assert sorted(one.task for one in queue.due(104.0, 20)) == [0, 1, 2, 3, 4]
    assert len(queue.due(1000.0, 7)) == 7
    assert len(queue.due(1000.0, 50)) == 20
    assert queue.due(1000.0, 0) == []


def test_a_deadline_of_before_is_not_due() -> None:
    """A lease that was renewed, or that ended, is not found by the deadline that it had."""
    queue = queue_of(3)
    for task in range(3):
        lease(queue, task, 100.0 + task)
    assert queue.next_deadline() == 100.0

    queue.apply(Changes(), {0: Times(95.0, 200.0, rearmed=False)})
    end(queue, 1, TaskState.DONE)

    assert [one.task for one in queue.due(150.0, 9)] == [2]
    assert queue.next_deadline() == 102.0
    end(queue, 2, TaskState.DONE)
    assert queue.next_deadline() == 200.0
    end(queue, 0, TaskState.DONE)
    assert queue.next_deadline() is None


def test_times_of_a_task_without_a_lease_are_ignored() -> None:
    """A renewal that comes with the end of its task sets no deadline."""
    queue = queue_of(1)
    queue.apply(Changes(), {0: Times(0.0, 5.0, rearmed=False)})

    assert queue.next_deadline() is None


def test_a_new_pass_begins_with_every_task_and_keeps_the_attempts() -> None:
    """A roll frees leases, returned tasks and skips; the fencing tokens and the last attempts that counted stay."""
    queue = queue_of(3)
    lease(queue, 0, 15.0, attempt=7)
    queue.apply(Changes(rows=[TaskRow(1, TaskState.FAILED, 4, 9, 3, 1, 2, 3)], returned=[2], skips=[(2, 11)]))

    queue.apply(Changes(rolled=True, head=HeadRow(pass_number=2)))

    status = queue.status()
    assert (status.pass_number, status.todo, status.workers) == (2, 3, 0)
    assert (queue.leases, list(queue.returned), queue.skips, queue.next_deadline()) == ({}, [], {}, None)
    assert queue.row(0) == TaskRow(0, TaskState.TODO, 7, holder_of(ANN), 0, 0, 0, 0)
    assert queue.row(1) == TaskRow(1, TaskState.TODO, 4, 9, 3, 0, 0, 0)


def test_tasks_that_came_back_leave_from_the_front() -> None:
    """The first that came back is the first that is handed out again; skips are told until they are forgotten."""
    queue = queue_of(4)
    queue.apply(Changes(returned=[2, 0], skips=[(2, 5), (0, 6)]))
    queue.apply(Changes(taken=1, returned=[3], skips=[(0, 0), (1, 0)]))

    assert (list(queue.returned), queue.skips) == ([0, 3], {2: 5})


def test_a_lease_is_told_what_was_trained_of_its_task() -> None:
    """`skip` is what earlier attempts have trained, `trained` what the lease itself has."""
    queue = queue_of(1)
    queue.apply(Changes(skips=[(0, 5)]))
    lease(queue, 0, 15.0)
    queue.apply(Changes(leases=[LeaseRow(0, ANN, 5.0, 9)]))

    found = queue.leases[0]
    assert (found.skip, found.trained, found.deadline, found.leased_at) == (5, 9, 15.0, 10.0)


def test_leases_run_for_their_full_time_after_a_recovery() -> None:
    """A replay knows no times: `rearm` gives every lease its duration from now on, and the save lease too."""
    queue = queue_of(2)
    rows = [row(task, TaskState.LEASED) for task in range(2)]
    leases = [LeaseRow(0, ANN, 5.0, 0), LeaseRow(1, BOB, 8.0, 0)]
    queue.apply(Changes(rows=rows, leases=leases, save=SaveRow(ANN, 1, 30.0)))
    assert queue.next_deadline() is None

    queue.rearm(1000.0)

    assert [(one.deadline, one.leased_at, one.rearmed) for one in queue.leases.values()] == [
        (1005.0, 1000.0, True),
        (1008.0, 1000.0, True),
    ]
    assert (queue.next_deadline(), queue.save_until) == (1005.0, 1030.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (Changes(registration=registered(2)), "impossible or a second data set"),
        (Changes(taken=1), "takes more returned tasks than there are"),
        (Changes(rows=[row(2, TaskState.DONE)]), "task 2 in state 2, of 2 tasks"),
        (Changes(rows=[row(-1, TaskState.DONE)]), "task -1 in state 2"),
        (Changes(rows=[TaskRow(0, 5, 1, 0, 0, 0, 0, 0)]), "task 0 in state 5"),
        (Changes(rows=[TaskRow(0, -1, 1, 0, 0, 0, 0, 0)]), "task 0 in state -1"),
        (Changes(leases=[LeaseRow(0, ANN, 5.0, 0)]), "a lease of task 0, which is not leased"),
        (Changes(leases=[LeaseRow(2, ANN, 5.0, 0)]), "a lease of task 2"),
    ],
)
def test_changes_that_contradict_the_state_are_refused(changes: Changes, reason: str) -> None:
    """The error says what the log claims."""
    with pytest.raises(StateDamaged, match=reason):
        queue_of(2).apply(changes)


@pytest.mark.parametrize("tasks", [0, -1, MAX_TASKS + 1])
def test_an_impossible_number_of_tasks_is_refused(tasks: int) -> None:
    """Before any memory is taken for them."""
    with pytest.raises(StateDamaged, match="impossible"):
        TaskQueue(RULES).apply(Changes(registration=registered(tasks)))


def test_ended_deadlines_do_not_pile_up() -> None:
    """A lease that is renewed five hundred times leaves a bounded number of deadlines."""
    queue = queue_of(2)
    lease(queue, 1, 1.0)
    lease(queue, 0, 100.0)
    for renewal in range(500):
        queue.apply(Changes(), {0: Times(0.0, 100.0 + renewal, rearmed=False)})

    assert len(queue._deadlines) <= 2 * 2 + 65
    assert sorted(one.task for one in queue.due(1e9, 9)) == [0, 1]


def test_a_lease_lasts_a_multiple_of_the_mean_task_time_within_its_limits() -> None:
    """The ceiling while no task time is known, then three times the mean, at least the floor."""
    assert lease_duration_s(RULES, HeadRow()) == 100.0
    assert lease_duration_s(RULES, HeadRow(mean_task_s=1.0, observed=1)) == 10.0
    assert lease_duration_s(RULES, HeadRow(mean_task_s=20.0, observed=1)) == 60.0
    assert lease_duration_s(RULES, HeadRow(mean_task_s=50.0, observed=1)) == 100.0
    assert TaskQueue(RULES).status().mean_task_s is None


def full_queue() -> TaskQueue:
    queue = queue_of(4)
    lease(queue, 0, 15.0, attempt=3)
    end(queue, 1, TaskState.DONE, attempt=2)
    queue.apply(Changes(returned=[2], skips=[(2, 8)], head=HeadRow(1, 3, "", 4.5, 6), save=SaveRow(BOB, 2, 30.0)))
    return queue


def test_a_snapshot_has_the_whole_state() -> None:
    """What is read from one is the same queue, without the times; an empty queue too."""
    queue, read = full_queue(), TaskQueue(RULES)
    read.restore(decode_image(encode_image(queue.image())))

    assert read.image() == queue.image()
    assert read.status() == queue.status()
    assert [read.row(task) for task in range(4)] == [queue.row(task) for task in range(4)]
    assert (read.leases[0].attempt, read.leases[0].deadline, read.leases[0].rearmed) == (3, 0.0, True)

    empty = TaskQueue(RULES)
    empty.restore(decode_image(encode_image(TaskQueue(RULES).image())))
    assert (empty.tasks, empty.registration) == (0, None)


def test_an_image_is_a_copy() -> None:
    """What happens to the queue while a snapshot is written does not change it."""
    queue = full_queue()
    image = queue.image()
    before = encode_image(image)
    end(queue, 0, TaskState.FAILED)

    assert encode_image(image) == before


@pytest.mark.parametrize(
    ("replaced", "reason"),
    [
        ({"columns": [b"\0" * 4] * 4 + [b"\0" * 16] * 2}, "columns of"),
        ({"columns": [b"\0" * 4] * 4 + [b"\0" * 12] * 3}, "columns of"),
        ({"registration": None}, "for 0 tasks"),
        ({"leases": []}, "and 0 leases"),
        ({"columns": [b"\7" * 4] + [b"\0" * 4] * 3 + [b"\0" * 16] * 3}, "tasks in states"),
        ({"leases": [LeaseRow(1, ANN, 5.0, 0)]}, "lease of task 1, which is not leased"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(replaced: dict[str, object], reason: str) -> None:
    """Columns of another length, states that do not exist, and leases of tasks that are not leased."""
    image = msgspec.structs.replace(full_queue().image(), **replaced)
    with pytest.raises(StateDamaged, match=reason):
        TaskQueue(RULES).restore(image)


def test_bytes_that_are_no_snapshot_are_refused() -> None:
    """Cut, of another format, or with columns that are not compressed."""
    image = full_queue().image()
    whole = encode_image(image)

    for broken in (b"", whole[:-1], msgspec.msgpack.encode(image)):
        with pytest.raises(StateDamaged, match="cannot be read"):
            decode_image(broken)
    with pytest.raises(StateDamaged, match="has format 2, this program reads 1"):
        decode_image(encode_image(msgspec.structs.replace(image, format=2)))
