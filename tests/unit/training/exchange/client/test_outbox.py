"""The outbox: retries under one identity, final answers, its limit, and memory that it may no longer read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.exchange_context import GENESIS, Answer, ScriptedSwarm, context_of, records_of, until
from tests.harness.stores import IDS, contact, store_of, term
from tests.harness.virtual_loop import run
from training.exchange.client import outbox as outbox_module
from training.exchange.client.outbox import Delivery, Outbox, Outgoing
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import LocateOwnersAnswer, Push, PushAnswer, PushResult, decode
from training.exchange.ownership_messages import TransferResult
from training.settings import ExchangeSettings

ME, OWNER = contact("a"), contact("b")


def outbox_to_owner(answers: list[Any], *, limit: int = 1 << 20) -> tuple[Outbox, ScriptedSwarm, ExchangeContext]:
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
    swarm.answers["appeal"] = lambda *_: TransferResult([], [])
    store = store_of("a")
    for shard in range(len(store)):
        store.note_owner(shard, term(1, "b"), OWNER)
    settings = ExchangeSettings(codec="float32", outbox_bytes=limit)
    context = context_of(swarm, store, settings=settings)
    return Outbox(context, OwnerDirectory(context), cast(Any, None)), swarm, context


def delivery_of(step: int, memory: Any = b"") -> Delivery:
    push = Push(GENESIS, IDS["a"], 1, step, step - 1, 1.0, [])
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


def test_a_full_outbox_drops_the_oldest_delta_and_logs_it() -> None:
    """The newest delta is always kept, whatever the limit."""

    async def scenario() -> None:
        outbox, _, context = outbox_to_owner(["retry"], limit=40)
        first, second = delivery_of(1), delivery_of(2)
        outbox.add(first)
        await asyncio.sleep(0.1)
        outbox.add(second)
        await until(lambda: first.done.is_set())

        assert outbox.steps == [2]
        assert context.counters.lost == 2
        dropped = [record.fields for record in records_of(context) if record.event == "outbox_full_delta_dropped"]
        assert [(fields["step"], fields["shards"]) for fields in dropped] == [(1, 2)]
        await outbox.stop()

    run(scenario())


def test_own_shards_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large delta is decoded a part at a time: no part has more than its values, and every shard has its answer."""
    monkeypatch.setattr(outbox_module, "VALUES_PER_PART", 8)

    async def scenario() -> None:
        outbox, _, context = outbox_to_owner(["ok"])
        parts: list[list[int]] = []

        async def accept(_push: Push, items: list[Any]) -> list[PushResult]:
            parts.append([item.shard for item in items])
            return [PushResult(item.shard, "ok", 1) for item in items]

        outbox._deltas = cast(Any, SimpleNamespace(accept=accept))
        store = context.store
        for shard in range(4):
            state = store.fresh_state(shard, np.zeros(4, np.float32))
            store.own(shard, state, term(2, "a"), ME, 0.0, by_handover=False)
        encoded = np.ones(4, np.float32).tobytes()
        shards = {shard: Outgoing(shard, encoded, "float32", 4) for shard in range(4)}
        delivery = Delivery(Push(GENESIS, IDS["a"], 1, 1, 0, 1.0, []), shards, asyncio.Event())
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
