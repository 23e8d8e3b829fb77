"""Fetches for a joiner what the owners of shards do not serve: copies of other members.

A joiner waits for the whole vector. Other members are asked when the owners that are left do not deliver: half of the
owners are done, and the others take as long again; or no owner has sent anything for a while, whether requests to it
fail or it puts the joiner off. A failed fetch is not a finished one. A shard without an owner is waited for: its swarm
is being started again, and nobody knows yet which copy it will go on with.

The candidates of a shard are asked first, because its backup is one of them and has every delta. Then come members that
train, and so have the whole vector. The owners are asked on meanwhile, and the first answer counts. A copy may lack the
latest deltas; the joiner pulls the shard again from its owner after the first step. The shards are asked for in reverse
order, because their owners send them in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

from overlay.peers import Contact
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory

#: Owners have so long at least.
MIN_RELIEF_DELAY_S = 2.0
LOOK_INTERVAL_S = 0.05
#: Members asked for one shard before all is looked at again.
DONORS_ASKED = 4

#: Asks a member for its copies of shards.
FetchCopies = Callable[[Contact, list[int]], Awaitable[None]]


class JoinerRelief:
    """The relief of one pull. `waiting`: the shards that have not arrived. `is_receiving`: whether an owner sends."""

    def __init__(
        self,
        context: ExchangeContext,
        directory: OwnerDirectory,
        waiting: Mapping[int, None],
        is_receiving: Callable[[], bool],
        fetch: FetchCopies,
    ) -> None:
        self._context = context
        self._directory = directory
        self._waiting = waiting
        self._is_receiving = is_receiving
        self._fetch = fetch

    async def run(self, owners: Sequence[Sequence[int]]) -> None:
        """Return when every shard has arrived. `owners`: the shards of each."""
        clock = self._context.environment.clock
        began_s = idle_s = clock.monotonic()
        half_s: float | None = None
        while self._waiting:
            now = clock.monotonic()
            if self._is_receiving():
                idle_s = now
            if half_s is None and 2 * sum(map(self._is_done, owners)) >= len(owners) > 0:
                half_s = now
            is_late = half_s is not None and now - half_s >= max(MIN_RELIEF_DELAY_S, half_s - began_s)
            if is_late or now - idle_s >= MIN_RELIEF_DELAY_S:
                await self._ask_others()
                idle_s = clock.monotonic()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _is_done(self, shards: Sequence[int]) -> bool:
        return not any(shard in self._waiting for shard in shards)

    async def _ask_others(self) -> None:
        """Ask members for what is missing, those first that are most likely to have it."""
        missing = [shard for shard in reversed(list(self._waiting)) if self._owner(shard)]
        candidates = dict(zip(missing, await self._directory.candidates_of_all(missing), strict=True))
        workers = self._workers()
        for place in range(DONORS_ASKED):
            asked: dict[bytes, tuple[Contact, list[int]]] = {}
            for shard in missing:
                donors = self._fit([*candidates[shard], *workers], self._owner(shard))
                if shard in self._waiting and place < len(donors):
                    asked.setdefault(donors[place].node_id, (donors[place], []))[1].append(shard)
            for donor, shards in asked.values():
                self._log_change(donor, shards)
                await self._fetch(donor, [shard for shard in shards if shard in self._waiting])

    def _owner(self, shard: int) -> bytes:
        known = self._context.store.ownership.known_owners.get(shard)
        return b"" if known is None else known.owner.node_id

    def _workers(self) -> list[Contact]:
        """Members that train, in a random order."""
        context, now = self._context, self._context.environment.clock.monotonic()
        found = [peer.contact for peer in context.swarm.members() if peer.is_worker(now)]
        context.environment.entropy.random.shuffle(found)
        return found

    def _fit(self, donors: Sequence[Contact], *left_out: bytes) -> list[Contact]:
        swarm, view = self._context.swarm, self._context.view
        excluded: Container[bytes] = (swarm.node_id, *left_out)
        found = {donor.node_id: donor for donor in donors if donor.node_id not in excluded}
        return [one for node, one in found.items() if not (swarm.is_suspect(node) or view.is_gone(node))]

    def _log_change(self, donor: Contact, shards: Sequence[int]) -> None:
        owners = dict.fromkeys(self._owner(shard).hex()[:8] for shard in shards)
        log = self._context.environment.log
        log.info("donor_changed", slow=list(owners), donor=donor.node_id.hex()[:8], shards=len(shards))
