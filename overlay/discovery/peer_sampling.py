"""Peer sampling service (Jelasity et al. 2007): uniform samples of live peers, and the size of the swarm.

A background lookup of a random id every few seconds feeds the population estimate and the pool of samples. A swarm of
at most k nodes needs neither: every peer is known, and peers compare their contacts now and then. The rules are in
`overlay.discovery.population` and `overlay.discovery.sampling`.
"""

from __future__ import annotations

import asyncio
import math

from p2pnode.overlay.discovery.lookup_service import LookupService
from p2pnode.overlay.discovery.population import Estimator, Population, counted
from p2pnode.overlay.discovery.sampling import (
    BALL_NODES,
    POOL_AGE_S,
    POOL_BALLS,
    SLOTS,
    SamplePool,
    ball_radius,
    draw_distinct,
    inside_ball,
    is_kept,
)
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import random_id, relative_distance
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.members import FULL_VIEW
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Activity, Peer, PeerChange
from p2pnode.overlay.report import SamplingReport

#: Most balls in a pool, however large the samples are: a node cannot keep more of them fresh.
MAX_BALLS = 64
#: Seconds between sampling lookups until there are enough balls to sample from; later the pool grows at the rate that
#: keeps it full. Nodes that start at the same time would otherwise be busy with each other's lookups.
FILL_INTERVAL_S = 1.0
#: The first sampling lookup of a node comes so long after it has met more than k others. The nodes that start together
#: look up their own ids first; each sampling lookup before that meets the same strangers once more.
START_PAUSE_S = 2.0
#: Balls in the first pool; more where two samples would take more entries than these have.
FIRST_BALLS = 4
#: A pause is at least this many times as long as the lookup before it. When lookups take seconds, because network or
#: loop are overloaded, sampling must not add to the overload.
MIN_PAUSE_PER_LOOKUP = 4.0
#: In a swarm of at most k nodes, one peer is asked for its contacts this often; more often until none of them is new.
COMPARE_INTERVAL_S = 4.0
FIRST_COMPARE_INTERVAL_S = 0.3
FIRST_COMPARES = 5
#: In a larger swarm so many of the contacts that are new are verified at most, each time.
COMPARED = 4
ESTIMATE_TTL_S = 1.0


