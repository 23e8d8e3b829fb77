"""Values out of range are found at little cost, and nothing of them is served."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.harness.builders.stores import backup_of, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from training.exchange.owner import validation
from training.exchange.owner.validation import INSPECTION_INTERVAL_S, ShardInspector, is_good
from training.exchange.store.shard_store import ShardStore
from training.shards.applied import DeltaId
from training.shards.state import ShardState


def inspector_of(store: ShardStore):
    context = context_of(ScriptedSwarm(contact("a")), store)
    return ShardInspector(context.store, context.counters, context.rebalance, context.environment), context


@pytest.mark.parametrize("number", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("array", ["value", "momentum"])
def test_a_shard_with_such_values_is_resigned(number: float, array: str) -> None:
    """Whichever array has them. The state is dropped, the fence rises, and the best copy is searched for."""

    async def scenario() -> None:
        store = owner_of("a")
        inspector, context = inspector_of(store)
        former = store.owned[0].term
        store.owned[0].state.momentum = np.zeros(4, np.float32)
        await inspector.inspect([0])
        getattr(store.owned[0].state, array)[2] = number
        await inspector.inspect([0])
        assert 0 in store.owned, "it was looked at a moment ago"
        await asyncio.sleep(INSPECTION_INTERVAL_S)
        await inspector.inspect([0])
        assert (store.owned, store.superseded) == ({}, {})
        assert store.ownership.fence(0) > former
        assert context.rebalance.collect_orphans() == [0]
        assert context.counters.resigned_shards == 1
        assert [(one.event, one.fields) for one in records_of(context)] == [("shard_resigned", {"shard": 0})]

    run(scenario())


def test_the_copy_of_a_backup_is_looked_at_once_a_second() -> None:
    """Unless the pass that adds a delta has seen every value."""
    store = backup_of("a", "b")
    state = store.backed[0].state
    assert state is not None
    assert is_good(state, 1.0)
    state.value[1] = np.nan
    assert is_good(state, 1.0 + INSPECTION_INTERVAL_S / 2)
    assert not is_good(state, 1.0 + INSPECTION_INTERVAL_S)


def test_a_shard_that_trains_is_not_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that adds a delta sees every value. One that leaves a value out of range does not count, nor one of a
    second ago."""

    async def scenario() -> None:
        looked: list[object] = []
        monkeypatch.setattr(ShardState, "is_in_range", lambda state: looked.append(state) or True)
        store = owner_of("a")
        inspector, context = inspector_of(store)
        state, clock = store.owned[0].state, context.environment.clock
        for step in range(1, 6):
            state.apply(DeltaId(b"x" * 20, 1, step), 1.0, np.ones(4, np.float32), store.rule)
            state.note_addition(clock.monotonic())
            await inspector.inspect([0])
            await asyncio.sleep(INSPECTION_INTERVAL_S / 2)
        assert looked == []
        await asyncio.sleep(INSPECTION_INTERVAL_S)
        await inspector.inspect([0])
        assert looked == [state]
        await asyncio.sleep(INSPECTION_INTERVAL_S)
        state.value[1] = np.inf
        state.apply(DeltaId(b"x" * 20, 1, 9), 1.0, np.ones(4, np.float32), store.rule)
        state.note_addition(clock.monotonic())
        await inspector.inspect([0])
        assert looked == [state, state]

    run(scenario())


def test_one_broken_shard_of_several_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is of those that are looked at together; the others stay."""

    async def scenario(at_once: int, broken: int) -> None:
        monkeypatch.setattr(validation, "VALUES_AT_ONCE", at_once)
        store = store_of("a")
        for shard in range(4):
            store.own(shard, zeros(store, shard), term(1, "a"), contact("a"), 0.0, by_handover=False)
        inspector, _ = inspector_of(store)
        store.owned[broken].state.value[1] = np.nan
        await inspector.inspect(range(4))
        assert [shard for shard in range(4) if shard not in store.owned] == [broken]

    for at_once in (1, 6, 100):
        for broken in range(4):
            run(scenario(at_once, broken))
