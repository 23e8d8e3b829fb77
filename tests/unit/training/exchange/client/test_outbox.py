"""The outbox: retries under one identity, final answers, and memory that it may no longer read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.client import outbox as outbox_module
from p2pnode.training.exchange.client.outbox import COPIED_BYTES, Outbox
from p2pnode.training.exchange.delta import KEPT_BYTES, LARGEST_SHARE, Delivery, Outgoing
from p2pnode.training.exchange.messages import (
    SIGN_OF_LIFE,
    LocateOwnersAnswer,
    Push,
    PushAnswer,
    PushResult,
    decode,
    piece_of,
)
from p2pnode.training.exchange.ownership_messages import TransferResult
from p2pnode.training.exchange.store.repair_log import RepairLog
from p2pnode.training.shards.applied import DeltaId
from tests.harness.builders.stores import IDS, contact, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import (
    Answer,
    ExchangeContext,
    ScriptedSwarm,
    context_of,
    outbox_of,
    records_of,
    until,
)

ME, OWNER = contact("a"), contact("b")


def outbox_to_owner(answers: list[Any]) -> tuple[Outbox, ScriptedSwarm, ExchangeContext]:
    """An outbox whose shards are all owned by `OWNER`, which gives these answers, the last one repeatedly."""
    swarm = ScriptedSwarm(ME, [OWNER])

    def answer(to: Contact, payload: bytes) -> Answer:
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(given, Exception):
            return given
        push = decode(payload, Push)
        return PushAnswer([PushResult(shard, given, reason="test") for shard in push.shards])

    swarm.answers["push"] = answer
    swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
    swarm.answers["request_takeover"] = lambda *_: TransferResult([], [])
    store = store_of("a")
    for shard in range(len(store)):
        store.note_owner(shard, term(1, "b"), OWNER)
    context = context_of(swarm, store)
    return outbox_of(context, cast(Any, None)), swarm, context


def delivery_of(step: int, memory: Any = b"") -> Delivery:
    push = Push(IDS["a"], 1, step, step - 1, 1.0, [])
    encoded = memory or np.full(4, step, np.float32).tobytes()
    return Delivery(
        push,
        {shard: Outgoing(shard, encoded, "float32", 4, isinstance(encoded, memoryview)) for shard in (0, 1)},
        asyncio.Event(),
    )


def test_a_failed_request_is_repeated_under_the_same_identity() -> None:
    """A timeout, then `retry`, then `ok`: three requests of the same step, and both shards are acknowledged once."""

    async def scenario() -> None:
        silence = TransportError("timeout", OWNER.address, "was silent")
        outbox, swarm, _ = outbox_to_owner([silence, "retry", "ok"])
        delivery = delivery_of(7)
        outbox.add(delivery)
        await asyncio.wait_for(delivery.done.wait(), 10)

        pushes = swarm.sent("push", Push)
        assert [(push.step, push.incarnation, push.shards) for push in pushes] == [(7, 1, [0, 1])] * 3
        assert (delivery.acknowledged, delivery.refused, outbox.steps) == (2, {}, [])
        assert OWNER.node_id in swarm.suspected

    run(scenario())


def test_a_delivery_goes_on_after_a_fault_of_this_node() -> None:
    """The fault is logged, and no shard is dropped: its owner may have added it already."""

    async def scenario() -> None:
        outbox, _, context = outbox_to_owner([KeyError(5), "ok"])
        delivery = delivery_of(7)
        outbox.add(delivery)
        await asyncio.wait_for(delivery.done.wait(), 10)

        assert (delivery.acknowledged, outbox.steps) == (2, [])
        (record,) = [record for record in records_of(context) if record.level == "error"]
        fields = {"service": "outbox", "error": "KeyError(5)"}
        assert (record.event, record.fields) == ("exchange_service_failed", fields)

    run(scenario())


def test_a_refusal_is_final_and_counted_by_reason() -> None:
    """It is not sent again."""

    async def scenario() -> None:
        outbox, swarm, context = outbox_to_owner(["refused"])
        delivery = delivery_of(1)
        outbox.add(delivery)
        await asyncio.wait_for(delivery.done.wait(), 10)

        assert len(swarm.requests) == 1
        assert delivery.refused == {"test": 2}
        assert context.counters.refused == 2

    run(scenario())


def test_a_delta_waits_until_the_one_before_is_answered_and_can_be_given_back() -> None:
    """The first was sent and may be in: it stays. The second was not: it is given back, and only once. The third is
    sent when the first has its answer."""

    async def scenario() -> None:
        answers: list[Any] = ["retry"]
        outbox, swarm, _ = outbox_to_owner(answers)
        first, second, third = delivery_of(1), delivery_of(2), delivery_of(3)
        outbox.add(first)
        await asyncio.sleep(0.1)
        assert outbox.give_back(first) == ()
        outbox.add(second)
        await asyncio.sleep(2.0)

        assert {push.step for push in swarm.sent("push", Push)} == {1}
        assert outbox.give_back(second) == (0, 1)
        await asyncio.wait_for(second.done.wait(), 1)
        assert (second.acknowledged, outbox.steps, outbox.give_back(second)) == (0, [1], ())

        outbox.add(third)
        answers[0] = "ok"
        await asyncio.wait_for(third.done.wait(), 10)
        assert (first.acknowledged, third.acknowledged) == (2, 2)
        assert [push.step for push in swarm.sent("push", Push)][-2:] == [1, 3]

    run(scenario())


def test_results_of_an_answer_that_breaks_off_count() -> None:
    """The owner's stream had one shard when it broke: only the other is sent again."""

    async def scenario() -> None:
        outbox, swarm, _ = outbox_to_owner(["ok"])
        plain = swarm.answers["push"]

        def broken(_to: Contact, _payload: bytes) -> Answer:
            swarm.answers["push"] = plain
            return PushAnswer([]), [SIGN_OF_LIFE, piece_of([PushResult(0, "ok")]), b"\0\0"]

        swarm.answers["push"] = broken
        delivery = delivery_of(4)
        outbox.add(delivery)
        await asyncio.wait_for(delivery.done.wait(), 10)

        assert [push.shards for push in swarm.sent("push", Push)] == [[0, 1], [1]]
        assert delivery.acknowledged == 2

    run(scenario())


