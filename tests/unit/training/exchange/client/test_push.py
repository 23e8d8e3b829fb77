"""Pushing: own unreplicated shards are added at once and exactly, the others are encoded and delivered."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Response
from p2pnode.training.encoding.frames import FrameReader, Part, read_array
from p2pnode.training.exchange.client.push import PUSH_DEADLINE_S
from p2pnode.training.exchange.messages import LocateOwnersAnswer, Push, PushAnswer, PushResult, decode, encode
from p2pnode.training.exchange.ownership_messages import TransferResult
from p2pnode.training.settings import ExchangeSettings
from tests.harness.builders.stores import BOUNDS, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, Answer, ScriptedSwarm, context_of, deltas_of, pusher_of

ME, OTHER = contact("a"), contact("b")
VALUES = BOUNDS[-1][1]
PLAIN = ExchangeSettings(codec="float32", weight="sum", outer_lr=1.0, outer_momentum=0.0)


def test_shards_without_a_backup_are_added_without_a_request() -> None:
    """A node alone in its swarm owns everything: the push is acknowledged at once, and adds the exact delta."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(len(store)):
            store.own(shard, zeros(store, shard), term(1, "a"), ME, 0.0, by_handover=False)
        swarm = ScriptedSwarm(ME)
        context = context_of(swarm, store)
        client = pusher_of(context)
        delta = np.arange(VALUES, dtype=np.float32)

        report = await client.push(1, 0, 1.0, delta)

        assert (report.acknowledged, report.refused, report.outstanding) == (len(store), {}, 0)
        assert (report.bytes_sent, swarm.requests) == (0, [])
        assert np.concatenate([store.owned[shard].state.value for shard in range(4)]).tolist() == delta.tolist()

    run(scenario())


def test_the_shards_of_another_owner_are_sent_to_it() -> None:
    """Shard 0 is added here, the others are acknowledged by their owner, in one request."""

    async def scenario() -> None:
        store = owner_of("a")
        for shard in (1, 2, 3):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm = ScriptedSwarm(ME, [OTHER])

        def answer(_to: Contact, payload: bytes) -> Answer:
            return PushAnswer([PushResult(shard, "ok") for shard in decode(payload, Push).shards])

        swarm.answers["push"] = answer
        context = context_of(swarm, store, settings=ExchangeSettings(codec="float32", weight="sum", replicas=0))
        deltas = deltas_of(context)
        client, add, added_here = pusher_of(context, deltas), deltas.add_unreplicated, []

        def counted(push: Push, shard: int, part: Any) -> PushResult | None:
            added_here.append(shard)
            return add(push, shard, part)

        deltas.add_unreplicated = counted  # type: ignore[method-assign]

        report = await client.push(1, 0, 1.0, np.ones(VALUES, np.float32))

        assert (report.acknowledged, report.outstanding, client.outbox.steps) == (4, 0, [])
        assert [push.shards for push in swarm.sent("push", Push)] == [[1, 2, 3]]
        # Nothing is done here for the shards of others, which are most where many nodes train.
        assert added_here == [0]

    run(scenario())


def test_what_no_owner_can_be_sent_by_the_deadline_is_returned() -> None:
    """The step continues, and nothing is outstanding: no byte was sent."""

    async def scenario() -> None:
        store = store_of("a")
        swarm = ScriptedSwarm(ME, [OTHER])
        swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
        swarm.answers["request_takeover"] = lambda *_: TransferResult([], [])
        settings = ExchangeSettings(codec="float32", weight="sum")
        context = context_of(swarm, store, settings=settings)
        client = pusher_of(context)
        began = context.environment.clock.monotonic()

        report = await client.push(3, 2, 1.0, np.ones(VALUES, np.float32))

        assert context.environment.clock.monotonic() - began == pytest.approx(PUSH_DEADLINE_S, abs=0.1)
        assert (report.acknowledged, report.outstanding, report.returned) == (0, 0, (0, 1, 2, 3))
        await asyncio.sleep(0)
        assert client.outbox.steps == []
        await client.outbox.stop()
        await asyncio.sleep(0)

    run(scenario())


def test_what_an_owner_puts_off_again_and_again_stays_in_the_outbox() -> None:
    """Each exchange waits for its deadline. The first delta stays in the outbox; the next ones go back to the trainer,
    for no byte of them was sent."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm, status = ScriptedSwarm(ME, [OTHER]), "retry"
        added: list[tuple[int, float]] = []

        async def push(_sender: Contact, payload: bytes, stream: Any) -> Response:
            message, reader = decode(payload.removeprefix(GENESIS), Push), FrameReader(stream)
            for shard in message.shards:
                values, _, _ = await read_array(reader, shard, Part.DELTA, 4)
                if status == "ok":
                    added.append((message.step, float(values[0])))
            return Response(encode(PushAnswer([PushResult(shard, status) for shard in message.shards])))  # type: ignore[arg-type]

        swarm.linked[OTHER.node_id] = ScriptedSwarm(OTHER)
        swarm.linked[OTHER.node_id].handlers["push"] = push
        context = context_of(swarm, store, settings=ExchangeSettings(codec="float32", weight="sum"))
        client, clock = pusher_of(context), context.environment.clock
        returned = []
        for step in range(1, 6):
            began_s = clock.monotonic()
            report = await client.push(step, step - 1, 1.0, np.ones(VALUES, np.float32))
            assert clock.monotonic() - began_s == pytest.approx(PUSH_DEADLINE_S, abs=0.1)
            returned.append(len(report.returned))
        assert returned == [0, 4, 4, 4, 4]
        assert client.outbox.shards == {0, 1, 2, 3}
        assert client.outbox.steps == [1]
        status = "ok"
        assert await client.outbox.finish(5.0) == 0
        assert added == [(1, 1.0)] * 4

    run(scenario())


@pytest.mark.parametrize("codec", ["bfloat16", "sparse"])
def test_the_thread_that_encodes_pauses_between_shards(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """The event loop may share its core. A codec that takes less time pauses after twice as many values."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_TURN", 4)

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm = ScriptedSwarm(ME, [OTHER])
        swarm.answers["push"] = lambda _to, payload: PushAnswer(
            [PushResult(shard, "ok") for shard in decode(payload, Push).shards]
        )
        context = context_of(swarm, store, settings=ExchangeSettings(codec=codec))  # type: ignore[arg-type]
        pauses: list[None] = []
        monkeypatch.setattr(context.environment.executor, "pause", lambda: pauses.append(None))
        client = pusher_of(context)
        await client.push(1, 0, 1.0, np.ones(VALUES, np.float32))
        assert len(pauses) == (4 if codec == "sparse" else 2)

    run(scenario())


