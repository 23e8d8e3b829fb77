"""Pushing: own unreplicated shards are added at once and exactly, the others are encoded and delivered."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from overlay.peers import Contact
from overlay.transport import Response
from tests.harness.builders.stores import BOUNDS, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, Answer, ScriptedSwarm, context_of
from training.encoding import codecs
from training.encoding.frames import FrameReader, Part, read_array
from training.exchange.client.delivery import Outgoing
from training.exchange.client.push import PushClient, TakenBack, _runs
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import LocateOwnersAnswer, Push, PushAnswer, PushResult, decode, encode
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.ownership_messages import TransferResult
from training.settings import ExchangeSettings

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
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
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
        deltas = DeltaHandler(context)
        client, add, added_here = PushClient(context, OwnerDirectory(context), deltas), deltas.add_unreplicated, []

        def counted(push: Push, parts: Any, *, is_finite: bool) -> dict[int, PushResult]:
            listed = list(parts)
            added_here.append((tuple(shard for shard, _ in listed), is_finite))
            return add(push, listed, is_finite=is_finite)

        deltas.add_unreplicated = counted  # type: ignore[method-assign]
        client._runs = [range(shard, shard + 1) for shard in range(4)]

        report = await client.push(1, 0, 1.0, np.ones(VALUES, np.float32))

        assert (report.acknowledged, report.outstanding, client.outstanding_steps) == (4, 0, [])
        assert [push.shards for push in swarm.sent("push", Push)] == [[1, 2, 3]]
        # Nothing is done here for the shards of others, which are most where many nodes train.
        assert [shards for shards, _ in added_here] == [(0,)]

    run(scenario())


def test_what_misses_the_deadline_stays_in_the_outbox() -> None:
    """The step continues; the shards are shown as outstanding until their owner answers."""

    async def scenario() -> None:
        store = store_of("a")
        swarm = ScriptedSwarm(ME, [OTHER])
        swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
        swarm.answers["appeal"] = lambda *_: TransferResult([], [])
        settings = ExchangeSettings(codec="float32", weight="sum", push_deadline_s=1.0)
        context = context_of(swarm, store, settings=settings)
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
        began = context.environment.clock.monotonic()

        report = await client.push(3, 2, 1.0, np.ones(VALUES, np.float32))

        assert context.environment.clock.monotonic() - began == pytest.approx(1.0, abs=0.1)
        assert (report.acknowledged, report.outstanding, client.outstanding_steps) == (0, 4, [3])
        assert await client.finish(0.1) == 1
        await client.stop()
        await asyncio.sleep(0)

    run(scenario())


def test_what_an_owner_puts_off_again_and_again_stays_in_the_outbox() -> None:
    """Each step waits for its deadline. The first delta stays in the outbox, and the next ones are added to each other
    until it takes them: nothing is lost."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm, status = ScriptedSwarm(ME, [OTHER]), "retry"
        added: list[tuple[int, float]] = []

        async def push(_sender: Contact, payload: bytes, stream: Any) -> Response:
            message, reader = decode(payload, Push), FrameReader(stream)
            for shard in message.shards:
                values, _, _ = await read_array(reader, shard, Part.DELTA, 4)
                if status == "ok":
                    added.append((message.step, float(values[0])))
            return Response(encode(PushAnswer([PushResult(shard, status) for shard in message.shards])))  # type: ignore[arg-type]

        swarm.linked[OTHER.node_id] = ScriptedSwarm(OTHER)
        swarm.linked[OTHER.node_id].handlers["push"] = push
        context = context_of(swarm, store, settings=ExchangeSettings(codec="float32", weight="sum"))
        client, clock = PushClient(context, OwnerDirectory(context), DeltaHandler(context)), context.environment.clock
        for step in range(1, 6):
            began_s = clock.monotonic()
            await client.push(step, step - 1, 1.0, np.ones(VALUES, np.float32))
            assert clock.monotonic() - began_s == pytest.approx(PLAIN.push_deadline_s, abs=0.1)
        assert client.outstanding_steps == [1, 5]
        status = "ok"
        assert await client.finish(5.0) == 0
        assert added == [(1, 1.0)] * 4 + [(5, 4.0)] * 4

    run(scenario())


