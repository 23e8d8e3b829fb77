"""The nodes of a conservation history: how they start, train, exchange, and what their disks keep."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np

from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding.codec_choice import LineFacts
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CHOICES
from p2pnode.training.exchange.delta import Delivery
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.terms import Term
from p2pnode.training.layout import shard_bounds
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.robust import Robust
from tests.harness.histories.conservation_plan import SHARDS, VALUES, Plan, Tally, delta_of
from tests.harness.histories.delta_ledger import Ledger, Sent
from tests.harness.histories.progress_clocks import STEP_MOST_S, ProgressClocks
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Member

#: What the trainer leaves in its memory when a push has ended.
OVERWRITTEN = 777.0
#: As `p2pnode.lifecycle.node`: how long a node that starts takes nothing over.
TAKEOVER_DELAY_S = 30.0


@dataclass
class Saved:
    """What the disk of a node has: its replica and the states that it owned or backed up."""

    versions: list[tuple[Term, int]]
    replica: Vector
    states: list[bytes]
    step: int


class HistoryNodes:
    """Swarm, ledger and clocks of a history, and what each of its nodes does by itself."""

    def __init__(self, seed: int, nodes: int, robust: Robust = "") -> None:
        self.plan = plan = Plan.of(seed, nodes, robust)
        self.bounds = shard_bounds(VALUES, SHARDS)
        self.tally = Tally(seed)
        self.chance = random.Random(f"{seed}/faults")
        self.world = World(
            seed, settings=plan.settings, shards=SHARDS, values=VALUES, synchronous=plan.synchronous, tenure_s=8.0
        )
        self.ledger = Ledger(f"seed {seed}", plan.settings, self.bounds, exact=plan.is_exact)
        self.clocks = ProgressClocks(SHARDS, plan.links.loss)
        self.names: dict[bytes, str] = {}
        self.pushing = True
        self.resumed_by = ""
        self.saved: dict[str, Saved] = {}

    async def start(self, name: str, *, founder: bool = False, works: bool = False, resumes: int = 0) -> Member:
        """Start a node on its machine. The founder founds, or with `resumes` resumes a swarm of so many others."""
        saved = None if self.world.parted else self.saved.get(name)
        member = await self.world.start(name, founder=founder and not resumes)
        self.names[member.contact.node_id] = name
        exchange = member.exchange
        sent = self.ledger.watch(name, member.contact.node_id, member.starts, exchange)
        self._time_acknowledgements(name, exchange)
        if self.plan.settings.codec == "auto":
            self._draw_codecs(member, sent)
        # Not during a split: there an old state may take a shard back from a new era before the other side's newer one
        # is heard (docs/faults.md, what is not promised).
        if saved is not None:
            exchange.rebalancer.delay_takeover(TAKEOVER_DELAY_S)
            exchange.replica.vector[:] = saved.replica
            exchange.offer(saved.step, saved.versions, self._read(saved))
        member.worker = asyncio.create_task(
            self._live(member, sent, founder=founder, works=works, resumes=resumes), name=f"life-{name}"
        )
        return member

    def _time_acknowledgements(self, name: str, exchange: Exchange) -> None:
        outbox = exchange.outbox
        count = outbox.note_answer

        def counted(delivery: Delivery, result: PushResult) -> None:
            count(delivery, result)
            if result.status == "ok":
                self.clocks.acknowledged(name, result.shard, self._now())

        outbox.note_answer = counted

    def _draw_codecs(self, member: Member, sent: Sent) -> None:
        choice = member.exchange.codec
        chance = random.Random(f"{self.world.seed}/{member.name}/{member.starts}/codecs")

        def drawn(_: LineFacts) -> bool:
            former, choice.codec = choice.codec, chance.choice(CHOICES)
            sent.codecs[max(sent.steps)] = choice.codec
            return choice.codec != former

        choice.decide = drawn

    async def _live(self, member: Member, sent: Sent, *, founder: bool, works: bool, resumes: int) -> None:
        exchange, overlay = member.exchange, member.overlay
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
                        peer = overlay.peers[exchange.environment.entropy.random.choice(sources)]
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
        chance = random.Random(f"{self.world.seed}/{member.name}/{member.starts}/steps")
        step = exchange.view.median_step()
        exchange.begin_at(step)
        overlay.step = step
        replica = exchange.replica.vector
        self.clocks.start(member.name, self._now(), replica)
        is_sum = self.plan.settings.weight == "sum"
        memory = np.empty(VALUES, np.float32)
        progress = sent.progress = np.zeros(VALUES, np.float32)
        flight: asyncio.Task[None] | None = None
        try:
            while self.pushing:
                base = step
                await asyncio.sleep(min(STEP_MOST_S, 0.2 + chance.expovariate(1.2)))
                step += 1
                own = delta_of(member.name, member.starts, step)
                progress += own
                self.ledger.trained(sent, own)
                if flight is not None and not flight.done():
                    continue  # at most one delta is in flight: progress adds up
                if flight is not None:
                    await flight
                memory[:] = progress
                weight = 1.0 if is_sum else 1.0 / max(1.0, exchange.view.worker_count())
                self.ledger.handed_over(sent, step)
                flight = asyncio.create_task(self._exchange(member, sent, step, base, weight, memory))
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

    async def _exchange(self, member: Member, sent: Sent, step: int, base: int, weight: float, memory: Vector) -> None:
        """One step but its training: push and pull. The trainer's memory is overwritten as soon as it may be."""
        exchange, overlay, progress = member.exchange, member.overlay, sent.progress
        assert progress is not None

        def keep_the_rest() -> None:
            np.subtract(progress, memory, out=progress)

        self.clocks.exchanging(member.name, self._now())
        began_s, identity = self._now(), DeltaId(member.contact.node_id, exchange.run.incarnation, step)
        report = await exchange.push(step, base, weight, memory, on_encoded=keep_the_rest)
        bounds = exchange.store.bounds
        self.ledger.returned(sent, identity, report.returned)
        for shard in report.returned:
            progress[slice(*bounds[shard])] += memory[slice(*bounds[shard])]
        memory[:] = OVERWRITTEN
        exchange.begin_at(step)
        overlay.step = step
        missing = (await exchange.pull(step)).missing
        self.clocks.exchanged(member.name, began_s, missing, self._now())
        self.clocks.pulled(member.name, exchange.replica.vector, self.bounds, self._now())

    def _now(self) -> float:
        return self.world.clock.monotonic()

    def _save(self, member: Member, *, clean: bool = False) -> None:
        """Write what a checkpoint of this node has."""
        exchange = member.exchange
        held = exchange.store.states_to_save()
        parts = shard_states.encode(bytes.fromhex(exchange.manifest.genesis), held, clean=clean)
        replica = exchange.replica
        self.saved[member.name] = Saved(
            replica.versions(),
            replica.vector.copy(),
            [b"".join(parts)],
            exchange.view.median_step(),
        )

    def _read(self, saved: Saved) -> dict[int, StoredState]:
        found: dict[int, StoredState] = {}
        manifest = self.world.manifest
        for raw in saved.states:
            genesis = bytes.fromhex(manifest.genesis)
            found |= shard_states.decode(raw, genesis, manifest.bounds(), VALUES)
        return found

    async def _keep_saving(self) -> None:
        """Checkpoints: each node writes one every few seconds, at its own time."""
        while True:
            await asyncio.sleep(1.0)
            for member in self.world.running():
                if self.chance.random() < 0.25:
                    self._save(member)
