"""The state of the queue as a draft sees it: its own changes on top of what is stored, and nothing of them below."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from training.dispatch.answers import Lease, QueueRules, Registration
from training.dispatch.changes import Changes, HeadRow, LeaseRow, TaskRow, TaskState
from training.dispatch.queue import TaskQueue, Times
from training.dispatch.queue_overlay import QueueOverlay

ANN, BOB = b"ann", b"bob"


def stored(tasks: int = 3) -> TaskQueue:
    """Task 0 is leased to ann, with failures; task 1 is done; two records of task 2 are trained."""
    queue = TaskQueue(QueueRules(passes=2))
    facts = Registration(identity=b"i", digest=b"d", tasks=tasks, chunks_per_task=1, shuffle=False, seed=0)
    rows = [TaskRow(0, TaskState.LEASED, 4, 9, 0, 1, 2, 3), TaskRow(1, TaskState.DONE, 1, 9, 1, 0, 0, 0)]
    queue.apply(
        Changes(registration=facts, rows=rows, leases=[LeaseRow(0, ANN, 5.0, 0)], skips=[(2, 2)], returned=[2]),
        {0: Times(10.0, 15.0, rearmed=False)},
    )
    return queue


def lease_of(task: int, worker: bytes = BOB, **fields: Any) -> Lease:
    base = Lease(task, 1, worker, 1, 5.0, 25.0, 20.0, rearmed=False, skip=0, trained=0)
    return replace(base, **fields)


def test_a_draft_that_does_nothing_changes_nothing() -> None:
    """Also after it has read everything."""
    overlay = QueueOverlay(stored())
    assert [overlay._peek(task).state for task in range(3)] == [TaskState.LEASED, TaskState.DONE, TaskState.TODO]
    assert overlay._lease(0) is not None
    assert overlay._lease(2) is None
    assert (list(overlay._held_by(ANN)), list(overlay._held_by(BOB)), overlay._skip(2)) == ([0], [], 2)

    assert not overlay.changes()
    assert overlay.size == 0


def test_what_is_changed_is_seen_here_and_not_in_the_queue() -> None:
    """A row that is only peeked at is no change; one that was taken is, even as it was."""
    queue = stored()
    overlay = QueueOverlay(queue)
    overlay._move(overlay._row(2), TaskState.LEASED)
    overlay._keep(lease_of(2))

    assert overlay._peek(2).state == TaskState.LEASED
    assert list(overlay._held_by(BOB)) == [2]
    assert overlay._counts == [0, 2, 1, 0, 0]
    assert (queue.row(2).state, queue.held_by.get(BOB), queue.counts) == (TaskState.TODO, None, [1, 1, 1, 0, 0])
    assert [row.task for row in overlay.changes().rows] == [2]
    assert overlay.changes().leases == [LeaseRow(2, BOB, 5.0, 0)]
    assert overlay.times == {2: Times(20.0, 25.0, rearmed=False)}
    assert overlay.size == 2


def test_a_lease_that_is_only_renewed_is_not_stored() -> None:
    """Its end is this process's own; what was trained of it is stored."""
    overlay = QueueOverlay(stored())
    overlay._keep(lease_of(0, ANN, attempt=4, deadline=99.0))
    assert overlay.changes().leases == []
    assert overlay.times[0].deadline == 99.0

    overlay._keep(lease_of(0, ANN, attempt=4, trained=3))
    assert overlay.changes().leases == [LeaseRow(0, ANN, 5.0, 3)]


def test_a_lease_that_ended_is_none_any_more() -> None:
    """Its worker holds it no longer, and it has no end."""
    overlay = QueueOverlay(stored())
    found = overlay._lease(0)
    assert found is not None
    overlay._keep(found)
    overlay._drop(found)

    assert overlay._lease(0) is None
    assert (list(overlay._held_by(ANN)), overlay.times, overlay.changes().leases) == ([], {}, [])


def test_a_new_pass_forgets_failures_and_keeps_attempts() -> None:
    """Of rows that this draft has changed, and of those that it has not; skips and returned tasks begin anew."""
    overlay = QueueOverlay(stored())
    overlay._row(1).errors = 5
    overlay._set_skip(1, 7)
    overlay._begin_pass()

    rows = [overlay._peek(task) for task in range(3)]
    assert [(row.state, row.errors, row.timeouts, row.deaths) for row in rows] == [(TaskState.TODO, 0, 0, 0)] * 3
    assert [row.attempt for row in rows] == [4, 1, 0]
    assert [overlay._skip(task) for task in range(3)] == [0, 0, 0]
    changes = overlay.changes()
    assert (changes.rolled, changes.taken, changes.returned, changes.skips) == (True, 0, [], [])
    assert changes.head == HeadRow(pass_number=2)
    assert overlay._counts == [3, 0, 0, 0, 0]


@pytest.mark.parametrize(("records", "skips"), [(2, []), (5, [(2, 5)]), (0, [(2, 0)])])
def test_a_skip_is_stored_where_it_differs(records: int, skips: list[tuple[int, int]]) -> None:
    """0 forgets one that is stored."""
    overlay = QueueOverlay(stored())
    overlay._set_skip(2, records)

    assert overlay.changes().skips == skips
    assert overlay._skip(2) == records


def test_before_a_data_set_is_registered_there_are_no_tasks() -> None:
    """The pass has an order of none."""
    overlay = QueueOverlay(TaskQueue(QueueRules()))

    assert overlay._tasks() == 0
    with pytest.raises(IndexError):
        overlay._order(0)
