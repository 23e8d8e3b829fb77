"""Overlay nodes that come and go, on the simulated network.

Lives are exponential with a median of ten virtual minutes. Of those that end, three in four are killed and one in four
leaves in order. A third returns on its own disk after a while; the others are replaced by new nodes. Every node may
end; a bootstrap that ends returns at its address. A lookup is right when the node looked for, alive from before its
start to after its end, comes back first and at its address.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

from p2pnode.overlay.discovery.lookup_service import Finished
from p2pnode.overlay.overlay import Overlay
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import OverlayWorld

MEDIAN_LIFE_S = 600.0
BOOTSTRAPS = 3
#: A node that joined so lately is not looked for yet: it may still be on its way in.
SETTLED_S = 10.0
LOOKUPS_PER_MINUTE = 30
LEAVING_SHARE, RETURNING_SHARE = 0.25, 1 / 3
AWAY_S = (2.0, 60.0)


@dataclass
class Churned:
    """What became of a swarm."""

    deaths: int = 0
    leaves: int = 0
    lookups: int = 0
    right: int = 0
    by_minute: list[float] = field(default_factory=list)
    took: list[Finished] = field(default_factory=list)
    isolated: int = 0
    unreached: int = 0
    dead_entries: float = 0.0
    dead_peers: float = 0.0
    estimate_error: float = 0.0


class Churn:
    def __init__(self, world: OverlayWorld, nodes: int, median_life_s: float, rng: random.Random) -> None:
        self.world = world
        self.nodes = nodes
        self.mean_life_s = median_life_s / math.log(2)
        self.rng = rng
        self.found = Churned()
        self.joined_at: dict[int, float] = {}
        self.numbers = nodes
        self.lives: dict[asyncio.Task[None], bool] = {}

    def begin(self, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self._live(number), name=f"life {number}")
        self.lives[task] = True
        task.add_done_callback(lambda ended: self.lives.pop(ended, None))

    async def _live(self, number: int) -> None:
        """Lives of one place in the swarm: one node after the other."""
        rng = self.rng
        while True:
            await asyncio.sleep(rng.expovariate(1 / self.mean_life_s))
            self.joined_at.pop(number, None)
            if rng.random() < LEAVING_SHARE:
                self.found.leaves += 1
                await self.world.nodes[number].leave()
            else:
                self.found.deaths += 1
            await self.world.kill(number, refused=rng.random() < 0.5)
            if number < BOOTSTRAPS or rng.random() < RETURNING_SHARE:
                await asyncio.sleep(rng.uniform(*AWAY_S))
            else:
                self.world.disks.pop(number, None)
                number, self.numbers = self.numbers, self.numbers + 1
            others = [other for other in range(BOOTSTRAPS) if other != number]
            await self.world.join(number, through=others)
            self.joined_at[number] = self.world.clock.monotonic()

    def settled(self) -> list[Overlay]:
        """Nodes that have been in for a moment."""
        now = self.world.clock.monotonic()
        return [self.world.nodes[number] for number, at in sorted(self.joined_at.items()) if now - at > SETTLED_S]

    async def look_up(self) -> bool | None:
        """One lookup of one settled node by another; None if either ended meanwhile."""
        asker, wanted = self.rng.sample(self.settled(), 2)
        found = await asker.lookup(wanted.node_id)
        living = self.world.nodes.values()
        if asker not in living or wanted not in living:
            return None
        self.found.took.append(next(each for each in reversed(asker._lookups.recent) if each.target == wanted.node_id))
        return bool(found) and found[0].node_id == wanted.node_id and found[0].address == wanted.address

    async def minute(self) -> None:
        outcomes: list[bool] = []
        for _ in range(LOOKUPS_PER_MINUTE):
            outcome = await self.look_up()
            if outcome is not None:
                outcomes.append(outcome)
            await asyncio.sleep(60.0 / LOOKUPS_PER_MINUTE)
        self.found.lookups += len(outcomes)
        self.found.right += sum(outcomes)
        self.found.by_minute.append(sum(outcomes) / len(outcomes))

    def judge(self) -> None:
        """The swarm as it is at the end."""
        settled = self.settled()
        alive = {node.node_id: node for node in self.world.nodes.values()}
        entries = [contact.node_id for node in settled for contact in node._protocol.router]
        peers = [peer.node_id for node in settled for peer in node.peers]
        self.found.dead_entries = sum(node_id not in alive for node_id in entries) / len(entries)
        self.found.dead_peers = sum(node_id not in alive for node_id in peers) / len(peers)
        self.found.isolated = sum(all(peer.node_id not in alive for peer in node.peers) for node in settled)
        reached = {settled[0].node_id}
        todo = deque(reached)
        while todo:
            for peer in alive[todo.popleft()].peers:
                if peer.node_id in alive and peer.node_id not in reached:
                    reached.add(peer.node_id)
                    todo.append(peer.node_id)
        self.found.unreached = sum(node.node_id not in reached for node in settled)
        errors = [node.population().estimate / len(alive) - 1 for node in settled]
        self.found.estimate_error = statistics.median(map(abs, errors))


def run(seed: int, nodes: int, minutes: int, median_life_s: float = MEDIAN_LIFE_S, *, loss: float = 0.0) -> Churned:
    """Churn for so many virtual minutes."""

    async def story() -> Churned:
        world = OverlayWorld(seed, loss=loss, recording=False)
        churn = Churn(world, nodes, median_life_s, random.Random(f"{seed}/churn"))
        await world.raise_swarm(nodes, bootstraps=BOOTSTRAPS)
        now = world.clock.monotonic()
        churn.joined_at = dict.fromkeys(range(nodes), now)
        await asyncio.sleep(SETTLED_S + 1)
        for number in range(nodes):
            churn.begin(number)
        for _ in range(minutes):
            await churn.minute()
        churn.judge()
        lives = list(churn.lives)
        for task in lives:
            task.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await world.stop()
        return churn.found

    return VirtualLoop().run(story(), limit_s=60.0 * minutes + 600)
