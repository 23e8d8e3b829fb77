"""Hand-over of shards to their backup: taken, refused, unanswered, and while deltas are in flight."""

from __future__ import annotations

from typing import Any, cast

import pytest

from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, owner_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import Answer, ScriptedSwarm, context_of
from tests.harness.stubs.exchange_services import publisher_of
from training.exchange.ownership_messages import HandOver, TransferResult
from training.exchange.recovery.handover import ShardHandover
from training.exchange.store.shard_store import ShardStore
from training.settings import ExchangeSettings

ME, BACKUP = contact("a"), contact("b")


class Drain:
    """Deltas in flight: they land, or do not within the time."""

    def __init__(self, lands: bool = True) -> None:
        self.lands = lands

    async def drained(self, _shards: list[int], _timeout_s: float) -> bool:
        return self.lands


def handover_of(
    answer: Answer, drain: Drain | None = None, settings: ExchangeSettings | None = None
) -> tuple[ShardHandover, ShardStore, ScriptedSwarm]:
    store = owner_of("a", 4)
    store.owned[0].backup = BACKUP
    swarm = ScriptedSwarm(ME, [BACKUP])
    swarm.answers["hand_over"] = lambda *_: answer
    context = context_of(swarm, store, settings=settings)
    return ShardHandover(context, cast(Any, drain or Drain()), publisher_of(context)), store, swarm


def test_a_backup_that_accepts_is_the_owner_and_this_node_its_backup() -> None:
    """Under a new term of this node's, which the message names."""

    async def scenario() -> None:
        handover, store, swarm = handover_of(TransferResult([0], []))
        await handover.hand_over(BACKUP, [0])

        assert 0 not in store.owned
        assert store.backed[0].owner == BACKUP
        (message,) = swarm.sent("hand_over", HandOver)
        assert [info.term for info in message.shards] == [term(5, "a")] == [store.backed[0].term]

    run(scenario())


def test_a_refusal_costs_the_backup_its_role() -> None:
    """It lacks something: the shard stays here, under a new term that its copy ranks below."""

    async def scenario() -> None:
        handover, store, _ = handover_of(TransferResult([], []))
        await handover.hand_over(BACKUP, [0])

        assert store.owned[0].backup is None
        assert not store.owned[0].moving
        assert store.owned[0].term > term(5, "a")

    run(scenario())


def test_without_an_answer_the_shard_stays_in_motion() -> None:
    """It is unknown which node owns it: no delta is added until another request is answered."""

    async def scenario() -> None:
        handover, store, _ = handover_of(TransportError("timeout", BACKUP.address, "was silent"))
        with pytest.raises(TransportError):
            await handover.hand_over(BACKUP, [0])
        assert store.owned[0].moving

    run(scenario())


def test_deltas_in_flight_stop_a_hand_over() -> None:
    """It is given up without a request, and deltas are added again."""

    async def scenario() -> None:
        handover, store, swarm = handover_of(TransferResult([0], []), Drain(lands=False))
        await handover.hand_over(BACKUP, [0])
        assert swarm.requests == []
        assert not store.owned[0].moving

    run(scenario())


def test_only_the_backup_of_a_shard_receives_it() -> None:
    """The backup may have changed since the tick that planned the hand-over."""

    async def scenario() -> None:
        handover, store, swarm = handover_of(TransferResult([0], []))
        await handover.hand_over(contact("c"), [0, 1])
        assert swarm.requests == []
        assert store.owned[0].backup is not None
        assert store.owned[0].backup.node_id == IDS["b"]

    run(scenario())
