"""Sparse and int4 deltas through the whole exchange: crash, take-over, catch-up, split and repair lose nothing.

Every node notes what it has encoded and what it owes. After the faults each shard is the sum of what the deltas in it
decode to, at owner and backup, and all deltas together are what was trained, less what the residuals hold and what they
have let decay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.exchange_swarm import Links, Member, World
from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.exchange.client.delivery import Delivery
from training.exchange.messages import PushResult
from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import is_plain
from training.shards.state import ShardState

SHARDS, VALUES = 4, 400
SIZE = VALUES // SHARDS
NAMES = ["n0", "n1", "n2", "n3", "n4"]
#: Of float32 sums of some hundred deltas in any order.
CLOSE = 1e-3

Key = tuple[int, bytes, int, int]


class Ledger:
    """What was trained, encoded and let decay, over all starts of all nodes."""

    def __init__(self) -> None:
        self.trained = np.zeros(VALUES)
        self.decayed = np.zeros(VALUES)
        self.sent: dict[Key, Vector] = {}
        self.owed: list[Any] = []
        #: Refused by an owner whose side of a split went on from a replica.
        self.refused: dict[Key, None] = {}

    def watch(self, member: Member) -> None:
        """Note every delta that this start of a node encodes, under its identity."""
        assert member.exchange is not None
        feedback = member.exchange.push_client._feedback
        encode, starts = feedback.encode, member.starts
        self.owed.append(feedback)
        steps: dict[int, int] = {}

        def noted(shard: int, values: Vector, codec: CodecName, *, is_last: bool = False) -> codecs.Encoded:
            place = slice(shard * SIZE, (shard + 1) * SIZE)
            before = feedback.residual(shard).copy()
            encoded = encode(shard, values, codec, is_last=is_last)
            steps[shard] = steps.get(shard, 0) + 1
            key = (shard, member.contact.node_id, starts, steps[shard])
            self.sent[key] = codecs.decoded(bytes(encoded), codec, SIZE)
            self.trained[place] += values
            self.decayed[place] += before * (1.0 - codecs.decay(codec))
            return encoded

        feedback.encode = noted  # type: ignore[method-assign]
        outbox = member.exchange.push_client._outbox
        count = outbox.count

        def counted(delivery: Delivery, result: PushResult) -> None:
            if result.status != "ok":
                assert result.reason == "before_era"
                self.refused[result.shard, member.contact.node_id, starts, delivery.push.step] = None
            count(delivery, result)

        outbox.count = counted  # type: ignore[method-assign]

    def expected(self, shard: int, state: ShardState) -> Vector:
        """The sum of the deltas that a state has."""
        total = np.zeros(SIZE, np.float32)
        for node, incarnation, ranges in state.applied.rows():
            for low, high in ranges:
                for step in range(low, high + 1):
                    total += self.sent[shard, node, incarnation, step]
        return total

    def is_balanced(self) -> bool:
        """Whether what was trained is what was sent, what is owed and what decayed."""
        sent = np.zeros(VALUES)
        for (shard, *_), values in self.sent.items():
            sent[shard * SIZE : (shard + 1) * SIZE] += values
        owed = sum((np.concatenate([one.residual(shard) for shard in range(SHARDS)]) for one in self.owed), 0.0)
        return bool(np.allclose(sent + owed + self.decayed, self.trained, atol=CLOSE))


async def live(world: World, ledger: Ledger, name: str, pushing: asyncio.Event, *, founder: bool = False) -> None:
    """Start a node, have it join, and let it push a delta about every second while `pushing` is set."""
    member = await world.start(name, founder=founder)
    exchange, overlay = member.exchange, member.overlay
    assert exchange is not None
    assert overlay is not None
    ledger.watch(member)
    if not founder:
        source = next(other for other in world.running() if other is not member)
        await exchange.directory.learn_all(source.contact)
        await exchange.pull_client.pull(0, deadline_s=None)

    async def work() -> None:
        chance = random.Random(f"{world.seed}/{name}/{member.starts}")
        step = 0  # every start has its own incarnation: its first encoded delta is step 1
        while pushing.is_set():
            await asyncio.sleep(0.3 + chance.expovariate(1.5))
            step += 1
            delta = np.array([chance.gauss(0.0, 1.0) for _ in range(VALUES)], np.float32)
            await exchange.push(step, exchange.view.median_step(), 1.0, delta)
            exchange.begin_at(step)
            overlay.step = step
            await exchange.pull(step)

    member.worker = asyncio.create_task(work())


def pairs(world: World) -> Iterator[tuple[int, Member, Member]]:
    """Each shard with its only owner and its backup; nothing while there is no such pair."""
    by_id = {member.contact.node_id: member for member in world.members.values()}
    for shard in range(SHARDS):
        owners = [one for one in world.running() if one.exchange and shard in one.exchange.store.owned]
        if len(owners) != 1 or owners[0].exchange is None:
            continue
        owned = owners[0].exchange.store.owned[shard]
        backup = by_id[owned.backup.node_id] if owned.backup is not None else None
        if backup is None or backup.exchange is None or owned.moving or owned.learner is not None:
            continue
        backed = backup.exchange.store.backed.get(shard)
        if backed is not None and backed.is_active and backed.state is not None:
            yield shard, owners[0], backup


async def settled(world: World) -> None:
    """Wait until every shard has a pair, every outbox is empty and every split is repaired."""
    async with asyncio.timeout(200.0):
        while True:
            await asyncio.sleep(0.5)
            exchanges = [one.exchange for one in world.running() if one.exchange is not None]
            is_busy = any(one.push_client.outstanding_steps or one.store.superseded for one in exchanges)
            if not is_busy and len(list(pairs(world))) == SHARDS:
                return


@pytest.mark.parametrize("codec", ["sparse", "int4"])
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("seed", [1])
def test_compressed_deltas_survive_what_others_do(codec: CodecName, synchronous: bool, seed: int) -> None:
    """A backup and an owner crash, a node joins, the swarm splits and heals, requests are lost: owner and backup of
    each shard have every delta once, by its rule, and residuals account for the rest."""
    # A rule with rate and momentum, which sparse deltas must not follow; int4 deltas are to be a plain sum.
    lr, momentum = (0.7, 0.5) if is_plain(codec) else (1.0, 0.0)
    settings = ExchangeSettings(
        codec=codec, shards=SHARDS, weight="sum", outer_lr=lr, outer_momentum=momentum, tenure_s=5.0
    )
    ledger = Ledger()

    async def scenario() -> int:
        world = World(seed, settings=settings, shards=SHARDS, values=VALUES, synchronous=synchronous)
        pushing = asyncio.Event()
        pushing.set()
        for name in NAMES:
            await live(world, ledger, name, pushing, founder=name == "n0")
        await asyncio.sleep(12.0)
        world.links = Links(loss=0.02, duplicate=0.05, slow=0.02)
        await asyncio.sleep(5.0)
        await settled_pairs(world)
        shard, owner, _ = next(iter(pairs(world)))
        world.kill(owner.name)
        await asyncio.sleep(12.0)
        await settled_pairs(world)
        backup = next(two for one, _, two in pairs(world) if one == shard)
        world.kill(backup.name)
        await asyncio.sleep(14.0)
        await live(world, ledger, backup.name, pushing)
        await settled_pairs(world)
        # An owner and its backup on different sides: both go on, and both sides' deltas are to be in the end.
        _, owner, backup = next(iter(pairs(world)))
        others = [member for member in world.running() if member not in (owner, backup)]
        world.part({one.name: int(one is owner or one is others[0]) for one in world.running()})
        await asyncio.sleep(12.0)
        world.heal()
        world.links = Links()
        await asyncio.sleep(8.0)
        pushing.clear()
        await asyncio.sleep(20.0)
        world.training = False
        await settled(world)
        for shard, owner, backup in pairs(world):
            assert owner.exchange is not None
            assert backup.exchange is not None
            states = [owner.exchange.store.owned[shard].state, backup.exchange.store.backed[shard].state]
            for state in states:
                assert state is not None
                state.fold(10**6, owner.exchange.store.rule)
                assert state.era_step == 0
                np.testing.assert_allclose(state.value, ledger.expected(shard, state), rtol=0, atol=CLOSE)
                if is_plain(codec):
                    assert state.momentum is None
            known = [sorted(state.applied.rows()) for state in states if state is not None]
            assert known[0] == known[1]
            everything = {key[1:] for key in ledger.sent if key[0] == shard and key not in ledger.refused}
            state = states[0]
            assert state is not None
            running = {member.contact.node_id: member.starts for member in world.running()}
            lost = [
                DeltaId(*key)
                for key in everything
                if running.get(key[0]) == key[1] and DeltaId(*key) not in state.applied
            ]
            assert not lost, lost[:3]
        assert ledger.is_balanced()
        repaired = sum(one.exchange.counters.repaired for one in world.running() if one.exchange)
        world.stop()
        return repaired

    print(f"seed {seed}")
    assert VirtualLoop().run(scenario(), limit_s=900) > 0
    assert len(ledger.sent) > 200


async def settled_pairs(world: World) -> None:
    """Wait until every shard has an owner and an active backup, between two faults."""
    async with asyncio.timeout(60.0):
        while len(list(pairs(world))) < SHARDS:  # noqa: ASYNC110 — the nodes do not say when
            await asyncio.sleep(0.1)