def test_under_bsp_a_node_waits_for_its_owners() -> None:
    """A step is announced when all have it: nothing is trained apart."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME)
        swarm.is_eligible, swarm.candidate_list = False, []
        context = context_of(swarm, store_of("a"), synchronous=True)
        client = pusher_of(context)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100.0):
                await client.push(1, 0, 1.0, np.ones(VALUES, np.float32))
        assert client.apart_since is None
        await client.outbox.stop()

    run(scenario())


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "sparse"])
def test_a_delta_is_overwritten_with_what_its_owners_decode(codec: Any) -> None:
    """As soon as it is encoded: the rest stays with the trainer. The last delta of a run leaves less of it."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm, decoded = ScriptedSwarm(ME, [OTHER]), np.zeros(VALUES, np.float32)

        async def push(_sender: Contact, payload: bytes, stream: Any) -> Response:
            message, reader = decode(payload.removeprefix(GENESIS), Push), FrameReader(stream)
            for shard in message.shards:
                values, _, _ = await read_array(reader, shard, Part.DELTA, 4)
                decoded[slice(*BOUNDS[shard])] = values
            return Response(encode(PushAnswer([PushResult(shard, "ok") for shard in message.shards])))

        swarm.linked[OTHER.node_id] = ScriptedSwarm(OTHER)
        swarm.linked[OTHER.node_id].handlers["push"] = push
        context = context_of(swarm, store, settings=ExchangeSettings(codec=codec, weight="sum"))
        client = pusher_of(context)
        rests = []
        for is_last in (False, True):
            trained = np.random.default_rng(3).normal(size=VALUES).astype(np.float32)
            delta, told = trained.copy(), list[np.ndarray]()
            await client.push(
                1 + is_last, 0, 1.0, delta, on_sent=lambda d=delta, t=told: t.append(d.copy()), is_last=is_last
            )
            np.testing.assert_allclose(delta, decoded, rtol=1e-6, atol=1e-7)
            assert len(told) == 1
            assert np.array_equal(told[0], delta)
            rests.append(float(np.abs(trained - delta).sum()))
        assert (rests[0] == 0.0) is (codec == "float32")
        assert rests[1] <= rests[0]

    run(scenario())


@pytest.mark.parametrize(("codec", "kind"), [("float32", "sum"), ("int8", "population"), ("sparse", "population")])
def test_what_is_trained_while_no_owner_is_in_reach_is_returned(codec: Any, kind: Any) -> None:
    """No step waits, and nothing of it is encoded. What goes out then was trained apart, with the weight that a delta
    had before; what was begun to be sent before keeps its identity. The last delta of a run waits for its owners."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm, status = ScriptedSwarm(ME, [OTHER]), "retry"
        swarm.is_eligible, swarm.worker_count = False, 4.0
        swarm.answers["push"] = lambda _to, payload: PushAnswer(
            [PushResult(shard, status) for shard in decode(payload, Push).shards]  # type: ignore[arg-type]
        )
        settings = ExchangeSettings(codec=codec, weight=kind)
        context = context_of(swarm, store, settings=settings)
        client, clock = pusher_of(context), context.environment.clock

        async def trained(step: int, amount: float, *, is_last: bool = False) -> tuple[np.ndarray, Any]:
            delta = np.full(VALUES, amount, np.float32)
            context.run.step = step
            weight = 1.0 if kind == "sum" else 1.0 / swarm.worker_count
            return delta, await client.push(step, step - 1, weight, delta, is_last=is_last)

        await trained(1, 8.0)
        swarm.gone.append(OTHER.node_id)
        swarm.worker_count = 2.0
        context.view.invalidate()
        began_s = clock.monotonic()
        for step, amount in ((2, 1.0), (3, 3.0), (4, np.nan), (5, 7.0)):
            delta, report = await trained(step, amount)
            assert report.refused == ({"not_finite": 4} if step == 4 else {})
            assert report.returned == (() if step == 4 else (0, 1, 2, 3))
            assert step == 4 or delta[0] == amount
        assert clock.monotonic() == began_s
        assert client.outbox.steps == [1]
        assert client.apart_since == (began_s, 2)
        await trained(6, 7.0, is_last=True)
        assert client.outbox.steps == [1, 6]

        status = "ok"
        swarm.gone.clear()
        context.view.invalidate()
        assert await client.outbox.finish(10.0) == 0
        first, last = (push for push in swarm.sent("push", Push)[-2:])
        assert (first.step, first.apart, last.step, last.apart) == (1, True, 6, True)
        assert (last.weight, last.workers) == ((1.0, 4.0) if kind == "sum" else (0.25, 4.0))
        await trained(7, 1.0)
        assert client.apart_since is None
        assert not swarm.sent("push", Push)[-1].apart

    run(scenario())
