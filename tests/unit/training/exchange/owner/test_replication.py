"""Replication: a delta is added only when each present target has acknowledged it under the present term."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import as_bytes
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Forward, ForwardAnswer, ForwardResult, Push, PushResult, decode
from p2pnode.training.exchange.owner.replication import FORWARD_ROUNDS, DeltaReplicator, lacks_backup, not_owned
from p2pnode.training.exchange.owner.validation import DeltaValidator
from p2pnode.training.exchange.run_state import Phase
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from tests.harness.builders.stores import IDS, contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import Answer, ExchangeContext, ScriptedSwarm, context_of

ME, B, C = contact("a"), contact("b"), contact("c")
IDENTITY = DeltaId(IDS["x"], 1, 1)


def forwarded(status: str = "ok", fence: tuple[int, bytes] = (0, b"")) -> Callable[[Contact, bytes], Answer]:
    def answer(_to: Contact, payload: bytes) -> Answer:
        shards = [entry.shard for entry in decode(payload, Forward).shards]
        return ForwardAnswer([ForwardResult(shard, status, fence) for shard in shards])  # type: ignore[arg-type]

    return answer


def replicator_in(context: ExchangeContext) -> DeltaReplicator:
    validator = DeltaValidator(context.store, context.view, context.counters, context.settings, context.environment)
    return DeltaReplicator(
        swarm=context.swarm,
        synchronous=context.synchronous,
        store=context.store,
        view=context.view,
        run=context.run,
        rpc=context.rpc,
        rebalance=context.rebalance,
        validator=validator,
        counters=context.counters,
        environment=context.environment,
    )


def replicator_of(store: ShardStore, *others: Contact) -> tuple[DeltaReplicator, ScriptedSwarm, ExchangeContext]:
    swarm = ScriptedSwarm(ME, list(others))
    swarm.answers["forward"] = forwarded()
    context = context_of(swarm, store)
    return replicator_in(context), swarm, context


async def replicate(replicator: DeltaReplicator, *shards: int) -> list[PushResult]:
    values = np.ones(4, np.float32)
    items = [IncomingDelta(shard, values, bytes(as_bytes(values)), "float32") for shard in shards]
    push = Push(IDS["x"], 1, 1, 0, 1.0, list(shards))
    return await replicator.replicate_and_add(push, IDENTITY, items)


def test_the_delta_is_added_after_its_backup_has_acknowledged_it() -> None:
    """One forward, with the owner's term; the origin is reported as merged."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, _ = replicator_of(store, B)
        added_at_forward = []
        answer = swarm.answers["forward"]

        def note(to: Contact, payload: bytes) -> Answer:
            added_at_forward.append(store.owned[0].state.knows(IDENTITY))
            return answer(to, payload)

        swarm.answers["forward"] = note

        assert await replicate(replicator, 0) == [PushResult(0, "ok", version=1)]
        assert added_at_forward == [False]
        (message,) = swarm.sent("forward", Forward)
        assert message.shards[0].term == term(1, "a")
        assert replicator.take_merged() == {IDS["x"]: 1}

    run(scenario())


