"""The sets of applied deltas stay bounded: which shards are looked at, how often, and after what silence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.harness.builders.stores import IDS, backup_of, contact, owner_of, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from training.exchange.owner.identities import (
    LEAST_SILENT_S,
    LOOK_INTERVAL_S,
    SILENT_LOGS,
    SILENT_STEPS,
    IdentityKeeper,
)
from training.exchange.store.shard_store import ShardStore
from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.state import ShardState

NODE = IDS["x"]


def settings_of(log_s: float) -> ExchangeSettings:
    return ExchangeSettings(codec="float32", outer_lr=1.0, outer_momentum=0.0, log_seconds=log_s)


def keeper_of(store: ShardStore, settings: ExchangeSettings | None = None) -> tuple[IdentityKeeper, Any, ScriptedSwarm]:
    swarm = ScriptedSwarm(contact("a"), [contact("b")])
    for peer in swarm.peers.values():
        peer.incarnation = 1
    context = context_of(swarm, store, settings=settings or settings_of(60.0))
    log_s = context.settings.log_seconds
    keeper = IdentityKeeper(context.store, context.view, log_s, context.stale_limit, context.environment)
    return keeper, context, swarm


def add(state: ShardState, incarnation: int, *steps: int, node: bytes = NODE) -> None:
    for step in steps:
        state.applied.add(DeltaId(node, incarnation, step))


def starts_of(state: ShardState, node: bytes = NODE) -> list[int]:
    return [incarnation for name, incarnation, _ in state.applied.iterate() if name == node]


async def silence(keeper: IdentityKeeper, seconds: float) -> None:
    """Look, wait so long, and look again."""
    await keeper.forget()
    await asyncio.sleep(seconds)
    await keeper.forget()


def test_an_earlier_start_is_forgotten_after_its_silence_and_no_sooner() -> None:
    """The last start of a node stays, however long it is silent."""

    async def scenario() -> None:
        store = owner_of("a")
        keeper, context, _ = keeper_of(store)
        state = store.owned[0].state
        add(state, 1, 1, 2)
        add(state, 2, 1)
        await silence(keeper, LEAST_SILENT_S - 1.0)
        assert starts_of(state) == [1, 2]
        await asyncio.sleep(1.0)
        await keeper.forget()
        assert starts_of(state) == [2]
        assert [one.fields["rows"] for one in records_of(context) if one.event == "identities_forgotten"] == [1]
        await silence(keeper, 2 * LEAST_SILENT_S)
        assert starts_of(state) == [2]

    run(scenario())


def test_a_delta_that_comes_late_begins_the_silence_anew() -> None:
    """It may have more behind it."""

    async def scenario() -> None:
        store = owner_of("a")
        keeper, _, _ = keeper_of(store)
        state = store.owned[0].state
        add(state, 1, 1)
        add(state, 2, 1)
        await keeper.forget()
        await asyncio.sleep(LEAST_SILENT_S - 1.0)
        add(state, 1, 2)
        await silence(keeper, LEAST_SILENT_S - 1.0)
        assert starts_of(state) == [1, 2]

    run(scenario())


def test_a_copy_that_was_received_anew_begins_with_a_new_watch() -> None:
    """What is known of the former state says nothing of this one; a state that is gone is watched no more."""

    async def scenario() -> None:
        store = owner_of("a")
        keeper, _, _ = keeper_of(store)
        add(store.owned[0].state, 1, 1)
        add(store.owned[0].state, 2, 1)
        await keeper.forget()
        await asyncio.sleep(LEAST_SILENT_S)
        store.owned[0].state = store.owned[0].state.copy()
        await keeper.forget()
        assert starts_of(store.owned[0].state) == [1, 2]
        assert list(keeper._watches) == [0]
        await asyncio.sleep(LEAST_SILENT_S)
        await keeper.forget()
        assert starts_of(store.owned[0].state) == [2]
        del store.owned[0]
        await keeper.forget()
        assert keeper._watches == {}

    run(scenario())


def test_a_backup_forgets_too() -> None:
    """Every node by itself."""

    async def scenario() -> None:
        store = backup_of("a", "b")
        state = store.backed[0].state
        assert state is not None
        add(state, 1, 1)
        add(state, 2, 1)
        keeper, _, _ = keeper_of(store)
        await silence(keeper, LEAST_SILENT_S)
        assert starts_of(state) == [2]

    run(scenario())


@pytest.mark.parametrize(
    ("log_s", "step_s", "silent_s"),
    [
        (60.0, 1.0, LEAST_SILENT_S),
        (3600.0, 1.0, SILENT_LOGS * 3600.0),
        (60.0, 100.0, SILENT_STEPS * 100.0),
        (60.0, 0.0, LEAST_SILENT_S),
    ],
)
def test_silence_outlasts_retries_repairs_and_slow_steps(log_s: float, step_s: float, silent_s: float) -> None:
    """The longest of the three; where no step time is known, of the other two."""

    async def scenario() -> None:
        keeper, _, swarm = keeper_of(store_of("a"), settings_of(log_s))
        for peer in swarm.peers.values():
            peer.step_seconds = step_s
        assert keeper.silent_s() == silent_s

    run(scenario())


def test_sets_are_looked_at_once_a_minute() -> None:
    """The first time a minute after the start."""

    async def scenario() -> None:
        keeper, _, _ = keeper_of(owner_of("a"))
        assert not keeper.is_due()
        await asyncio.sleep(LOOK_INTERVAL_S)
        assert keeper.is_due()
        await keeper.forget()
        assert not keeper.is_due()

    run(scenario())
