"""What a story does with a swarm and sees of it, on either simulated network.

`tests.harness.swarms.swarm.Swarm` has whole nodes on the simulated sockets, `tests.harness.swarms.exchange_swarm.World`
exchanges alone on a light network, and `tests.harness.swarms.overlay_swarm.OverlayWorld` overlays alone. Each starts,
kills and cuts off its nodes by `start`, `kill` and `cut`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.trainer_link.interface import Vector
from tests.harness.environment.simulated import Record, VirtualClock
from tests.harness.environment.virtual_loop import VirtualLoop


class SimulatedSwarm:
    """Its time and its records."""

    #: How often a condition is looked at, in virtual seconds.
    look_s = 0.05

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.records: list[Record] = []

    async def until(
        self, condition: Callable[[], object], within_s: float, what: str, *, every_s: float | None = None
    ) -> float:
        """Wait in virtual time; returns the seconds it took, raises `AssertionError` with `what` when it is late."""
        began = self.clock.monotonic()
        while not condition():
            if self.clock.monotonic() - began > within_s:
                raise AssertionError(f"not within {within_s} virtual seconds: {what} (seed {self.seed})")
            await asyncio.sleep(every_s or self.look_s)
        return self.clock.monotonic() - began

    def of(self, event: str) -> list[Record]:
        """The records of one event."""
        return [record for record in self.records if record.event == event]


class ExchangingSwarm(SimulatedSwarm):
    """Its shards. A node has a `name`, a `node_id`, and an `exchange` as soon as that has begun."""

    def running(self) -> list[Any]:
        """The nodes that live, in the order of their first starts."""
        raise NotImplementedError

    def owners(self, shard: int = 0) -> list[Any]:
        """The nodes that own a shard: during a hand-over, and on two sides of a split, there are two."""
        return [one for one in self.running() if one.exchange is not None and shard in one.exchange.store.owned]

    def owner(self, shard: int = 0) -> Any:
        """The one with the highest term."""
        return max(self.owners(shard), key=lambda one: one.exchange.store.owned[shard].term)

    def owned(self, shard: int = 0) -> Owned:
        """The shard as its owner has it."""
        return self.owner(shard).exchange.store.owned[shard]

    def backup(self, shard: int = 0) -> Any:
        """The node that its owner names."""
        named = self.owned(shard).backup.node_id
        return next(one for one in self.running() if one.node_id == named)

    def model(self) -> Vector:
        """What the owners of all shards have, float32[total]."""
        shards = len(self.running()[0].exchange.store.bounds)
        return np.concatenate([self.owned(shard).state.value for shard in range(shards)])


def play(scenario: Callable[[Any], Awaitable[None]], make: Callable[[], Any], *, limit_s: float = 3600.0) -> Any:
    """Make a swarm, run the scenario in virtual time and end all nodes; returns the swarm for a look at its records."""
    made: list[Any] = []

    async def main() -> None:
        made.append(swarm := make())
        print(f"seed {swarm.seed}")
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=limit_s)
    return made[0]
