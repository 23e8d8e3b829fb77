"""What a node answers to the other side of a split: histories, deltas that it adds, and deltas of its log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, SUM, contact, delta, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, deltas_of, records_of
from training.exchange.owner.delta_item import logged_frames
from training.exchange.ownership_messages import (
    FindDeltas,
    FoundDeltas,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
    ShardList,
)
from training.exchange.recovery import repair_handler
from training.exchange.recovery.repair_handler import RepairHandler, as_message, logged_bodies
from training.exchange.store.repair_log import RepairLog
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import MAX_BELIEVED, OwnerInfo
from training.settings import ExchangeSettings

SETTINGS = ExchangeSettings(codec="float32", weight="sum", outer_lr=1.0, outer_momentum=0.0, replicas=0)


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
        self.handler = RepairHandler(self.context, deltas)

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
        answer = await self.swarm.deliver("mend", contact("b"), message, OfferedDeltasAnswer, body)
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
        history = owner.handler.history(0)
        assert (history.status, history.term) == ("owner", term(5, "a"))
        assert history.known_deltas().rows() == owner.store.owned[0].state.applied.rows()
        assert owner.handler.history(2).status == "not_owner"
        assert owner.handler.history(2).owner_info == OwnerInfo.of(2, term(3, "b"), contact("b"))

    play(scenario)


def test_an_owner_that_cannot_tell_now_is_asked_again() -> None:
    """While its shard is held, or has no backup though the run has backups."""

    async def scenario(owner: Owner) -> None:
        assert owner.handler.history(0).status == "retry"
        owner.store.owned[0].backup = contact("b")
        assert owner.handler.history(0).status == "owner"
        owner.store.owned[0].moving = True
        assert owner.handler.history(0).status == "retry"

    play(scenario, msgspec.structs.replace(SETTINGS, replicas=1))


def test_an_answer_has_so_many_rows_of_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """One history at least; the sender asks again for the others, and shards that there are not are passed over."""

    async def scenario(owner: Owner) -> None:
        for shard in range(2):
            owner.store.add(shard, delta(1))
        offer = ShardList([0, 9, 1])
        for rows, shards in ((2, [0, 1]), (1, [0]), (0, [0])):
            monkeypatch.setattr(repair_handler, "MAX_ROWS", rows)
            answer = await owner.swarm.deliver("offer", contact("b"), offer, ShardList)
            assert answer.shards == shards

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


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (logged(10), (1, [])),
        (logged(11), (1, [])),
        (logged(12), (0, [])),
        (logged(10**9), (0, [0])),
        (logged(1, incarnation=2), (0, [0])),
        (logged(12, node="a"), (1, [])),
        (logged(13, node="a"), (0, [0])),
        (logged(10, node="x"), (1, [])),
        (logged(10**9, node="x"), (0, [0])),
    ],
)
def test_a_delta_under_an_identity_of_the_future_is_not_added(
    message: LoggedDelta, outcome: tuple[int, list[int]]
) -> None:
    """It would take the place of the true one. One that is ahead of the last heartbeat may be offered again; one that
    no node can have reached is refused for ever."""

    async def scenario(owner: Owner) -> None:
        assert await owner.offered(message) == outcome
        assert owner.value == float(outcome[0])

    play(scenario)


def test_an_origin_that_is_ahead_of_its_heartbeat_is_asked_first() -> None:
    """Its answer may prove the step; what only it may know is not refused for ever."""

    async def scenario(owner: Owner) -> None:
        async def query_steps(nodes: Any) -> None:
            assert nodes == [IDS["b"]]
            owner.set_step(20)

        owner.swarm.query_steps = query_steps  # type: ignore[method-assign]
        assert await owner.offered(logged(21)) == (1, [])

    play(scenario)


def test_a_step_that_no_node_reaches_is_nonsense() -> None:
    """It is refused, and counted against who sent it."""

    async def scenario(owner: Owner) -> None:
        assert await owner.offered(logged(MAX_BELIEVED + 1)) == (0, [0])
        (record,) = [one for one in records_of(owner.context) if one.event == "nonsense_received"]
        assert record.fields["reason"] == "repair"

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
        assert owner.handler._weight(LoggedDelta(0, IDS["x"], 1, 1, 1 / 3, 3.0)) == pytest.approx(expected)

    play(scenario, msgspec.structs.replace(SETTINGS, weight=weight))


def test_who_searches_for_deltas_gets_those_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their weights and frames, until the answer is full; none of a shard that there is not."""

    async def scenario(owner: Owner) -> None:
        for step in (1, 2, 3):
            owner.store.log.add(0, delta(step).identity, 0.5, delta(step).delta.tobytes(), "float32", momentum=True)
        wanted = [(IDS["x"], 1, [(2, 9)])]

        async def found(shard: int) -> list[LoggedDelta]:
            answer = await owner.swarm.deliver("seek", contact("b"), FindDeltas(shard, wanted), FoundDeltas)
            return list(answer.deltas)

        assert [(one.step, one.weight) for one in await found(0)] == [(2, 0.5), (3, 0.5)]
        assert await found(1) == []
        assert await found(9) == []
        monkeypatch.setattr(repair_handler, "MAX_BATCH_BYTES", 31)
        assert [one.step for one in await found(0)] == [2]

    play(scenario)


def test_a_logged_delta_is_offered_with_the_workers_that_there_were() -> None:
    """One at least: it is what the weight is divided by. Its frames carry its bytes."""
    log = RepairLog(1 << 20, 600.0)
    payload = delta(4).delta.tobytes()
    log.tick(1.0, 0.0, {})
    log.add(0, delta(4).identity, 0.25, payload, "float32", momentum=True)
    (entry,) = log.entries(0)
    message = as_message(0, entry)
    assert (message.node, message.step, message.weight, message.workers) == (IDS["x"], 4, 0.25, 1.0)
    assert b"".join(bytes(one) for one in logged_bodies([(0, entry)], is_batch=False)).endswith(payload)
