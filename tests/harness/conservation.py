"""Random histories with many faults over the real exchange, and a check that every acknowledged delta is in the model.

`python -m tests.harness.conservation --histories 2000` plays that many; `--seed 17` replays one, event by event, with
the same digest. In every history some nodes push about a delta a second to the owners of all shards. Meanwhile nodes
crash, return, are paused, are separated from the others, join and leave. Requests are lost, duplicated and delayed.
Then the faults end, and after a while

* every shard has one owner, and a backup that has its state,
* its value is the sum of the deltas whose identities are in its set of applied ones, each once, to the bit,
* every delta that any owner acknowledged is among them,
* and during the faults no node was idle for longer than the detection bound after the last of them.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlay.transport import TransportError
from tests.harness.environment import Record, digest
from tests.harness.exchange_swarm import Links, Member, World
from tests.harness.virtual_loop import START_S, VirtualLoop
from training.exchange.messages import Push, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.store.records import Owned
from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.robust import Robust
from training.shards.state import ShardState

#: The detection bound (docs/faults.md), and the slowest step of a stub.
BOUND_S = 10.0
STEP_MOST_S = 3.0
SHARDS = 4
VALUES = 16
QUIET_S = 90.0


class Broken(AssertionError):
    """An invariant does not hold; the message names the seed."""


def delta_of(name: str, incarnation: int, step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32[VALUES], multiples of 1/1024: their sums are exact, and few sets of them have the same sum."""
    chance = random.Random(zlib.crc32(f"{name}/{incarnation}/{step}".encode()))
    return np.array([chance.randrange(1, 2**10) / 1024.0 for _ in range(VALUES)], np.float32)


@dataclass
class Plan:
    """What a seed decides before the first event."""

    nodes: int
    workers: int
    synchronous: bool
    train_s: float
    faults: int
    links: Links

    @classmethod
    def of(cls, seed: int, nodes: int) -> Plan:
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
            ),
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
    longest_s: float = 0.0
    digest: str = ""


