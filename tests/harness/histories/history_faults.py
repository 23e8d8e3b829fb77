"""The faults of a conservation history: which strike, when, whom, and how each ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.shards.robust import Robust
from tests.harness.environment.simulated import Record
from tests.harness.environment.virtual_loop import START_S
from tests.harness.histories.conservation_plan import SHARDS
from tests.harness.histories.history_nodes import HistoryNodes
from tests.harness.swarms.exchange_swarm import GENESIS, World
from tests.harness.swarms.light_network import Member


class HistoryFaults(HistoryNodes):
    """Nodes that crash, pause, part, join and leave."""

    def __init__(self, seed: int, nodes: int, robust: Robust = "") -> None:
        super().__init__(seed, nodes, robust)
        #: Whether the moment of a request may be struck now.
        self.strikes = False
        self.asked_to_leave: dict[str, None] = {}
        self._moments = 0
        self.world.observers.append(self._on_request)
        self._tasks: list[asyncio.Task[None]] = []

    def _fault(self, what: str, names: list[str] | None = None, shards: list[int] | None = None) -> None:
        """Note a fault; it may stop these nodes and these shards, or all of them (None)."""
        self.tally.faults[what] = self.tally.faults.get(what, 0) + 1
        # Under bsp no shard goes on before the others.
        is_everywhere = shards is None or (shards and self.plan.synchronous)
        at_nodes = self.clocks.names() if names is None else names
        self.clocks.struck(at_nodes, range(SHARDS) if is_everywhere else shards or (), self.world.clock.monotonic())
        self.world.records.append(_record(self.world, "fault", what=what))

    def _shards_of(self, *names: str) -> list[int]:
        """The shards that these nodes own, back up or learn."""
        found: dict[int, None] = {}
        for name in names:
            exchange = self.world.members[name].exchange
            if exchange is not None:
                for shard in (*exchange.store.owned, *exchange.store.backed):
                    found[shard] = None
        return sorted(found)

    def may_crash(self, member: Member) -> bool:
        """Whether the guarantee covers its crash, as far as the owners know."""
        exchange = member.exchange
        if exchange.store.superseded:
            return False
        running = self.world.running()
        if any(not self._is_owned(shard, backed.owner.node_id) for shard, backed in exchange.store.backed.items()):
            return False  # its owner is gone, and it alone may have what both had
        for shard in range(SHARDS):
            owners = [one for one in running if one.exchange and self._owned_at(one.exchange, shard) is not None]
            if not owners:
                return False
            for one in owners:
                owned = self._owned_at(one.exchange, shard)
                assert owned is not None
                involved = one is member or (owned.backup and owned.backup.node_id == member.contact.node_id)
                if involved and not self._complete(one, shard):
                    return False
            # During a hand-over both sides of it own the shard, until the answer is there.
            acting = [
                one
                for one in owners
                if one.exchange and (owned := self._owned_at(one.exchange, shard)) is not None and not owned.moving
            ]
            parted = len(acting) > 1 or any(one.exchange and shard in one.exchange.store.superseded for one in running)
            if parted and exchange.store.log.entries(shard):
                return False
        return True

    def _owned_at(self, exchange: Exchange, shard: int) -> Owned | None:
        return exchange.store.owned.get(shard)

    def _is_owned(self, shard: int, node: bytes) -> bool:
        exchange = self.world.members[self.names[node]].exchange
        return exchange is not None and self._owned_at(exchange, shard) is not None

    def _complete(self, owner: Member, shard: int) -> bool:
        owned = self._owned_at(owner.exchange, shard)
        if owned is None or owned.backup is None:
            return False
        backup = self.world.members[self.names[owned.backup.node_id]]
        if backup.exchange is None or not self.world.reachable(owner, backup):
            return False
        if owned.moving and self._owned_at(backup.exchange, shard) is not None:
            return True
        # It has restarted, and its owner does not know that yet: a crash that is still to be detected.
        backed = backup.exchange.store.backed.get(shard)
        restarted = backup.starts > 1 and (backed is None or backed.owner.node_id != owner.contact.node_id)
        return not restarted

    async def faults(self) -> None:
        plan, chance = self.plan, self.chance
        moments = sorted(chance.uniform(2.0, plan.train_s) for _ in range(plan.faults))
        began = self._now()
        for moment in moments:
            await asyncio.sleep(max(0.0, began + moment - self._now()))
            what = chance.choice(["crash", "crash", "restart", "pause", "part", "part", "cut", "join", "leave"])
            names = self._present()
            owners = [name for name in names if self._shards_of(name)]
            # Two of three faults hit an owner or a backup.
            name = chance.choice(owners if owners and chance.random() < 0.67 else names)
            await self._strike(what, name, names)
        self.strikes = False

    def _present(self) -> list[str]:
        return sorted(member.name for member in self.world.running() if member.name not in self.asked_to_leave)

    def _on_request(self, source: str, target: str, request: str, payload: bytes) -> None:
        """Note what is forwarded; and kill one of the two nodes of a request at its moment: before it arrives, or soon
        after."""
        if request == "forward":  # the backup has the delta from then on
            sender = self.world.members[source].exchange
            assert sender is not None
            self.ledger.forwarded(source, payload.removeprefix(GENESIS))
        wanted, number, after_s = self.plan.moment or ("", 0, 0.0)
        if not self.strikes or request != wanted:
            return
        self._moments += 1
        if self._moments % 8 != number % 8:
            return
        name = self.chance.choice((source, target))
        if name not in self.asked_to_leave:
            self._later(after_s, partial(self._strike, "crash", name, self._present(), of="moment"))

    async def _strike(self, what: str, name: str, names: list[str], of: str = "") -> None:
        world, chance = self.world, self.chance
        member = world.members[name]
        if not member.running or world.isolated(name):
            return
        works = name in self.clocks.names()
        if what in ("crash", "restart", "leave") and (len(names) < 4 or not self.may_crash(member)):
            what = "pause"
        if of == "moment":
            self.tally.faults[f"{what} at a {self.plan.moment[0] if self.plan.moment else ''}"] = 1
        match what:
            case "crash" | "restart":
                self._fault(what, [name], self._shards_of(name))
                self.clocks.stop(name)
                await world.kill(name)
                after_s = chance.uniform(0.1, 2.5) if what == "restart" else chance.uniform(4.0, 12.0)
                if what == "restart" or chance.random() < 0.6:
                    self._later(after_s, partial(self._again, name, works))
            case "pause":
                self._fault(what, [name], self._shards_of(name))
                world.pause(name)
                self._later(chance.uniform(1.0, 9.0), partial(self._resumed, name))
            case "part":
                self._fault(what)
                groups = {one: chance.randrange(2) for one in [*names, *world.members]}
                if chance.random() < 0.3:
                    groups = dict.fromkeys(world.members, 0) | {name: 1}
                world.part(groups)
                self._later(chance.uniform(3.0, 12.0), self._healed)
            case "cut":
                other = chance.choice([other for other in names if other != name])
                self._fault(what, [name, other], self._shards_of(name, other))
                world.cut(name, other)
                self._later(chance.uniform(3.0, 8.0), self._healed)
            case "join":
                self._fault(what, [], [])
                self._later(0.0, partial(self._joined, f"j{len(world.members)}", chance.random() < 0.5))
            case "leave":
                self._fault(what, [], [])
                self.asked_to_leave[name] = None
                self._later(0.0, partial(self._left, name))

    def _later(self, after_s: float, work: Callable[[], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            await work()

        self._tasks.append(asyncio.create_task(wait(), name="fault"))

    async def _again(self, name: str, works: bool) -> None:
        if not self.world.members[name].running:
            self._fault("started again", [], [])
            await self.start(name, works=works and self.pushing)

    async def _joined(self, name: str, works: bool) -> None:
        await self.start(name, works=works and self.pushing)

    async def _resumed(self, name: str) -> None:
        self.world.resume(name)
        self._fault("resumed", [name], self._shards_of(name))

    async def _healed(self) -> None:
        paused = dict(self.world._paused)
        self.world.heal()
        self.world._paused.update(paused)
        self.world._watch_all()
        self._fault("healed")

    async def _left(self, name: str) -> None:
        member = self.world.members[name]
        exchange, overlay = member.exchange, member.overlay
        if exchange is None or overlay is None:
            return
        self.clocks.stop(name)
        if member.worker is not None:
            member.worker.cancel()
            member.worker = None
        overlay.eligible = False
        for other in self.world.running():
            if other.overlay is not None and other is not member and self.world.reachable(member, other):
                other.overlay.met(overlay)
        for _ in range(20):
            await exchange.leave(4.0)
            if member.exchange is not exchange:
                return
            if not exchange.store.owned and not exchange.outbox.steps and self.may_crash(member):
                await self.world.kill(name, left=True)
                self._fault("left", [], [])
                return
            await asyncio.sleep(0.5)


def _record(world: World, event: str, **fields: Any) -> Record:
    return Record(world.clock.monotonic() - START_S, "world", "info", event, fields)
