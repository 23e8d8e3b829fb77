"""Two owners of one shard after a split: the deltas of both are in the surviving copy, once, or are reported lost."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from overlay.peers import PeerChange
from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, SUM, contact, delta, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, deltas_of, directory_of, records_of
from tests.harness.stubs.exchange_services import reads_of
from training.exchange.context import ExchangeContext
from training.exchange.messages import LocateOwners, LocateOwnersAnswer
from training.exchange.ownership_messages import FindDeltas
from training.exchange.recovery.reconciliation import CLAIMS_INTERVAL_S, OCCASION_S, SplitReconciler
from training.exchange.store.records import StoredState
from training.exchange.store.repair_log import RepairLog, to_mend
from training.exchange.store.shard_store import ShardStore
from training.settings import ExchangeSettings
from training.shards.applied import Applied

SETTINGS = ExchangeSettings(codec="float32", weight="sum", outer_lr=1.0, outer_momentum=0.0, replicas=0)


class Side:
    """One node, owner of shard 0 under the term (number, name), with a repair log."""

    def __init__(self, name: str, other: str, number: int, log_bytes: int = 1 << 20) -> None:
        self.store = ShardStore(IDS[name], BOUNDS, PARAMETERS, SUM, RepairLog(log_bytes, 600.0))
        self.store.own(0, zeros(self.store), term(number, name), contact(name), 0.0, by_handover=False)
        self.swarm = ScriptedSwarm(contact(name), [contact(other)])
        self.context: ExchangeContext = context_of(self.swarm, self.store, settings=SETTINGS)
        deltas, directory = deltas_of(self.context), directory_of(self.context)
        deltas.register()
        reads_of(self.context).register()
        self.reconciler = SplitReconciler(self.context, directory, deltas)

    @property
    def value(self) -> float:
        return float(self.store.owned[0].state.value[0])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record.fields for record in records_of(self.context) if record.event == name]


def split(log_bytes: int = 1 << 20) -> tuple[Side, Side]:
    """Node a owns shard 0 under term 5 and has delta 1 and 2, node b under term 3 and has delta 1 and 3."""
    high, low = Side("a", "b", 5), Side("b", "a", 3, log_bytes)
    high.swarm.linked[IDS["b"]], low.swarm.linked[IDS["a"]] = low.swarm, high.swarm
    for side, own in ((high, delta(2, 20.0)), (low, delta(3, 300.0))):
        side.reconciler.due()  # sets the clock of the log
        side.store.add(0, delta(1, 1.0))
        side.store.add(0, own)
    return high, low


async def reconcile(*sides: Side) -> None:
    for _ in range(3):
        for side in sides:
            side.reconciler.due()
            await side.reconciler.reconcile()


async def mended(side: Side) -> list[dict[str, Any]]:
    """What the node says when the occasion is over."""
    await asyncio.sleep(OCCASION_S)
    side.reconciler.due()
    return side.events("split_mended")


def test_the_deltas_of_both_sides_are_added_once() -> None:
    """The lower term steps down and offers what only it has; the delta that both have is not added again."""

    async def scenario() -> None:
        high, low = split()
        await reconcile(high, low)

        assert (high.value, 0 in low.store.owned, low.store.superseded) == (321.0, False, {})
        assert await mended(low) == [{"shards": 1, "lost": 0}]
        assert high.context.counters.repaired == 1

        await reconcile(high, low)
        assert high.value == 321.0

    run(scenario())


def test_the_shards_of_one_occasion_are_one_event() -> None:
    """A restart of all nodes mends dozens of shards within a moment: one event at its end, and one per occasion."""

    async def scenario() -> None:
        low = split(log_bytes=0)[1]
        low.store.step_down(0)
        (copy,) = low.store.superseded.values()
        for shard, lost in (0, []), (1, [(IDS["x"], 1, 3, 4)]), (2, []):
            low.reconciler._report_lost(shard, dataclasses.replace(copy), lost)
            await asyncio.sleep(OCCASION_S / 2)
            low.reconciler.due()
        assert low.events("split_mended") == []
        assert await mended(low) == [{"shards": 3, "lost": 2}]

        low.reconciler._report_lost(4, copy, [])
        assert (await mended(low))[1:] == [{"shards": 1, "lost": 0}]

    run(scenario())


def test_what_the_log_has_no_longer_is_reported_with_its_identity() -> None:
    """Without a log the delta is lost: counted, and named in an event."""

    async def scenario() -> None:
        high, low = split(log_bytes=0)
        await reconcile(high, low)

        assert high.value == 21.0
        (lost,) = low.events("deltas_lost_in_split")
        assert (lost["count"], lost["deltas"]) == (1, [f"{IDS['x'].hex()[:8]}/1:3-3"])
        assert low.context.counters.lost_in_splits == 1

    run(scenario())


def test_many_lost_deltas_are_sought_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request names so many at most; the next one those that follow."""
    monkeypatch.setattr("training.exchange.recovery.reconciliation.MAX_SOUGHT", 2)

    async def scenario() -> None:
        high, low = split(log_bytes=0)
        for step in (5, 7, 9, 11):
            low.store.add(0, delta(step, 1.0))
        await reconcile(high, low)

        sought = [[ranges for *_, ranges in one.identities] for one in low.swarm.sent("seek", FindDeltas)]
        assert sought[:3] == [[[(3, 3)], [(5, 5)]], [[(7, 7)], [(9, 9)]], [[(11, 11)]]]

    run(scenario())


