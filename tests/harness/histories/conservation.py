"""Random histories with many faults over the real exchange, and a check that every acknowledged delta is in the model.

`python -m tests.harness.histories.conservation --histories 2000` plays that many; `--seed 17` replays one, event by
event, with the same digest. In every history some nodes push about a delta a second to the owners of all shards.
Meanwhile nodes crash, also in the middle of a hand-over or a catch-up, return with the states on their disks, are
paused, are separated from the others, join and leave. Requests are lost, duplicated, delayed and torn. Then the faults
end, and after a while

* every shard has one owner, and a backup that has its state;
* both have every delta that any owner acknowledged, also its own, and their values are the sums of their deltas, each
  once (`tests.harness.histories.delta_ledger`);
* what a node has trained is acknowledged, refused, or in its residual;
* every node has the owners' values after a last pull, and the same bits after the final one;
* and no node waited longer for an acknowledgement or a fresh value than the detection bound allows
  (`tests.harness.histories.progress_clocks`).

Codec, weight, momentum and barrier family vary with the seed. In some histories all nodes stop in order at the end, and
start again from their disks.

Under the trimmed mean a value is no sum. Then owner and backup have the same windows and the same value, and each has
every acknowledged delta.

There are no exceptions. A node whose crash the guarantee does not cover is paused instead of killed. That is a node of
a pair that is not complete as far as its owner knows. Before a split is reconciled, it is also a node whose log has
deltas of that shard.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from overlay.transport import TransportError
from tests.harness.environment.simulated import Record, digest
from tests.harness.environment.virtual_loop import START_S, VirtualLoop
from tests.harness.histories.delta_ledger import Ledger, Sent, identities
from tests.harness.histories.progress_clocks import STEP_MOST_S, ProgressClocks
from tests.harness.swarms.exchange_swarm import Links, Member, World
from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.encoding.pull_codecs import WHOLE, pull_codec
from training.exchange.client.outbox import Delivery
from training.exchange.codec_choice import CHOICES, LineFacts
from training.exchange.exchange import Exchange
from training.exchange.messages import PushResult
from training.exchange.store import state_files
from training.exchange.store.records import Owned, StoredState
from training.exchange.store.replica import NO_POSITION, Position
from training.exchange.terms import Term
from training.layout import shard_bounds
from training.manifest import Manifest
from training.settings import ExchangeSettings
from training.shard_count import Partition
from training.shards.outer_rule import Rule
from training.shards.robust import Robust
from training.shards.state import ShardState
from training.stored_shards import StoredShards, divided

SHARDS = 4
VALUES = 16
#: Into how many parts the shards of a history with divisions are divided at most: those are its cells, by which all is
#: counted. One that divides nothing has a cell for each shard.
MOST_PARTS = 4
#: Within this time after the last fault every shard has an owner and a backup, and no delta is in an outbox.
QUIET_S = 30.0
#: What the trainer leaves in its memory when it computes the next delta.
OVERWRITTEN = 777.0
#: How far a published value may be from the owner's, as a share of its largest.
PUBLISHED_APART = 0.1
#: As `p2pnode.lifecycle.node`: how long a node that starts takes nothing over.
TAKEOVER_DELAY_S = 30.0
#: Steps of every worker after all nodes have been switched off and on.
STEPS_AFTER = 3
PullCodec = Literal["auto", "float32", "bfloat16", "int8", "int4", "sparse"]
#: Requests at whose moment a node is killed: those that move a shard, or a delta on its way to the backup.
MOMENTS = ("hand_over", "hand_over", "state", "learn", "forward", "survey", "mend", "push")


def delta_of(name: str, incarnation: int, step: int) -> Vector:
    """float32[VALUES], multiples of 1/1024 from a quarter to one: their sums are exact, also of what bfloat16 makes of
    them, and few sets of them have the same sum."""
    chance = random.Random(zlib.crc32(f"{name}/{incarnation}/{step}".encode()))
    return np.array([chance.randrange(2**8, 2**10) / 1024.0 for _ in range(VALUES)], np.float32)


@dataclass
class Plan:
    """What a seed decides before the first event."""

    nodes: int
    workers: int
    synchronous: bool
    train_s: float
    faults: int
    links: Links
    #: With the codec "auto" every node draws another one for each step, as if its line changed all the time.
    settings: ExchangeSettings
    #: The request at whose moment a node is killed, which of those requests, and how much later.
    moment: tuple[str, int, float] | None
    #: Whether a node trains on while its last step is exchanged.
    overlaps: bool
    keeps_states: bool
    switches_off: bool

    @classmethod
    def of(cls, seed: int, nodes: int, robust: Robust) -> Plan:
        chance = random.Random(f"{seed}/plan")
        return cls(
            nodes=nodes,
            workers=max(2, min(nodes // 3, chance.randint(4, 10))),
            synchronous=chance.random() < 0.3,
            train_s=chance.uniform(14.0, 26.0),
            faults=chance.randint(2, 7),
            links=Links(
                loss=chance.choice([0.0, 0.0, 0.01, 0.05]),
                duplicate=chance.choice([0.0, 0.0, 0.02, 0.1]),
                slow=chance.choice([0.0, 0.01, 0.05]),
                torn=chance.choice([0.0, 0.0, 0.03]),
                state_s=chance.choice([0.0, 1.5]),
            ),
            settings=_settings(chance, robust, changes=random.Random(f"{seed}/codec").random() < 0.25),
            moment=(chance.choice(MOMENTS), chance.randint(1, 8), chance.choice([0.0, 0.01, 0.05]))
            if chance.random() < 0.5
            else None,
            overlaps=chance.random() < 0.3,
            keeps_states=chance.random() < 0.5,
            switches_off=chance.random() < 0.25,
        )

    @property
    def is_exact(self) -> bool:
        """Whether sums of deltas are equal to the bit in any order."""
        settings = self.settings
        is_plain = settings.weight == "sum" and settings.outer_lr == 1.0 and not settings.outer_momentum
        return is_plain and settings.codec in ("float32", "bfloat16") and not settings.robust


def _settings(chance: random.Random, robust: Robust, *, changes: bool) -> ExchangeSettings:
    codec: CodecName = chance.choice(["float32", "float32", "bfloat16", "bfloat16", "int8", "int4", "sparse"])
    pulls: PullCodec = chance.choice(["auto", "auto", "float32", "bfloat16", "int8", "int4", "sparse"])
    weight: Literal["sum", "population"] = chance.choice(["sum", "sum", "population"])
    lr, momentum = chance.choice([(1.0, 0.0), (1.0, 0.0), (0.7, 0.5), (0.5, 0.9)])
    if codec == "sparse":
        lr, momentum = 1.0, 0.0
    plain = ExchangeSettings(
        codec="float32",
        pull_codec="float32",
        sparse_values=2,
        shards=SHARDS,
        weight="sum",
        outer_lr=1.0,
        outer_momentum=0.0,
        tenure_s=8.0,
        robust=robust,
    )
    if robust == "trimmed-mean":
        return plain
    return msgspec.structs.replace(
        plain,
        codec="auto" if changes else codec,
        pull_codec=pulls,
        weight=weight,
        outer_lr=lr,
        outer_momentum=momentum,
    )


@dataclass
class Tally:
    """The counts of a history."""

    seed: int
    acknowledged: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    taken_over: int = 0
    repaired: int = 0
    taken_back: int = 0
    windows: int = 0
    #: Deltas that a split gave two weights or two forms, so that their share of a sum is known between two bounds.
    ambiguous: int = 0
    refused: int = 0
    #: Identities that states do not list any more.
    forgotten: int = 0
    clipped: int = 0
    #: Shards of replicas that were compared because they follow the same chain.
    followers: int = 0
    #: Longest wait for an acknowledgement or a fresh value: of all, and of those that one fault at most had struck.
    longest_s: float = 0.0
    longest_of_one_s: float = 0.0
    #: The most that a clock of the latter kind may have shown.
    limit_s: float = 0.0
    quiet_s: float = 0.0
    #: How often a node has divided its shards.
    divided: int = 0
    digest: str = ""


@dataclass
class Saved:
    """What the disk of a node has: its replica and the states that it owned or backed up."""

    versions: list[tuple[Term, int]]
    replica: Vector
    states: list[bytes]
    step: int
    manifest: Manifest


class History:
    """One history, from one seed."""

    def __init__(self, seed: int, nodes: int, robust: Robust = "", *, divides: bool = False) -> None:
        self.plan = plan = Plan.of(seed, nodes, robust)
        self.divides = divides
        self.cells = SHARDS * (MOST_PARTS if divides else 1)
        self.cell_bounds = shard_bounds(VALUES, self.cells, self.cells // SHARDS)
        self.tally = Tally(seed)
        self.chance = random.Random(f"{seed}/faults")
        self.world = World(seed, settings=plan.settings, shards=SHARDS, values=VALUES, synchronous=plan.synchronous)
        self.ledger = Ledger(f"seed {seed}", plan.settings, self.cell_bounds, exact=plan.is_exact)
        self.clocks = ProgressClocks(self.cells, plan.links.loss)
        self.names: dict[bytes, str] = {}
        self.pushing = True
        #: Whether the moment of a request may be struck now.
        self.strikes = False
        self.resumed_by = ""
        self.saved: dict[str, Saved] = {}
        self.asked_to_leave: dict[str, None] = {}
        self._moments = 0
        self.world.observers.append(self._on_request)
        self._tasks: list[asyncio.Task[None]] = []

    # -- nodes

    async def start(self, name: str, *, founder: bool = False, works: bool = False, resumes: int = 0) -> Member:
        """Start a node on its machine. The founder founds, or with `resumes` resumes a swarm of so many others."""
        saved = None if self.world.parted else self.saved.get(name)
        member = await self.world.start(name, founder=founder and not resumes, manifest=self._manifest_for(saved))
        self.names[member.contact.node_id] = name
        exchange = member.exchange
        assert exchange is not None
        sent = self.ledger.watch(name, member.contact.node_id, member.starts, exchange)
        self._time_acknowledgements(name, exchange)
        exchange.on_divided(lambda _manifest: self._on_divided(member, exchange))
        if self.plan.settings.codec == "auto":
            self._draw_codecs(member, sent)
        # Not during a split: there an old state may take a shard back from a new era before the other side's newer one
        # is heard (docs/faults.md, what is not promised).
        if saved is not None:
            exchange.delay_takeover(TAKEOVER_DELAY_S)
            exchange.context.replica.vector[:] = saved.replica
            exchange.begin_at(saved.step)
            found = self._read(saved, exchange.manifest)
            exchange.offer_versions(found.versions)
            exchange.offer_states(found.states)
        member.worker = asyncio.create_task(
            self._live(member, sent, founder=founder, works=works, resumes=resumes), name=f"life-{name}"
        )
        return member

    def _manifest_for(self, saved: Saved | None) -> Manifest:
        """That of some node which runs, as a joiner is told, or of its own disk, if that has smaller shards."""
        running = [one.exchange.manifest for one in self.world.running() if one.exchange is not None]
        if not self.divides or not running:
            return self.world.manifest if saved is None else saved.manifest
        told = self.chance.choice(running)
        return max([told, *([] if saved is None else [saved.manifest])], key=lambda manifest: manifest.shards)

    def _on_divided(self, member: Member, exchange: Exchange) -> None:
        self.tally.divided += 1
        self.ledger.watch(member.name, member.contact.node_id, exchange.context.run.incarnation, exchange)
        self._time_acknowledgements(member.name, exchange)

    def _shard_at(self, exchange: Exchange, cell: int) -> int:
        """The shard of a node in which a cell is."""
        return cell * len(exchange.store) // self.cells

    def _time_acknowledgements(self, name: str, exchange: Exchange) -> None:
        outbox = exchange.push_client._outbox
        count = outbox.count

        def counted(delivery: Delivery, result: PushResult) -> None:
            count(delivery, result)
            if result.status == "ok":
                for cell in self.ledger.cells(result.shard, len(exchange.store)):
                    self.clocks.acknowledged(name, cell, self._now())

        outbox.count = counted  # type: ignore[method-assign]

    def _draw_codecs(self, member: Member, sent: Sent) -> None:
        assert member.exchange is not None
        choice = member.exchange.context.codec
        chance = random.Random(f"{self.world.seed}/{member.name}/{member.starts}/codecs")

        def drawn(_: LineFacts) -> bool:
            former, choice.codec = choice.codec, chance.choice(CHOICES)
            sent.codecs[max(sent.trained)] = choice.codec
            return choice.codec != former

        choice.decide = drawn  # type: ignore[method-assign]

    async def _live(self, member: Member, sent: Sent, *, founder: bool, works: bool, resumes: int) -> None:
        exchange, overlay = member.exchange, member.overlay
        assert exchange is not None
        assert overlay is not None
        if founder:
            if resumes:
                await exchange.resume(resumes, 5.0)
        else:
            overlay.eligible = False
            while True:
                sources = sorted(peer.node_id for peer in overlay.members())
                if self.resumed_by:
                    # After everybody was off only the founder opens the swarm again: it alone is eligible.
                    sources = [node for node in sources if self.names[node] == self.resumed_by]
                try:
                    if sources:
                        peer = overlay.peers[exchange.context.environment.entropy.random.choice(sources)]
                        await exchange.join(peer.contact)
                        break
                except TransportError:
                    pass
                await asyncio.sleep(0.3)
            overlay.eligible = True
            self.world.spread(member)
        if works:
            await self._work(member, sent)

    async def _work(self, member: Member, sent: Sent) -> None:
        exchange, overlay = member.exchange, member.overlay
        assert exchange is not None
        assert overlay is not None
        chance = random.Random(f"{self.world.seed}/{member.name}/{member.starts}/steps")
        step = exchange.view.median_step()
        exchange.begin_at(step)
        overlay.step = step
        replica = exchange.context.replica.vector
        self.clocks.start(member.name, self._now(), replica)
        is_sum = self.plan.settings.weight == "sum"
        memory = np.empty(VALUES, np.float32)
        flight: asyncio.Task[None] | None = None
        try:
            while self.pushing:
                base = step
                await asyncio.sleep(min(STEP_MOST_S, 0.2 + chance.expovariate(1.2)))
                if flight is not None:
                    await flight  # at most one delta is in flight
                step += 1
                memory[:] = delta_of(member.name, member.starts, step)
                weight = 1.0 if is_sum else 1.0 / max(1.0, exchange.view.worker_count())
                self.ledger.trained(sent, step, memory)
                flight = asyncio.create_task(self._exchange(member, step, base, weight, memory))
                if not self.plan.overlaps:
                    await flight
                self.tally.steps += 1
                if step % 4 == 0 and flight.done():
                    self.ledger.check_node(member.contact.node_id, member.starts, exchange)
            if flight is not None:
                await flight
        finally:
            if flight is not None:
                flight.cancel()

    async def _exchange(self, member: Member, step: int, base: int, weight: float, memory: Vector) -> None:
        """One step but its training: push and pull. The trainer's memory is overwritten as soon as it may be."""
        exchange, overlay = member.exchange, member.overlay
        assert exchange is not None
        assert overlay is not None

        def overwrite() -> None:
            memory[:] = OVERWRITTEN

        if self.plan.overlaps:
            await exchange.push(step, base, weight, memory, overwrite)
        else:
            await exchange.push(step, base, weight, memory)
            overwrite()
        exchange.begin_at(step)
        overlay.step = step
        await exchange.pull(step)
        self.clocks.pulled(member.name, exchange.context.replica.vector, self.cell_bounds, self._now())

    def _now(self) -> float:
        return self.world.clock.monotonic()

    # -- disks

    def _save(self, member: Member, *, clean: bool = False) -> None:
        """Write what a checkpoint of this node has."""
        exchange = member.exchange
        assert exchange is not None
        held = [(shard, term, state) for shard, term, state in exchange.states_to_save()]
        parts = state_files.encode(exchange.context.run_genesis, held, clean=clean)
        replica = exchange.context.replica
        self.saved[member.name] = Saved(
            replica.versions(),
            replica.vector.copy(),
            [b"".join(parts)],
            exchange.view.median_step(),
            exchange.manifest,
        )

    def _read(self, saved: Saved, present: Manifest) -> StoredShards:
        found: dict[int, StoredState] = {}
        for raw in saved.states:
            manifest = saved.manifest
            genesis = bytes.fromhex(manifest.genesis)
            found |= state_files.decode(raw, genesis, manifest.bounds(), VALUES, manifest.rule.outer_momentum)
        whole = StoredShards(saved.versions, {}, found)
        factor = saved.manifest.partition.divisor(present.partition)
        return whole if factor == 1 else divided(whole, factor, present.bounds())

    async def _keep_saving(self) -> None:
        """Checkpoints: each node writes one every few seconds, at its own time."""
        while True:
            await asyncio.sleep(1.0)
            for member in self.world.running():
                if self.chance.random() < 0.25:
                    self._save(member)

    # -- faults

    def _fault(self, what: str, names: list[str] | None = None, shards: list[int] | None = None) -> None:
        """Note a fault; it may stop these nodes and these shards, or all of them (None)."""
        self.tally.faults[what] = self.tally.faults.get(what, 0) + 1
        # Under bsp no shard goes on before the others.
        is_everywhere = shards is None or (shards and self.plan.synchronous)
        self.clocks.struck(
            self.clocks.names() if names is None else names, range(self.cells) if is_everywhere else shards or ()
        )
        self.world.records.append(_record(self.world, "fault", what=what))

    def _shards_of(self, *names: str) -> list[int]:
        """The cells that these nodes own, back up or learn."""
        found: dict[int, None] = {}
        for name in names:
            exchange = self.world.members[name].exchange
            if exchange is not None:
                for shard in (*exchange.store.owned, *exchange.store.backed):
                    found |= dict.fromkeys(self.ledger.cells(shard, len(exchange.store)))
        return sorted(found)

    def may_crash(self, member: Member) -> bool:
        """Whether the guarantee covers its crash, as far as the owners know."""
        exchange = member.exchange
        assert exchange is not None
        if exchange.store.superseded:
            return False
        running = self.world.running()
        if any(
            not self._is_owned(cell, backed.owner.node_id)
            for shard, backed in exchange.store.backed.items()
            for cell in self.ledger.cells(shard, len(exchange.store))
        ):
            return False  # its owner is gone, and it alone may have what both had
        for cell in range(self.cells):
            owners = [one for one in running if one.exchange and self._owned_at(one.exchange, cell) is not None]
            if not owners:
                return False
            for one in owners:
                assert one.exchange is not None
                owned = self._owned_at(one.exchange, cell)
                assert owned is not None
                involved = one is member or (owned.backup and owned.backup.node_id == member.contact.node_id)
                if involved and not self._complete(one, cell):
                    return False
            # During a hand-over both sides of it own the shard, until the answer is there.
            acting = [
                one
                for one in owners
                if one.exchange and (owned := self._owned_at(one.exchange, cell)) is not None and not owned.moving
            ]
            parted = len(acting) > 1 or any(
                one.exchange and self._shard_at(one.exchange, cell) in one.exchange.store.superseded for one in running
            )
            if parted and exchange.store.log.entries(self._shard_at(exchange, cell)):
                return False
        return True

    def _owned_at(self, exchange: Exchange, cell: int) -> Owned | None:
        return exchange.store.owned.get(self._shard_at(exchange, cell))

    def _is_owned(self, cell: int, node: bytes) -> bool:
        exchange = self.world.members[self.names[node]].exchange
        return exchange is not None and self._owned_at(exchange, cell) is not None

    def _complete(self, owner: Member, cell: int) -> bool:
        assert owner.exchange is not None
        owned = self._owned_at(owner.exchange, cell)
        if owned is None or owned.backup is None:
            return False
        backup = self.world.members[self.names[owned.backup.node_id]]
        if backup.exchange is None or not self.world.reachable(owner, backup):
            return False
        if owned.moving and self._owned_at(backup.exchange, cell) is not None:
            return True
        # It has restarted, and its owner does not know that yet: a crash that is still to be detected.
        backed = backup.exchange.store.backed.get(self._shard_at(backup.exchange, cell))
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

    async def divisions(self) -> None:
        """Twice in a history some nodes divide their shards, each for itself: amid the faults, and at any moment of
        what the others do."""
        chance = random.Random(f"{self.world.seed}/divisions")
        moments = sorted(chance.uniform(1.0, self.plan.train_s + 4.0) for _ in range(2))
        began = self._now()
        for moment in moments:
            await asyncio.sleep(max(0.0, began + moment - self._now()))
            self._fault("divided")
            names = self._present()
            for name in chance.sample(names, min(len(names), chance.choice([1, 1, 2, 5]))):
                exchange = self.world.members[name].exchange
                if exchange is None:
                    continue
                shards, parts = exchange.manifest.partition
                exchange.divide(Partition(2 * shards, 2 * parts))
                await asyncio.sleep(chance.choice([0.0, 0.01, 0.2]))

    def _present(self) -> list[str]:
        return sorted(member.name for member in self.world.running() if member.name not in self.asked_to_leave)

    def _on_request(self, source: str, target: str, request: str, payload: bytes) -> None:
        """Note what is forwarded; and kill one of the two nodes of a request at its moment: before it arrives, or soon
        after."""
        if request == "forward":
            sender = self.world.members[source].exchange
            assert sender is not None
            self.ledger.forwarded(source, payload, len(sender.store))
        wanted, number, after_s = self.plan.moment or ("", 0, 0.0)
        if request != wanted or not self.strikes:
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
                world.kill(name)
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
            if not exchange.store.owned and not exchange.push_client.outstanding_steps and self.may_crash(member):
                self.world.kill(name, left=True)
                self._fault("left", [], [])
                return
            await asyncio.sleep(0.5)

    # -- the whole

    async def play(self) -> Tally:
        plan, world = self.plan, self.world
        names = [f"n{number}" for number in range(plan.nodes)]
        workers = names[: plan.workers]
        await self.start(names[0], founder=True, works=True)
        for name in names[1:]:
            await self.start(name, works=name in workers)
        await asyncio.sleep(3.0)
        world.links = plan.links
        if plan.keeps_states:
            self._tasks.append(asyncio.create_task(self._keep_saving(), name="checkpoints"))
        self.strikes = plan.moment is not None
        if self.divides:
            self._tasks.append(asyncio.create_task(self.divisions(), name="fault"))
        faults = asyncio.create_task(self.faults(), name="faults")
        ends = self._now() + plan.train_s + 2.0
        while self._now() < ends:
            await asyncio.sleep(0.5)
            self._look(faults)
        await faults
        for task in self._tasks:
            if not task.done() and task.get_name() == "fault":
                await asyncio.wait([task], timeout=25.0)
        world.heal()
        world.links = Links()
        await self._calm()
        if plan.switches_off:
            await self._switch_off()
        await self._check()
        return self._done()

    async def _calm(self) -> None:
        """No more faults, and no more steps: wait until every delta has its answer and every shard its pair."""
        self._fault("calm")
        self.pushing = self.world.training = False
        await self._quiet()
        for name in self.clocks.names():
            self.clocks.stop(name)

    async def _quiet(self) -> None:
        began = self._now()
        while why := self._unquiet():
            await asyncio.sleep(0.5)
            self._look(None)
            if self._now() - began > QUIET_S:
                raise self.ledger.broken(f"not quiet after {QUIET_S:.0f} s: {why}")
        self.tally.quiet_s = max(self.tally.quiet_s, self._now() - began)

    async def _switch_off(self) -> None:
        """All nodes stop in order, write their states, and start again; then every worker makes a few steps more."""
        names = [member.name for member in self.world.running()]
        exchanges = [member.exchange for member in self.world.running() if member.exchange is not None]
        await asyncio.gather(*(exchange.close(2.0) for exchange in exchanges))
        for member in self.world.running():
            self._save(member, clean=True)
        for name in names:
            self.world.kill(name)
        await asyncio.sleep(1.0)
        self.pushing = self.world.training = True
        self.resumed_by = names[0]
        for name in names:
            works = name in names[: self.plan.workers]
            await self.start(name, founder=name == names[0], works=works, resumes=len(names) - 1)
        self._fault("switched off")
        before = self.tally.steps
        while self.tally.steps < before + STEPS_AFTER * self.plan.workers:
            await asyncio.sleep(0.5)
            self._look(None)
        await self._calm()

    def _look(self, faults: asyncio.Task[None] | None) -> None:
        now = self._now()
        workers = [one.worker for one in self.world.running() if one.worker is not None]
        for task in [*([faults] if faults is not None else []), *self._tasks, *workers]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        waiting = (
            None if self.pushing else {member.name: _waiting(member, self.ledger) for member in self.world.running()}
        )
        if late := self.clocks.late(now, waiting):
            raise self.ledger.broken(late)

    def _unquiet(self) -> str:
        members = self.world.running()
        for member in members:
            exchange = member.exchange
            assert exchange is not None
            if exchange.push_client.outstanding_steps:
                return f"{member.name} has steps {exchange.push_client.outstanding_steps} in its outbox"
            if exchange.store.superseded:
                return f"{member.name} has shards {list(exchange.store.superseded)} to mend"
            if member.worker is not None and not member.worker.done():
                return f"{member.name} joins, or makes its last step"
        partitions = {member.name: member.exchange.manifest.shards for member in members if member.exchange}
        if len({*partitions.values()}) > 1:
            return f"nodes have other numbers of shards than others: {partitions}"
        for shard in range(min(partitions.values())):
            owners = [one for one in members if one.exchange and shard in one.exchange.store.owned]
            if len(owners) != 1:
                return f"shard {shard} is owned by {[one.name for one in owners]}"
            (owner,) = owners
            assert owner.exchange is not None
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
            assert member.exchange is not None
            self.ledger.check_node(member.contact.node_id, member.starts, member.exchange)
            if member.exchange.counters.chain_mismatches:
                raise self.ledger.broken(f"{member.name} has followed a chain to other bits than its owner's")
        await self._check_replicas()
        await self._quiet()
        for shard in range(shards := self._shards()):
            owner, state = self._owner(shard)
            assert owner.exchange is not None
            owned = owner.exchange.store.owned[shard]
            backup = self.world.members[self.names[owned.backup.node_id]].exchange if owned.backup else None
            if backup is None or (copy := backup.store.backed[shard].state) is None:
                raise self.ledger.broken(f"shard {shard} of {owner.name} has lost its backup")
            if self.plan.synchronous:
                copy.fold(10**6, owner.exchange.store.rule)
            if self.plan.settings.robust == "trimmed-mean":
                self._check_windows(shard, owner.name, owned, copy)
                continue
            self.ledger.check_state(shard, shards, owner.name, state)
            self.ledger.check_state(shard, shards, f"{owner.name}'s backup", copy)

    def _shards(self) -> int:
        """How many shards every node has, once it is quiet."""
        (shards,) = {len(one.exchange.store) for one in self.world.running() if one.exchange is not None}
        return shards

    def _owner(self, shard: int) -> tuple[Member, ShardState]:
        owners = [one for one in self.world.running() if one.exchange and shard in one.exchange.store.owned]
        exchanges = [(one, one.exchange) for one in owners if one.exchange is not None]
        # Shards move on to better candidates all the time: during a hand-over the new owner's term is higher.
        owner, exchange = max(exchanges, key=lambda entry: entry[1].store.owned[shard].term)
        return owner, exchange.store.owned[shard].state

    async def _check_replicas(self) -> None:
        """Every node has the owners' values after a last pull, and the same bits after the final one."""
        members = self.world.running()
        exchanges = {member.name: member.exchange for member in members if member.exchange is not None}
        reports = await asyncio.gather(*(exchange.pull(10**6) for exchange in exchanges.values()))
        if any(report.missing for report in reports):
            raise self.ledger.broken("a last pull has missing shards, although nothing fails any more")
        settings = self.plan.settings
        pulled = {name: pull_codec(settings, exchange.context.codec.codec) for name, exchange in exchanges.items()}
        self._check_followers({name: exchange for name, exchange in exchanges.items() if pulled[name] not in WHOLE})
        for name, exchange in exchanges.items():
            if pulled[name] in WHOLE:
                self._check_replica(name, exchange, pulled[name])
        await asyncio.gather(*(exchange.pull_final(10**6, QUIET_S) for exchange in exchanges.values()))
        for name, exchange in exchanges.items():
            self._check_replica(name, exchange, "float32")
            if exchange.counters.chain_mismatches:
                raise self.ledger.broken(f"{name} had other bits than those published, although nothing damages any")

    def _check_followers(self, exchanges: dict[str, Exchange]) -> None:
        """Nodes at one position of a chain hold the same bits, near to the owner's value; owners hold their own."""
        held: dict[tuple[int, Position], tuple[str, Vector]] = {}
        for name, exchange in exchanges.items():
            replica = exchange.context.replica
            for shard in range(self._shards()):
                mine, position = replica.slice_of(shard), replica.position_of(shard)
                if position != NO_POSITION:
                    other, theirs = held.setdefault((shard, position), (name, mine))
                    if not np.array_equal(mine, theirs):
                        raise self.ledger.broken(f"{name} and {other} follow shard {shard} and hold other bits")
                    self.tally.followers += 1
                owner, state = self._owner(shard)
                apart, largest = np.abs(mine - state.value).max(), np.abs(state.value).max()
                # A sparse chain leaves most of a value for later.
                if self.plan.settings.pull_codec != "sparse" and apart > PUBLISHED_APART * largest + 0.1:
                    raise self.ledger.broken(f"{name} follows shard {shard} of {owner.name} {apart} apart")

    def _check_replica(self, name: str, exchange: Exchange, codec: CodecName) -> None:
        for shard in range(self._shards()):
            owner, state = self._owner(shard)
            pulled, exact = exchange.context.replica.slice_of(shard), state.value
            rounded = codecs.decoded(bytes(codecs.encode(exact, codec)), codec, exact.size)
            # A node copies what it owns: exact, even if it has handed the shard over since.
            if not np.array_equal(pulled, rounded) and not np.array_equal(pulled, exact):
                raise self.ledger.broken(f"{name} has pulled shard {shard} of {owner.name}, and has other values")

    def _check_windows(self, shard: int, owner: str, owned: Owned, copy: ShardState) -> None:
        cells = self.ledger.cells(shard, self._shards())
        state, acknowledged = owned.state, {one: None for cell in cells for one in self.ledger.acknowledged[cell]}
        assert owned.backup is not None
        for window in owned.unsent_windows(owned.backup.node_id):
            if not copy.close(window, Rule(1.0, 0.0, "trimmed-mean")):
                raise self.ledger.broken(f"shard {shard}: the backup of {owner} lacks a delta of a window")
        for whose, one in ((owner, state), (f"{owner}'s backup", copy)):
            lost = [identity for identity in acknowledged if not one.knows(identity)]
            if lost:
                named = [self.ledger.named(each) for each in lost[:5]]
                raise self.ledger.broken(f"shard {shard} of {whose} lost {len(lost)}: {named}")
        if dict.fromkeys(identities(state)) != dict.fromkeys(identities(copy)) or state.version != copy.version:
            raise self.ledger.broken(f"shard {shard}: {owner} and its backup have closed different windows")
        if not np.allclose(state.value, copy.value, rtol=1e-5, atol=1e-3):
            apart = float(np.abs(state.value - copy.value).max())
            raise self.ledger.broken(f"shard {shard}: {owner} and its backup are {apart} apart")
        if state.pending or state.version != len(list(identities(state))):
            raise self.ledger.broken(f"shard {shard} of {owner}: held {state.pending}, version {state.version}")
        self.tally.windows += owned.closed_count

    def _done(self) -> Tally:
        tally = self.tally
        tally.acknowledged = sum(len(one) for one in self.ledger.acknowledged)
        exchanges = [member.exchange for member in self.world.running() if member.exchange is not None]
        tally.clipped = sum(exchange.counters.clipped for exchange in exchanges)
        tally.ambiguous, tally.refused = self.ledger.ambiguous, self.ledger.refused
        tally.forgotten = self.ledger.forgotten
        tally.longest_s, tally.longest_of_one_s = self.clocks.longest_s, self.clocks.longest_of_one_s
        tally.limit_s = self.clocks.limit_s()
        tally.requests = self.world.requests
        for record in self.world.records:
            assert record.event != "exchange_service_failed", record
            # Nobody lies here: no fault makes one look like a liar to another.
            assert record.event not in ("member_lied", "member_distrusted"), record
            assert record.fields.get("reason") != "misbehaved", record
            tally.taken_over += record.fields.get("count", 1) * (record.event == "shards_taken_over")
            tally.repaired += record.fields.get("count", 0) * (record.event == "deltas_repaired")
            tally.taken_back += record.event == "shard_taken_back"
        tally.digest = digest(self.world.records)
        return tally


