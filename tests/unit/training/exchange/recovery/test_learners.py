"""Learners: forwarded deltas first, the state beside them, then the backup under the promised term."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from overlay.transport import TransportError
from tests.harness.builders.stores import BOUNDS, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import Answer, ScriptedSwarm, context_of, until
from tests.harness.stubs.exchange_services import publisher_of
from tests.harness.swarms.exchange_overlay import chunks, collected
from training.encoding.frames import HEADER_BYTES, FrameReader
from training.exchange.backup import BackupHandler
from training.exchange.context import ExchangeContext
from training.exchange.jobs import Jobs
from training.exchange.messages import encode, read_record
from training.exchange.own_deltas import SentDeltas
from training.exchange.ownership_messages import Learn, Release, ShardList, StateHead, TransferResult
from training.exchange.recovery.handover import BATCH_S, Learners
from training.exchange.store.replica import NO_POSITION, Position
from training.exchange.store.shard_store import ShardStore
from training.settings import ExchangeSettings

ME, LEARNER, FORMER = contact("a"), contact("b"), contact("c")


def learners_of(**answers: Answer) -> tuple[Learners, ShardStore, ScriptedSwarm, ExchangeContext]:
    store = owner_of("a", 4)
    swarm = ScriptedSwarm(ME, [LEARNER, FORMER])
    for name, answer in {"learn": TransferResult([0], []), "state": TransferResult([0], []), **answers}.items():
        swarm.answers[name] = lambda *_, answer=answer: answer
    context = context_of(swarm, store, settings=ExchangeSettings(codec="float32", pull_codec="int8"))
    return Learners(context, Jobs(context.rebalance, context.environment), publisher_of(context)), store, swarm, context


async def head_sent(swarm: ScriptedSwarm) -> StateHead:
    """That of the last state."""
    return await read_record(FrameReader(chunks(swarm.bodies["state"])), 0, StateHead)


def test_a_learner_that_has_the_state_is_the_backup_under_the_promised_term() -> None:
    """The request, the state and the new term name the same number."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of()
        await learners.add_learner(LEARNER, [0])

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
        learners, store, swarm, _ = learners_of()
        during = []

        def take_state(*_: object) -> Answer:
            during.append(store.owned[0].targets())
            store.add(0, delta(2, 8.0))
            return TransferResult([0], [])

        swarm.answers["state"] = take_state
        await learners.add_learner(LEARNER, [0])

        assert during == [[LEARNER]]
        assert (await head_sent(swarm)).version == 0
        assert np.all(store.owned[0].state.value == 8.0)

    run(scenario())


@pytest.mark.parametrize("failing", ["learn", "state"])
def test_a_failed_request_leaves_no_learner(failing: str) -> None:
    """The next attempt starts again, with a new promise."""

    async def scenario() -> None:
        silence = TransportError("timeout", LEARNER.address, "was silent")
        learners, store, swarm, _ = learners_of(**{failing: silence})
        with pytest.raises(TransportError):
            await learners.add_learner(LEARNER, [0])
        assert (store.owned[0].learner, store.owned[0].backup) == (None, None)

        swarm.answers[failing] = lambda *_: TransferResult([0], [])
        await learners.add_learner(LEARNER, [0])
        assert [learn.attempts for learn in swarm.sent("learn", Learn)] == [[5], [6]]
        assert store.owned[0].term == term(6, "a")

    run(scenario())


def test_a_promise_is_void_once_the_term_has_risen() -> None:
    """While the learner answered, the owner raised its term: no snapshot is sent under the old promise."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of()

        def learn(*_: object) -> Answer:
            store.drop_backup(0, ME, term(9, "x"))
            return TransferResult([0], [])

        swarm.answers["learn"] = learn
        await learners.add_learner(LEARNER, [0])

        assert [name for name, _, _ in swarm.requests] == ["learn"]
        assert store.owned[0].backup is None

    run(scenario())


def test_the_former_backup_is_released() -> None:
    """It may free its memory; its copy ranks below the new backup's."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of(release=TransferResult([0], []))
        store.owned[0].backup = FORMER
        await learners.add_learner(LEARNER, [0])
        await until(lambda: bool(swarm.sent("release", Release)))

        assert store.owned[0].backup == LEARNER
        (release,) = swarm.sent("release", Release)
        assert [info.term for info in release.shards] == [term(5, "a")]

    run(scenario())


