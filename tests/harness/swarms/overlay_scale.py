"""Overlay nodes on the simulated network join, find each other, and lose a fifth at once.

Real overlay code, virtual time: the seconds are those of the simulated network (1 to 10 ms one way, no loss unless
named), not of this machine. A lookup has found its node when it comes back first; the share of dead entries is that of
the routing tables and of the lists of peers together.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from p2pnode.overlay.discovery.lookup_service import Finished
from p2pnode.overlay.ids import distance, random_id
from p2pnode.overlay.overlay import Overlay
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import OverlayWorld

BOOTSTRAPS = 3
DEAD_SHARE = 0.2
#: Tables are looked at this long after the deaths.
SETTLED_S = 60.0
#: Lookups under way at one moment.
AT_ONCE = 50


@dataclass(frozen=True)
class Found:
    """Some lookups: the share that found what there is, and what each took."""

    right: float
    took: Sequence[Finished]

    def seconds(self, share: float) -> float:
        """The quantile of the times."""
        ordered = sorted(finished.seconds for finished in self.took)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Joined:
    """A swarm that has come together. What a node has sent until the last has joined is a mean over the nodes; a proof
    is signed by one node and verified by another."""

    joined_s: float
    resolved: Found
    round_trip_s: float
    datagrams: float
    datagram_bytes: float
    proofs: float


@dataclass(frozen=True)
class Survived:
    """A swarm that lost a share of its nodes at one moment."""

    resolved: Found
    recall: float
    dead_returned: int
    call_timeout_s: float
    dead_entries: float
    dead_peers: float


async def resolve(pairs: Sequence[tuple[Overlay, Overlay]]) -> Found:
    """Each first node looks up the id of its second one."""
    took: list[Finished] = []
    right = 0

    async def one(asker: Overlay, wanted: Overlay) -> None:
        nonlocal right
        found = await asker.lookup(wanted.node_id)
        right += bool(found) and found[0].node_id == wanted.node_id and found[0].address == wanted.address
        took.append(next(each for each in reversed(asker._lookups.recent) if each.target == wanted.node_id))

    for first in range(0, len(pairs), AT_ONCE):
        await asyncio.gather(*(one(asker, wanted) for asker, wanted in pairs[first : first + AT_ONCE]))
    return Found(right / len(pairs), took)


async def recall(nodes: Sequence[Overlay], lookups: int, rng: random.Random, k: int = 20) -> tuple[float, int]:
    """Share of the true k closest among these that lookups of random targets find; and foreign nodes that they
    return."""
    alive = {node.node_id for node in nodes}
    shares: list[float] = []
    foreign = 0
    for _ in range(lookups):
        target = random_id(rng)
        true = sorted(alive, key=lambda node_id: distance(node_id, target))[:k]
        found = {contact.node_id for contact in await rng.choice(nodes).lookup(target)}
        shares.append(len(found & set(true)) / len(true))
        foreign += len(found - alive)
    return statistics.mean(shares), foreign


def pairs_of(nodes: Sequence[Overlay], count: int, rng: random.Random) -> list[tuple[Overlay, Overlay]]:
    """Ordered pairs of two different nodes."""
    return [(one, two) for one, two in (rng.sample(nodes, 2) for _ in range(count))]


async def join(world: OverlayWorld, nodes: int, pairs: int, rng: random.Random) -> Joined:
    """All at one moment through the bootstraps; the pairs are looked up as soon as the last has joined."""
    before = world.clock.monotonic()
    swarm = await world.raise_swarm(nodes, bootstraps=BOOTSTRAPS)
    joined_s = world.clock.monotonic() - before
    datagrams, datagram_bytes, proofs = (
        statistics.mean(node._protocol.counters[name] for node in swarm)
        for name in ("datagrams_out", "bytes_out", "proofs_made")
    )
    resolved = await resolve(pairs_of(swarm, pairs, rng))
    means = [mean for node in swarm if (mean := node._protocol.round_trips.mean_s) is not None]
    return Joined(joined_s, resolved, statistics.median(means), datagrams, datagram_bytes, proofs)


async def lose(world: OverlayWorld, share: float, pairs: int, rng: random.Random) -> Survived:
    """A share crashes at one moment, and the rest looks for each other from that moment on."""
    victims = rng.sample(sorted(world.nodes), round(share * len(world.nodes)))
    await asyncio.gather(*(world.kill(number) for number in victims))
    died = world.clock.monotonic()
    living = list(world.nodes.values())
    call_timeout_s = statistics.median(sum(node._protocol.round_trips.waits(None)) for node in living)
    resolved = await resolve(pairs_of(living, pairs, rng))
    share_found, dead_returned = await recall(living, max(20, pairs // 20), rng)
    await asyncio.sleep(max(0.0, died + SETTLED_S - world.clock.monotonic()))
    alive = {node.node_id for node in living}
    entries = [contact.node_id for node in living for contact in node._protocol.router]
    peers = [peer.node_id for node in living for peer in node.peers]
    return Survived(
        resolved,
        share_found,
        dead_returned,
        call_timeout_s,
        sum(node_id not in alive for node_id in entries) / len(entries),
        sum(node_id not in alive for node_id in peers) / len(peers),
    )


def run(seed: int, nodes: int, pairs: int, *, delay: tuple[float, float] = (0.001, 0.01)) -> tuple[Joined, Survived]:
    """The whole story of one seed."""

    async def story() -> tuple[Joined, Survived]:
        world = OverlayWorld(seed, delay=delay, recording=False)
        rng = random.Random(f"{seed}/story")
        joined = await join(world, nodes, pairs, rng)
        await asyncio.sleep(10)
        survived = await lose(world, DEAD_SHARE, pairs, rng)
        await world.stop()
        return joined, survived

    return VirtualLoop().run(story())