class History:
    """One history, from one seed."""

    def __init__(self, seed: int, nodes: int, robust: Robust = "") -> None:
        self.plan = Plan.of(seed, nodes)
        self.tally = Tally(seed)
        self.chance = random.Random(f"{seed}/faults")
        settings = ExchangeSettings(
            codec="float32",
            shards=SHARDS,
            weight="sum",
            outer_lr=1.0,
            outer_momentum=0.0,
            tenure_s=8.0,
            robust=robust,
        )
        self.world = World(seed, settings=settings, shards=SHARDS, values=VALUES, synchronous=self.plan.synchronous)
        #: Per shard the identities that an owner has acknowledged.
        self.acknowledged: list[dict[DeltaId, None]] = [{} for _ in range(SHARDS)]
        self.names: dict[bytes, str] = {}
        self.pushing = True
        self.stood_s: dict[str, float] = {}
        self.fault_s = 0.0
        self.asked_to_leave: dict[str, None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # -- nodes

    async def start(self, name: str, *, founder: bool = False, works: bool = False) -> Member:
        member = await self.world.start(name, founder=founder)
        self.names[member.contact.node_id] = name
        exchange = member.exchange
        assert exchange is not None
        accept = exchange.deltas.accept

        async def listening(push: Push, items: list[IncomingDelta]) -> list[PushResult]:
            results = await accept(push, items)
            identity = DeltaId(push.node, push.incarnation, push.step)
            for result, item in zip(results, items, strict=True):
                if result.status == "ok" and not item.repair:
                    self.acknowledged[result.shard].setdefault(identity)
            return results

        exchange.deltas.accept = listening  # type: ignore[method-assign]
        if not founder:
            member.worker = asyncio.create_task(self._live(member, works), name=f"life-{name}")
        elif works:
            member.worker = asyncio.create_task(self._work(member), name=f"work-{name}")
        return member

    async def _live(self, member: Member, works: bool) -> None:
        exchange, overlay = member.exchange, member.overlay
        assert exchange is not None
        assert overlay is not None
        overlay.eligible = False
        while True:
            sources = sorted(peer.node_id for peer in overlay.members())
            try:
                if sources:
                    peer = overlay.peers[exchange.context.environment.entropy.random.choice(sources)]
                    await exchange.directory.learn_all(peer.contact)
                    break
            except TransportError:
                pass
            await asyncio.sleep(0.3)
        overlay.eligible = True
        await exchange.pull_client.pull(0, deadline_s=None)
        if works:
            await self._work(member)

    async def _work(self, member: Member) -> None:
        exchange, overlay = member.exchange, member.overlay
        assert exchange is not None
        assert overlay is not None
        chance = random.Random(f"{self.world.seed}/{member.name}/{member.starts}/steps")
        step = exchange.view.median_step()
        exchange.begin_at(step)
        overlay.step = step
        self.stood_s[member.name] = self.world.clock.monotonic()
        while self.pushing:
            base = step
            await asyncio.sleep(min(STEP_MOST_S, 0.2 + chance.expovariate(1.2)))
            step += 1
            delta = delta_of(member.name, member.starts, step)
            await exchange.push(step, base, 1.0, delta)
            exchange.begin_at(step)
            overlay.step = step
            await exchange.pull(step)
            self._moved(member.name)
            self.tally.steps += 1
        self.stood_s.pop(member.name, None)

    def _moved(self, name: str) -> None:
        now = self.world.clock.monotonic()
        if name in self.stood_s:
            self._note_stand(name, now)
            self.stood_s[name] = now

    def _note_stand(self, name: str, now: float) -> None:
        """Note how long a node has been idle, since its last step or the last fault."""
        stood = now - max(self.stood_s[name], self.fault_s)
        self.tally.longest_s = max(self.tally.longest_s, stood)
        if stood > BOUND_S + STEP_MOST_S:
            raise Broken(f"seed {self.tally.seed}: {name} stood still for {stood:.1f} s")

    # -- faults

    def _fault(self, what: str) -> None:
        self.tally.faults[what] = self.tally.faults.get(what, 0) + 1
        self.fault_s = self.world.clock.monotonic()
        self.world.records.append(_record(self.world, "fault", what=what))

    def may_crash(self, member: Member) -> bool:
        """Whether the guarantee covers its crash, as far as the owners know."""
        exchange = member.exchange
        assert exchange is not None
        if exchange.store.superseded:
            return False
        running = self.world.running()
        for shard in range(SHARDS):
            owners = [one for one in running if one.exchange and shard in one.exchange.store.owned]
            if not owners:
                return False
            for one in owners:
                assert one.exchange is not None
                owned = one.exchange.store.owned[shard]
                involved = one is member or (owned.backup and owned.backup.node_id == member.contact.node_id)
                if involved and not self._complete(one, shard):
                    return False
            parted = len(owners) > 1 or any(one.exchange and shard in one.exchange.store.superseded for one in running)
            if parted and exchange.store.log.entries(shard):
                return False
        return True

    def _complete(self, owner: Member, shard: int) -> bool:
        assert owner.exchange is not None
        owned = owner.exchange.store.owned[shard]
        if owned.backup is None or owned.moving:
            return False
        backup = self.world.members[self.names[owned.backup.node_id]]
        if backup.exchange is None or not self.world.reachable(owner, backup):
            return False
        # It has restarted, and its owner does not know that yet: a crash that is still to be detected.
        backed = backup.exchange.store.backed.get(shard)
        restarted = backup.starts > 1 and (backed is None or backed.owner.node_id != owner.contact.node_id)
        return not restarted

    async def faults(self) -> None:
        plan, chance, world = self.plan, self.chance, self.world
        moments = sorted(chance.uniform(2.0, plan.train_s) for _ in range(plan.faults))
        began = world.clock.monotonic()
        for moment in moments:
            await asyncio.sleep(max(0.0, began + moment - world.clock.monotonic()))
            what = chance.choice(["crash", "crash", "restart", "pause", "part", "part", "cut", "join", "leave"])
            names = sorted(member.name for member in world.running() if member.name not in self.asked_to_leave)
            owners = [name for name in names if self._owns(name)]
            # Two of three faults hit an owner or a backup.
            name = chance.choice(owners if owners and chance.random() < 0.67 else names)
            await self._strike(what, name, names)

    def _owns(self, name: str) -> bool:
        exchange = self.world.members[name].exchange
        return exchange is not None and bool(exchange.store.owned or exchange.store.backed)

    async def _strike(self, what: str, name: str, names: list[str]) -> None:
        world, chance = self.world, self.chance
        member = world.members[name]
        works = name in self.stood_s
        if what in ("crash", "restart", "leave") and (len(names) < 4 or not self.may_crash(member)):
            what = "pause"
        self._fault(what)
        match what:
            case "crash" | "restart":
                self.stood_s.pop(name, None)
                world.kill(name)
                after_s = chance.uniform(0.1, 2.5) if what == "restart" else chance.uniform(4.0, 20.0)
                if what == "restart" or chance.random() < 0.6:
                    self._later(after_s, self._again(name, works))
            case "pause":
                self.stood_s.pop(name, None)
                world.pause(name)
                self._later(chance.uniform(1.0, 9.0), self._resumed(name, works))
            case "part":
                groups = {one: chance.randrange(2) for one in [*names, *world.members]}
                if chance.random() < 0.3:
                    groups = dict.fromkeys(world.members, 0) | {name: 1}
                world.part(groups)
                self._later(chance.uniform(3.0, 12.0), self._healed())
            case "cut":
                world.cut(name, chance.choice([other for other in names if other != name]))
                self._later(chance.uniform(3.0, 8.0), self._healed())
            case "join":
                self._later(0.0, self._joined(f"j{len(world.members)}", chance.random() < 0.5))
            case "leave":
                self.asked_to_leave[name] = None
                self._later(0.0, self._left(name))

    def _later(self, after_s: float, work: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            await work

        self._tasks.append(asyncio.create_task(wait(), name="fault"))

    async def _again(self, name: str, works: bool) -> None:
        self._fault("started again")
        await self.start(name, works=works and self.pushing)

    async def _joined(self, name: str, works: bool) -> None:
        await self.start(name, works=works and self.pushing)

    async def _resumed(self, name: str, works: bool) -> None:
        self.world.resume(name)
        self._fault("resumed")
        if works and self.world.members[name].running:
            self.stood_s[name] = self.world.clock.monotonic()

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
        self.stood_s.pop(name, None)
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
                self._fault("left")
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
        self.fault_s = world.clock.monotonic() + 5.0
        await asyncio.sleep(3.0)
        world.links = plan.links
        faults = asyncio.create_task(self.faults(), name="faults")
        ends = world.clock.monotonic() + plan.train_s + 2.0
        while world.clock.monotonic() < ends:
            await asyncio.sleep(0.5)
            self._look(faults)
        await faults
        for task in self._tasks:
            if not task.done() and "left" not in repr(task):
                await asyncio.wait([task], timeout=25.0)
        world.heal()
        world.links = Links()
        self._fault("calm")
        self.pushing = world.training = False
        await self._quiet()
        self._check()
        return self._done()

    def _look(self, faults: asyncio.Task[None]) -> None:
        now = self.world.clock.monotonic()
        for task in [faults, *self._tasks, *(one.worker for one in self.world.running() if one.worker)]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        for name in list(self.stood_s):
            if self.world.members[name].running and not self.world.isolated(name):
                self._note_stand(name, now)

    async def _quiet(self) -> None:
        for _ in range(int(2 * QUIET_S)):
            await asyncio.sleep(0.5)
            why = self._unquiet()
            if not why:
                return
        raise Broken(f"seed {self.tally.seed}: not quiet after {QUIET_S:.0f} s: {why}")

    def _unquiet(self) -> str:
        members = self.world.running()
        for member in members:
            exchange = member.exchange
            assert exchange is not None
            if exchange.push_client.outstanding_steps:
                return f"{member.name} has steps {exchange.push_client.outstanding_steps} in its outbox"
            if exchange.store.superseded:
                return f"{member.name} has shards {list(exchange.store.superseded)} to mend"
        for shard in range(SHARDS):
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

    def _check(self) -> None:
        for shard in range(SHARDS):
            (owner,) = [one for one in self.world.running() if one.exchange and shard in one.exchange.store.owned]
            assert owner.exchange is not None
            store = owner.exchange.store
            owned = store.owned[shard]
            if self.plan.synchronous:
                owned.state.fold(10**6, store.rule)
            backup = self.world.members[self.names[owned.backup.node_id]].exchange if owned.backup else None
            assert backup is not None
            copy = backup.store.backed[shard].state
            assert copy is not None
            if self.plan.synchronous:
                copy.fold(10**6, store.rule)
            if store.rule.robust == "trimmed-mean":
                assert owned.backup is not None
                self._check_windows(shard, owner.name, owned, copy)
                continue
            self._check_state(shard, owner.name, owned.state)
            self._check_state(shard, f"{owner.name}'s backup", copy)

    def _check_windows(self, shard: int, owner: str, owned: Owned, copy: ShardState) -> None:
        seed, state = self.tally.seed, owned.state
        assert owned.backup is not None
        for window in owned.unsent_windows(owned.backup.node_id):
            if not copy.close(window, Rule(1.0, 0.0, "trimmed-mean")):
                raise Broken(f"seed {seed}: shard {shard}: the backup of {owner} lacks a delta of a window")
        for whose, one in ((owner, state), (f"{owner}'s backup", copy)):
            lost = [identity for identity in self.acknowledged[shard] if not one.knows(identity)]
            if lost or one.era_step:
                raise Broken(f"seed {seed}: shard {shard} of {whose} lost {len(lost)}: {self._named(lost)}")
        if dict.fromkeys(self._applied(state)) != dict.fromkeys(self._applied(copy)) or state.version != copy.version:
            raise Broken(f"seed {seed}: shard {shard}: {owner} and its backup have closed different windows")
        if not np.allclose(state.value, copy.value, rtol=1e-5, atol=1e-3):
            apart = float(np.abs(state.value - copy.value).max())
            raise Broken(f"seed {seed}: shard {shard}: {owner} and its backup are {apart} apart")
        if state.pending or state.version != len(list(self._applied(state))):
            raise Broken(f"seed {seed}: shard {shard} of {owner}: held {state.pending}, version {state.version}")
        self.tally.windows += owned.closed_count

    def _check_state(self, shard: int, whose: str, state: Any) -> None:
        seed = self.tally.seed
        start, stop = _bounds(shard)
        lost = [identity for identity in self.acknowledged[shard] if not state.knows(identity)]
        if lost and state.era_step == 0:
            raise Broken(f"seed {seed}: shard {shard} of {whose} lost {len(lost)}: {self._named(lost)}")
        if state.era_step:
            raise Broken(
                f"seed {seed}: shard {shard} of {whose} began anew from a replica, and {len(lost)} are missing"
            )
        applied = list(self._applied(state))
        expected = np.zeros(stop - start, np.float32)
        for identity in applied:
            delta = delta_of(self.names[identity.node], identity.incarnation, identity.step)
            expected += delta[start:stop]
        if not np.array_equal(state.value, expected) or state.version != len(applied):
            raise Broken(f"seed {seed}: shard {shard} of {whose} is not the sum of its {len(applied)} deltas")

    def _applied(self, state: Any) -> Iterable[DeltaId]:
        for node, incarnation, ranges in state.applied.rows():
            for low, high in ranges:
                yield from (DeltaId(node, incarnation, step) for step in range(low, high + 1))

    def _named(self, lost: list[DeltaId]) -> list[str]:
        return [f"{self.names[one.node]}/{one.incarnation}:{one.step}" for one in lost[:5]]

    def _done(self) -> Tally:
        tally = self.tally
        tally.acknowledged = sum(len(one) for one in self.acknowledged)
        tally.requests = self.world.requests
        for record in self.world.records:
            tally.taken_over += record.fields.get("count", 1) * (record.event == "shards_taken_over")
            tally.repaired += record.fields.get("count", 0) * (record.event == "deltas_repaired")
            tally.taken_back += record.event == "shard_taken_back"
        tally.digest = digest(self.world.records)
        return tally


def _bounds(shard: int) -> tuple[int, int]:
    size = VALUES // SHARDS
    return shard * size, (shard + 1) * size


def _record(world: World, event: str, **fields: Any) -> Record:
    return Record(world.clock.monotonic() - START_S, "world", "info", event, fields)


def play(seed: int, nodes: int = 50, robust: Robust = "") -> Tally:
    """One history. Raises `Broken` when an invariant does not hold."""
    found: list[Tally] = []

    async def main() -> None:
        history = History(seed, nodes, robust)
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
    parser.add_argument("--robust", choices=("", "clip", "trimmed-mean"), default="")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        print(json.dumps(vars(play(arguments.seed, arguments.nodes, arguments.robust))))
        return 0
    began = time.perf_counter()
    tallies, broken = [], []
    for seed in range(arguments.first, arguments.first + arguments.histories):
        try:
            tallies.append(play(seed, arguments.nodes, arguments.robust))
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
            for name in ("steps", "acknowledged", "requests", "taken_over", "repaired", "taken_back", "windows")
        },
        "longest_s": max((round(tally.longest_s, 1) for tally in tallies), default=0.0),
        "faults": faults,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(summary))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
