"""Acknowledged deltas are sent again where a shard has another owner that lacks them, and only there."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.delta import Acknowledged, AcknowledgedKey, Outgoing, SentDeltas
from p2pnode.training.exchange.messages import Push, decode
from p2pnode.training.exchange.ownership_messages import (
    AskedDelta,
    FindLacking,
    LackingDeltas,
    OfferedDeltas,
    OfferedDeltasAnswer,
)
from p2pnode.training.exchange.recovery.resending import EVERY_S
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.shards.applied import DeltaId
from tests.harness.builders.stores import IDS, contact, owner_of, store_of, term, value_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, resending_of

ME, FORMER, PRESENT = contact("b"), contact("a"), contact("c")


class Resent:
    """A node whose delta "a" has acknowledged, and "c" owns the shard now."""

    def __init__(self, store: ShardStore | None = None) -> None:
        self.store = store or store_of("b")
        self.swarm = ScriptedSwarm(ME, [FORMER, PRESENT])
        self.context: Any = context_of(self.swarm, self.store)
        self.kept = SentDeltas()
        self.resending = resending_of(self.context, self.kept)
        self.lacks, self.is_owner = True, True
        self.answer = OfferedDeltasAnswer(1)
        self.swarm.answers["lacking"] = self._on_question
        self.swarm.answers["repair"] = lambda *_: self.answer

    def _on_question(self, _to: Contact, payload: bytes) -> LackingDeltas:
        asked = decode(payload, FindLacking).deltas
        lacking = range(len(asked)) if self.lacks and self.is_owner else ()
        return LackingDeltas([] if self.is_owner else [0], list(lacking))

    def acknowledged(self, step: int = 5, encoded: bytes = bytes(16), base_step: int = 4) -> AcknowledgedKey:
        push = Push(IDS["b"], 1, step, base_step, 0.5, [])
        key = AcknowledgedKey(0, DeltaId(IDS["b"], 1, step))
        self.kept.acknowledge(push, IDS["a"], Outgoing(0, encoded, "float32", 4))
        return key

    def moves(self, to: Contact = PRESENT) -> None:
        self.store.note_owner(0, term(2, "c"), to)

    async def work(self) -> None:
        await asyncio.sleep(EVERY_S)
        await self.resending.send(self.resending.due())

    @property
    def sent(self) -> list[OfferedDeltas]:
        return self.swarm.sent("repair", OfferedDeltas)


def test_a_delta_that_the_new_owner_lacks_is_sent_under_its_identity_once() -> None:
    async def scenario() -> None:
        one = Resent()
        one.acknowledged()
        one.store.note_owner(0, term(1, "a"), FORMER)
        await one.work()
        assert one.swarm.requests == []
        one.moves()
        await one.work()
        await one.work()
        (message,) = one.sent
        (found,) = message.deltas
        assert (found.shard, found.node, found.incarnation, found.step, found.weight) == (0, IDS["b"], 1, 5, 0.5)
        assert one.context.counters.sent_again == 1

    run(scenario())


class Passed(dict[AcknowledgedKey, Acknowledged]):
    """Counts how often all deltas are passed."""

    times = 0

    def items(self) -> Any:
        self.times += 1
        return super().items()


def test_deltas_whose_owners_have_not_changed_are_not_passed() -> None:
    """There are thousands, and each second all would be: the shards are looked at instead."""

    async def scenario() -> None:
        one = Resent()
        one.store.note_owner(0, term(1, "a"), FORMER)
        for step in range(1, 6):
            one.acknowledged(step)
        one.answer = OfferedDeltasAnswer(5)
        one.kept.acknowledged = passed = Passed(one.kept.acknowledged)
        await one.work()
        assert passed.times == 0
        one.moves()
        await one.work()
        assert passed.times == 1
        assert [len(message.deltas) for message in one.sent] == [5]
        await one.work()
        assert passed.times == 1, "all have moved"

    run(scenario())


def test_what_the_new_owner_has_is_not_sent() -> None:
    """One that is no owner says nothing."""

    async def scenario() -> None:
        for is_owner in (True, False):
            one = Resent()
            one.lacks, one.is_owner = False, is_owner
            one.acknowledged()
            one.moves()
            await one.work()
            assert len(one.swarm.requests) == 1
            await one.work()
            assert one.sent == []
            assert (len(one.swarm.requests) == 1) == is_owner, "who does not own it yet is asked again"

    run(scenario())


def test_an_owner_names_what_its_shards_certainly_lack() -> None:
    """Not what they have, nor what they may have forgotten, nor a delta with a base before an era."""

    async def scenario() -> None:
        store = owner_of("c", 2)
        state = store.owned[0].state
        state.era_step = 3
        state.applied.add(DeltaId(IDS["b"], 1, 5))
        swarm = ScriptedSwarm(PRESENT, [ME])
        context = context_of(swarm, store)
        resending_of(context)
        asked = [AskedDelta(0, 5, 4), AskedDelta(0, 6, 5), AskedDelta(0, 7, 2), AskedDelta(2, 6, 5)]
        answer = await swarm.deliver("lacking", ME, FindLacking(1, asked), LackingDeltas)
        assert answer == LackingDeltas([2], [1])

    run(scenario())


def test_without_an_answer_it_is_sent_again_and_a_refusal_is_final() -> None:
    async def scenario() -> None:
        one = Resent()
        key = one.acknowledged()
        one.moves()
        one.swarm.answers["repair"] = lambda to, _: TransportError("timeout", to.address, "x")
        await one.work()
        one.swarm.answers["repair"] = lambda *_: OfferedDeltasAnswer(0)
        await one.work()
        assert len(one.sent) == 2
        one.swarm.answers["repair"] = lambda *_: OfferedDeltasAnswer(0, [0])
        await one.work()
        assert key not in one.kept.acknowledged
        await one.work()
        assert (len(one.sent), one.context.counters.sent_again) == (3, 0)

    run(scenario())


def test_deltas_of_an_earlier_start_are_not_sent_again() -> None:
    """Their identities are others. Nor is anything sent while the new owner is gone."""

    async def scenario() -> None:
        one = Resent()
        one.moves()
        one.acknowledged(6)
        one.context.run.incarnation = 2
        await one.work()
        assert one.sent == []
        one.context.run.incarnation = 1
        one.swarm.gone.append(IDS["c"])
        await one.work()
        assert one.sent == []

    run(scenario())


def test_a_node_that_has_taken_over_adds_its_own() -> None:
    """Once, however often it is looked at; and none that its copy may have, from before an era."""

    async def scenario() -> None:
        store = owner_of("b", 2)
        one = Resent(store)
        values = np.full(4, 2.0, np.float32).tobytes()
        one.acknowledged(5, values)
        one.swarm.gone += [IDS["a"], IDS["c"]]  # nobody could be its backup
        for _ in range(3):
            await one.work()
        assert value_of(store.owned[0].state) == 1.0  # weighed as it was pushed
        assert one.swarm.requests == []

        old = owner_of("b", 2)
        old.owned[0].state.era_step = 9
        other = Resent(old)
        other.swarm.gone += [IDS["a"], IDS["c"]]
        other.acknowledged(5, values)
        await other.work()
        assert value_of(old.owned[0].state) == 0.0

    run(scenario())


def test_an_owner_that_was_started_again_is_sent_what_its_disk_lacks() -> None:
    """It is the same node. It is asked once it may have less than it has acknowledged, with the count of then."""

    async def scenario() -> None:
        one = Resent()
        key = one.acknowledged()
        one.store.note_owner(0, term(1, "a"), FORMER)
        kept = one.kept.acknowledged[key]
        kept.push = msgspec.structs.replace(kept.push, workers=3.0)
        await one.work()
        assert one.swarm.requests == []
        one.kept.unconfirm(IDS["a"])
        await one.work()
        (message,) = one.sent
        assert [(found.step, found.weight, found.workers) for found in message.deltas] == [(5, 0.5, 3.0)]
        assert [owner for _, owner in one.kept.owners()] == [IDS["a"]]
        await one.work()
        assert len(one.sent) == 1

    run(scenario())
