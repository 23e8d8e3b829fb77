"""Pushed deltas: added once, refused, redirected, or to be sent again."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.training.codec_choice import CodecChoice
from p2pnode.training.encoding.codecs import as_bytes
from p2pnode.training.encoding.frames import Part, frames
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import (
    Forward,
    ForwardAnswer,
    ForwardResult,
    Push,
    PushAnswer,
    PushResult,
    decode,
)
from p2pnode.training.exchange.owner import deltas
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.run_state import Phase
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.swarm_view import LASTING_S
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.builders.stores import IDS, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, deltas_of

ME, OTHER = contact("a"), contact("x")


def handler_of(store: ShardStore, others: list[Contact] | None = None, **changes: Any) -> tuple[DeltaHandler, Any, Any]:
    swarm = ScriptedSwarm(ME, others or [])
    plain = context_of(swarm, store)
    context = dataclasses.replace(plain, **{"codec": CodecChoice(changes.get("settings", plain.settings)), **changes})
    handler = deltas_of(context)
    handler.register()
    return handler, swarm, context


def push_of(step: int = 1, *, base_step: int = 0, shards: list[int] | None = None, node: str = "x") -> Push:
    return Push(IDS[node], 1, step, base_step, 1.0, [0] if shards is None else shards)


def item_of(shard: int = 0, amount: float = 1.0) -> IncomingDelta:
    values = np.full(4, amount, dtype=np.float32)
    return IncomingDelta(shard, values, bytes(as_bytes(values)), "float32")


def body_of(*shards: int) -> list[bytes]:
    values = np.ones(4, np.float32)
    return [bytes(buffer) for shard in shards for buffer in frames(shard, values, "float32", Part.DELTA)]


async def pushed(swarm: ScriptedSwarm, push: Push, body: list[bytes], sender: Contact = OTHER) -> list[PushResult]:
    answer = await swarm.deliver("push", sender, push, PushAnswer, body)
    results: list[PushResult] = answer.results
    return results


def test_a_delta_is_added_once_however_often_it_is_sent() -> None:
    """The first answer says which version of the state has it, and a retry is acknowledged."""

    async def scenario() -> None:
        store = owner_of("a")
        _, swarm, _ = handler_of(store)

        for version in (1, 0):
            assert await pushed(swarm, push_of(), body_of(0)) == [PushResult(0, "ok", version=version)]
        assert store.owned[0].state.value.tolist() == [1.0] * 4

    run(scenario())


def test_a_delta_of_a_node_that_counts_fewer_workers_gets_the_owners_weight() -> None:
    """The answer names the owner's count, and who counts otherwise is noted."""

    async def scenario() -> None:
        store = owner_of("a")
        _, swarm, context = handler_of(store, settings=ExchangeSettings(replicas=0))
        swarm.worker_count = 6.0
        push = msgspec.structs.replace(push_of(), weight=0.5, workers=2.0)

        for version in (1, 0):
            answer = await swarm.deliver("push", OTHER, push, PushAnswer, body_of(0))
            assert (answer.results, answer.workers) == ([PushResult(0, "ok", version=version)], 6.0)
            await asyncio.sleep(LASTING_S)
        assert store.owned[0].state.value.tolist() == [pytest.approx(1 / 6)] * 4
        assert context.view.counts.lasting() == [(OTHER.node_id, 2.0)]

    run(scenario())


def test_an_addition_counts_as_a_look_at_the_shard() -> None:
    """Of a delta of another node and of the node's own; a repeated one is not added, and looks at nothing."""

    async def scenario() -> None:
        store = owner_of("a")
        handler, swarm, context = handler_of(store)
        clock, state = context.environment.clock, store.owned[0].state
        await pushed(swarm, push_of(), body_of(0))
        assert state.looked_s == (first_s := clock.monotonic())
        await asyncio.sleep(1.0)
        await pushed(swarm, push_of(), body_of(0))
        assert state.looked_s == first_s
        handler.add_unreplicated(push_of(node="a"), 0, np.ones(4, np.float32))
        assert state.looked_s == clock.monotonic() > first_s

    run(scenario())


