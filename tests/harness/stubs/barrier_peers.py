"""Peers with a true step each, for a node that waits at a barrier on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.population import Population
from p2pnode.overlay.peers import Activity, Heartbeat, Peer, PeerTable
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.settings import BarrierSettings
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run

MINE = 20
#: Virtual seconds that a round of queries takes.
QUERY_S = 0.005
#: Step time where minutes are waited: the waiter looks again after a twentieth of it.
SLOW_S = 6.0


def node(number: int) -> bytes:
    return bytes([number]) * 20


class FakeOverlay:
    """Peers with a true step each, which a query reveals, unless they are silent."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.node_id = node(0)
        self.peers = PeerTable()
        self.steps: dict[bytes, int] = {}
        self.incarnations: dict[bytes, int] = {}
        self.activities: dict[bytes, Activity] = {}
        self.step_seconds: dict[bytes, float] = {}
        self.silent: dict[bytes, None] = {}
        #: How long a query waits for one that is silent.
        self.silence_s = QUERY_S
        self.dead: dict[bytes, None] = {}
        self.estimate = 1.0
        self.asked: list[list[int]] = []
        self.draws: list[int] = []
        #: The sample of each draw, the last one from then on; None: all peers.
        self.samples: list[list[int]] | None = None

    def add(
        self,
        number: int,
        step: int,
        *,
        known: int | None = None,
        activity: Activity = Activity.TRAINING,
        step_seconds: float = 0.1,
    ) -> None:
        """A peer at `step` whose last known heartbeat had `known` completed steps."""
        self.steps[node(number)] = step
        self.incarnations[node(number)] = 1
        self.activities[node(number)] = activity
        self.step_seconds[node(number)] = step_seconds
        self.hear(node(number), step if known is None else known)

    def hear(self, node_id: bytes, step: int) -> None:
        """A heartbeat of the peer arrives."""
        incarnation = self.incarnations[node_id]
        activity, step_seconds = int(self.activities[node_id]), self.step_seconds[node_id]
        heartbeat = Heartbeat(node_id, incarnation, incarnation, 8468, "", activity, step, step_seconds)
        self.peers.observe(heartbeat, Address("10.0.0.1", 8468), self.clock.monotonic())

    def population(self) -> Population:
        return Population(self.estimate, self.estimate, self.estimate, True, 1, None)

    def sample(self, count: int, since: float = 0.0) -> list[Peer]:
        self.draws.append(count)
        if self.samples is None:
            chosen = [peer.node_id for peer in self.peers]
        else:
            chosen = [node(number) for number in self.samples[min(len(self.draws), len(self.samples)) - 1]]
        return [self.peer(node_id) for node_id in chosen]

    def peer(self, node_id: bytes) -> Peer:
        peer = self.peers.get(node_id)
        assert peer is not None
        return peer

    def all_members(self, since: float = 0.0) -> list[Peer]:
        now = self.clock.monotonic()
        return [peer for peer in self.peers if peer.counts_for_barrier(now, since) and self.is_alive(peer.node_id)]

    def members(self) -> list[Peer]:
        return [peer for peer in self.peers if self.is_alive(peer.node_id)]

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self.peers and node_id not in self.dead

    async def query_steps(self, node_ids: Sequence[bytes]) -> None:
        self.asked.append([node_id[0] for node_id in node_ids])
        await asyncio.sleep(self.silence_s if any(node_id in self.silent for node_id in node_ids) else QUERY_S)
        for node_id in node_ids:
            if node_id not in self.silent and node_id not in self.dead:
                self.hear(node_id, self.steps[node_id])


Scenario = Callable[[FakeOverlay, BarrierWaiter], Coroutine[Any, Any, None]]


def play(scenario: Scenario, method: str = "pbsp", **settings: Any) -> None:
    """Run a scenario on the virtual loop with a gate of the method (s = 4 where it has one)."""

    async def main() -> None:
        clock = VirtualClock()
        overlay = FakeOverlay(clock)
        chosen = BarrierSettings(method=method, **settings)
        await scenario(overlay, BarrierWaiter(overlay, make_barrier(chosen), chosen, clock))

    run(main(), limit_s=600.0, strict=True)


def later(delay_s: float, change: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, change)
