"""One shard among four stores: no delta is lost or added twice, whatever is late, lost, suspected, or dead.

`tests.harness.histories.store_histories` plays the services around the stores and checks the invariants. Random
histories reach far; Hypothesis shrinks a failing one.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.harness.histories.store_histories import World
from tests.harness.swarms.store_swarm import DELTAS, NAMES

ACTIONS = {
    "push": 6,
    "deliver": 26,
    "lose": 2,
    "time_out": 2,
    "add_learner": 4,
    "hand_over": 2,
    "suspect": 2,
    "crash": 1,
    "notice_crash": 2,
    "gossip": 2,
    "ask_owner": 3,
    "fold": 1,
}


def play(seed: int, events: int) -> World:
    """A random history: the faults of the machine below, at odds that let more of it come to an end."""
    rng = random.Random(seed)
    world = World(synchronous=seed % 3 == 0)
    names, weights = list(ACTIONS), list(ACTIONS.values())
    for _ in range(events):
        name, other, place = rng.choice(NAMES), rng.choice(NAMES), rng.randrange(1000)
        match rng.choices(names, weights)[0]:
            case "push":
                world.push(rng.randrange(DELTAS), name)
            case "add_learner" | "gossip" as action:
                getattr(world, action)(name, other)
            case "fold":
                world.fold(name, rng.randrange(14))
            case "deliver" | "lose" | "time_out" as action:
                getattr(world, action)(place)
            case action:
                getattr(world, action)(name)
        world.check()
    world.settle()
    return world


def test_random_histories_lose_and_double_nothing() -> None:
    """A hundred histories of 250 events each keep every invariant and end with one owner. Acknowledgements, promotions,
    hand-overs, take-overs and fenced owners all happen in them."""
    worlds = []
    for seed in range(100):
        try:
            worlds.append(play(seed, 250))
        except BaseException:
            print(f"seed {seed}")
            raise

    counts = {what: sum(world.counts[what] for world in worlds) for what in worlds[0].counts}
    print(counts)
    assert counts["acknowledged"] >= 50
    assert min(counts.values()) >= 3


NODES = st.sampled_from(NAMES)
PLACES = st.integers(0, 63)


class ShardMachine(RuleBasedStateMachine):
    """Hypothesis chooses the history, and makes a failing one short."""

    @initialize(synchronous=st.booleans())
    def begin(self, synchronous: bool) -> None:
        self.world = World(synchronous=synchronous)
        self.world.add_learner("a", "b")
        self.world.drain()

    @rule(number=st.integers(0, DELTAS - 1), name=NODES)
    def push(self, number: int, name: str) -> None:
        self.world.push(number, name)

    @rule(number=st.integers(0, DELTAS - 1))
    def push_to_an_owner(self, number: int) -> None:
        if (owner := self.world.acting_owner()) is not None:
            self.world.push(number, owner.name)

    @precondition(lambda self: self.world.in_transit)
    @rule(place=PLACES)
    def deliver(self, place: int) -> None:
        self.world.deliver(place)

    @precondition(lambda self: self.world.in_transit)
    @rule(count=st.integers(1, 8))
    def deliver_the_oldest(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver(0)

    @precondition(lambda self: self.world.in_transit)
    @rule(place=PLACES)
    def lose(self, place: int) -> None:
        self.world.lose(place)

    @precondition(lambda self: self.world.waiting)
    @rule(place=PLACES)
    def time_out(self, place: int) -> None:
        self.world.time_out(place)

    @rule(name=NODES, to=NODES)
    def add_learner(self, name: str, to: str) -> None:
        self.world.add_learner(name, to)

    @rule(name=NODES)
    def hand_over(self, name: str) -> None:
        self.world.hand_over(name)

    @rule(name=NODES)
    def suspect(self, name: str) -> None:
        self.world.suspect(name)

    @precondition(lambda self: not self.world.crashed)
    @rule(name=NODES)
    def crash(self, name: str) -> None:
        self.world.crash(name)

    @rule(name=NODES)
    def notice_crash(self, name: str) -> None:
        self.world.notice_crash(name)

    @rule(source=NODES, to=NODES)
    def gossip(self, source: str, to: str) -> None:
        self.world.gossip(source, to)

    @rule(name=NODES)
    def ask_owner(self, name: str) -> None:
        self.world.ask_owner(name)

    @rule(name=NODES, step=st.integers(0, 13))
    def fold(self, name: str, step: int) -> None:
        self.world.fold(name, step)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestShardMachine = ShardMachine.TestCase
TestShardMachine.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=50
)
