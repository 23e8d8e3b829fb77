"""Values out of range are found at little cost, and nothing of them is served."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.harness.builders.stores import backup_of, contact, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from training.exchange.owner import inspection
from training.exchange.owner.inspection import INTERVAL_S, ShardInspector
from training.exchange.store.shard_store import ShardStore
from training.shards.applied import DeltaId


def inspector_of(store: ShardStore):
    context = context_of(ScriptedSwarm(contact("a")), store)
    return ShardInspector(context), context


@pytest.mark.parametrize("number", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("array", ["value", "momentum"])
def test_a_shard_with_such_values_is_held(number: float, array: str) -> None:
    """Whichever array has them."""

    async def scenario() -> None:
        store = owner_of("a")
        inspector, context = inspector_of(store)
        store.owned[0].state.momentum = np.zeros(4, np.float32)
        assert inspector.due() == [0]
        await inspector.inspect([0])
        assert not store.owned[0].is_held
        getattr(store.owned[0].state, array)[2] = number
        await asyncio.sleep(INTERVAL_S)
        await inspector.inspect(inspector.due())
        assert store.owned[0].is_held
        assert [(one.event, one.fields["role"]) for one in records_of(context)] == [("shard_broken", "owner")]
        assert inspector.due() == []

    run(scenario())


def test_a_copy_of_a_backup_is_dropped_and_is_no_copy_any_more() -> None:
    """Only its identities are kept, so that nothing that it had is forgotten."""

    async def scenario() -> None:
        store = backup_of("a", "b")
        inspector, context = inspector_of(store)
        state = store.backed[0].state
        assert state is not None
        state.value[:] = np.nan
        await inspector.inspect(inspector.due())
        assert 0 not in store.backed
        assert store.unowned_copy(0) is None
        assert store.superseded[0].is_broken
        assert [one.fields["role"] for one in records_of(context)] == ["backup"]

    run(scenario())


def test_a_shard_that_trains_is_not_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that adds a delta sees every value. One that leaves a value out of range does not count, nor one of a
    second ago."""

    async def scenario() -> None:
        looked: list[object] = []
        monkeypatch.setattr(inspection, "_is_good", lambda state: looked.append(state) or True)
        store = owner_of("a")
        inspector, context = inspector_of(store)
        state, clock = store.owned[0].state, context.environment.clock
        for step in range(1, 6):
            state.apply(DeltaId(b"x" * 20, 1, step), 1.0, np.ones(4, np.float32), store.rule)
            state.note_addition(clock.monotonic())
            assert inspector.due() == []
            await inspector.inspect([0])
            await asyncio.sleep(INTERVAL_S / 2)
        assert looked == []
        await asyncio.sleep(INTERVAL_S)
        assert inspector.due() == [0]
        await inspector.inspect([0])
        assert looked == [state]
        await asyncio.sleep(INTERVAL_S)
        state.value[1] = np.inf
        state.apply(DeltaId(b"x" * 20, 1, 9), 1.0, np.ones(4, np.float32), store.rule)
        state.note_addition(clock.monotonic())
        assert inspector.due() == [0]

    run(scenario())


def test_one_broken_shard_of_several_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is of those that are looked at together; the others are not held."""

    async def scenario(at_once: int, broken: int) -> None:
        monkeypatch.setattr(inspection, "VALUES_AT_ONCE", at_once)
        store = store_of("a")
        for shard in range(4):
            store.own(shard, zeros(store, shard), term(1, "a"), contact("a"), 0.0, by_handover=False)
        inspector, _ = inspector_of(store)
        store.owned[broken].state.value[1] = np.nan
        assert inspector.due() == [0, 1, 2, 3]
        await inspector.inspect(inspector.due())
        assert [shard for shard, owned in store.owned.items() if owned.is_held] == [broken]
        assert inspector.due() == []

    for at_once in (1, 6, 100):
        for broken in range(4):
            run(scenario(at_once, broken))


def test_a_shard_is_looked_at_once_a_second_and_a_large_one_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who serves it a hundred times a second does not look a hundred times; the turns of a large store are longer."""

    async def scenario() -> None:
        looked = []
        monkeypatch.setattr(inspection, "_is_good", lambda state: looked.append(state) or True)
        inspector, _ = inspector_of(owner_of("a"))
        for _ in range(100):
            await inspector.inspect([0])
            await asyncio.sleep(0.01)
        assert 1 <= len(looked) <= 2
        monkeypatch.setattr(inspection, "BYTES_PER_S", 4)  # one value a second
        await asyncio.sleep(2.0)
        assert inspector.due() == []
        await asyncio.sleep(3.0)
        assert inspector.due() == [0]

    run(scenario())