def test_a_former_backup_is_released_from_all_shards_of_a_copy_at_once() -> None:
    """One small request instead of many behind each other on a full line."""

    async def scenario() -> None:
        both = TransferResult([0, 1], [])
        learners, store, swarm, _ = learners_of(learn=both, state=both, release=both)
        store.own(1, zeros(store, 1), term(4, "a"), ME, 0.0, by_handover=False)
        store.owned[0].backup = store.owned[1].backup = FORMER
        await learners.add_learner(LEARNER, [0, 1])
        await until(lambda: bool(swarm.sent("release", Release)))
        (release,) = swarm.sent("release", Release)
        assert [info.shard for info in release.shards] == [0, 1]

    run(scenario())


def test_a_learner_that_refuses_the_state_releases_no_backup() -> None:
    """The former backup stays until its successor has the state."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of(state=TransferResult([], []), release=TransferResult([0], []))
        store.owned[0].backup = FORMER
        await learners.add_learner(LEARNER, [0])

        assert (store.owned[0].backup, store.owned[0].learner) == (FORMER, None)
        assert swarm.sent("release", Release) == []

    run(scenario())


@pytest.mark.parametrize("holds", [True, False])
def test_a_learner_that_holds_the_first_published_value_is_sent_half(holds: bool) -> None:
    """Two bytes a value and no more, from which it makes every bit; without that value, or with another, the whole."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of()
        value = np.array([0.1, -0.2, 1e-3, 7.0], np.float32)
        store.owned[0].state.value[:] = value
        publisher = learners._publisher
        await publisher.publish(LEARNER.node_id, [(0, NO_POSITION)])
        published = publisher.published(0)
        assert published is not None
        assert published.version == 0
        there = store_of("b")
        receiver = ScriptedSwarm(LEARNER, [ME])
        at_learner = context_of(receiver, there)
        BackupHandler(at_learner, publisher_of(at_learner), SentDeltas()).register()
        at_learner.replica.slice_of(0)[:] = published.value
        if holds:
            at_learner.replica.set_version(0, term(4, "a"), 0, Position(published.chain, 0))
        swarm.linked[LEARNER.node_id] = receiver

        bodies = sizes_of(swarm)
        await learners.add_learner(LEARNER, [0])

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


def test_a_chain_that_has_gone_on_is_no_base() -> None:
    """The learner names the first value of a chain of which the owner has another by now: it is sent the whole."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of(learn=TransferResult([0], [], [b"another!"]))
        await learners._publisher.publish(LEARNER.node_id, [(0, NO_POSITION)])
        await learners.add_learner(LEARNER, [0])
        assert (await head_sent(swarm)).chain == b""
        assert store.owned[0].backup == LEARNER

    run(scenario())


def test_states_are_sent_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than `BATCH_BYTES` at a time, by what each takes, and at least one shard;
    where nothing waits for the copies, not more than the line carries in `BATCH_S`."""

    async def scenario() -> None:
        learners, store, swarm, context = learners_of(learn=TransferResult([], []))
        for shard in (1, 2, 3):
            store.own(shard, zeros(store, shard), term(4, "a"), ME, 0.0, by_handover=False)
        store.owned[0].state.momentum = np.zeros(4, np.float32)
        everything = list(range(len(BOUNDS)))
        assert learners.batch(everything) == everything
        line = context.swarm.line
        for rate, expected in ((44.0, 1), (48.0, 2), (64.0, 3), (80.0, 4), (1.0, 1)):
            line.upload = cast(Any, SimpleNamespace(bytes_per_s=rate / BATCH_S))
            assert len(learners.batch(everything)) == expected, rate

        line.upload = cast(Any, SimpleNamespace(bytes_per_s=None))
        monkeypatch.setattr("training.exchange.recovery.handover.BATCH_BYTES", 48)
        await learners.add_learner(LEARNER, everything)
        asked = [[info.shard for info in learn.shards] for learn in swarm.sent("learn", Learn)]
        assert asked == [[0, 1], [2, 3]]

    run(scenario())
