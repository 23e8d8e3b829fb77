"""Whether peers are drawn uniformly, beside the bias of "closest to a random id".

Two parts, because 200,000 draws with every datagram simulated would take hours. In a simulated swarm of real overlay
code every lookup of a random target is compared with the truth: the share whose ball (all nodes within the radius) is
exactly right. Then the real pool of every node is filled by lookups that return that truth, and renewed whole between
samples, so that the draws are independent and a chi-square test of them is valid. A smaller number of draws goes the
whole way, through real lookups.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from kademlia.node import Node as KademliaNode

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.peer_sampling import PeerSampler
from p2pnode.overlay.discovery.sampling import POOL_BALLS, ball_radius, inside_ball
from p2pnode.overlay.ids import random_id
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Activity, Contact, Peer
from p2pnode.overlay.system import SystemClock
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import OverlayWorld

BETA = 10


@dataclass(frozen=True)
class Uniformity:
    """Counts of draws against the uniform distribution."""

    draws: int
    p_value: float
    total_variation: float
    noise: float
    most: float
    least: float


def judge(counts: Sequence[int], sample: int = 1) -> Uniformity:
    """Chi-square of counts over equally likely nodes, each sample without replacement.

    Within a sample of β of n the counts vary less, by the factor 1 - (β - 1)/(n - 1). The p-value is that of Wilson
    and Hilferty (1931); `noise` is the total variation expected of truly uniform draws, sqrt(n / (2 π M)).
    """
    nodes, draws = len(counts), sum(counts)
    mean = draws / nodes
    chi_square = sum((count - mean) ** 2 / mean for count in counts) / (1 - (sample - 1) / (nodes - 1))
    freedom = nodes - 1
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return Uniformity(
        draws,
        0.5 * math.erfc(z / math.sqrt(2)),
        sum(abs(count / draws - 1 / nodes) for count in counts) / 2,
        math.sqrt(nodes / (2 * math.pi * draws)),
        max(counts) / mean,
        min(counts) / mean,
    )


class _Truth:
    """In the place of lookups and membership: every node is known and trains, and a lookup is never wrong."""

    def __init__(self, node_ids: Sequence[bytes], k: int = 20) -> None:
        self.k = k
        self.peers: list[Peer] = []
        self.members = self.detector = self
        self._table = ContactTable(len(node_ids), KademliaNode(b"\0" * 20))
        self._peers: dict[bytes, Peer] = {}
        for number, node_id in enumerate(node_ids):
            contact = Contact(node_id, Address("10.0.0.1", 1 + number))
            self._table.add(contact)
            self._peers[node_id] = Peer(contact, 1, 1, Activity.TRAINING, 0, 60.0, 0, True, 0.0, 0.0, 0.0)

    def closest(self, target: bytes, count: int) -> list[Contact]:
        return self._table.closest(target, count)

    async def find(self, target: bytes) -> list[Contact]:
        return self.closest(target, self.k)

    def on_change(self, callback: Callable[..., None]) -> None:
        """Nothing ever changes."""

    def all_known(self) -> bool:
        return False

    def is_suspect(self, _node_id: bytes) -> bool:
        return False

    def peer(self, node_id: bytes) -> Peer | None:
        return self._peers.get(node_id)


async def renew(discovery: PeerSampler, balls: int = POOL_BALLS) -> None:
    """Sample until nothing of the old pool is left in it."""
    discovery.pool.clear()
    while discovery.pool.balls < balls:
        await discovery.sample_once()


def draw_with_truth(seed: int, nodes: int, draws: int) -> Uniformity:
    """Every node draws equally often from its own pool."""
    rng = random.Random(f"{seed}/draws of {nodes}")
    node_ids = [random_id(rng) for _ in range(nodes)]
    truth = cast(Any, _Truth(node_ids))
    counts = dict.fromkeys(node_ids, 0)
    environment = make_environment(clock=SystemClock(), entropy=cast(Any, SimpleNamespace(random=rng)))

    async def story() -> None:
        for own_id in node_ids:
            local = LocalNode(own_id, 1, 1, "benchmark", Address("127.0.0.1", 1))
            discovery = PeerSampler(local, 20, truth, truth, environment)
            for _ in range(4):  # an estimate to begin with
                await discovery.sample_once()
            for _ in range(max(1, round(draws / nodes / BETA))):
                await renew(discovery)
                for peer in discovery.sample(BETA):
                    counts[peer.node_id] += 1

    asyncio.run(story())
    return judge(list(counts.values()), BETA)


def draw_naively(seed: int, nodes: int, draws: int) -> Uniformity:
    """The closest node to a random id, on the same ids."""
    rng = random.Random(f"{seed}/draws of {nodes}")
    node_ids = [random_id(rng) for _ in range(nodes)]
    truth = _Truth(node_ids)
    drawn = Counter(truth.closest(random_id(rng), 1)[0].node_id for _ in range(draws))
    return judge([drawn[node_id] for node_id in node_ids])


#: Lookups are counted for so long.
COUNTED_S = 30.0


@dataclass(frozen=True)
class Real:
    """A swarm of real overlay code."""

    exact_balls: float
    uniformity: Uniformity
    lookups_per_second: float
    oldest_s: float
    pool: float


def run_real(seed: int, nodes: int, lookups: int, draws: int, *, settle_s: float = 150.0) -> Real:
    """Check balls against the truth, look at the cost of the steady pool, then draw through real lookups."""

    async def story() -> Real:
        world = OverlayWorld(seed, recording=False)
        swarm = await world.raise_swarm(nodes, bootstraps=3)
        await asyncio.sleep(settle_s)
        before = [node.report().counters["lookups"] for node in swarm]
        await asyncio.sleep(COUNTED_S)
        reports = [node.report() for node in swarm]
        lookups_made = [report.counters["lookups"] - lookups for report, lookups in zip(reports, before, strict=True)]
        rng = random.Random(f"{seed}/real")
        truth = _Truth([node.node_id for node in swarm])
        radius = ball_radius(nodes)
        exact = 0
        for _ in range(lookups):
            target = random_id(rng)
            found = [contact.node_id for contact in await rng.choice(swarm).lookup(target)]
            true = [contact.node_id for contact in truth.closest(target, 20)]
            exact += inside_ball(target, found, radius) == inside_ball(target, true, radius)
        counts = dict.fromkeys((node.node_id for node in swarm), 0)

        async def draw(node: Any, times: int) -> None:
            for _ in range(times):
                await renew(node._sampler)
                for peer in node.sample(BETA):
                    counts[peer.node_id] += 1

        times = math.ceil(draws / BETA / nodes)
        askers = swarm[: max(1, min(nodes, round(draws / BETA / times)))]
        for first in range(0, len(askers), 50):
            await asyncio.gather(*(draw(node, times) for node in askers[first : first + 50]))
        await world.stop()
        return Real(
            exact / max(1, lookups),
            judge(list(counts.values()), BETA),
            statistics.median(lookups_made) / COUNTED_S,
            max(report.sampling.oldest_seconds for report in reports),
            statistics.median(report.sampling.pool for report in reports),
        )

    return VirtualLoop().run(story())
