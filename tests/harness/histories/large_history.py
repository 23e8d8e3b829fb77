"""A history of hundreds of nodes over the real exchange, with shards of a real size; and what it costs.

All nodes join one founder, and the shards spread. Then every node trains: a step takes a second on average, its delta
goes to the owners of all shards, the node waits at a sampled barrier (pssp), and pulls. Meanwhile a share of the nodes
is killed, at seeded points of the progress, half of them start again with nothing on their disks, and requests are lost
in either direction. When all have made their steps the losses end, and it is checked as in
`tests.harness.histories.conservation` that

* every shard has one owner, and a backup that has its state;
* both have every delta that any owner acknowledged, once, and are the sum of their deltas, bit by bit
  (`tests.harness.histories.view_ledger`);
* what a node has trained is acknowledged, refused, or its progress;
* every node has the owners' values after a last pull, and the same bits after the final one;
* no node waited longer for an acknowledgement or a fresh value than the detection bound and the losses explain
  (`tests.harness.histories.progress_clocks`).

A node is killed when the guarantee covers its crash, as far as the owners know: each shard that it owns has a backup,
and each that it backs up has its owner. Otherwise it is killed a little later.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from p2pnode.overlay.peers import Activity
from p2pnode.overlay.transport import TransportError
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.exchange.delta import Delivery
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.layout import shard_bounds
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.shards.applied import DeltaId
from tests.harness.environment.simulated import ListLog
from tests.harness.histories.delta_ledger import Sent
from tests.harness.histories.large_plan import LargePlan, LargeTally
from tests.harness.histories.large_replicas import LargeReplicas, owners_of
from tests.harness.histories.progress_clocks import STEP_MOST_S, ProgressClocks
from tests.harness.histories.view_ledger import ViewLedger
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Links, Member
from tests.harness.swarms.simulated_swarm import play

#: So long until all have joined and the shards have spread; and until all is quiet after the last step.
SPREAD_S, QUIET_S = 300.0, 60.0
#: A node that was killed starts again after so long, if it does.
AGAIN_S = (4.0, 12.0)
#: One look at the clocks of all nodes passes some hundred thousand of them.
LOOK_S, CLOCKS_S = 0.25, 2.0


class _EventLog(ListLog):
    """Without what only explains: of millions of requests thousands fail."""

    def debug(self, event: str, **fields: object) -> None:
        """Not kept."""


class LargeHistory:
    """One history, from one seed."""

    def __init__(self, seed: int, plan: LargePlan) -> None:
        self.plan, self.seed = plan, seed
        values = plan.shards * plan.values_per_shard
        self.bounds = shard_bounds(values, plan.shards)
        self.world = World(seed, settings=plan.settings, shards=plan.shards, values=values, synchronous=False)
        self.world.make_log = lambda name: _EventLog(self.world.records, name, self.world.clock)
        self._barrier_settings = BarrierSettings()
        self.barrier = make_barrier(self._barrier_settings)
        self.world.staleness = self.barrier.staleness
        # A node that starts again trains at most all steps once more.
        most = (plan.nodes + self._to_crash) * (plan.steps + 1)
        self.ledger = ViewLedger(f"seed {seed}", plan.settings, self.bounds, seed, most)
        self.replicas = LargeReplicas(self.ledger, plan.shards)
        # Of all requests none is lost more often in a row.
        requests = 4.0 * plan.nodes * plan.steps * min(plan.nodes, plan.shards)
        self.clocks = ProgressClocks(plan.shards, plan.loss, rare=max(500.0, requests))
        self.tally = LargeTally(seed, plan.nodes)
        self.chance = random.Random(f"{seed}/crashes")
        self._tasks: list[asyncio.Task[None]] = []
        self._steps_done = 0
        self._goes_on = asyncio.Event()
        self._names: dict[bytes, str] = {}
        self.world.observers.append(self._count)

    @property
    def _to_crash(self) -> int:
        return round(self.plan.crash * self.plan.nodes)

    def _count(self, _source: str, _target: str, request: str, _payload: bytes) -> None:
        """While the nodes train."""
        if self._goes_on.is_set() and self.world.training:
            self.tally.requests[request] = self.tally.requests.get(request, 0) + 1

    def _now(self) -> float:
        return self.world.clock.monotonic()

    # -- nodes

    async def _start(self, name: str, *, founder: bool = False) -> None:
        member = await self.world.start(name, founder=founder)
        exchange = member.exchange
        self._names[member.contact.node_id] = name
        sent = self.ledger.watch(name, member.contact.node_id, member.starts, exchange)
        self._time_acknowledgements(name, exchange)
        member.worker = asyncio.create_task(self._live(member, sent, founder=founder), name=f"life-{name}")

    def _time_acknowledgements(self, name: str, exchange: Exchange) -> None:
        outbox = exchange.outbox
        count = outbox.note_answer

        def counted(delivery: Delivery, result: PushResult) -> None:
            count(delivery, result)
            if result.status == "ok":
                self.clocks.acknowledged(name, result.shard, self._now())

        outbox.note_answer = counted

    async def _live(self, member: Member, sent: Sent, *, founder: bool) -> None:
        exchange, overlay = member.exchange, member.overlay
        if not founder:
            overlay.eligible, overlay.activity = False, Activity.JOINING
            while True:
                sources = sorted(peer.node_id for peer in overlay.members() if peer.eligible)
                try:
                    if sources:
                        source = exchange.environment.entropy.random.choice(sources)
                        await exchange.join(overlay.peers[source].contact)
                        break
                except TransportError:
                    pass
                await asyncio.sleep(0.3)
            overlay.eligible, overlay.activity = True, Activity.READY
            self.world.spread(member)
        await self._goes_on.wait()
        await self._train(member, sent)

    async def _train(self, member: Member, sent: Sent) -> None:
        exchange, overlay = member.exchange, member.overlay
        chance = random.Random(f"{self.seed}/{member.name}/{member.starts}/steps")
        clock, node_id = self.world.clock, member.contact.node_id
        gate = BarrierWaiter(overlay, self.barrier, self._barrier_settings, clock)
        gate.exclude(exchange.view.score.is_quarantined)
        step = exchange.view.median_step()
        exchange.begin_at(step)
        overlay.step, overlay.activity = step, Activity.TRAINING
        gate.begin()
        self.clocks.start(member.name, self._now(), np.empty(0, np.float32))
        seen = exchange.replica.versions()
        progress: Any = None
        while step < self.plan.steps:
            base, began_s = exchange.view.median_step(), self._now()
            await asyncio.sleep(min(STEP_MOST_S, 0.2 + chance.expovariate(1.2)))
            step += 1
            delta = self.ledger.delta(node_id, member.starts, step)
            identity, bounds = DeltaId(node_id, exchange.run.incarnation, step), exchange.store.bounds
            handed = delta if progress is None else delta + progress
            memory = handed.copy()
            self.ledger.handed_over(sent, step)
            sent.progress = None
            report = await exchange.push(step, base, 1.0, memory)
            self.ledger.returned(sent, identity, report.returned)
            progress = handed - memory
            for shard in report.returned:
                progress[slice(*bounds[shard])] += memory[slice(*bounds[shard])]
            progress = sent.progress = progress if progress.any() else None
            exchange.advance(step)
            overlay.step, overlay.step_seconds = step, self._now() - began_s
            self._steps_done += 1
            await gate.wait(step, overlay.step_seconds)
            await exchange.pull(step)
            present, now = exchange.replica.versions(), self._now()
            for shard, (old, new) in enumerate(zip(seen, present, strict=True)):
                if old != new:
                    self.clocks.fresh(member.name, shard, now)
            seen = present
        self.clocks.stop(member.name)

    # -- faults

    async def _crashes(self) -> None:
        """Kill nodes when the swarm has made seeded shares of its steps."""
        names = [f"n{number}" for number in range(1, self.plan.nodes)]
        victims = self.chance.sample(names, self._to_crash)
        shares = sorted(self.chance.uniform(0.05, 0.85) for _ in victims)
        for victim, share in zip(victims, shares, strict=True):
            wanted = share * self.plan.nodes * self.plan.steps
            await self._until(partial(self._is_before, wanted), math.inf, "so far")
            member = self.world.members[victim]
            while not self._may_crash(member):
                self.tally.postponed += 1
                await asyncio.sleep(LOOK_S)
            struck = [*member.exchange.store.owned, *member.exchange.store.backed]
            self.clocks.stop(victim)
            self.clocks.struck([], struck, self.world.clock.monotonic())
            await self.world.kill(victim)
            self.tally.crashed += 1
            if self.chance.random() < 0.5:
                self._tasks.append(asyncio.create_task(self._again(victim), name="fault"))

    def _is_before(self, steps: float) -> bool:
        return self._steps_done < steps

    async def _again(self, name: str) -> None:
        await asyncio.sleep(self.chance.uniform(*AGAIN_S))
        self.tally.again += 1
        await self._start(name)

    def _may_crash(self, member: Member) -> bool:
        """Whether the guarantee covers its crash, as far as the owners know (`HistoryFaults.may_crash`)."""
        exchange = member.exchange
        if exchange.store.superseded:
            return False
        exchanges = {one.contact.node_id: one.exchange for one in self.world.running() if one.exchange is not None}
        for shard, backed in exchange.store.backed.items():
            owner = exchanges.get(backed.owner.node_id)
            if owner is None or shard not in owner.store.owned:
                return False  # its owner is gone, and it alone may have what both had
        for owner in exchanges.values():
            for shard, owned in owner.store.owned.items():
                backup = None if owned.backup is None else exchanges.get(owned.backup.node_id)
                if owner is not exchange and backup is not exchange:
                    continue
                if backup is None or shard not in {**backup.store.backed, **backup.store.owned}:
                    return False
        # Between an owner's death and the take-over the shard is nobody's, and its new owner not known yet.
        owned_now = {shard for one in exchanges.values() for shard in one.store.owned}
        return all(shard in owned_now for shard in exchange.store.backed)

    # -- the story

    async def play(self) -> LargeTally:
        """All of it; raises `Broken`."""
        tally, began = self.tally, time.process_time()
        await self._start("n0", founder=True)
        for number in range(1, self.plan.nodes):
            await self._start(f"n{number}")
        tally.spread_s = await self._until(self._unspread, SPREAD_S, "spread")
        tally.processor_spread_s, began = time.process_time() - began, time.process_time()
        await self._train_all()
        tally.processor_trained_s, began = time.process_time() - began, time.process_time()
        self.world.links = Links()
        self.world.training = False
        tally.quiet_s = await self._until(self._unquiet, QUIET_S, "quiet")
        await self._check()
        tally.processor_checked_s = time.process_time() - began
        return self._done()

    async def _train_all(self) -> None:
        self.world.links = Links(loss=self.plan.loss)
        began, looked = self._now(), self._now()
        self._goes_on.set()
        crashes = asyncio.create_task(self._crashes(), name="crashes")
        self._tasks.append(crashes)
        while not self._is_trained():
            await asyncio.sleep(LOOK_S)
            self._raise_errors()
            if self._now() - looked >= CLOCKS_S:
                looked = self._now()
                if late := self.clocks.late(looked):
                    raise self.ledger.broken(late)
        self.tally.trained_s = self._now() - began
        self.tally.steps = self._steps_done

    def _is_trained(self) -> bool:
        return all(task.done() for task in self._tasks) and all(
            member.worker is not None and member.worker.done() for member in self.world.running()
        )

    def _raise_errors(self) -> None:
        workers = [member.worker for member in self.world.running() if member.worker is not None]
        for task in (*self._tasks, *workers):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _until(self, unmet: Callable[[], object], within_s: float, what: str) -> float:
        began = self._now()
        while why := unmet():
            await asyncio.sleep(0.5)
            self._raise_errors()
            if self._now() - began > within_s:
                raise self.ledger.broken(f"not {what} after {within_s:.0f} s: {why}")
        return self._now() - began

    def _unspread(self) -> str:
        members = self.world.running()
        joining = [member.name for member in members if member.overlay and not member.overlay.eligible]
        if joining:
            return f"{len(joining)} nodes join"
        return self._unpaired()

    def _unquiet(self) -> str:
        for member in self.world.running():
            if steps := member.exchange.outbox.steps:
                return f"{member.name} has steps {steps} in its outbox"
            if member.exchange.store.superseded:
                return f"{member.name} has shards {list(member.exchange.store.superseded)} to mend"
        return self._unpaired()

    def _unpaired(self) -> str:
        """Which shard has not one owner and its backup."""
        owners: dict[int, list[Member]] = {}
        for member in self.world.running():
            for shard in member.exchange.store.owned:
                owners.setdefault(shard, []).append(member)
        for shard in range(self.plan.shards):
            theirs = owners.get(shard, [])
            if len(theirs) != 1:
                return f"shard {shard} is owned by {[one.name for one in theirs]}"
            (owner,) = theirs
            owned = owner.exchange.store.owned[shard]
            if owned.backup is None or owned.moving or owned.learner is not None:
                return f"shard {shard} of {owner.name} moves or has no backup"
            backup = self.world.members[self._names[owned.backup.node_id]].exchange
            backed = None if backup is None else backup.store.backed.get(shard)
            if backed is None or backed.state is None or backed.owner.node_id != owner.contact.node_id:
                return f"shard {shard} of {owner.name}: its backup backs it not"
        return ""

    # -- checks

    async def _check(self) -> None:
        members = self.world.running()
        exchanges = {member.name: member.exchange for member in members if member.exchange is not None}
        for member in members:
            self.ledger.check_node(member.contact.node_id, member.starts, member.exchange)
        # One after the other: every answer is held in memory.
        for one in exchanges.values():
            if (await one.pull(10**6)).missing:
                raise self.ledger.broken("a last pull has missing shards, although nothing fails any more")
        self.replicas.check(exchanges, "bfloat16")
        for one in exchanges.values():
            await one.pull_final(10**6, QUIET_S)
        self.replicas.check(exchanges, "float32")
        await self._until(self._unpaired, QUIET_S, "paired")
        owners = owners_of(exchanges)
        for shard in range(self.plan.shards):
            name = owners[shard]
            owned = exchanges[name].store.owned[shard]
            assert owned.backup is not None
            copy = exchanges[self._names[owned.backup.node_id]].store.backed[shard].state
            assert copy is not None
            self.ledger.check_state(shard, name, owned.state)
            self.ledger.check_state(shard, f"{name}'s backup", copy)

    def _done(self) -> LargeTally:
        tally = self.tally
        tally.acknowledged, tally.carried = self.ledger.acknowledged_count, self.ledger.carried_count
        tally.refused = self.ledger.refused
        tally.longest_s, tally.longest_of_one_s = self.clocks.longest_s, self.clocks.longest_of_one_s
        tally.limit_s = self.clocks.limit_s()
        for record in self.world.records:
            assert record.event != "exchange_service_failed", record
            # No fault makes one member look to another as if it sent nonsense.
            assert record.event != "nonsense_received", record
            tally.taken_over += record.fields.get("count", 1) * (record.event == "shards_taken_over")
        tally.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return tally

    async def stop(self) -> None:
        """Cancel everything."""
        for task in self._tasks:
            task.cancel()
        await self.world.stop()


def play_large(seed: int, plan: LargePlan) -> LargeTally:
    """One history. Raises `Broken` when an invariant does not hold."""

    tallies: list[LargeTally] = []

    async def story(history: LargeHistory) -> None:
        tallies.append(await history.play())

    play(story, lambda: LargeHistory(seed, plan), limit_s=7200)
    return tallies[0]
