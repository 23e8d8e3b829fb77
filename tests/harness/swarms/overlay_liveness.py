"""Which nodes are held for dead when datagrams are lost and loops stall, and how long the dead are held alive.

On the simulated network, real overlay code. Every node's loop stalls now and then: nothing of that node runs, it
receives nothing, and its timers come late. The others continue. A false death is a running node that another node
declared dead. Now and then one node is killed. Its detection time ends when no other node has it in its peers, routing
table, pool or cached lookups. A few nodes watch it as a partner from shortly before, as the owner of a shard is watched
by its backup. A barrier may have to wait until they declare it dead.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from p2pnode.overlay.ids import random_id
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import PeerChange
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import OverlayWorld

LOSS = 0.05
STALL_S = 0.2
#: A node's loop stalls once in so many seconds, on average.
STALL_EVERY_S = 10.0
#: A node is killed, and another one takes its place, so often.
KILL_EVERY_S = 120.0
#: Placement asks this often, so that there are candidates kept to be cleaned.
CANDIDATES_EVERY_S = 20.0
#: So many nodes watch the one that will be killed, from so long before.
WATCHERS = 3
WATCHED_S = 5.0
#: A partner's death is known within the bound of overlay/membership/failure_detector.py, and a round more: it may have
#: stalled in one.
PARTNER_BOUND_S = 7.0
#: Services of a node that look others up.
LOOKING_UP = ("overlay sampling", "overlay refresh", "overlay crawl")
#: Within this long after a crash, no node lists the crashed one any more (docs/architecture.md).
BOUND_S = 15.0


@dataclass
class Watched:
    """What happened to a swarm in which no node failed but the killed ones."""

    node_seconds: float = 0.0
    false_deaths: int = 0
    suspicions: int = 0
    refuted: int = 0
    stalls: int = 0
    #: Of each killed node: until the first other one declared it dead, until half did, until no node listed it.
    first_s: list[float] = field(default_factory=list)
    half_s: list[float] = field(default_factory=list)
    gone_s: list[float] = field(default_factory=list)
    #: Of each killed node and each that watched it: until that one declared it dead.
    watched_s: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def holds(node: Overlay, node_id: bytes) -> bool:
    """Whether a node still has this one in its peers, which candidates are of, or in its table or pool."""
    return node_id in node.peers or node_id in node._protocol.router or node_id in node._sampler.pool.ids()


class _Watch:
    def __init__(self, world: OverlayWorld, stall_s: float, rng: random.Random, *, lookups: bool) -> None:
        self.world = world
        self.stall_s = stall_s
        self.lookups = lookups
        self.rng = rng
        self.found = Watched()
        self.services: list[asyncio.Task[None]] = []

    async def add(self, number: int) -> None:
        await self.world.join(number, through=[other for other in range(3) if other in self.world.nodes])
        self.begin(number)

    def begin(self, number: int) -> None:
        node = self.world.nodes[number]
        node.on_change(self._changed)
        loop = asyncio.get_running_loop()
        self.services.append(loop.create_task(self._stall(number), name=f"stalls of {number}"))
        if self.lookups:
            self.services.append(loop.create_task(self._place(number, node), name=f"placement of {number}"))
        for task in node._tasks if not self.lookups else ():
            if task.get_name() in LOOKING_UP:
                task.cancel()

    def _changed(self, change: PeerChange) -> None:
        if change.kind == "suspect":
            self.found.suspicions += any(node.node_id == change.node_id for node in self.world.nodes.values())
        elif change.kind == "refuted":
            self.found.refuted += 1
        elif change.kind == "dead" and any(node.node_id == change.node_id for node in self.world.nodes.values()):
            self.found.false_deaths += 1
            self.found.reasons.append(f"{self.world.clock.monotonic():.1f}: {change.reason}")

    async def _stall(self, number: int) -> None:
        while number in self.world.nodes and self.stall_s:
            await asyncio.sleep(self.rng.expovariate(1 / STALL_EVERY_S))
            self.world.stall(number, self.stall_s)
            self.found.stalls += 1

    async def _place(self, number: int, node: Overlay) -> None:
        while number in self.world.nodes:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * CANDIDATES_EVERY_S)
            await node._candidates.of(random_id(self.rng))

    async def kill_one(self) -> None:
        """Kill a node, wait until all nodes know, and put another one in its place."""
        number = self.rng.choice([number for number in sorted(self.world.nodes) if number >= 3])
        node_id = self.world.nodes[number].node_id
        others = [node for other, node in sorted(self.world.nodes.items()) if other != number]
        watchers = self.rng.sample([node for node in others if node.is_alive(node_id)], WATCHERS)
        for node in watchers:
            node.watch([node_id])
        await asyncio.sleep(WATCHED_S)
        await self.world.kill(number)
        died = self.world.clock.monotonic()
        rest = list(self.world.nodes.values())
        knew = sum(node.is_alive(node_id) for node in rest)
        first = half = False
        while any(holds(node, node_id) for node in rest):
            left = sum(node.is_alive(node_id) for node in rest)
            now_s = self.world.clock.monotonic() - died
            for node in [node for node in watchers if not node.is_alive(node_id)]:
                self.found.watched_s.append(now_s)
                watchers.remove(node)
                node.watch([])
            if not first and left < knew:
                first = True
                self.found.first_s.append(now_s)
            if not half and left <= knew / 2:
                half = True
                self.found.half_s.append(now_s)
            assert now_s < 300, f"still held after {now_s:.0f} s"
            await asyncio.sleep(0.1)
        gone_s = self.world.clock.monotonic() - died
        self.found.gone_s.append(gone_s)
        self.found.watched_s += [gone_s] * len(watchers)
        for node in watchers:
            node.watch([])
        await self.add(max(self.world.nodes) + 1)


def run(
    seed: int, nodes: int, seconds: float, *, stall_s: float = STALL_S, loss: float = LOSS, lookups: bool = True
) -> Watched:
    """So many virtual seconds of a swarm. Without `lookups` there is nothing but probes to carry gossip."""

    async def story() -> Watched:
        world = OverlayWorld(seed, loss=loss, recording=False)
        watch = _Watch(world, stall_s, random.Random(f"{seed}/watch"), lookups=lookups)
        await world.raise_swarm(nodes, bootstraps=3)
        await asyncio.sleep(10)
        for number in list(world.nodes):
            watch.begin(number)
        began = world.clock.monotonic()
        while (elapsed := world.clock.monotonic() - began) < seconds:
            pause_s = min(KILL_EVERY_S, seconds - elapsed)
            await asyncio.sleep(pause_s)
            await watch.kill_one()
        watch.found.node_seconds = nodes * (world.clock.monotonic() - began)
        for service in watch.services:
            service.cancel()
        await asyncio.gather(*watch.services, return_exceptions=True)
        await world.stop()
        return watch.found

    return VirtualLoop().run(story(), limit_s=2 * seconds + 600)