class PeerSampler:
    """Population and sample pool of one node."""

    def __init__(
        self,
        local: LocalNode,
        k: int,
        membership: Membership,
        lookups: LookupService,
        environment: Environment,
    ) -> None:
        self.pool = SamplePool()
        self._balls_wanted = POOL_BALLS
        self._balls_first = FIRST_BALLS
        self.estimator = Estimator(k)
        self._local = local
        self._k = k
        self._membership = membership
        self._members = membership.members
        self._lookups = lookups
        self._clock = environment.clock
        self._rng = environment.entropy.random
        self._estimate: tuple[float, Population | None] = (float("-inf"), None)
        membership.on_change(self._on_change)

    def _on_change(self, change: PeerChange) -> None:
        if change.kind in ("dead", "left"):
            self.pool.discard(change.node_id)

    # -- queries -------------------------------------------------------------------------------------------------

    def population(self) -> Population:
        """The number of nodes, this one included: counted where all are known, estimated elsewhere."""
        known = len(self._members.peers) + 1
        if known <= self._k:
            return counted(known)
        now = self._clock.monotonic()
        if now - self._estimate[0] > ESTIMATE_TTL_S:
            self._estimate = (now, self.estimator.estimate(now))
        estimate = self._estimate[1]
        if estimate is None or estimate.exact:
            # No lookup of a random target has ended yet: the number of known peers is a lower bound.
            return Population(float(known), float(self._k), 4.0 * known, False, 0)
        return estimate

    def knows_nearly_all(self) -> bool:
        """Whether the member list reaches the lower bound of the estimate; a lookup would hardly find others."""
        if self._members.all_known():
            return True
        known = len(self._members.peers) + 1
        return known <= FULL_VIEW and known >= self.population().low

    def workers(self) -> float:
        """Live nodes that train or are ready to, this one included if it trains; at least 1."""
        now = self._clock.monotonic()

        def works(peer: Peer) -> bool:
            return peer.is_worker(now) or peer.activity is Activity.READY or peer.is_in_first_step

        own = 1.0 if self._local.is_training else 0.0
        population = self.population()
        if population.exact:
            return max(1.0, own + sum(works(peer) for peer in self._members.peers))
        peers = [peer for node_id in self.pool.ids() if (peer := self._members.peer(node_id)) is not None]
        peers = peers or list(self._members.peers)
        share = sum(works(peer) for peer in peers) / max(1, len(peers))
        return max(1.0, own + share * (population.estimate - 1))

    def sample(self, count: int, since: float = 0.0) -> list[Peer]:
        """At most `count` live peers that count for barriers, uniform without replacement."""
        now = self._clock.monotonic()

        def allowed(node_id: bytes) -> bool:
            peer = self._members.peer(node_id)
            return (
                peer is not None
                and peer.counts_for_barrier(now, since)
                and not self._members.detector.is_suspect(node_id)
            )

        if self._members.all_known():
            drawn = draw_distinct(self._members.peers.ids(), count, allowed, self._rng)
        else:
            # A sample takes each peer from another ball, so a pool has a few balls more than the largest sample peers.
            self._balls_wanted = min(MAX_BALLS, max(self._balls_wanted, count + 2))
            self._balls_first = min(self._balls_wanted, max(self._balls_first, math.ceil(2 * count / BALL_NODES) + 2))
            drawn = self.pool.sample(count, allowed, self._rng)
            if len(drawn) < count:  # just joined: the pool is not full yet
                rest = [node_id for node_id in self._members.peers.ids() if node_id not in drawn]
                drawn += draw_distinct(rest, count - len(drawn), allowed, self._rng)
        return [peer for node_id in drawn if (peer := self._members.peer(node_id)) is not None]

    def report(self) -> SamplingReport:
        """The pool."""
        return SamplingReport(len(self.pool.ids()), self.pool.balls, self.pool.oldest_s(self._clock.monotonic()))

    # -- services ------------------------------------------------------------------------------------------------

    async def keep_sampling(self) -> None:
        """Look up random targets, for estimate and pool, until cancelled. In a small swarm compare contacts instead."""
        quiet = 0
        is_first = True
        while True:
            now = self._clock.monotonic()
            self.pool.expire(now)
            if self._members.all_known():
                self.pool.clear()
                quiet = 0 if await self._compare_contacts(self._local.node_id) else quiet + 1
                pause_s = FIRST_COMPARE_INTERVAL_S if quiet < FIRST_COMPARES else COMPARE_INTERVAL_S
            elif self._came_before_neighbours():
                await self._meet_neighbours()
                pause_s = FILL_INTERVAL_S
            elif is_first:
                is_first = False
                pause_s = START_PAUSE_S
            else:
                quiet = 0
                began = self._clock.monotonic()
                await self.sample_once()
                took_s = self._clock.monotonic() - began
                if len(self._members.peers) < FULL_VIEW:
                    await self._compare_contacts(random_id(self._rng), COMPARED)
                pause_s = FILL_INTERVAL_S if self.pool.balls < self._balls_first else self._steady_s()
                pause_s = max(pause_s, MIN_PAUSE_PER_LOOKUP * took_s)
            await asyncio.sleep(pause_s * (0.75 + 0.5 * self._rng.random()))

    def _steady_s(self) -> float:
        """Pause between sampling lookups that renews the pool a little faster than it ages."""
        kept_share = BALL_NODES / SLOTS
        return 0.9 * kept_share * POOL_AGE_S / self._balls_wanted

    async def _compare_contacts(self, target: bytes, most: int | None = None) -> bool:
        """Ask one peer for its contacts near `target`, and verify those that are unknown here, `most` of them; true if
        there were any.

        Nodes that join a small swarm at the same time find only half of each other; this way they find the rest.
        """
        node_ids = [node_id for node_id in self._members.peers.ids() if self._members.helper(node_id) is None]
        asked = self._members.contact(self._rng.choice(node_ids)) if node_ids else None
        if asked is None:
            return True
        known = await self._lookups.ask(asked, target)
        unknown = [contact for contact in known if contact.node_id not in self._members.peers]
        is_larger = most is None and len(known) > self._k
        if is_larger:  # neighbours are found by a lookup, not so; those that did not answer it may answer others
            if self._came_before_neighbours():
                await self._meet_neighbours()
            now = self._clock.monotonic()
            most, unknown = COMPARED, [one for one in unknown if self._members.negative.is_silent(one, now)]
        for contact in unknown[:most]:
            self._membership.verify(contact, named_by=asked)
        return is_larger or bool(unknown)

    def _came_before_neighbours(self) -> bool:
        """Whether this node looked up its id when there were hardly others to ask.

        So do the first of many that join at one moment. In the swarm that they become, they know none of the nodes
        closest to them, and these do not know them: no lookup would find them until they look up their ids again.
        """
        asked = self._lookups.most_asked(self._local.node_id)
        return asked is not None and asked < self._k - 1

    async def _meet_neighbours(self) -> None:
        """Look up the own id, and rest as after any lookup of this service: an overloaded loop has no more to do."""
        began = self._clock.monotonic()
        await self._lookups.find(self._local.node_id)
        await asyncio.sleep(MIN_PAUSE_PER_LOOKUP * (self._clock.monotonic() - began))

    async def sample_once(self) -> None:
        """Look up one uniformly random target, and add the result to the estimator and perhaps to the pool."""
        target = random_id(self._rng)
        found = await self._lookups.find(target)
        now = self._clock.monotonic()
        if len(found) < self._k and not self._members.all_known():
            return  # cut off, or many nodes just failed: no evidence for the number of nodes
        # The radius must not depend on this very lookup, or dense regions would have smaller balls.
        before = self.estimator.estimate(now)
        self.estimator.observe([relative_distance(target, contact.node_id) for contact in found], now)
        self._estimate = (float("-inf"), None)
        if before is None or before.exact:
            return
        radius = ball_radius(before.estimate)
        inside = inside_ball(target, (contact.node_id for contact in found), radius)
        others = [node_id for node_id in inside if node_id != self._local.node_id]
        if is_kept(len(inside), self._rng):
            self.pool.add(others, now, self._balls_wanted)