def _waiting(member: Member, ledger: Ledger) -> list[int]:
    """The cells for which a node has deltas in its outbox."""
    assert member.exchange is not None
    deliveries, shards = member.exchange.push_client._outbox._deliveries.values(), len(member.exchange.store)
    waiting = {shard for delivery in deliveries for shard in delivery.unacknowledged}
    return sorted(cell for shard in waiting for cell in ledger.cells(shard, shards))


def _record(world: World, event: str, **fields: Any) -> Record:
    return Record(world.clock.monotonic() - START_S, "world", "info", event, fields)


def play(seed: int, nodes: int = 50, robust: Robust = "", *, divides: bool = False) -> Tally:
    """One history. Raises `Broken` when an invariant does not hold."""
    found: list[Tally] = []

    async def main() -> None:
        history = History(seed, nodes, robust, divides=divides)
        try:
            found.append(await history.play())
        finally:
            for task in history._tasks:
                task.cancel()
            history.world.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first history")
    parser.add_argument("--seed", type=int, default=None, help="play this one alone, and print it")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--divides", action="store_true", help="nodes divide their shards meanwhile")
    parser.add_argument("--robust", choices=("", "clip", "trimmed-mean"), default="")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        print(json.dumps(vars(play(arguments.seed, arguments.nodes, arguments.robust, divides=arguments.divides))))
        return 0
    began = time.perf_counter()
    tallies, broken = [], []
    for seed in range(arguments.first, arguments.first + arguments.histories):
        try:
            tallies.append(play(seed, arguments.nodes, arguments.robust, divides=arguments.divides))
        except Exception as error:
            broken.append(seed)
            print(f"BROKEN {type(error).__name__}: {error}", flush=True)
    faults: dict[str, int] = {}
    for tally in tallies:
        for what, count in tally.faults.items():
            faults[what] = faults.get(what, 0) + count
    summary = {
        "histories": len(tallies) + len(broken),
        "broken": broken,
        "nodes": arguments.nodes,
        **{
            name: sum(getattr(tally, name) for tally in tallies)
            for name in (
                "steps",
                "acknowledged",
                "requests",
                "taken_over",
                "repaired",
                "taken_back",
                "windows",
                "ambiguous",
                "refused",
                "clipped",
                "followers",
                "divided",
            )
        },
        **{
            name: max((round(getattr(tally, name), 1) for tally in tallies), default=0.0)
            for name in ("longest_s", "longest_of_one_s", "quiet_s")
        },
        "faults": faults,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(summary))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
