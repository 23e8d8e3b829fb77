"""The shared data of a node with several trainers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from p2pnode.training.devices.data_routes import DataRoutes
from p2pnode.training.sharing.member import DataMember
from p2pnode.training.trainer_link.data_messages import (
    Claim,
    DataGranted,
    DataKnown,
    DataOpened,
    DataShape,
    DataTrained,
    DataWanted,
    PartitionTrained,
)
from p2pnode.training.trainer_link.record_messages import RecordsGranted, RecordsWanted

SHAPE = DataShape("samples", 60, 1)


class Node:
    """A node alone with its data: its daemon answers each request of its trainers at once, as `DataService` does."""

    def __init__(self, trainers: int) -> None:
        self.member: DataMember | None = None
        self.inbox: list[list[Any]] = [[] for _ in range(trainers)]
        self.passed: list[Any] = []
        self.holds_answers = False
        self.routes = DataRoutes([box.append for box in self.inbox])
        self.routes.on_data(self.daemon)
        self.numbers = [0] * trainers
        self.epochs = [0] * trainers

    def daemon(self, message: Any) -> None:
        self.passed.append(message)
        match message:
            case DataOpened(shape, _):
                if self.member is None or self.member.shape != shape:
                    self.member = DataMember(b"n" * 20, 1, shape, 0.0)
                    self.member.is_admitted(0.0)
                else:
                    self.member.grant_again()
            case DataWanted() if not self.holds_answers:
                self.answer(message)
            case DataTrained(_, trained, partitions):
                assert self.member is not None
                self.member.on_trained(trained, partitions)

    def answer(self, wanted: DataWanted) -> None:
        member = self.member
        assert member is not None
        if wanted.begins:
            assert member.begin(0.0, finished=wanted.finished, has_claims=wanted.has_claims)
        claims = member.claim(wanted.position, wanted.count)
        if not claims and wanted.begins and not wanted.has_claims:
            claims = [member.claim_copy()]
        self.routes.to_trainers(DataGranted(wanted.number, member.epoch, claims))

    def ask(self, index: int, *, begins: bool = False, finished: bool = False, count: int = 2) -> list[Claim]:
        self.numbers[index] += 1
        self.routes.from_trainer(index, DataWanted(self.numbers[index], begins, finished, 0, count, has_claims=False))
        if not self.inbox[index]:
            return []
        granted = self.inbox[index].pop()
        assert granted.number == self.numbers[index], "the answer has another number than the request"
        self.epochs[index] = granted.epoch
        return list(granted.claims)

    def train(self, index: int, claim: Claim, *, turn: int = 1, offset: int | None = None) -> None:
        one = PartitionTrained(claim.epoch, claim.partition, offset or 1, finished=offset is None)
        self.routes.from_trainer(index, DataTrained(turn, [one], -1))


def test_trainers_of_a_node_have_different_partitions_of_one_epoch() -> None:
    """Together they get every partition of the epoch once, however they take turns."""
    node = Node(3)
    for index in range(3):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    assert sum(isinstance(one, DataOpened) for one in node.passed) == 1
    got: list[int] = []
    begins = [True] * 3
    while True:
        claims = [(index, node.ask(index, begins=begins[index])) for index in range(3)]
        begins = [False] * 3
        for index, granted in claims:
            for claim in granted:
                got.append(claim.partition)
                node.train(index, claim)
        if not any(granted for _, granted in claims):
            break
    assert sorted(got) == list(range(60))


def test_trainers_that_end_an_epoch_one_after_the_other_begin_the_same_next_one() -> None:
    """The first that begins anew moves the node to the next epoch, the second follows it."""
    node = Node(2)
    for index in range(2):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    for index in range(2):
        for claim in node.ask(index, begins=True, count=30):
            node.train(index, claim)
    for index in range(2):
        node.ask(index, begins=True, finished=True)
    assert node.epochs == [1, 1]


def test_what_a_trainer_had_when_it_failed_is_given_to_it_again_and_to_nobody_else() -> None:
    """A restarted trainer continues where its last report stood; what the other one has stays with it."""
    node = Node(2)
    for index in range(2):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    mine, theirs = node.ask(0, begins=True), node.ask(1, begins=True)
    node.train(0, mine[0], offset=1)
    node.routes.from_trainer(0, DataOpened(SHAPE, None))
    again = node.ask(0, begins=True)

    assert [(one.partition, one.offset) for one in again] == [(mine[0].partition, 1), (mine[1].partition, 0)]
    assert {one.partition for one in node.ask(0)}.isdisjoint(one.partition for one in theirs + mine)


def test_what_a_given_up_trainer_had_goes_to_another() -> None:
    """The next that asks gets the partitions of the one that never comes back."""
    node = Node(2)
    for index in range(2):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    lost = node.ask(0, begins=True)
    node.routes.gone(0)
    assert [one.partition for one in node.ask(1, begins=True)] == [one.partition for one in lost]


def test_an_answer_to_a_trainer_that_was_given_up_is_not_lost() -> None:
    """The claims of a request whose trainer has gone meanwhile go to the next that asks."""
    node = Node(2)
    for index in range(2):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    node.holds_answers = True
    assert node.ask(0, begins=True) == []
    node.routes.gone(0)
    [wanted] = [one for one in node.passed if isinstance(one, DataWanted)]
    node.answer(wanted)
    node.holds_answers = False
    assert node.inbox[0] == []
    assert node.member is not None
    claimed = set(node.member.begun)
    first = node.ask(1, begins=True)
    assert len(claimed) == 2
    assert {(one.epoch, one.partition) for one in first} == claimed


def test_a_request_of_a_trainer_that_was_started_again_is_not_passed_on() -> None:
    """It waited for that of another trainer. The trainer that sent it is gone, and nobody would train its claims."""
    node = Node(2)
    for index in range(2):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    node.holds_answers = True
    for index in range(2):
        assert node.ask(index, begins=True) == []
    node.routes.from_trainer(1, DataOpened(SHAPE, None))
    node.holds_answers = False
    [wanted] = [one for one in node.passed if isinstance(one, DataWanted)]
    node.answer(wanted)
    assert (len(node.inbox[0]), node.inbox[1]) == (1, [])
    assert node.member is not None
    assert len(node.member.begun) == 2


def test_each_trainer_hears_what_is_known_under_its_own_turn() -> None:
    """The turn of a `DataKnown` is the last that its receiver has reported."""
    node = Node(2)
    for index in range(2):
        node.routes.from_trainer(index, DataOpened(SHAPE, None))
    for index, turn in ((0, 7), (1, 4)):
        node.train(index, node.ask(index, begins=True)[0], turn=turn)
    assert node.member is not None
    node.routes.to_trainers(DataKnown(4, node.member.state()))
    assert [box[-1].turn for box in node.inbox] == [7, 4]


def test_a_master_s_records_are_over_for_every_trainer_at_once() -> None:
    """A trainer that asks for a task is told that there is none, under its own number."""
    node = Node(2)
    node.routes.from_trainer(1, RecordsWanted(3, wait=True))
    assert node.inbox[1] == [RecordsGranted(3, None, is_over=True)]


@pytest.mark.parametrize("seed", range(8))
def test_no_partition_is_with_two_trainers_whoever_fails(seed: int) -> None:
    """Trainers ask, train, fail and come back in any order: a partition is with one of them at a time, and in the end
    every partition of the first epoch is trained once."""
    generator = random.Random(seed)
    node = Node(3)
    holds: list[dict[int, Claim]] = [{}, {}, {}]
    trained: list[int] = []
    is_open = [False] * 3
    while len(trained) < SHAPE.size:
        index = generator.randrange(3)
        begins = not is_open[index] or generator.random() < 0.05
        if begins:
            node.routes.from_trainer(index, DataOpened(SHAPE, None))
            is_open[index], holds[index] = True, {}
        if holds[index] and generator.random() < 0.6:
            partition = generator.choice(sorted(holds[index]))
            node.train(index, holds[index].pop(partition))
            trained.append(partition)
            continue
        for claim in node.ask(index, begins=begins, count=generator.randint(1, 4)):
            if claim.epoch == 0:
                assert not any(claim.partition in other for other in holds), f"{claim} is with two (seed {seed})"
                holds[index][claim.partition] = claim
    assert sorted(trained) == list(range(SHAPE.size))