def test_a_large_delta_is_decoded_and_measured_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over millions of values into fresh memory would hold the loop for tens of milliseconds. A retry that comes
    meanwhile is added once all the same, and one that is not finite is refused."""
    monkeypatch.setattr("p2pnode.training.cooperative.LIGHT_PASSES", 1)
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_PASS", 3)

    async def scenario() -> None:
        store = owner_of("a")
        _, swarm, context = handler_of(store)
        run_in_thread, names = context.environment.executor.run, []

        async def noted(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            names.append(function.__name__)
            return await run_in_thread(function, *args, **kwargs)

        monkeypatch.setattr(context.environment.executor, "run", noted)
        retries = await asyncio.gather(*(pushed(swarm, push_of(), body_of(0)) for _ in range(3)))
        assert [[one.status for one in results] for results in retries] == [["ok"]] * 3
        assert store.owned[0].state.value.tolist() == [1.0] * 4
        assert names == ["received"] * 3
        infinite = [bytes(buffer) for buffer in frames(0, np.full(4, np.inf, np.float32), "float32", Part.DELTA)]
        assert [result.reason for result in await pushed(swarm, push_of(2), infinite)] == ["not_finite"]

    run(scenario())


def test_a_large_push_is_forwarded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner keeps a part of the delta at a time, decoded and as received, until its backup has that part."""
    monkeypatch.setattr(deltas, "VALUES_PER_PART", 8 * (deltas.PARTS_AT_ONCE + 1))

    def answer(_to: Contact, payload: bytes) -> ForwardAnswer:
        message = decode(payload, Forward)
        return ForwardAnswer([ForwardResult(entry.shard, "ok", term(1, "a")) for entry in message.shards])

    async def scenario() -> None:
        store = owner_of("a")
        for shard in range(1, 3):
            state = store.fresh_state(shard, np.zeros(4, np.float32))
            store.own(shard, state, term(1, "a"), ME, 0.0, by_handover=False)
        for owned in store.owned.values():
            owned.backup = OTHER
        _, swarm, _ = handler_of(store, [OTHER])
        swarm.answers["forward"] = answer
        results = await pushed(swarm, push_of(shards=[0, 1, 2]), body_of(0, 1, 2))

        forwards = swarm.sent("forward", Forward)
        assert [[entry.shard for entry in message.shards] for message in forwards] == [[0, 1], [2]]
        assert [(result.shard, result.status) for result in results] == [(0, "ok"), (1, "ok"), (2, "ok")]

    run(scenario())


def test_a_delta_under_another_node_s_identity_is_refused() -> None:
    """The sender of a push is its origin; the refusal is counted."""

    async def scenario() -> None:
        store = owner_of("a")
        _, swarm, context = handler_of(store)

        results = await pushed(swarm, push_of(), body_of(0), sender=contact("c"))

        assert results == [PushResult.refused(0, "not_yours")]
        assert context.counters.refused_here == {"not_yours": 1}

    run(scenario())


def test_a_shard_outside_the_layout_refuses_the_whole_push() -> None:
    """Nothing is read from such a body."""

    async def scenario() -> None:
        _, swarm, _ = handler_of(owner_of("a"))

        results = await pushed(swarm, push_of(shards=[0, 9]), [])

        assert [(result.status, result.reason) for result in results] == [("refused", "shape")] * 2

    run(scenario())


def test_a_broken_frame_refuses_the_shards_after_it() -> None:
    """The shards that were added before it stay acknowledged."""

    async def scenario() -> None:
        store = owner_of("a")
        _, swarm, _ = handler_of(store)

        results = await pushed(swarm, push_of(shards=[0, 1]), [*body_of(0), b"garbage" * 10])

        assert [(result.status, result.reason) for result in results] == [("ok", ""), ("refused", "malformed")]

    run(scenario())


