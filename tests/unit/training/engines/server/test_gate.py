"""The barrier at the server, with one common sample."""

import random

import pytest

from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.core import StepGate

WORKERS = [bytes([number]) for number in range(10)]


def gate(barrier: str, *, staleness: int = 2, sample: int = 3, seed: int = 1) -> StepGate:
    made = StepGate(ServerOptions(barrier=barrier, staleness=staleness).make_barrier(), sample, random.Random(seed))
    for worker in WORKERS:
        made.join(worker, 0)
    return made


def test_ssp_allows_the_staleness_and_no_more():
    """Completed steps differ by `staleness` at most when a worker begins."""
    at = gate("ssp", staleness=2)
    at.completed(WORKERS[0], 2)
    at.completed(WORKERS[1], 3)
    assert at.passed(WORKERS[:3], [], 0.0, 1.0) == [WORKERS[0], WORKERS[2]]


def test_all_idle_workers_are_compared_with_one_sample():
    """Under pbsp equal workers pass together or not at all, until the sample is drawn afresh."""
    at = gate("pbsp", sample=1)
    for worker in WORKERS[5:]:
        at.completed(worker, 1)
    found = []
    for draw in range(40):
        passed = at.passed(WORKERS[5:], [], float(draw), 1.0)
        assert passed in ([], WORKERS[5:])
        assert at.passed(WORKERS[5:], [], draw + 0.01, 1.0) == passed  # held for a twentieth of a step
        found.append(bool(passed))
    assert 10 <= sum(found) <= 30  # half of the workers have completed the step


def test_a_completed_step_draws_a_fresh_sample():
    """A held sample that was not fresh would block until its slowest member moves."""
    outcomes = set()
    for seed in range(20):
        at = gate("pbsp", sample=1, seed=seed)
        at.completed(WORKERS[9], 1)
        before = at.passed([WORKERS[9]], [], 0.0, 1000.0)
        for worker in WORKERS[:9]:
            at.completed(worker, 1)
        assert at.passed([WORKERS[9]], [], 0.0, 1000.0) == [WORKERS[9]]
        outcomes.add(bool(before))
    assert outcomes == {True, False}


@pytest.mark.parametrize("barrier", ["bsp", "ssp"])
def test_the_task_of_a_dead_worker_holds_a_complete_barrier(barrier):
    """A task that came back counts as a worker which has not completed its step."""
    at = gate(barrier, staleness=0)
    at.leave(WORKERS[9])
    for worker in WORKERS[:9]:
        at.completed(worker, 3)
    assert at.passed(WORKERS[:9], [3], 0.0, 1.0) == []
    assert at.passed(WORKERS[:9], [], 0.0, 1.0) == WORKERS[:9]


def test_a_joiner_begins_where_the_barrier_lets_it():
    """Under bsp after the step under way, under ssp within the staleness, never behind the slowest."""
    for barrier, staleness, expected in (("bsp", 0, 5), ("ssp", 2, 3), ("asp", 0, 0), ("ssp", 9, 0)):
        at = StepGate(ServerOptions(barrier=barrier, staleness=staleness).make_barrier(), 0, random.Random(1))
        at.join(b"a", 0)
        at.join(b"new", 5)
        assert at.steps[b"new"] == expected, barrier


def test_the_last_worker_that_leaves_is_remembered():
    """Steps do not begin again at 0 when all workers are gone for a moment."""
    at = gate("bsp")
    for worker in WORKERS:
        at.completed(worker, 4)
    for worker in WORKERS:
        at.leave(worker)
    assert at.lowest() == 4
    at.join(b"new", 0)
    assert at.steps == {b"new": 4}
