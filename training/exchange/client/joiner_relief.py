"""Fetches for a joiner what the owners of shards do not serve: copies of other members.

Promise 2: a joiner waits for the whole vector. Other members are asked when the owners that are left do not deliver:
half of the owners are done, and the others take as long again; or no owner has sent anything for a while, whether
requests to it fail or it puts the joiner off. A shard without an owner is waited for: its swarm is being started again,
and nobody knows yet which copy it will go on with.

The candidates of a shard are asked first, because its backup is one of them and has every delta. Then come members that
train, and so have the whole vector. The owners are asked on meanwhile, and the first answer counts. A copy may lack the
latest deltas; the joiner pulls the shard again from its owner after the first step. The shards are asked for in reverse
order, because their owners send them in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.swarm_view import SwarmView
from p2pnode.training.swarm import Swarm

#: Owners have so long at least.
MIN_RELIEF_DELAY_S = 2.0
LOOK_INTERVAL_S = 0.05
#: Members asked for one shard before all is looked at again.
DONORS_ASKED = 4


@dataclass(eq=False)
class JoinerRelief:
    """The relief of one pull. `waiting`: the shards that have not arrived. `is_receiving`: whether an owner sends.
    `fetch` asks a member for its copies of shards."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    directory: OwnerDirectory
    environment: Environment
    waiting: Mapping[int, None]
    is_receiving: Callable[[], bool]
    fetch: Callable[[Contact, list[int]], Awaitable[None]]

    async def run(self, owners: Sequence[Sequence[int]]) -> None:
        """Return when every shard has arrived. `owners`: the shards of each."""
        now_s = self.environment.clock.monotonic
        began_s = idle_s = now_s()
        half_s: float | None = None
        while self.waiting:
            if self.is_receiving():
                idle_s = now_s()
            done = sum(not any(shard in self.waiting for shard in shards) for shards in owners)
            if half_s is None and 2 * done >= len(owners) > 0:
                half_s = now_s()
            is_late = half_s is not None and now_s() - half_s >= max(MIN_RELIEF_DELAY_S, half_s - began_s)
            if is_late or now_s() - idle_s >= MIN_RELIEF_DELAY_S:
                await self._ask_others()
                idle_s = now_s()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _ask_others(self) -> None:
        """Ask members for what is missing, those first that are most likely to have it."""
        known, now_s = self.store.ownership.known_owners, self.environment.clock.monotonic()
        owners = {shard: known[shard].owner.node_id for shard in reversed(list(self.waiting)) if shard in known}
        candidates = await self.directory.candidates_of_all(list(owners))
        workers = [peer.contact for peer in self.swarm.members() if peer.is_worker(now_s)]
        self.environment.entropy.random.shuffle(workers)
        donors = {
            shard: self._fit([*found, *workers], owner)
            for (shard, owner), found in zip(owners.items(), candidates, strict=True)
        }
        for place in range(DONORS_ASKED):
            asked: dict[bytes, tuple[Contact, list[int]]] = {}
            for shard in owners:
                if shard in self.waiting and place < len(donors[shard]):
                    donor = donors[shard][place]
                    asked.setdefault(donor.node_id, (donor, []))[1].append(shard)
            for donor, shards in asked.values():
                slow = list(dict.fromkeys(owners[shard].hex()[:8] for shard in shards))
                self.environment.log.info("donor_changed", slow=slow, donor=donor.node_id.hex()[:8], shards=len(shards))
                await self.fetch(donor, [shard for shard in shards if shard in self.waiting])

    def _fit(self, donors: Sequence[Contact], owner: bytes) -> list[Contact]:
        found = {donor.node_id: donor for donor in donors if donor.node_id not in (self.swarm.node_id, owner)}
        return [one for node, one in found.items() if not (self.swarm.is_suspect(node) or self.view.is_gone(node))]