def test_who_owns_again_adds_what_its_earlier_copies_had() -> None:
    """A node that lost a shard twice and goes on from its second copy has the deltas of the first in its log still."""

    async def scenario() -> None:
        side = Side("a", "b", 5)
        side.swarm.answers["where_is"] = lambda _to, _payload: LocateOwnersAnswer([])
        side.reconciler.due()  # sets the clock of the log
        for first, own in (True, delta(2, 20.0)), (False, delta(3, 300.0)):
            side.store.add(0, delta(1, 1.0))
            side.store.add(0, own)
            side.store.step_down(0)
            if first:
                side.store.own(0, zeros(side.store), term(7, "a"), contact("a"), 0.0, by_handover=False)
        again = side.store.superseded[0].state
        side.store.own(0, again, term(9, "a"), contact("a"), 0.0, by_handover=False)
        await reconcile(side)

        assert (side.value, side.store.superseded) == (321.0, {})
        assert side.events("deltas_lost_in_split") == []

    run(scenario())


def from_replica(side: Side, unlisted: int) -> None:
    """Side a began with a replica of so many deltas, whose identities it does not know; delta 2 came after that."""
    state = side.store.owned[0].state
    state.era_step, state.era_term, state.unlisted = 1, (3, IDS["b"]), unlisted
    state.applied = Applied()
    state.applied.add(delta(2, 20.0).identity)
    side.store.log = RepairLog(1 << 20, 600.0)
    side.reconciler.due()  # sets the clock of the log
    side.store.log.add(0, delta(2, 20.0).identity, 1.0, delta(2, 20.0).encoded(), "float32", momentum=True)


def test_the_side_with_the_history_takes_the_shard_back_from_a_replica() -> None:
    """The replica has one delta, the history two: the lower term rises above, and the other side's deltas are added."""

    async def scenario() -> None:
        high, low = split()
        from_replica(high, 1)
        await reconcile(high, low)

        assert 0 not in high.store.owned
        assert low.store.owned[0].term > term(5, "a")
        assert low.value == 321.0
        assert low.events("shard_taken_back")

    run(scenario())


async def settled_with_an_era_that_cannot_tell() -> tuple[Side, Side]:
    """Node a began an era after the copy of node b, from a replica that may have any of its deltas."""
    high, low = split()
    from_replica(high, 1)
    high.store.owned[0].state.era_term = (4, IDS["a"])
    await reconcile(high, low)
    return high, low