def test_an_owner_is_sent_one_delivery_at_a_time() -> None:
    """Two deltas for one owner take turns, also of different shards; of the second nothing leaves before its turn."""

    async def scenario() -> None:
        outbox, swarm, _ = outbox_to_owner(["ok"])
        swarm.request_s = 3.0
        first, second = delivery_of(1), delivery_of(2)
        second.unacknowledged = {shard + 2: item for shard, item in second.unacknowledged.items()}
        for shard, item in second.unacknowledged.items():
            item.shard = shard
        outbox.add(first)
        await asyncio.sleep(0.5)
        outbox.add(second)
        await asyncio.sleep(2.0)
        assert [push.step for push in swarm.sent("push", Push)] == [1]
        await asyncio.wait_for(second.done.wait(), 10)
        assert [push.step for push in swarm.sent("push", Push)] == [1, 2]
        assert len(outbox._turns) == 0

    run(scenario())


def test_what_is_on_its_way_is_kept_for_the_backup_role_until_it_is_answered() -> None:
    """The owner may have this node as its backup: it finds the encoded shard until there is an answer."""

    async def scenario() -> None:
        answers: list[Any] = ["retry"]
        outbox, _, _ = outbox_to_owner(answers)
        delivery = delivery_of(1)
        outbox.add(delivery)
        await asyncio.sleep(0.1)
        identity = DeltaId(IDS["a"], 1, 1)
        assert outbox.sent.find(identity, 1) is delivery.unacknowledged[1]
        answers[0] = "ok"
        await asyncio.wait_for(delivery.done.wait(), 10)
        assert outbox.sent.find(identity, 1) is None

    run(scenario())


