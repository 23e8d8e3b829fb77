"""A new backup: forwarded deltas first, the state beside them, then the promised term. A hand-over to the backup."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding.frames import HEADER_BYTES, FrameReader
from p2pnode.training.exchange.messages import encode, read_record
from p2pnode.training.exchange.ownership_messages import HandOver, Learn, ShardList, StateHead, TransferResult
from p2pnode.training.exchange.recovery.moves import BATCH_S, ShardMoves
from p2pnode.training.exchange.store.replica import NO_POSITION, Position
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from tests.harness.builders.stores import BOUNDS, IDS, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import Answer, ExchangeContext, ScriptedSwarm, context_of
from tests.harness.stubs.exchange_services import backup_of_node, moves_of, publisher_of
from tests.harness.swarms.exchange_overlay import chunks, collected

ME, LEARNER, FORMER = contact("a"), contact("b"), contact("c")


class Drain:
    """Deltas in flight: they land, or do not within the time."""

    def __init__(self, lands: bool = True) -> None:
        self.lands = lands

    async def drained(self, _shards: list[int], _timeout_s: float) -> bool:
        return self.lands


def teaching(**answers: Answer) -> tuple[ShardMoves, ShardStore, ScriptedSwarm, ExchangeContext]:
    store = owner_of("a", 4)
    swarm = ScriptedSwarm(ME, [LEARNER, FORMER])
    for name, answer in {"learn": TransferResult([0], []), "state": TransferResult([0], []), **answers}.items():
        swarm.answers[name] = lambda *_, answer=answer: answer
    context = context_of(swarm, store, settings=ExchangeSettings(codec="float32", pull_codec="int8"))
    return moves_of(context, publisher_of(context), cast(Any, Drain())), store, swarm, context


async def head_sent(swarm: ScriptedSwarm) -> StateHead:
    """That of the last state."""
    return await read_record(FrameReader(chunks(swarm.bodies["state"])), 0, StateHead)


def test_a_learner_that_has_the_state_is_the_backup_under_the_promised_term() -> None:
    """The request, the state and the new term name the same number."""

    async def scenario() -> None:
        moves, store, swarm, _ = teaching()
        await moves.copy(LEARNER, [0])

        assert [name for name, _, _ in swarm.requests] == ["learn", "state"]
        owned = store.owned[0]
        assert (owned.backup, owned.learner, owned.term) == (LEARNER, None, term(5, "a"))
        assert swarm.sent("learn", Learn)[0].attempts == [5]
        assert swarm.sent("state", ShardList)[0].shards == [0]
        assert (await head_sent(swarm)).term == term(5, "a")

    run(scenario())


def test_deltas_are_forwarded_to_the_learner_while_its_state_is_sent() -> None:
    """It is a target from the moment of the snapshot; a delta added then is not in the snapshot."""

    async def scenario() -> None:
        moves, store, swarm, _ = teaching()
        during = []

        def take_state(*_: object) -> Answer:
            during.append(store.owned[0].targets())
            store.add(0, delta(2, 8.0))
            return TransferResult([0], [])

        swarm.answers["state"] = take_state
        await moves.copy(LEARNER, [0])

        assert during == [[LEARNER]]
        assert (await head_sent(swarm)).version == 0
        assert np.all(store.owned[0].state.value == 8.0)

    run(scenario())


@pytest.mark.parametrize("failing", ["learn", "state"])
def test_a_failed_request_leaves_no_learner(failing: str) -> None:
    """The next attempt starts again, with a new promise."""

    async def scenario() -> None:
        silence = TransportError("timeout", LEARNER.address, "was silent")
        moves, store, swarm, _ = teaching(**{failing: silence})
        with pytest.raises(TransportError):
            await moves.copy(LEARNER, [0])
        assert (store.owned[0].learner, store.owned[0].backup) == (None, None)

        swarm.answers[failing] = lambda *_: TransferResult([0], [])
        await moves.copy(LEARNER, [0])
        assert [learn.attempts for learn in swarm.sent("learn", Learn)] == [[5], [6]]
        assert store.owned[0].term == term(6, "a")

    run(scenario())


def test_a_promise_is_void_once_the_term_has_risen() -> None:
    """While the learner answered, the owner raised its term: no snapshot is sent under the old promise."""

    async def scenario() -> None:
        moves, store, swarm, _ = teaching()

        def learn(*_: object) -> Answer:
            store.drop_backup(0, ME, term(9, "x"))
            return TransferResult([0], [])

        swarm.answers["learn"] = learn
        await moves.copy(LEARNER, [0])

        assert [name for name, _, _ in swarm.requests] == ["learn"]
        assert store.owned[0].backup is None

    run(scenario())


def test_the_former_backup_stays_until_its_successor_has_the_state() -> None:
    """A learner that refuses the state is none."""

    async def scenario() -> None:
        moves, store, swarm, _ = teaching(state=TransferResult([], []))
        store.owned[0].backup = FORMER
        await moves.copy(LEARNER, [0])

        assert (store.owned[0].backup, store.owned[0].learner) == (FORMER, None)
        swarm.answers["state"] = lambda *_: TransferResult([0], [])
        await moves.copy(LEARNER, [0])
        assert store.owned[0].backup == LEARNER

    run(scenario())


@pytest.mark.parametrize("holds", [True, False])
def test_a_learner_that_holds_the_first_published_value_is_sent_half(holds: bool) -> None:
    """Two bytes a value and no more, from which it makes every bit; without that value, or with another, the whole."""

    async def scenario() -> None:
        moves, store, swarm, _ = teaching()
        value = np.array([0.1, -0.2, 1e-3, 7.0], np.float32)
        store.owned[0].state.value[:] = value
        publisher = moves.publisher
        await publisher.publish(LEARNER.node_id, [(0, NO_POSITION)])
        published = publisher.published(0)
        assert published is not None
        assert published.version == 0
        there = store_of("b")
        receiver = ScriptedSwarm(LEARNER, [ME])
        at_learner = context_of(receiver, there)
        backup_of_node(at_learner)
        at_learner.replica.slice_of(0)[:] = published.value
        if holds:
            at_learner.replica.set_version(0, term(4, "a"), 0, Position(published.publication, 0))
        swarm.linked[LEARNER.node_id] = receiver

        bodies = sizes_of(swarm)
        await moves.copy(LEARNER, [0])

        assert store.owned[0].backup == LEARNER
        state = there.backed[0].state
        assert state is not None
        assert state.value.tobytes() == value.tobytes()
        head_bytes = HEADER_BYTES + len(encode(await head_sent(swarm)))
        assert bodies["state"] == head_bytes + HEADER_BYTES + value.size * (2 if holds else 4)

    run(scenario())


def sizes_of(swarm: ScriptedSwarm) -> dict[str, int]:
    """The bytes of the last body of each request."""
    found: dict[str, int] = {}
    request = swarm.request

    @asynccontextmanager
    async def counting(to: Any, name: str, payload: bytes, body: Any = (), *, timeout_s: float) -> AsyncIterator[Any]:
        buffers = await collected(body)
        found[name] = sum(map(len, buffers))
        async with request(to, name, payload, buffers, timeout_s=timeout_s) as answer:
            yield answer

    swarm.request = counting  # type: ignore[method-assign]
    return found


def test_a_publication_that_has_gone_on_is_no_base() -> None:
    """The learner names the first value of a publication of which the owner has another by now: it is sent the
    whole."""

    async def scenario() -> None:
        moves, store, swarm, _ = teaching(learn=TransferResult([0], [], [b"another!"]))
        await moves.publisher.publish(LEARNER.node_id, [(0, NO_POSITION)])
        await moves.copy(LEARNER, [0])
        assert (await head_sent(swarm)).publication == b""
        assert store.owned[0].backup == LEARNER

    run(scenario())


def test_one_batch_is_sent_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `BATCH_BYTES`, and no more than the line carries in `BATCH_S`, by what each shard takes; at least one.
    A batch of which the learner takes nothing holds up no other."""

    async def scenario() -> None:
        moves, store, swarm, context = teaching()
        for shard in (1, 2, 3):
            store.own(shard, zeros(store, shard), term(4, "a"), ME, 0.0, by_handover=False)
        store.owned[0].state.momentum = np.zeros(4, np.float32)
        everything = list(range(len(BOUNDS)))

        async def asked() -> list[list[int]]:
            swarm.requests.clear()
            await moves.copy(LEARNER, everything)
            return [[info.shard for info in learn.shards] for learn in swarm.sent("learn", Learn)]

        assert await asked() == [everything]
        line = context.swarm.line
        for rate, expected in ((44.0, 1), (48.0, 2), (64.0, 3), (80.0, 4), (1.0, 1)):
            line.upload = cast(Any, SimpleNamespace(bytes_per_s=rate / BATCH_S))
            assert await asked() == [everything[:expected]], rate

        line.upload = cast(Any, SimpleNamespace(bytes_per_s=None))
        monkeypatch.setattr("p2pnode.training.exchange.recovery.moves.BATCH_BYTES", 48)
        assert await asked() == [[0, 1]]
        swarm.answers["learn"] = lambda *_: TransferResult([], [])
        assert await asked() == [[0, 1], [2, 3]]

    run(scenario())