def test_what_an_era_may_have_is_offered_to_a_later_owner_with_the_history() -> None:
    """The owner of the era is offered nothing. When another state takes its place, whose deltas are known, it gets what
    it lacks: the copy and its log have waited, and nothing is reported as lost in the end."""

    async def scenario() -> None:
        high, low = await settled_with_an_era_that_cannot_tell()
        assert (high.value, to_mend(low.store.superseded)) == (21.0, [])
        assert low.store.unowned_copy(0) is None  # nobody continues from it

        high.store.step_down(0)
        del high.store.superseded[0]
        high.store.own(0, zeros(high.store), term(7, "a"), contact("a"), 0.0, by_handover=False)
        high.store.add(0, delta(1, 1.0))
        low.store.note_owner(0, term(7, "a"), contact("a"))
        await reconcile(high, low)

        assert (high.value, low.store.superseded) == (301.0, {})
        assert low.context.counters.lost_in_splits == 0

    run(scenario())


def test_a_copy_waits_for_another_owner_as_long_as_its_log_reaches() -> None:
    """After that it is dropped: it has nothing left to offer."""

    async def scenario() -> None:
        _, low = await settled_with_an_era_that_cannot_tell()
        await asyncio.sleep(low.store.log.seconds - 10.0)
        low.reconciler.due()
        assert list(low.store.superseded) == [0]
        await asyncio.sleep(11.0)
        low.reconciler.due()
        assert low.store.superseded == {}

    run(scenario())


def test_an_older_copy_takes_no_shard_back_from_a_replica_that_has_more() -> None:
    """The replica has three deltas and the history two: it goes on, and nothing of the older copy is lost or added."""

    async def scenario() -> None:
        high, low = split()
        from_replica(high, 3)
        low.store.stored = {0: StoredState(term(3, "b"), low.store.owned.pop(0).state, clean=False)}
        low.store.note_owner(0, term(5, "a"), contact("a"))
        low.store.settle_stored()
        await reconcile(high, low)

        assert (high.value, 0 in low.store.owned, low.store.superseded) == (21.0, False, {})
        assert low.context.counters.lost_in_restarts == 0

    run(scenario())


def test_claims_are_sent_at_intervals_and_at_once_to_a_node_that_returns() -> None:
    """Otherwise the two owners of a shard would never learn of each other."""

    async def scenario() -> None:
        high, low = split()
        assert not high.reconciler.due()

        high.reconciler.on_change(PeerChange(IDS["b"], "up", ""))
        assert not high.reconciler.due()
        high.reconciler.on_change(PeerChange(IDS["b"], "returned", ""))
        assert high.reconciler.due()
        await high.reconciler.reconcile()
        (claims,) = high.swarm.sent("where_is", LocateOwners)
        assert [(one.shard, one.term) for one in claims.known] == [(0, term(5, "a"))]
        assert not high.reconciler.due()
        assert 0 in low.store.superseded

        await asyncio.sleep(CLAIMS_INTERVAL_S)
        assert high.reconciler.due()

    run(scenario())


def test_a_state_that_is_not_finite_is_not_added() -> None:
    """A repaired delta is validated like any push."""

    async def scenario() -> None:
        high, low = split()
        low.store.add(0, delta(4, float("nan")))
        await reconcile(high, low)
        assert np.isfinite(high.store.owned[0].state.value).all()

    run(scenario())


def superseded_twice() -> tuple[Side, Side]:
    """The lower side owns two shards and has an earlier copy of each."""
    high, low = split(log_bytes=0)
    low.store.step_down(0)
    low.store.superseded[1] = low.store.superseded[0]
    for shard in range(2):
        low.store.own(shard, zeros(low.store), term(7, "b"), contact("b"), 0.0, by_handover=False)
    return high, low


def test_a_copy_that_is_settled_while_another_one_is_ends_nothing() -> None:
    """Reconciling goes through the copies with requests in between; each is looked up when it is its turn."""

    async def scenario() -> None:
        _, low = superseded_twice()
        turns: list[int] = []

        async def settle(shard: int, *_: Any) -> list[Any]:
            turns.append(shard)
            low.store.superseded.pop(1)
            return []

        low.reconciler._settle = settle  # type: ignore[method-assign]
        await low.reconciler.reconcile()

        assert turns == [0]

    run(scenario())