def test_a_shard_of_another_owner_is_redirected() -> None:
    """Without a known owner the origin is to try again."""

    async def scenario() -> None:
        store = store_of("a")
        store.note_owner(0, term(3, "b"), contact("b"))
        handler, _, _ = handler_of(store)

        known, unknown = await handler.accept(push_of(shards=[0, 1]), [item_of(0), item_of(1)])

        assert (known.status, known.owner_info) == ("redirect", store.ownership.owner_info(0))
        assert unknown == PushResult.retry(1, "owner_unknown")
        assert known.denies_ownership
        assert unknown.denies_ownership

    run(scenario())


@pytest.mark.parametrize(
    ("phase", "moving", "reason"), [(Phase.CLOSED, False, "leaving"), (Phase.RUNNING, True, "moving")]
)
def test_a_closed_node_and_a_moving_shard_start_no_delta(phase: Phase, moving: bool, reason: str) -> None:
    """The origin sends it again, to the next owner."""

    async def scenario() -> None:
        store = owner_of("a")
        handler, _, context = handler_of(store)
        context.run.enter(phase)
        if moving:
            store.owned[0].moving = True

        (result,) = await handler.accept(push_of(), [item_of()])

        assert (result.status, result.reason, result.denies_ownership) == ("retry", reason, False)

    run(scenario())


def test_a_delta_that_is_too_old_is_refused() -> None:
    """By the staleness limit as `late`, by the era of a take-over as `before_era`; a repair is exempt from both."""

    async def scenario() -> None:
        store = owner_of("a")
        handler, _, context = handler_of(store, stale_limit=10)
        context.run.step = 20
        assert await handler.accept(push_of(base_step=9), [item_of()]) == [PushResult.refused(0, "late")]

        store.owned[0].state.era_step = 15
        assert await handler.accept(push_of(base_step=14), [item_of()]) == [PushResult.refused(0, "before_era")]

        repair = dataclasses.replace(item_of(), repair=True)
        assert (await handler.accept(push_of(base_step=0), [repair]))[0].status == "ok"

    run(scenario())


def test_a_known_delta_without_a_backup_is_not_safe_yet() -> None:
    """After a hand-over the new owner may be the only node that has it."""

    async def scenario() -> None:
        store = owner_of("a")
        handler, swarm, context = handler_of(store)
        await handler.accept(push_of(), [item_of()])
        swarm.peers[IDS["b"]] = swarm._peer(contact("b"))
        context.view.invalidate()

        assert await handler.accept(push_of(), [item_of()]) == [PushResult.retry(0, "no_backup_yet")]

    run(scenario())