@pytest.mark.parametrize(("codec", "synchronous"), [("sparse", False), ("sparse", True), ("int8", False)])
def test_a_sparse_delta_takes_along_what_the_one_before_lacked(
    codec: str, synchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is pushed, so that the next step can begin with it; not in another codec, and not under bsp. The last
    one sends more of its values."""
    monkeypatch.setattr("training.exchange.client.error_feedback.LAST_SPARSE_VALUES", 4096)

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm = ScriptedSwarm(ME, [OTHER])
        swarm.answers["push"] = lambda _to, payload: PushAnswer(
            [PushResult(shard, "ok") for shard in decode(payload, Push).shards]
        )
        settings = ExchangeSettings(codec=codec, weight="sum", sparse_values=512)  # type: ignore[arg-type]
        context = context_of(swarm, store, settings=settings, synchronous=synchronous)
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
        first = np.random.default_rng(3).normal(size=VALUES).astype(np.float32)
        await client.prepare(first, is_last=False)  # there is none yet
        await client.push(1, 0, 1.0, first)
        lacking = np.concatenate([client._feedback.residual(shard).copy() for shard in range(4)])
        assert np.abs(lacking).max() > 0.0

        delta = np.ones(VALUES, np.float32)
        await client.prepare(delta, is_last=False)

        is_taken = codec == "sparse" and not synchronous
        np.testing.assert_allclose(delta, 1.0 + is_taken * 0.95 * lacking, rtol=1e-6)
        assert bool(client._feedback.residual_shards) is not is_taken
        report = await client.push(2, 1, 1.0, delta)
        await client.prepare(delta, is_last=True)
        last = await client.push(3, 2, 1.0, delta)
        assert (last.bytes_sent > report.bytes_sent) is (codec == "sparse")

    run(scenario())


def test_runs_hold_about_so_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive shards are grouped until they reach the limit; no shard is left out."""
    monkeypatch.setattr("training.exchange.client.push.VALUES_PER_TURN", 8)

    assert _runs(BOUNDS) == [range(2), range(2, 4)]
    assert _runs(BOUNDS[:3]) == [range(2), range(2, 3)]


@pytest.mark.parametrize("codec", ["bfloat16", "sparse"])
def test_the_thread_that_encodes_pauses_between_shards(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """The event loop may share its core; also while what sparse deltas lacked is added to the next one. A codec that
    takes less time pauses after twice as many values."""
    monkeypatch.setattr("training.exchange.cooperative.VALUES_PER_TURN", 4)

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
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
        await client.push(1, 0, 1.0, np.ones(VALUES, np.float32))
        assert len(pauses) == (4 if codec == "sparse" else 2)
        await client.prepare(np.ones(VALUES, np.float32), is_last=False)
        assert len(pauses) == (8 if codec == "sparse" else 2)

    run(scenario())


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_a_delta_that_was_never_sent_travels_with_the_next_one(codec: str) -> None:
    """The first is sent and unanswered, the second waits: the third brings the second along, with its own weight."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm = ScriptedSwarm(ME, [OTHER])
        statuses = ["retry"]
        swarm.answers["push"] = lambda _to, payload: PushAnswer(
            [PushResult(shard, statuses[0], reason="test") for shard in decode(payload, Push).shards]  # type: ignore[arg-type]
        )
        settings = ExchangeSettings(codec=codec, weight="sum", push_deadline_s=0.5)  # type: ignore[arg-type]
        context = context_of(swarm, store, settings=settings)
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
        for step, weight, amount in ((1, 1.0, 8.0), (2, 0.5, 4.0), (3, 1.0, 1.0)):
            report = await client.push(step, step - 1, weight, np.full(VALUES, amount, np.float32))
            assert report.outstanding == 4
        waiting = client._outbox._deliveries[3].unacknowledged
        values = [codecs.decoded(item.encoded, item.codec, item.values)[0] for item in waiting.values()]
        assert values == pytest.approx([1.0 + 0.5 * 4.0] * 4, rel=0.01)
        assert client.outstanding_steps == [1, 3]

        statuses[0] = "ok"
        assert await client.finish(10.0) == 0
        assert {push.step for push in swarm.sent("push", Push)} == {1, 3}
        assert context.counters.lost == 0

    run(scenario())


def test_a_delta_that_will_be_refused_takes_none_along() -> None:
    """What is not finite is refused: what waits stays in the outbox."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm = ScriptedSwarm(ME, [OTHER])
        swarm.answers["push"] = lambda _to, payload: PushAnswer(
            [PushResult(shard, "retry", reason="test") for shard in decode(payload, Push).shards]
        )
        settings = ExchangeSettings(codec="float32", weight="sum", push_deadline_s=0.5)
        context = context_of(swarm, store, settings=settings)
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
        for step, amount in ((1, 8.0), (2, 4.0), (3, np.nan)):
            await client.push(step, step - 1, 1.0, np.full(VALUES, amount, np.float32))
        assert client.outstanding_steps == [1, 2, 3]
        await client.stop()

    run(scenario())


def test_all_that_was_taken_back_of_a_shard_is_added_each_with_its_weight() -> None:
    """Two deltas of shard 3, of weight 0.5 and 1, as parts of one of weight 1; of another shard there is nothing."""
    taken = [
        (
            Outgoing(3, codecs.as_bytes(np.full(4, value, np.float32)), "float32", 4),
            Push(genesis=GENESIS, node=b"n" * 20, incarnation=1, step=1, base_step=0, weight=weight, shards=[]),
        )
        for value, weight in ((1.0, 0.5), (3.0, 1.0))
    ]
    found = TakenBack(taken, 1.0)

    assert found.of(3).tolist() == [3.5] * 4
    assert found.of(3).tolist() == [3.5] * 4
    assert (len(found), found.shards, 3 in found, 2 in found) == (1, {3}, True, False)


@pytest.mark.parametrize(("codec", "kind"), [("float32", "sum"), ("int8", "population"), ("sparse", "population")])
def test_what_is_trained_while_no_owner_is_in_reach_becomes_one_delta(codec: Any, kind: Any) -> None:
    """The next step begins with all of it, and no step waits. It is sent as trained apart, with the weight that a delta
    had before. What was begun to be sent before keeps its identity. A delta that is not finite is left out."""

    async def scenario() -> None:
        store = store_of("a")
        for shard in range(4):
            store.note_owner(shard, term(1, "b"), OTHER)
        swarm, status = ScriptedSwarm(ME, [OTHER]), "retry"
        swarm.is_eligible, swarm.worker_count = False, 4.0
        swarm.answers["push"] = lambda _to, payload: PushAnswer(
            [PushResult(shard, status) for shard in decode(payload, Push).shards]  # type: ignore[arg-type]
        )
        settings = ExchangeSettings(codec=codec, weight=kind, push_deadline_s=0.5)
        context = context_of(swarm, store, settings=settings)
        client, clock = PushClient(context, OwnerDirectory(context), DeltaHandler(context)), context.environment.clock

        async def trained(step: int, amount: float) -> tuple[np.ndarray, Any]:
            delta = np.full(VALUES, amount, np.float32)
            await client.prepare(delta, is_last=False)
            context.run.step = step
            weight = 1.0 if kind == "sum" else 1.0 / swarm.worker_count
            return delta, await client.push(step, step - 1, weight, delta.copy())

        await trained(1, 8.0)
        swarm.gone.append(OTHER.node_id)
        swarm.worker_count = 2.0
        context.view.invalidate()
        began_s = clock.monotonic()
        carried = []
        for step, amount in ((2, 1.0), (3, 2.0), (4, np.nan), (5, 4.0)):
            delta, report = await trained(step, amount)
            carried.append(float(delta[0]))
            assert report.refused == ({"not_finite": 4} if step == 4 else {})
        assert clock.monotonic() == began_s
        residual = 0.95 * 8.0 if codec == "sparse" else 0.0  # of step 1, in some places
        np.testing.assert_allclose([*carried[:2], carried[3]], [1.0, 3.0, 7.0], atol=residual + 0.05)
        assert client.outstanding_steps == [1, 5]
        assert client.apart_since == (began_s, 1)

        status = "ok"
        swarm.gone.clear()
        assert await client.finish(10.0) == 0
        first, last = (push for push in swarm.sent("push", Push)[-2:])
        assert (first.step, first.apart, last.step, last.apart) == (1, True, 5, True)
        weight, workers = (1.0, 4.0) if kind == "sum" else (0.25, 4.0)
        assert (last.weight, last.workers) == (weight, workers)
        delta, _ = await trained(6, 1.0)
        assert client.apart_since is None
        assert not swarm.sent("push", Push)[-1].apart

    run(scenario())


def test_under_bsp_a_node_waits_for_its_owners() -> None:
    """A step is announced when all have it: nothing is trained apart."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME)
        swarm.is_eligible, swarm.candidate_list = False, []
        context = context_of(swarm, store_of("a"), synchronous=True)
        client = PushClient(context, OwnerDirectory(context), DeltaHandler(context))
        await client.prepare(np.ones(VALUES, np.float32), is_last=False)
        assert client.apart_since is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100.0):
                await client.push(1, 0, 1.0, np.ones(VALUES, np.float32))
        await client.stop()

    run(scenario())
