"""Many real exchanges on a light network: the code of `training/exchange` is real, everything below it is simulated.

The overlay (live peers, eligible peers, requests between nodes) is a table and a few timers. So a history of fifty
nodes takes a fraction of a second.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import numpy as np

from p2pnode.overlay.environment import Environment, Log
from p2pnode.training.exchange.directory import shard_key
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.recovery.rebalancing import TENURE_S
from p2pnode.training.manifest import PROTOCOL, Manifest
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.environment.simulated import InlineExecutor, ListLog
from tests.harness.swarms.exchange_overlay import Overlay
from tests.harness.swarms.light_network import RETURNED_S, LightNetwork, Member
from tests.harness.trainers.stub_trainer import plain_layout

GENESIS = b"g" * 16


class StartEntropy:
    """The randomness of one start of a node."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def token(self, size_bytes: int) -> bytes:
        return self.random.randbytes(size_bytes)


class World(LightNetwork):
    """Processes on these machines, each with one exchange."""

    def __init__(
        self,
        seed: int,
        *,
        settings: ExchangeSettings,
        shards: int,
        values: int,
        synchronous: bool,
        tenure_s: float = TENURE_S,
    ) -> None:
        super().__init__(seed)
        self._tenure_s = tenure_s
        self.settings = settings
        self.synchronous = synchronous
        #: Whether nodes train; if not, none is counted as a worker.
        self.training = True
        #: Capacity classes that nodes have announced.
        self.capacities: dict[bytes, int] = {}
        #: Of each shard the names of its best candidates, best first; the others follow by the distance of their ids.
        self.preferred: dict[int, list[str]] = {}
        #: Ids of nodes that nobody can dial.
        self.hidden: dict[bytes, None] = {}
        #: How far apart the barrier lets nodes be; None: there is none.
        self.staleness: int | None = None
        self.make_log: Callable[[str], Log] = lambda name: ListLog(self.records, name, self.clock)
        self.manifest = Manifest(
            protocol=PROTOCOL,
            run="world",
            genesis=GENESIS.hex(),
            task="stub",
            task_version="1",
            layout=plain_layout(values),
            frozen_digest="",
            shards=shards,
            rule=Rule(settings.outer_lr, settings.outer_momentum, settings.robust),
            weight=settings.weight,
            replicas=settings.replicas,
            local_steps=1,
            barrier_family="bsp" if synchronous else "relaxed",
            max_steps=0,
            until="",
        )

    # -- processes

    async def start(self, name: str, *, founder: bool = False, manifest: Manifest | None = None) -> Member:
        """Start a process on a machine, with the shards that the swarm has, or those of `manifest`. It knows all nodes
        it can reach, and these learn of it after a while."""
        member = self.member(name)
        member.starts += 1
        overlay = Overlay(self, name, member.contact, member.starts)
        others = [one for one in self.members.values() if one.overlay is not None and one is not member]
        exchange = Exchange(
            swarm=overlay,
            manifest=manifest or self.manifest,
            settings=self.settings,
            staleness=self.staleness,
            replica=np.zeros(self.manifest.layout.total, np.float32),
            incarnation=member.starts,
            environment=Environment(
                clock=self.clock,
                entropy=StartEntropy(f"{self.seed}/{name}/{member.starts}"),
                disk=member.disk,
                executor=InlineExecutor(),
                log=self.make_log(name),
            ),
        )
        exchange.rebalancer.tenure_s = self._tenure_s
        member.overlay, member.exchange = overlay, exchange
        await exchange.start()
        for other in others:
            if self.reachable(member, other):
                overlay.met(other.overlay)
                asyncio.get_running_loop().call_later(self.random.uniform(*RETURNED_S), self._hear, other, member)
        if founder:
            await exchange.found()
        return member

    def spread(self, member: Member) -> None:
        """Something of a node has changed: the others hear of it after a while."""
        for other in self.running():
            if other is not member and self.reachable(member, other):
                asyncio.get_running_loop().call_later(self.random.uniform(*RETURNED_S), self._hear, other, member)

    async def join(self, name: str) -> Member:
        """Start a process that gets the model from the first node that runs."""
        source = self.running()[0].contact
        member = await self.start(name)
        await member.exchange.join(source)
        return member

    async def kill(self, name: str, *, left: bool = False) -> None:
        """Kill a process; with `left` the others have received its leave message."""
        member = self.members[name]
        self._end(member)
        for other in self.running():
            peer = other.overlay.peers.get(member.node_id)
            if left and peer is not None and peer.alive:
                peer.alive = False
                other.overlay.changed(peer.node_id, "left")
        self._watch_all()

    async def stop(self) -> None:
        """Kill all processes; no node notices."""
        for member in self.running():
            self._end(member)

    def _end(self, member: Member) -> None:
        overlay, exchange = member.overlay, member.exchange
        overlay.running = False
        for task in [*overlay.tasks, *exchange._tasks, *([member.worker] if member.worker else [])]:
            task.cancel()
        for one in exchange.values.tasks():
            one.halt()
        for delivery in exchange.sent.deliveries.values():
            if delivery.task is not None:
                delivery.task.cancel()
        member.overlay = member.exchange = member.worker = None

    # -- placement

    def hide(self, name: str) -> None:
        """Nobody can dial a node any more: it finds out, and may own nothing."""
        member = self.members[name]
        self.hidden[member.node_id] = None
        member.overlay.eligible = False
        member.overlay._candidates.clear()
        self.spread(member)

    def prefer(self, shards: Iterable[int], *names: str) -> None:
        """These are the best candidates of the shards from now on, the first one before the second."""
        for shard in shards:
            self.preferred[shard] = list(names)
        for member in self.running():
            member.overlay._candidates.clear()

    def place(self, key: bytes, node_id: bytes) -> int:
        """How far behind a preferred candidate of a shard another one is."""
        shard = next((shard for shard in self.preferred if shard_key(GENESIS, shard) == key), None)
        names = [] if shard is None else self.preferred[shard]
        member = self._by_id[node_id]
        return names.index(member.name) if member.name in names else len(names)

    def announce(self, name: str, capacity: int) -> None:
        """A node announces another capacity class."""
        self.capacities[self.members[name].node_id] = capacity
        for member in self.running():
            member.overlay._candidates.clear()

    # -- shards

    def bystander(self) -> Member:
        """A node that neither owns shard 0 nor backs it."""
        return next(one for one in self.running() if one not in (self.owner(), self.backup()))

    def value(self) -> list[float]:
        """The first value of each shard, at its owner."""
        return [float(self.owned(shard).state.value[0]) for shard in range(self.manifest.shards)]

    def logged(self) -> bool:
        """One owner for each shard, with a backup, and nothing left to offer."""
        stores = [member.exchange.store for member in self.running()]
        all_owned = [one for store in stores for one in store.owned.values()]
        paired = all(one.backup is not None and not one.moving for one in all_owned)
        return paired and len(all_owned) == len(stores[0]) and not any(store.superseded for store in stores)

    def placed(self) -> bool:
        """Whether the best candidate owns each shard, and the second one backs it up where there are backups."""
        for shard, names in self.preferred.items():
            if [one.name for one in self.owners(shard)] != names[:1]:
                return False
            owned = self.owned(shard)
            if owned.moving or owned.learner:
                return False
            if len(names) > 1 and self.settings.replicas and owned.backup != self.members[names[1]].contact:
                return False
        return True

    def paired(self) -> bool:
        """Whether each backup has what its owner has, bit by bit."""
        for shard in range(self.manifest.shards):
            if self.owned(shard).backup is None:
                return False
            backed = self.backup(shard).exchange.store.backed.get(shard)
            copy, state = None if backed is None else backed.state, self.owned(shard).state
            if copy is None or _compared(copy) != _compared(state):
                return False
        return True


def _compared(state: ShardState) -> tuple[object, ...]:
    """All that a backup has to have as its owner has it."""
    return state.value.tobytes(), state.known_count, sorted(state.norms.rows())