def test_a_retry_waits_for_the_first_attempt() -> None:
    """Both are acknowledged, and the delta is forwarded and added once."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = contact("b")
        handler, swarm, _ = handler_of(store, [contact("b")])
        arrived, answer = asyncio.Event(), asyncio.Event()
        replicate = handler.replicator.replicate_and_add

        async def slow(*arguments: Any) -> list[PushResult]:
            arrived.set()
            await answer.wait()
            store.owned[0].backup = None
            swarm.peers.clear()
            return await replicate(*arguments)

        handler.replicator.replicate_and_add = slow  # type: ignore[method-assign]
        first = asyncio.create_task(handler.accept(push_of(), [item_of()]))
        await arrived.wait()
        second = asyncio.create_task(handler.accept(push_of(), [item_of()]))
        assert not await handler.drained([0], 0.1)
        assert await handler.drained([1], 0.1)

        answer.set()

        assert await first == [PushResult(0, "ok", version=1)]
        assert await second == [PushResult(0, "ok")]
        assert await handler.drained([0], 0.1)

    run(scenario())


OWN_PART = np.full(4, 2.0, np.float32)


def test_own_deltas_of_unreplicated_shards_are_added_at_once() -> None:
    """Only shards that this node owns without a target; a value that is not finite is refused."""

    async def scenario() -> None:
        store = owner_of("a")
        handler, _, _ = handler_of(store)
        push = push_of(node="a")
        assert handler.unreplicated(range(4)) == [0]

        assert handler.add_unreplicated(push, 0, OWN_PART) == PushResult(0, "ok")
        assert store.owned[0].state.value.tolist() == [2.0] * 4
        refused = handler.add_unreplicated(push_of(2, node="a"), 0, np.full(4, np.nan, np.float32))
        assert refused == PushResult.refused(0, "not_finite")

        store.owned[0].moving = True
        assert handler.add_unreplicated(push_of(3, node="a"), 0, OWN_PART) is None
        assert handler.replicator.take_merged() == {IDS["a"]: 1}
        assert handler.replicator.take_merged() == {}

    run(scenario())


@pytest.mark.parametrize(("codec", "value"), [("bfloat16", 1.0), ("sparse", 2.0)])
@pytest.mark.parametrize("synchronous", [False, True])
def test_own_deltas_follow_the_rule_of_the_codec(codec: Any, value: float, synchronous: bool) -> None:
    """A node that has met no other adds its own deltas whole, and under sparse by the plain rule. With others, they are
    encoded like theirs, so that the frame says how they are added everywhere."""

    async def scenario() -> None:
        store = store_of("a", Rule(outer_lr=0.5, outer_momentum=0.0))
        store.own(0, zeros(store), term(1, "a"), ME, 0.0, by_handover=False)
        settings = ExchangeSettings(codec=codec, weight="sum", outer_lr=0.5, outer_momentum=0.0, replicas=0)
        handler, swarm, _ = handler_of(store, settings=settings, synchronous=synchronous)
        assert handler.unreplicated(range(4)) == [0]

        handler.add_unreplicated(push_of(node="a"), 0, OWN_PART)
        store.fold(0, 1)

        assert store.owned[0].state.value.tolist() == [value] * 4
        swarm.remembered = lambda: ["somebody"]
        assert handler.unreplicated(range(4)) == ([] if codec == "sparse" else [0])

    run(scenario())


def test_a_shard_that_is_about_to_get_a_backup_is_not_unreplicated() -> None:
    """With another eligible node, own deltas are replicated like all others."""

    async def scenario() -> None:
        handler, _, _ = handler_of(owner_of("a"), [contact("b")])

        assert handler.unreplicated(range(4)) == []

    run(scenario())


@pytest.mark.parametrize(("weight", "value"), [("population", 0.25), ("sum", 0.5)])
def test_a_delta_that_was_trained_apart_is_added_as_from_the_other_side_of_a_split(weight: Any, value: float) -> None:
    """However old, without momentum, and with the weight that it has among all. Only an era that may have it refuses
    it: it may be one that was begun to be sent before."""

    async def scenario() -> None:
        store = store_of("a", Rule(outer_lr=1.0, outer_momentum=0.9))
        store.own(0, zeros(store), term(1, "a"), ME, 0.0, by_handover=False)
        settings = ExchangeSettings(codec="float32", weight=weight, outer_lr=1.0, outer_momentum=0.9)
        _, swarm, context = handler_of(store, settings=settings, stale_limit=10)
        context.run.step = 40
        swarm.worker_count = 4.0
        late = msgspec.structs.replace(push_of(base_step=1), weight=0.5, workers=2.0)
        assert await pushed(swarm, late, body_of(0)) == [PushResult(0, "refused", reason="late")]
        apart = msgspec.structs.replace(late, apart=True)
        assert await pushed(swarm, apart, body_of(0)) == [PushResult(0, "ok", version=1)]
        state = store.owned[0].state
        assert state.value.tolist() == [value] * 4
        assert (state.momentum, state.sum_weight) == (None, 0.0)
        state.era_step = 30
        again = msgspec.structs.replace(apart, step=2)
        assert await pushed(swarm, again, body_of(0)) == [PushResult(0, "refused", reason="before_era")]

    run(scenario())
