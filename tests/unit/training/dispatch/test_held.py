"""What a node holds of the queue, and when a record counts as trained."""

from __future__ import annotations

import random

import pytest

from p2pnode.training.dispatch.answers import Held
from p2pnode.training.dispatch.chunks import DatasetChunk
from p2pnode.training.dispatch.held import HeldTasks
from p2pnode.training.trainer_link.record_messages import RecordTask, TaskTrained


def task(number: int, records: int = 10, attempt: int = 1, skip: int = 0) -> RecordTask:
    return RecordTask(number, attempt, 1, 0, skip, [DatasetChunk("f", 0, 0, records)])


def holding(*tasks: RecordTask) -> HeldTasks:
    held = HeldTasks()
    for one in tasks:
        held.add(one, 30.0)
        held.draw()
    return held


def test_what_a_crashed_turn_trained_is_drawn_again() -> None:
    """A new trainer goes on after the last step that has a delta, counted or under way."""
    held = holding(task(1), task(2))
    held.report(4, [TaskTrained(1, 1, 5)])
    held.report(5, [TaskTrained(1, 1, 10), TaskTrained(2, 1, 3)])
    held.abandon(5)
    held.reopen()

    drawn = [held.draw(), held.draw(), held.draw()]

    assert [one and (one.task, one.skip) for one in drawn] == [(1, 5), (2, 0), None]


def test_a_step_counts_what_was_trained_up_to_it() -> None:
    """The step after it may never be pushed."""
    held = holding(task(1))
    held.report(1, [TaskTrained(1, 1, 5)])
    held.report(2, [TaskTrained(1, 1, 10)])

    assert held.count(1) == []
    assert held.held() == [Held(1, 1, trained=5)]
    assert held.count(2) == [Held(1, 1, trained=10)]


def test_a_dropped_step_gives_its_tasks_back() -> None:
    """A delta that nobody pushes: what was counted before stays trained, the rest is for others."""
    held = holding(task(1), task(2))
    held.report(1, [TaskTrained(1, 1, 4)])
    held.count(1)
    held.report(2, [TaskTrained(1, 1, 8)])

    assert held.drop(2) == [Held(1, 1, trained=4)]
    assert held.held() == [Held(2, 1, 0)]
    assert held.drop(2) == []


@pytest.mark.parametrize("seed", range(20))
def test_over_random_histories_counted_records_are_a_prefix_and_none_is_lost(seed: int) -> None:
    """Crashes, overlaps and counts in any order: counted ≤ reported ≤ records, and every task is finished once."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    held, finished, step, counted = HeldTasks(), [], 0, 0
    progress: dict[int, int] = {}
    for number in range(8):
        held.add(task(number, records=draw.randint(1, 6)), 30.0)
    while len(held):
        drawn = []
        while (one := held.draw()) is not None:
            drawn.append(one)
            progress[one.task] = one.skip
        for one in [found.task for found in held._tasks.values()]:
            step += 1
            progress[one.task] = min(one.records, progress[one.task] + draw.randint(1, 4))
            held.report(step, [TaskTrained(one.task, 1, progress[one.task])])
            if draw.random() < 0.3:
                held.abandon(step)
                held.reopen()
                break
            if draw.random() < 0.6:
                counted = draw.randint(counted, step)
                finished += held.count(counted)
        if draw.random() < 0.5:
            counted = step
            finished += held.count(step)
        held.reopen()
    assert sorted(one.task for one in finished) == list(range(8))
