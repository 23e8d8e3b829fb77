"""Learners: forwarded deltas first, the state beside them, then the backup under the promised term."""

from __future__ import annotations

import numpy as np
import pytest

from overlay.transport import TransportError
from tests.harness.exchange_context import Answer, ScriptedSwarm, context_of, until
from tests.harness.stores import BOUNDS, contact, delta, owner_of, term
from tests.harness.virtual_loop import run
from training.exchange.context import ExchangeContext
from training.exchange.ownership_messages import Learn, Release, StateTransfer, TransferResult
from training.exchange.recovery.jobs import Jobs
from training.exchange.recovery.learners import BATCH_BYTES, STATE_BYTES_PER_VALUE, Learners
from training.exchange.store.shard_store import ShardStore

ME, LEARNER, FORMER = contact("a"), contact("b"), contact("c")


def learners_of(**answers: Answer) -> tuple[Learners, ShardStore, ScriptedSwarm, ExchangeContext]:
    store = owner_of("a", 4)
    swarm = ScriptedSwarm(ME, [LEARNER, FORMER])
    for name, answer in {"learn": TransferResult([0], []), "state": TransferResult([0], []), **answers}.items():
        swarm.answers[name] = lambda *_, answer=answer: answer
    context = context_of(swarm, store)
    return Learners(context, Jobs(context)), store, swarm, context


def test_a_learner_that_has_the_state_is_the_backup_under_the_promised_term() -> None:
    """The request, the state and the new term name the same number."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of()
        await learners.add_learner(LEARNER, [0])

        assert [name for name, _, _ in swarm.requests] == ["learn", "state"]
        owned = store.owned[0]
        assert (owned.backup, owned.learner, owned.term) == (LEARNER, None, term(5, "a"))
        assert swarm.sent("learn", Learn)[0].attempts == [5]
        assert [head.term for head in swarm.sent("state", StateTransfer)[0].states] == [term(5, "a")]

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
        (head,) = swarm.sent("state", StateTransfer)[0].states
        assert head.version == 0
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


def test_a_learner_that_refuses_the_state_releases_no_backup() -> None:
    """The former backup stays until its successor has the state."""

    async def scenario() -> None:
        learners, store, swarm, _ = learners_of(state=TransferResult([], []), release=TransferResult([0], []))
        store.owned[0].backup = FORMER
        await learners.add_learner(LEARNER, [0])

        assert (store.owned[0].backup, store.owned[0].learner) == (FORMER, None)
        assert swarm.sent("release", Release) == []

    run(scenario())


def test_large_states_are_sent_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than `BATCH_BYTES` of states are copied at a time, and at least one shard."""
    assert BATCH_BYTES >= STATE_BYTES_PER_VALUE
    monkeypatch.setattr("training.exchange.recovery.learners.BATCH_BYTES", 2 * STATE_BYTES_PER_VALUE * 4)

    async def scenario() -> None:
        learners, _, _, _ = learners_of()
        assert learners._batches(list(range(len(BOUNDS)))) == [[0, 1], [2, 3]]
        monkeypatch.setattr("training.exchange.recovery.learners.BATCH_BYTES", 1)
        assert learners._batches([0, 1]) == [[0], [1]]

    run(scenario())