def handover_of(
    answer: Answer, drain: Drain | None = None, settings: ExchangeSettings | None = None
) -> tuple[ShardMoves, ShardStore, ScriptedSwarm]:
    store = owner_of("a", 4)
    store.owned[0].backup = LEARNER
    swarm = ScriptedSwarm(ME, [LEARNER])
    swarm.answers["hand_over"] = lambda *_: answer
    context = context_of(swarm, store, settings=settings)
    return moves_of(context, publisher_of(context), cast(Any, drain or Drain())), store, swarm


def test_a_backup_that_accepts_is_the_owner_and_this_node_its_backup() -> None:
    """Under a new term of this node's, which the message names."""

    async def scenario() -> None:
        handover, store, swarm = handover_of(TransferResult([0], []))
        await handover.hand_over(LEARNER, [0])

        assert 0 not in store.owned
        assert store.backed[0].owner == LEARNER
        (message,) = swarm.sent("hand_over", HandOver)
        assert [info.term for info in message.shards] == [term(5, "a")] == [store.backed[0].term]

    run(scenario())


def test_a_refusal_costs_the_backup_its_role() -> None:
    """It lacks something: the shard stays here, under a new term that its copy ranks below."""

    async def scenario() -> None:
        handover, store, _ = handover_of(TransferResult([], []))
        await handover.hand_over(LEARNER, [0])

        assert store.owned[0].backup is None
        assert not store.owned[0].moving
        assert store.owned[0].term > term(5, "a")

    run(scenario())


def test_without_an_answer_the_shard_stays_in_motion() -> None:
    """It is unknown which node owns it: no delta is added until another request is answered."""

    async def scenario() -> None:
        handover, store, _ = handover_of(TransportError("timeout", LEARNER.address, "was silent"))
        with pytest.raises(TransportError):
            await handover.hand_over(LEARNER, [0])
        assert store.owned[0].moving

    run(scenario())


def test_deltas_in_flight_stop_a_hand_over() -> None:
    """It is given up without a request, and deltas are added again."""

    async def scenario() -> None:
        handover, store, swarm = handover_of(TransferResult([0], []), Drain(lands=False))
        await handover.hand_over(LEARNER, [0])
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