@pytest.mark.parametrize(("codec", "weight"), [("float32", 0.25), ("sparse", 0.5)])
def test_a_sparse_delta_may_weigh_more_than_another(codec: CodecName, weight: float) -> None:
    """Of eight nodes one asks for half of the whole: a sparse delta gets it, another twice its share; the backup is
    told the same."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        swarm = ScriptedSwarm(ME, [B])
        swarm.answers["forward"] = forwarded()
        swarm.worker_count = 8.0
        context = context_of(swarm, store, settings=ExchangeSettings(codec="sparse", weight="population"))
        replicator = replicator_in(context)
        values = np.ones(4, np.float32)
        item = IncomingDelta(0, values, bytes(codecs.encode(values, codec)), codec)

        await replicator.replicate_and_add(Push(IDS["x"], 1, 1, 0, 0.5, [0]), IDENTITY, [item])

        assert store.owned[0].state.value.tolist() == [weight] * 4
        assert [message.weight for message in swarm.sent("forward", Forward)] == [weight]

    run(scenario())


@pytest.mark.parametrize("is_added", [False, True])
def test_a_delta_that_is_sent_again_keeps_the_weight_that_its_backup_may_have_added_it_with(is_added: bool) -> None:
    """And its factor of clipping: meanwhile there are more workers. What was added is forgotten."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        swarm = ScriptedSwarm(ME, [B])
        swarm.worker_count = 2.0
        answers = iter([True, *[is_added] * FORWARD_ROUNDS, *[True] * 9])

        def answer(to: Contact, payload: bytes) -> Answer:
            if not next(answers):
                return TransportError("timeout", to.address, "was silent")
            return forwarded()(to, payload)

        swarm.answers["forward"] = answer
        context = context_of(swarm, store, settings=ExchangeSettings(codec="float32", weight="population"))
        replicator = replicator_in(context)
        values = np.ones(4, np.float32)

        async def sent(step: int, scale: float) -> PushResult:
            item = IncomingDelta(0, values, bytes(as_bytes(values)), "float32", scale=scale)
            push = Push(IDS["x"], 1, step, 0, 0.9, [0])
            [result] = await replicator.replicate_and_add(push, DeltaId(IDS["x"], 1, step), [item])
            return result

        assert (await sent(1, 0.5)).status == "ok"
        assert replicator._forwarded == {}, "what is added is answered by its identity"
        first = await sent(2, 0.5)
        assert first.status == ("ok" if is_added else "retry")
        assert len(replicator._forwarded) == (0 if is_added else 1)
        swarm.worker_count = 16.0
        await asyncio.sleep(1.0)
        assert (await sent(2 + is_added, 1.0)).status == "ok"
        assert replicator._forwarded == {}

        last = swarm.sent("forward", Forward)[-1]
        expected = (2 / 16, 1.0) if is_added else (0.9, 0.5)
        assert (last.weight, last.shards[0].scale) == expected
        added = 0.45 * 2 + (2 / 16 if is_added else 0.0)
        assert store.owned[0].state.value.tolist() == pytest.approx([added] * 4)

    run(scenario())


def test_of_deltas_that_are_never_sent_again_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their origins have left."""
    monkeypatch.setattr("p2pnode.training.exchange.owner.replication.MAX_FORWARDED", 2)

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, _ = replicator_of(store, B)
        swarm.answers["forward"] = lambda to, _: TransportError("timeout", to.address, "was silent")
        values = np.ones(4, np.float32)
        for step in range(1, 5):
            item = IncomingDelta(0, values, bytes(as_bytes(values)), "float32")
            push = Push(IDS["x"], 1, step, 0, 1.0, [0])
            await replicator.replicate_and_add(push, DeltaId(IDS["x"], 1, step), [item])
        assert [identity.step for identity in replicator._forwarded] == [3, 4]

    run(scenario())


def test_a_backup_that_joined_during_the_forward_is_forwarded_to_as_well() -> None:
    """The pair is checked again after the answer: the new learner must have the delta too."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, _ = replicator_of(store, B, C)
        answer = forwarded()

        def attach(to: Contact, payload: bytes) -> Answer:
            store.owned[0].learner = C
            return answer(to, payload)

        swarm.answers["forward"] = attach

        assert (await replicate(replicator, 0))[0].status == "ok"
        assert [to for name, to, _ in swarm.requests if name == "forward"] == [B, C]

    run(scenario())


def test_an_acknowledgement_under_an_older_term_does_not_count() -> None:
    """The same backup is asked again when the term has risen meanwhile; a pair that never rests gives up."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, _ = replicator_of(store, B)
        answer = forwarded()

        def rise(to: Contact, payload: bytes) -> Answer:
            store.owned[0].term = store.next_term(0)
            store.ownership.raise_fence(0, store.owned[0].term)
            return answer(to, payload)

        swarm.answers["forward"] = rise

        assert await replicate(replicator, 0) == [PushResult.retry(0, "backup_silent")]
        assert len(swarm.requests) == FORWARD_ROUNDS
        assert not store.owned[0].state.knows(IDENTITY)

    run(scenario())


def test_a_backup_that_does_not_answer_is_suspected_and_a_learner_dropped() -> None:
    """The delta is not added without the backup; the learner begins again with a new snapshot."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        store.owned[0].learner = C
        replicator, swarm, _ = replicator_of(store, B, C)
        swarm.answers["forward"] = lambda to, _: TransportError("timeout", to.address, "no answer")

        assert await replicate(replicator, 0) == [PushResult.retry(0, "backup_silent")]
        assert (store.owned[0].backup, store.owned[0].learner) == (B, None)
        assert IDS["b"] in swarm.suspected

    run(scenario())


