"""The queue protocol of the trainers of one host, as a state machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.devices.cycle import CycleServer, GivenAnswer
from p2pnode.training.trainer_link.messages import StepAnswer

LOCAL, DISTRIBUTED, STOP = StepAnswer.LOCAL, StepAnswer.DISTRIBUTED, StepAnswer.STOP


class Hall:
    """Workers that ask, and wait for their answers. The distributed step is made when all living ones have joined."""

    def __init__(self, workers: int, period: int) -> None:
        self.server = CycleServer(period)
        self.numbers: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.inside: set[int] = set()
        self.trace: list[GivenAnswer] = []
        for worker in range(workers):
            self.begin(worker)

    def begin(self, worker: int) -> None:
        self.numbers[worker] = 0
        self.take(self.server.join(worker))

    def ask(self, worker: int) -> None:
        assert worker not in self.waiting
        assert worker not in self.inside
        self.numbers[worker] += 1
        self.waiting.add(worker)
        self.take(self.server.request(worker, self.numbers[worker]))

    def die(self, worker: int) -> None:
        del self.numbers[worker]
        self.waiting.discard(worker)
        self.inside.discard(worker)
        self.take(self.server.lost(worker))

    def take(self, answers: list[GivenAnswer]) -> None:
        for one in answers:
            assert one.worker in self.waiting, f"{one} answers no request"
            assert one.number == self.numbers[one.worker]
            self.waiting.remove(one.worker)
            self.trace.append(one)
            if one.answer is DISTRIBUTED:
                self.inside.add(one.worker)
        members = set(self.server.workers)
        if members and members <= self.inside:
            self.inside -= members
            self.take(self.server.end_cycle())

    @property
    def free(self) -> list[int]:
        return sorted(worker for worker in self.numbers if worker not in self.waiting | self.inside)


@pytest.mark.parametrize(("workers", "period"), [(4, 1), (4, 2), (1, 1), (8, 4)])
def test_the_trace_is_that_of_lsgd(workers: int, period: int) -> None:
    """Workers of one speed get W · period times 0 and then W times 1, again and again."""
    hall = Hall(workers, period)
    for _ in range(3 * workers * (period + 1)):
        hall.ask(hall.free[0] if len(hall.free) == workers else hall.free[-1])
    answers = [one.answer for one in hall.trace]

    assert answers[: workers * (period + 1)] == [LOCAL] * (workers * period) + [DISTRIBUTED] * workers
    for cycle in range(1, hall.server.cycle):
        of_cycle = [one for one in hall.trace if one.cycle == cycle]
        assert [one.answer for one in of_cycle] == [LOCAL] * (workers * period) + [DISTRIBUTED] * workers


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_cycle_has_its_local_steps_and_then_one_distributed_for_each(
    workers: int, period: int, generator: random.Random
) -> None:
    """Whoever asks when: a cycle gives exactly W · period times local, then exactly one distributed to each worker, and
    as many answers as there were requests."""
    hall = Hall(workers, period)
    asked = 0
    while hall.server.cycle < 5:
        assert hall.free, "all wait, and nobody is answered"
        hall.ask(generator.choice(hall.free))
        asked += 1
        assert len(hall.trace) + len(hall.waiting) == asked
    for cycle in range(1, 5):
        of_cycle = [one for one in hall.trace if one.cycle == cycle]
        kinds = [one.answer for one in of_cycle]
        assert kinds == [LOCAL] * (workers * period) + [DISTRIBUTED] * workers
        assert sorted(one.worker for one in of_cycle if one.answer is DISTRIBUTED) == list(range(workers))
        taken = [one.worker for one in of_cycle if one.answer is LOCAL]
        assert set(taken) == set(range(workers)), "each has a local step of its own"


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
@pytest.mark.promise(16)
def test_workers_that_die_and_come_back_hang_nobody(workers: int, period: int, generator: random.Random) -> None:
    """However workers die and come back: while one lives that is free to ask, or none does, nobody waits in vain, and
    each cycle gives each of its workers at most one distributed."""
    hall = Hall(workers, period)
    next_name = workers
    for _ in range(120):
        kind = generator.random()
        if kind < 0.05 and hall.numbers:
            hall.die(generator.choice(sorted(hall.numbers)))
        elif kind < 0.1:
            hall.begin(next_name)
            next_name += 1
        elif hall.free:
            hall.ask(generator.choice(hall.free))
        assert hall.free or not hall.numbers, f"all of {sorted(hall.numbers)} wait"
    for cycle in range(1, hall.server.cycle + 1):
        joined = [one.worker for one in hall.trace if one.cycle == cycle and one.answer is DISTRIBUTED]
        assert len(joined) == len(set(joined))


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40), st.randoms(use_true_random=False))
def test_a_stop_reaches_everybody(workers: int, period: int, before: int, generator: random.Random) -> None:
    """After a stop in the middle of a cycle everybody who waits, and everybody who asks later, is told to stop."""
    hall = Hall(workers, period)
    for _ in range(before):
        hall.ask(generator.choice(hall.free))
    waiting = set(hall.waiting)
    told = hall.server.stop()

    assert {one.worker for one in told} == waiting
    assert {one.answer for one in told} <= {STOP}
    for worker in range(workers):
        later = hall.server.request(worker, hall.numbers[worker] + 1)
        assert [(one.worker, one.answer) for one in later] == [(worker, STOP)]


def test_a_repeated_request_has_the_same_answer() -> None:
    """A request that comes twice is counted once, and an older one has no answer any more."""
    server = CycleServer(2)
    server.join(0)
    first = server.request(0, 1)

    assert server.request(0, 1) == first
    assert server.given == 1
    assert [one.answer for one in server.request(0, 2)] == [LOCAL]
    assert server.request(0, 1) == []
    assert [one.answer for one in server.request(0, 3)] == [DISTRIBUTED]


def test_a_worker_without_data_sits_out_the_cycle() -> None:
    """A worker that ended its part by itself holds nobody up, and takes part in the next cycle."""
    server = CycleServer(1)
    for worker in (0, 1):
        server.join(worker)
    assert [one.answer for one in server.request(0, 1)] == [LOCAL]
    assert server.request(0, 2) == []
    assert [one.answer for one in server.sits_out(1)] == [LOCAL]
    assert [one.answer for one in server.request(0, 3)] == [DISTRIBUTED]
    server.end_cycle()
    assert [one.answer for one in server.request(1, 1)] == [LOCAL]


def test_leased_steps_are_given_as_they_are_granted() -> None:
    """With leased steps a request waits for a grant, and is told to join when no more will be granted."""
    server = CycleServer(8, is_leased=True)
    for worker in (0, 1):
        server.join(worker)
    assert server.request(0, 1) == []
    assert server.wants == 1
    assert [one.answer for one in server.grant(1, is_closed=False)] == [LOCAL]
    assert server.request(1, 1) == []
    assert server.grant(1, is_closed=False) == [], "a repeated grant allows nothing more"
    answers = server.grant(2, is_closed=True)
    assert [(one.worker, one.answer) for one in answers] == [(1, LOCAL)]
    assert server.grant(9, is_closed=False) == [], "after the last grant nothing is allowed"
    assert server.wants == 0
    assert [one.answer for one in server.request(0, 2)] == [DISTRIBUTED]


def test_a_period_of_nothing_is_refused() -> None:
    """A cycle without a local step would never train."""
    with pytest.raises(ValueError, match="period = 0"):
        CycleServer(0)
