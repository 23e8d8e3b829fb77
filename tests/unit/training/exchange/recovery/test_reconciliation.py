"""Two owners of one shard after a split: the deltas of both are in the surviving copy, once, or are reported lost.

And what a node answers to the other side: histories, deltas that it adds, and deltas of its log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.peers import PeerChange
from p2pnode.training.encoding.frames import FrameReader
from p2pnode.training.exchange.delta import logged_frames
from p2pnode.training.exchange.messages import LocateOwners, LocateOwnersAnswer, decode, read_record
from p2pnode.training.exchange.ownership_messages import (
    FindDeltas,
    FoundDeltas,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
    OwnedHistory,
    ShardList,
)
from p2pnode.training.exchange.recovery import reconciliation
from p2pnode.training.exchange.recovery.reconciliation import CLAIMS_INTERVAL_S
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.repair_log import RepairLog, to_mend
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED, OwnerInfo
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import Applied
from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, SUM, contact, delta, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import (
    ExchangeContext,
    ScriptedSwarm,
    context_of,
    deltas_of,
    directory_of,
    records_of,
)
from tests.harness.stubs.exchange_services import reads_of, reconciler_of
from tests.harness.swarms.exchange_overlay import chunks

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
        self.reconciler = reconciler_of(self.context, directory, deltas)

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


def test_the_deltas_of_both_sides_are_added_once() -> None:
    """The lower term steps down and offers what only it has; the delta that both have is not added again."""

    async def scenario() -> None:
        high, low = split()
        await reconcile(high, low)

        assert (high.value, 0 in low.store.owned, low.store.superseded) == (321.0, False, {})
        assert low.events("split_mended") == [{"shards": 1, "lost": 0}]
        assert high.context.counters.repaired == 1

        await reconcile(high, low)
        assert high.value == 321.0

    run(scenario())


def test_the_shards_that_one_round_settles_are_one_event() -> None:
    """A restart of all nodes mends dozens of shards within a moment."""

    async def scenario() -> None:
        high, low = split(log_bytes=0)
        for side, number in ((high, 5), (low, 3)):
            name = "a" if side is high else "b"
            side.store.own(1, zeros(side.store, 1), term(number, name), contact(name), 0.0, by_handover=False)
        await reconcile(high, low)

        assert low.events("split_mended") == [{"shards": 2, "lost": 1}]

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
    monkeypatch.setattr("p2pnode.training.exchange.recovery.reconciliation.MAX_SOUGHT", 2)

    async def scenario() -> None:
        high, low = split(log_bytes=0)
        for step in (5, 7, 9, 11):
            low.store.add(0, delta(step, 1.0))
        await reconcile(high, low)

        sought = [[ranges for *_, ranges in one.identities] for one in low.swarm.sent("request_repair", FindDeltas)]
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
    side.store.log.add(0, delta(2, 20.0).identity, 1.0, delta(2, 20.0).encoded(), "float32")


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


def test_a_copy_of_which_an_era_has_all_waits_for_nobody() -> None:
    """It has nothing to offer."""

    async def scenario() -> None:
        high, low = split()
        from_replica(high, 1)
        state = high.store.owned[0].state
        state.era_term = (4, IDS["a"])
        state.applied.merge(low.store.owned[0].state.applied)
        await reconcile(high, low)
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

        async def settle(_copy: Any, history: OwnedHistory) -> list[Any]:
            turns.append(history.shard)
            low.store.superseded.pop(1)
            return []

        low.reconciler._settle = settle  # type: ignore[method-assign]
        await low.reconciler.reconcile()

        assert turns == [0]

    run(scenario())


class Owner:
    """Node a, which owns shards 0 and 1 under term 5; b owns shard 2. Both train, b is at step 10."""

    def __init__(self, settings: ExchangeSettings) -> None:
        self.store = ShardStore(IDS["a"], BOUNDS, PARAMETERS, SUM, RepairLog(1 << 20, 600.0))
        for shard in range(2):
            self.store.own(shard, zeros(self.store, shard), term(5, "a"), contact("a"), 0.0, by_handover=False)
        self.store.note_owner(2, term(3, "b"), contact("b"))
        self.swarm = ScriptedSwarm(contact("a"), [contact("b")])
        self.set_step(10)
        self.context = context_of(self.swarm, self.store, settings=settings)
        self.context.run.step = 10
        deltas = deltas_of(self.context)
        self.reconciler = reconciler_of(self.context, directory_of(self.context), deltas)

    def set_step(self, step: int) -> None:
        """Node b announces this step."""
        self.swarm.peers[IDS["b"]].step, self.swarm.peers[IDS["b"]].incarnation = step, 1

    @property
    def value(self) -> float:
        return float(self.store.owned[0].state.value[0])

    async def offered(self, *messages: LoggedDelta) -> tuple[int, list[int]]:
        """How many of these deltas were added, and which are refused for ever."""
        body = [bytes(one) for logged in messages for one in frames(logged)]
        message = OfferedDeltas(list(messages))
        answer = await self.swarm.deliver("repair", contact("b"), message, OfferedDeltasAnswer, body)
        return answer.added, answer.refused


def frames(logged: LoggedDelta) -> Any:
    values = delta(logged.step, 1.0).delta
    return logged_frames(logged.shard, values.tobytes(), "float32", logged.step, is_batch=False)


def logged(step: int = 3, *, node: str = "b", incarnation: int = 1, shard: int = 0) -> LoggedDelta:
    return LoggedDelta(shard, IDS[node], incarnation, step, 1.0, 2.0)


def play(scenario: Callable[[Owner], Awaitable[None]], settings: ExchangeSettings = SETTINGS) -> None:
    async def main() -> None:
        await scenario(Owner(settings))

    run(main())


def test_an_owner_tells_which_deltas_it_has() -> None:
    """With its term and era; who does not own the shard names the owner that it knows."""

    async def scenario(owner: Owner) -> None:
        owner.store.add(0, delta(1))
        history = owner.reconciler.history(0)
        assert (history.status, history.term) == ("owner", term(5, "a"))
        assert history.known_deltas().rows() == owner.store.owned[0].state.applied.rows()
        assert owner.reconciler.history(2).status == "not_owner"
        assert owner.reconciler.history(2).owner_info == OwnerInfo.of(2, term(3, "b"), contact("b"))

    play(scenario)


def test_an_owner_that_cannot_tell_now_is_asked_again() -> None:
    """While its shard is held, or has no backup though the run has backups."""

    async def scenario(owner: Owner) -> None:
        assert owner.reconciler.history(0).status == "retry"
        owner.store.owned[0].backup = contact("b")
        assert owner.reconciler.history(0).status == "owner"
        owner.store.owned[0].moving = True
        assert owner.reconciler.history(0).status == "retry"

    play(scenario, msgspec.structs.replace(SETTINGS, replicas=1))


def test_an_answer_has_the_histories_of_all_shards_asked_about() -> None:
    """Shards that there are not are passed over."""

    async def scenario(owner: Owner) -> None:
        answer = await owner.swarm.respond("offer_repair", contact("b"), ShardList([0, 9, 1]))
        reader = FrameReader(chunks([bytes(one) for one in answer.body]))
        for shard in decode(answer.head, ShardList).shards:
            history = await read_record(reader, shard, OwnedHistory)
            assert (history.shard, history.status) == (shard, "owner")
        assert decode(answer.head, ShardList).shards == [0, 1]

    play(scenario)


def test_what_the_owner_lacks_is_added_once() -> None:
    """It is counted and logged; offered again, it changes nothing."""

    async def scenario(owner: Owner) -> None:
        assert await owner.offered(logged(3), logged(4)) == (2, [])
        assert owner.value == 2.0
        assert owner.context.counters.repaired == 2
        (record,) = [one for one in records_of(owner.context) if one.event == "deltas_repaired"]
        assert record.fields == {"count": 2, "source": IDS["b"].hex()[:8]}
        await owner.offered(logged(3))
        assert owner.value == 2.0

    play(scenario)


@pytest.mark.parametrize("step", [10**9, MAX_BELIEVED + 1])
def test_a_step_that_no_node_reaches_is_refused(step: int) -> None:
    """Under an identity that is still to be used a wrong delta would take the place of the true one."""

    async def scenario(owner: Owner) -> None:
        assert await owner.offered(logged(step)) == (0, [0])
        assert owner.value == 0.0

    play(scenario)


def test_deltas_of_a_shard_that_there_is_not_end_the_request() -> None:
    """Those before it are added."""

    async def scenario(owner: Owner) -> None:
        assert await owner.offered(logged(3), logged(4, shard=9), logged(5)) == (1, [])
        assert owner.value == 1.0

    play(scenario)


@pytest.mark.parametrize(
    ("weight", "workers", "expected"), [("sum", 6.0, 1 / 3), ("population", 6.0, 1 / 6), ("population", 2.0, 1 / 3)]
)
def test_a_delta_is_weighed_among_the_workers_of_both_sides(weight: Any, workers: float, expected: float) -> None:
    """It was weighed by 1/3 among three workers; a smaller number now does not raise it. A sum stays a sum."""

    async def scenario(owner: Owner) -> None:
        owner.swarm.worker_count = workers
        await owner.offered(LoggedDelta(0, IDS["b"], 1, 1, 1 / 3, 3.0))
        assert owner.value == pytest.approx(expected)

    play(scenario, msgspec.structs.replace(SETTINGS, weight=weight))


def test_who_searches_for_deltas_gets_those_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their weights and frames, until the answer is full; none of a shard that there is not."""

    async def scenario(owner: Owner) -> None:
        for step in (1, 2, 3):
            owner.store.log.add(0, delta(step).identity, 0.5, delta(step).delta.tobytes(), "float32")
        wanted = [(IDS["x"], 1, [(2, 9)])]

        async def found(shard: int) -> list[LoggedDelta]:
            answer = await owner.swarm.deliver("request_repair", contact("b"), FindDeltas(shard, wanted), FoundDeltas)
            return list(answer.deltas)

        assert [(one.step, one.weight) for one in await found(0)] == [(2, 0.5), (3, 0.5)]
        assert await found(1) == []
        assert await found(9) == []
        monkeypatch.setattr(reconciliation, "MAX_BATCH_BYTES", 31)
        assert [one.step for one in await found(0)] == [2]

    play(scenario)