def test_a_backup_that_does_not_know_the_shard_is_dropped() -> None:
    """The owner continues under a new term; without another node it adds the delta alone."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, _ = replicator_of(store)
        swarm.answers["forward"] = forwarded("unknown")

        assert await replicate(replicator, 0) == [PushResult(0, "ok", version=1)]
        assert store.owned[0].backup is None
        assert store.owned[0].term == term(2, "a")

    run(scenario())


def test_a_fence_above_the_owner_is_a_challenge() -> None:
    """The rebalancer finds out whose term it is; the delta is not added meanwhile."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, context = replicator_of(store, B)
        swarm.answers["forward"] = forwarded("fenced", term(5, "c"))

        assert await replicate(replicator, 0) == [PushResult.retry(0, "backup_silent")]
        assert context.store.outranked() == {0: term(5, "c")}

    run(scenario())


def test_without_a_backup_that_could_exist_the_delta_waits() -> None:
    """Another eligible node will become the backup first; a drained node adds nothing either."""

    async def scenario() -> None:
        store = owner_of("a")
        replicator, _, context = replicator_of(store, B)
        assert lacks_backup(context.view, store.owned[0])
        assert await replicate(replicator, 0) == [PushResult.retry(0, "no_backup_yet")]

        context.run.enter(Phase.DRAINED)
        assert await replicate(replicator, 0) == [PushResult.retry(0, "leaving")]

    run(scenario())


def test_a_shard_that_is_not_owned_names_its_owner() -> None:
    """A redirect if the owner is known, a retry otherwise."""
    store = store_of("a")
    store.note_owner(0, term(1, "b"), B)

    assert not_owned(store, 0) == PushResult(0, "redirect", owner_info=store.ownership.owner_info(0))
    assert not_owned(store, 1) == PushResult.retry(1, "owner_unknown")


def test_an_owner_that_lost_a_shard_and_took_it_again_does_not_redirect_to_itself() -> None:
    """A delta that was checked before that is to be sent again. Whoever redirects to itself counts as a liar."""

    async def scenario() -> None:
        store = owner_of("a")
        replicator, _, _ = replicator_of(store, B)
        item = IncomingDelta(0, np.ones(4, np.float32), b"", "float32", basis=store.owned[0])
        state = store.owned[0].state
        store.step_down(0)
        store.own(0, state, term(7, "a"), contact("a"), 0.0, by_handover=False)

        push = Push(IDS["x"], 1, 1, 0, 1.0, [0])
        (result,) = await replicator.replicate_and_add(push, DeltaId(IDS["x"], 1, 1), [item])

        assert (result.status, result.owner_info, result.denies_ownership) == ("retry", None, False)

    run(scenario())


def has_it_of(swarm: ScriptedSwarm) -> list[list[bool]]:
    return [[entry.has_it for entry in message.shards] for message in swarm.sent("forward", Forward)]


async def replicate_from(replicator: DeltaReplicator, node: str, *, repair: bool = False) -> list[PushResult]:
    values = np.ones(4, np.float32)
    push = Push(IDS[node], 1, 1, 0, 1.0, [0])
    item = IncomingDelta(0, values, bytes(as_bytes(values)), "float32", repair=repair)
    return await replicator.replicate_and_add(push, DeltaId(IDS[node], 1, 1), [item])


@pytest.mark.parametrize(("node", "repair", "has_it"), [("b", False, True), ("b", True, False), ("x", False, False)])
def test_a_backup_is_sent_no_delta_of_its_own(node: str, repair: bool, has_it: bool) -> None:
    """Only its identity and weight. Deltas of others are sent to it whole, and what a log had of its own: it may have
    been rounded."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, context = replicator_of(store, B)

        assert await replicate_from(replicator, node, repair=repair) == [PushResult(0, "ok", version=1)]
        assert has_it_of(swarm) == [[has_it]]
        assert context.counters.bytes_sent == (0 if has_it else 16)

    run(scenario())


def test_a_backup_that_keeps_its_delta_no_more_is_sent_it() -> None:
    """In a second forward, and only then the delta is added."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = B
        replicator, swarm, context = replicator_of(store, B)
        swarm.answers["forward"] = lambda to, payload: forwarded(
            "lacks" if decode(payload, Forward).shards[0].has_it else "ok"
        )(to, payload)

        assert await replicate_from(replicator, "b") == [PushResult(0, "ok", version=1)]
        assert has_it_of(swarm) == [[True], [False]]
        assert (context.counters.bytes_sent, store.owned[0].backup) == (16, B)

    run(scenario())
