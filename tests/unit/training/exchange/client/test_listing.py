"""Which deltas pulled values have: asked of the owners, and answered by each for its own versions only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.harness.builders.stores import BOUNDS, IDS, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.exchange.client.listing import DeltaLister
from training.exchange.directory import OwnerDirectory
from training.exchange.owner.final_values import FinalValues
from training.exchange.owner.inspection import ShardInspector
from training.exchange.owner.publishing import Publisher
from training.exchange.owner.reads import ReadHandler
from training.exchange.ownership_messages import ListDeltas
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM
from training.shards.applied import DeltaId

ROWS = [(delta(1, 1.0).identity.node, 1, [(1, 2)])]


def lister_and_owner(store: ShardStore | None = None) -> tuple[DeltaLister, ScriptedSwarm]:
    """Node a owns shard 0 and has added deltas 1 to 3; node b asks."""
    store = store or owner_of("a")
    for step in (1, 2, 3):
        store.add(0, delta(step, 1.0))
    swarm, asking = ScriptedSwarm(contact("a")), ScriptedSwarm(contact("b"), [contact("a")])
    context = context_of(swarm, store)
    ReadHandler(context, FinalValues(context), Publisher(context), ShardInspector(context)).register()
    asking.linked[contact("a").node_id] = swarm
    asks = context_of(asking, store_of("b"))
    asks.store.note_owner(0, store.owned[0].term, contact("a"))
    return DeltaLister(asks, OwnerDirectory(asks)), swarm


def test_the_owner_lists_the_deltas_of_the_version_that_was_pulled() -> None:
    """Not those that it has added since."""

    async def scenario() -> None:
        lister, _ = lister_and_owner()
        first = lister._store.ownership.fence(0)
        found = await lister.deltas_of([(first, 2)] + [(ZERO_TERM, 0)] * (len(BOUNDS) - 1))
        assert {shard: known.rows() for shard, known in found.items()} == {0: ROWS}

    run(scenario())


def test_values_of_a_former_owner_and_unknown_versions_are_not_listed() -> None:
    """Its versions may be other sets of deltas under the same numbers."""

    async def scenario() -> None:
        lister, _ = lister_and_owner()
        rest = [(ZERO_TERM, 0)] * (len(BOUNDS) - 1)
        first = lister._store.ownership.fence(0)
        assert await lister.deltas_of([(term(0, "x"), 2), *rest]) == {}
        assert await lister.deltas_of([(first, 4), *rest]) == {}

    run(scenario())


def test_a_checkpoint_does_not_wait_for_a_silent_owner() -> None:
    """After two seconds the list is what has come by then."""

    async def scenario() -> None:
        lister, owner = lister_and_owner()
        answers = owner.handlers["list"]

        async def late(*question: Any) -> Any:
            await asyncio.sleep(60.0)
            return await answers(*question)

        owner.handlers["list"] = late
        first = lister._store.ownership.fence(0)
        began = asyncio.get_running_loop().time()
        assert await lister.deltas_of([(first, 2)] + [(ZERO_TERM, 0)] * (len(BOUNDS) - 1)) == {}
        assert asyncio.get_running_loop().time() - began <= 2.1

    run(scenario())


def test_an_owner_lists_its_own_values_itself() -> None:
    """Without a request."""

    async def scenario() -> None:
        store = owner_of("a")
        store.add(0, delta(1, 1.0))
        swarm = ScriptedSwarm(contact("a"))
        context = context_of(swarm, store)
        found = await DeltaLister(context, OwnerDirectory(context)).deltas_of(
            [(store.owned[0].term, 1)] + [(ZERO_TERM, 0)] * (len(BOUNDS) - 1)
        )
        assert found[0].count() == 1
        assert swarm.requests == []

    run(scenario())


def test_a_full_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards with more rows than one answer has room for come in several, each with what it does not list any more."""

    async def scenario() -> None:
        store = owner_of("a")
        lister, _ = lister_and_owner(store)
        for shard in (1, 2):
            store.own(shard, zeros(store, shard), term(4, "a"), contact("a"), 0.0, by_handover=False)
            lister._store.note_owner(shard, term(4, "a"), contact("a"))
        for shard in (0, 1, 2):
            for start in (1, 2):
                store.owned[shard].state.applied.add(DeltaId(IDS["x"], start, 7))
        store.owned[2].state.applied.forget(IDS["x"], 1)
        for shard in (1, 2):
            store.owned[shard].state.version = 2
        monkeypatch.setattr("training.exchange.owner.reads.MAX_ROWS", 2)
        versions = [(one.term, one.state.version) for _, one in sorted(store.owned.items())]

        found = await lister.deltas_of([*versions, *[(ZERO_TERM, 0)] * (len(BOUNDS) - 3)])

        assert {shard: known.count() for shard, known in found.items()} == {0: 5, 1: 2, 2: 2}
        assert [found[shard].forgotten.count for shard in (1, 2)] == [0, 1]
        assert len(lister._context.swarm.sent("list", ListDeltas)) == 3  # type: ignore[attr-defined]

    run(scenario())
