"""What must hold in a conservation history: meanwhile, once it is quiet, and at its end."""

from __future__ import annotations

import asyncio

import numpy as np

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.pull_codecs import pull_codec
from p2pnode.training.encoding.table import CODECS, CodecName
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.store.replica import NO_POSITION, Position
from p2pnode.training.shards.state import ShardState
from tests.harness.histories.conservation_plan import SHARDS
from tests.harness.histories.history_faults import HistoryFaults
from tests.harness.swarms.light_network import Member

#: Within this time after the last fault every shard has an owner and a backup, and no delta is in an outbox.
QUIET_S = 30.0
#: How far a published value may be from the owner's, as a share of its largest.
PUBLISHED_APART = 0.1

#: A node whose credit to wait is spent leaves an owner that is late to its next pull.
LAST_PULLS = 3


class HistoryChecks(HistoryFaults):
    """Nobody waits too long, all comes to rest, and states, backups and replicas have what the ledger says."""

    async def _quiet(self) -> None:
        began = self._now()
        while why := self._unquiet():
            await asyncio.sleep(0.5)
            self._look(None)
            if self._now() - began > QUIET_S:
                raise self.ledger.broken(f"not quiet after {QUIET_S:.0f} s: {why}")
        self.tally.quiet_s = max(self.tally.quiet_s, self._now() - began)

    def _look(self, faults: asyncio.Task[None] | None) -> None:
        now = self._now()
        workers = [one.worker for one in self.world.running() if one.worker is not None]
        for task in [*([faults] if faults is not None else []), *self._tasks, *workers]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        waiting = None if self.pushing else {member.name: _waiting(member) for member in self.world.running()}
        if late := self.clocks.late(now, waiting):
            raise self.ledger.broken(late)

    def _unquiet(self) -> str:
        members = self.world.running()
        for member in members:
            exchange = member.exchange
            if exchange.outbox.steps:
                return f"{member.name} has steps {exchange.outbox.steps} in its outbox"
            # Where an owner cannot tell what it has, a copy waits for another owner, as long as the log reaches.
            if mended := [shard for shard, copy in exchange.store.superseded.items() if copy.unclear_at is None]:
                return f"{member.name} has shards {mended} to mend"
            if member.worker is not None and not member.worker.done():
                return f"{member.name} joins, or makes its last step"
        for shard in range(SHARDS):
            owners = [one for one in members if one.exchange and shard in one.exchange.store.owned]
            if len(owners) != 1:
                return f"shard {shard} is owned by {[one.name for one in owners]}"
            (owner,) = owners
            owned = owner.exchange.store.owned[shard]
            if owned.backup is None or owned.moving or owned.learner is not None:
                return f"shard {shard} of {owner.name} moves or has no backup"
            backup = self.world.members[self.names[owned.backup.node_id]].exchange
            backed = backup.store.backed.get(shard) if backup is not None else None
            if backed is None or backed.state is None or backed.owner.node_id != owner.contact.node_id:
                return f"shard {shard} of {owner.name}: its backup backs it not"
        return ""

    async def _check(self) -> None:
        for member in self.world.running():
            self.ledger.check_node(member.contact.node_id, member.starts, member.exchange)
            if member.exchange.counters.publication_mismatches:
                raise self.ledger.broken(f"{member.name} has followed a publication to other bits than its owner's")
        await self._check_replicas()
        await self._quiet()
        for shard in range(SHARDS):
            owner, state = self._owner(shard)
            owned = owner.exchange.store.owned[shard]
            backup = self.world.members[self.names[owned.backup.node_id]].exchange if owned.backup else None
            if backup is None or (copy := backup.store.backed[shard].state) is None:
                raise self.ledger.broken(f"shard {shard} of {owner.name} has lost its backup")
            if self.plan.synchronous:
                copy.fold(10**6, owner.exchange.store.rule)
            self.ledger.check_state(shard, owner.name, state)
            self.ledger.check_state(shard, f"{owner.name}'s backup", copy)

    def _owner(self, shard: int) -> tuple[Member, ShardState]:
        owners = [one for one in self.world.running() if one.exchange and shard in one.exchange.store.owned]
        exchanges = [(one, one.exchange) for one in owners if one.exchange is not None]
        # Shards move on to better candidates all the time: during a hand-over the new owner's term is higher.
        owner, exchange = max(exchanges, key=lambda entry: entry[1].store.owned[shard].term)
        return owner, exchange.store.owned[shard].state

    def _owners(self) -> list[str]:
        return [self._owner(shard)[0].name for shard in range(SHARDS)]

    async def _check_replicas(self) -> None:
        """Every node has the owners' values after a last pull, and the same bits after the final one."""
        members = self.world.running()
        exchanges = {member.name: member.exchange for member in members if member.exchange is not None}
        settings = self.plan.settings
        for _ in range(LAST_PULLS):
            owners = self._owners()
            reports = await asyncio.gather(*(exchange.pull(10**6) for exchange in exchanges.values()))
            has_all = not any(report.missing for report in reports)
            # An owner copies its own value. Its backup, which owns the shard next, may have added in another order.
            if has_all and owners == self._owners():
                break
            await asyncio.sleep(1.0)
        if not has_all:
            raise self.ledger.broken("a last pull has missing shards, although nothing fails any more")
        pulled = {name: pull_codec(settings, exchange.codec.codec) for name, exchange in exchanges.items()}
        self._check_followers(
            {name: exchange for name, exchange in exchanges.items() if not CODECS[pulled[name]].is_whole}
        )
        for name, exchange in exchanges.items():
            if CODECS[pulled[name]].is_whole:
                self._check_replica(name, exchange, pulled[name])
        await asyncio.gather(*(exchange.pull_final(10**6, QUIET_S) for exchange in exchanges.values()))
        for name, exchange in exchanges.items():
            self._check_replica(name, exchange, "float32")
            if exchange.counters.publication_mismatches:
                raise self.ledger.broken(f"{name} had other bits than those published, although nothing damages any")

    def _check_followers(self, exchanges: dict[str, Exchange]) -> None:
        """Nodes at one position of a publication hold the same bits, near to the owner's value; owners hold their
        own."""
        held: dict[tuple[int, Position], tuple[str, Vector]] = {}
        for name, exchange in exchanges.items():
            replica = exchange.replica
            for shard in range(SHARDS):
                mine, position = replica.slice_of(shard), replica.position_of(shard)
                if position != NO_POSITION:
                    other, theirs = held.setdefault((shard, position), (name, mine))
                    if not np.array_equal(mine, theirs):
                        raise self.ledger.broken(f"{name} and {other} follow shard {shard} and hold other bits")
                    self.tally.followers += 1
                owner, state = self._owner(shard)
                apart, largest = np.abs(mine - state.value).max(), np.abs(state.value).max()
                # A sparse publication leaves most of a value for later; the owner has chosen its codec.
                is_partial = CODECS[pull_codec(self.plan.settings, owner.exchange.codec.codec)].is_partial
                if not is_partial and apart > PUBLISHED_APART * largest + 0.1:
                    raise self.ledger.broken(f"{name} follows shard {shard} of {owner.name} {apart} apart")

    def _check_replica(self, name: str, exchange: Exchange, codec: CodecName) -> None:
        for shard in range(SHARDS):
            owner, state = self._owner(shard)
            pulled, exact = exchange.replica.slice_of(shard), state.value
            rounded = codecs.decoded(bytes(codecs.encode(exact, codec)), codec, exact.size)
            # A node copies what it owns: exact, even if it has handed the shard over since.
            if np.array_equal(pulled, rounded) or np.array_equal(pulled, exact):
                continue
            if codec == "float32" or not self._is_published(shard, exchange):
                raise self.ledger.broken(f"{name} has pulled shard {shard} of {owner.name}, and has other values")

    def _is_published(self, shard: int, exchange: Exchange) -> bool:
        """Whether a node that has pulled changes until now holds what is published of the owner's present version: then
        nothing is new for it, although it pulls whole values now."""
        owner, state = self._owner(shard)
        publication, replica = owner.exchange.publisher._publications.get(shard), exchange.replica
        if publication is None or publication.published.source.version != state.version:
            return False
        return np.array_equal(replica.slice_of(shard), publication.published.value)


def _waiting(member: Member) -> list[int]:
    """The shards for which a node has deltas in its outbox."""
    deliveries = member.exchange.sent.deliveries.values()
    return sorted({shard for delivery in deliveries for shard in delivery.unacknowledged})