def test_own_shards_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large delta is decoded a part at a time: no part has more than its values, and every shard has its answer."""
    monkeypatch.setattr(outbox_module, "VALUES_PER_PART", 8)

    async def scenario() -> None:
        outbox, _, context = outbox_to_owner(["ok"])
        parts: list[list[int]] = []

        async def accept(_push: Push, items: list[Any]) -> list[PushResult]:
            parts.append([item.shard for item in items])
            return [PushResult(item.shard, "ok") for item in items]

        outbox.deltas = cast(Any, SimpleNamespace(accept=accept))
        store = context.store
        for shard in range(4):
            state = store.fresh_state(shard, np.zeros(4, np.float32))
            store.own(shard, state, term(2, "a"), ME, 0.0, by_handover=False)
        encoded = np.ones(4, np.float32).tobytes()
        shards = {shard: Outgoing(shard, encoded, "float32", 4) for shard in range(4)}
        delivery = Delivery(Push(IDS["a"], 1, 1, 0, 1.0, []), shards, asyncio.Event())
        outbox.add(delivery)
        await asyncio.wait_for(delivery.done.wait(), 10)

        assert parts == [[0, 1], [2, 3]]
        assert delivery.acknowledged == 4

    run(scenario())


def test_a_lossy_delta_is_kept_without_a_copy() -> None:
    """Only what lies in the trainer's memory is copied for the repair log."""
    own, borrowed = np.ones(4, np.float32).data.cast("B"), np.ones(4, np.float32).data.cast("B")

    assert Outgoing(0, own, "float32", 4).item().encoded is own
    copied = Outgoing(0, borrowed, "float32", 4, is_borrowed=True).item().encoded
    assert isinstance(copied, bytes)


def test_a_detached_delivery_reads_the_trainers_memory_no_more() -> None:
    """The trainer overwrites its memory after the deadline: what is sent later is the delta as it was."""

    async def scenario() -> None:
        outbox, swarm, _ = outbox_to_owner(["retry"])
        memory = np.full(4, 5.0, np.float32)
        delivery = delivery_of(1, memoryview(memory).cast("B"))
        outbox.add(delivery)
        await asyncio.sleep(0.3)

        await outbox.detach(delivery)
        memory[:] = 9.0

        assert [np.frombuffer(item.encoded, np.float32)[0] for item in delivery.unacknowledged.values()] == [5.0, 5.0]
        sent = len(swarm.requests)
        await until(lambda: len(swarm.requests) > sent)
        assert not delivery.done.is_set()
        assert await outbox.finish(0.1) == 1
        await outbox.stop()

    run(scenario())


@pytest.mark.parametrize(("is_eligible", "kept"), [(True, [1]), (False, [1, 3])])
def test_what_an_owner_has_acknowledged_is_kept_to_be_sent_again(is_eligible: bool, kept: list[int]) -> None:
    """A small part of the trainer's memory as a copy, a large one not. A node that owns nothing has the room of its
    repair log for it."""

    async def scenario() -> None:
        outbox, swarm, context = outbox_to_owner(["ok"])
        swarm.is_eligible = is_eligible
        context.store.log = RepairLog(4 * KEPT_BYTES, 60.0)
        memory = bytearray(16)
        large = bytes(int(2 * LARGEST_SHARE * KEPT_BYTES))
        for step, encoded in ((1, memoryview(memory)), (2, memoryview(bytearray(COPIED_BYTES + 1))), (3, large)):
            delivery = delivery_of(step, encoded)
            outbox.add(delivery)
            await asyncio.wait_for(delivery.done.wait(), 10)
        memory[0] = 1
        found = {key.identity.step: one for key, one in outbox.sent.acknowledged.items()}
        assert list(found) == kept
        assert (found[1].owner, found[1].item.encoded) == (OWNER.node_id, bytes(16))

    run(scenario())
