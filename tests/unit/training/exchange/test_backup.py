"""Requests to a backup: forwards, catch-up and hand-over, and the answers that name the known owner.

Confirmation: a backup that receives nothing asks its owner, and drops or offers its copy.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import RequestRejected, TransportError
from p2pnode.training.encoding.codecs import as_bytes
from p2pnode.training.encoding.frames import Part, frames
from p2pnode.training.exchange.backup import CONFIRM_AFTER_S, BackupHandler
from p2pnode.training.exchange.delta import Delivery, Outgoing, SentDeltas
from p2pnode.training.exchange.messages import Forward, ForwardAnswer, Forwarded, Push
from p2pnode.training.exchange.ownership_messages import HandOver, Learn, ShardList, TransferResult
from p2pnode.training.exchange.peer_score import NONSENSE
from p2pnode.training.exchange.run_state import Phase
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.replica import Position
from p2pnode.training.exchange.store.shard_states import describe
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import OwnerInfo, Term
from tests.harness.builders.stores import IDS, backup_of, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from tests.harness.stubs.exchange_services import backup_of_node

OWNER, ME = contact("a"), contact("b")


def handler_of(store: ShardStore, sent: SentDeltas | None = None) -> tuple[ScriptedSwarm, Any]:
    swarm = ScriptedSwarm(ME, [OWNER])
    context = context_of(swarm, store)
    backup_of_node(context, sent)
    return swarm, context


def sent_of(node: str, step: int, amount: float) -> Delivery:
    """A delta of one shard on its way."""
    encoded = bytes(as_bytes(np.full(4, amount, np.float32)))
    push = Push(IDS[node], 1, step, step - 1, 1.0, [0])
    return Delivery(push, {0: Outgoing(0, encoded, "float32", 4)}, asyncio.Event())


def claim(number: int, owner: Contact = OWNER, shard: int = 0) -> OwnerInfo:
    return OwnerInfo.of(shard, Term(number, OWNER.node_id), owner)


def forward_of(*shards: Forwarded, weight: float = 1.0) -> Forward:
    return Forward(IDS["x"], 1, 1, weight, False, list(shards))


def body_of(*shards: int) -> list[bytes]:
    values = np.ones(4, np.float32)
    return [bytes(buffer) for shard in shards for buffer in frames(shard, values, "float32", Part.DELTA)]


def test_a_forward_is_added_with_the_clipped_weight() -> None:
    """Weight times scale; a shard outside the layout is unknown, and has no array in the body."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        swarm, context = handler_of(store)
        entries = [Forwarded(0, term(1, "a"), 0, scale=0.5, norm=2.0), Forwarded(99, term(1, "a"), 0)]

        answer = await swarm.deliver("forward", OWNER, forward_of(*entries), ForwardAnswer, body_of(0))

        assert [result.status for result in answer.results] == ["ok", "unknown"]
        state = store.backed[0].state
        assert state is not None
        assert state.value.tolist() == [0.5] * 4
        assert state.looked_s == context.environment.clock.monotonic()  # the addition has seen every value
        assert context.counters.bytes_received == 16

    run(scenario())


def test_a_large_forward_is_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its values are in the body or were kept here."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_PASS", 3)

    async def scenario() -> None:
        store = backup_of("b", "a")
        sent = SentDeltas()
        swarm, context = handler_of(store, sent)
        run_in_thread, names = context.environment.executor.run, []

        async def noted(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            names.append(function.__name__)
            return await run_in_thread(function, *args, **kwargs)

        monkeypatch.setattr(context.environment.executor, "run", noted)
        sent.deliveries[2] = sent_of("x", 2, 2.0)
        first = forward_of(Forwarded(0, term(1, "a"), 0))
        second = msgspec.structs.replace(first, step=2, shards=[Forwarded(0, term(1, "a"), 0, has_it=True)])
        for message, body in ((first, body_of(0)), (second, [])):
            answer = await swarm.deliver("forward", OWNER, message, ForwardAnswer, body)
            assert [result.status for result in answer.results] == ["ok"]
        assert names == ["_decoded_in_range", "decoded"]
        state = store.backed[0].state
        assert state is not None
        assert state.value.tolist() == [3.0] * 4

    run(scenario())


def test_a_fenced_forward_names_the_higher_term() -> None:
    """The former owner learns that it was replaced."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        store.ownership.raise_fence(0, term(7, "c"))
        swarm, _ = handler_of(store)

        answer = await swarm.deliver(
            "forward", OWNER, forward_of(Forwarded(0, term(1, "a"), 0)), ForwardAnswer, body_of(0)
        )

        (result,) = answer.results
        assert (result.status, result.term) == ("fenced", term(7, "c"))

    run(scenario())


def test_a_catch_up_makes_a_learner_and_then_a_state() -> None:
    """`Learn` is accepted per shard, `state` brings the state, the first forward makes it the backup."""

    async def scenario() -> None:
        owner, store = owner_of("a"), store_of("b")
        swarm, _ = handler_of(store)
        promised = owner.promise(0)

        learn = Learn([claim(1)], [promised.number])
        assert (await swarm.deliver("learn", OWNER, learn, TransferResult)).taken == [0]

        snapshot = describe(0, promised, owner.owned[0].state), owner.owned[0].state.copy()
        body = [bytes(buffer) for buffer in shard_states.body([snapshot])]
        message = ShardList([0])
        assert (await swarm.deliver("state", OWNER, message, TransferResult, body)).taken == [0]
        assert not store.backed[0].is_active

        entry = Forwarded(0, promised, 0)
        await swarm.deliver("forward", OWNER, forward_of(entry), ForwardAnswer, body_of(0))
        assert store.backed[0].is_active

    run(scenario())


def test_a_state_without_its_base_is_refused() -> None:
    """The catch-up has begun anew since: what the state lacks is not taken from other values."""

    async def scenario() -> None:
        owner, store = owner_of("a"), store_of("b")
        swarm, context = handler_of(store)
        context.replica.set_version(0, term(1, "a"), 0, Position(b"a name", 0))
        learn = Learn([claim(1)], [owner.promise(0).number])
        assert (await swarm.deliver("learn", OWNER, learn, TransferResult)).publications == [b"a name"]
        promised = owner.promise(0)
        head = msgspec.structs.replace(describe(0, promised, owner.owned[0].state), publication=b"a name")
        body = [bytes(buffer) for buffer in shard_states.body([(head, owner.owned[0].state)], {0: bytes(8)})]
        assert store.begin_catch_up(0, term(1, "a"), OWNER, promised.number)

        with pytest.raises(RequestRejected, match="its base is gone"):
            await swarm.deliver("state", OWNER, ShardList([0]), TransferResult, body)
        assert store.backed[0].state is None

        learn = Learn([claim(1)], [owner.promise(0).number])
        await swarm.deliver("learn", OWNER, learn, TransferResult)
        other = msgspec.structs.replace(describe(0, owner.promise(0), owner.owned[0].state), publication=b"other")
        body = [bytes(buffer) for buffer in shard_states.body([(other, owner.owned[0].state)], {0: bytes(8)})]
        with pytest.raises(RequestRejected, match="its base is gone"):
            await swarm.deliver("state", OWNER, ShardList([0]), TransferResult, body)

        context.replica.set_version(0, term(1, "a"), 1, Position(b"a name", 1))
        learn = Learn([claim(1)], [owner.promise(0).number])
        assert (await swarm.deliver("learn", OWNER, learn, TransferResult)).publications == []

    run(scenario())


def test_a_leaving_node_takes_no_learner_role_and_names_the_owner_it_knows() -> None:
    """`others` names the owner of the shard."""

    async def scenario() -> None:
        store = store_of("b")
        store.note_owner(0, term(5, "c"), contact("c"))
        swarm, context = handler_of(store)
        context.run.enter(Phase.LEAVING)

        answer = await swarm.deliver("learn", OWNER, Learn([claim(1)], [2]), TransferResult)

        assert answer == TransferResult([], [OwnerInfo.of(0, term(5, "c"), contact("c"))])

    run(scenario())


@pytest.mark.parametrize(("more", "backup"), [(0, OWNER), (1, None)])
def test_a_hand_over_makes_the_backup_the_owner(more: int, backup: Contact | None) -> None:
    """The former owner becomes its backup, unless their numbers of deltas differ: then it needs a new catch-up."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        state = store.backed[0].state
        assert state is not None
        swarm, _ = handler_of(store)
        message = HandOver([claim(2, ME)], [state.known_count + more], [[]])

        assert (await swarm.deliver("hand_over", OWNER, message, TransferResult)).taken == [0]

        assert store.owned[0].state is state
        assert store.owned[0].backup == backup
        assert store.owned[0].by_handover

    run(scenario())


def test_a_repeated_hand_over_is_acknowledged_again() -> None:
    """The answer to the first may have been lost."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        state = store.backed[0].state
        assert state is not None
        swarm, _ = handler_of(store)
        message = HandOver([claim(2, ME)], [state.known_count], [[]])

        for _ in range(2):
            assert (await swarm.deliver("hand_over", OWNER, message, TransferResult)).taken == [0]
        assert store.owned[0].term == term(2, "a")

    run(scenario())


def test_a_hand_over_right_after_the_promotion_is_accepted() -> None:
    """No delta has made this learner the backup yet, but the next number after its promise proves the promotion."""

    async def scenario() -> None:
        store = store_of("b")
        store.begin_catch_up(0, term(1, "a"), OWNER, 2)
        store.take_state(0, term(2, "a"), OWNER, zeros(store))
        swarm, _ = handler_of(store)

        late = HandOver([claim(4, ME)], [0], [[]])
        assert (await swarm.deliver("hand_over", OWNER, late, TransferResult)).taken == []
        next_number = HandOver([claim(3, ME)], [0], [[]])
        assert (await swarm.deliver("hand_over", OWNER, next_number, TransferResult)).taken == [0]

    run(scenario())


def test_a_hand_over_from_a_node_that_is_not_the_owner_is_refused() -> None:
    """And so is one below the fence."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        swarm, _ = handler_of(store)
        message = HandOver([claim(2, ME)], [0], [[]])
        assert (await swarm.deliver("hand_over", contact("c"), message, TransferResult)).taken == []

        store.ownership.raise_fence(0, term(9, "c"))
        assert (await swarm.deliver("hand_over", OWNER, message, TransferResult)).taken == []
        assert 0 not in store.owned

    run(scenario())


def test_an_owner_that_is_ignored_gets_no_backup() -> None:
    """It has sent nonsense, and counts as gone: its backup takes over, and no node catches up for it."""

    async def scenario() -> None:
        store = store_of("b")
        swarm, context = handler_of(store)
        await learned(swarm, store, 99)
        for _ in range(NONSENSE):
            context.view.score.nonsense(OWNER.node_id, "value")
            await asyncio.sleep(1.0)
        assert store.backed[0].is_active
        assert context.view.is_gone(OWNER.node_id)
        assert (await swarm.deliver("learn", OWNER, Learn([claim(102)], [103]), TransferResult)).taken == []

    run(scenario())


async def learned(swarm: ScriptedSwarm, store: ShardStore, number: int) -> None:
    """A whole catch-up, and the first delta after it."""
    promised = Term(number + 1, OWNER.node_id)
    await swarm.deliver("learn", OWNER, Learn([claim(number)], [number + 1]), TransferResult)
    state = zeros(store)
    body = [bytes(buffer) for buffer in shard_states.body([(describe(0, promised, state), state)])]
    await swarm.deliver("state", OWNER, ShardList([0]), TransferResult, body)
    forward = msgspec.structs.replace(forward_of(Forwarded(0, promised, 0)), step=number)
    await swarm.deliver("forward", OWNER, forward, ForwardAnswer, body_of(0))
    assert store.backed[0].is_active


def test_a_backup_adds_its_own_delta_from_its_own_copy() -> None:
    """Once, with the owner's weight, and no array in the body. Without a copy it asks for the array, unless it has the
    delta already: then the late forward is acknowledged."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        sent = SentDeltas()
        swarm, context = handler_of(store, sent)
        entry = Forwarded(0, term(1, "a"), 0, has_it=True)
        message = msgspec.structs.replace(forward_of(entry, weight=0.5), node=IDS["b"])

        async def status() -> str:
            answer = await swarm.deliver("forward", OWNER, message, ForwardAnswer)
            found: str = answer.results[0].status
            return found

        assert await status() == "lacks"
        sent.deliveries[1] = sent_of("b", 1, 6.0)
        assert await status() == "ok"
        del sent.deliveries[1]
        assert await status() == "ok"
        state = store.backed[0].state
        assert state is not None
        assert state.value.tolist() == [3.0] * 4
        assert context.counters.bytes_received == 0

        store.backed[0].promised = term(2, "a")  # a learner again: it needs the values for the coming snapshot
        assert await status() == "lacks"

    run(scenario())


@pytest.mark.parametrize("bad", [3e38, np.inf, np.nan])
def test_a_forward_out_of_range_is_not_added(bad: float) -> None:
    """Whatever its owner has accepted: the copy of the backup stays one that training can go on from."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        swarm, context = handler_of(store)
        body = list(frames(0, np.full(4, bad, np.float32), "float32", Part.DELTA))
        answer = await swarm.deliver("forward", OWNER, forward_of(Forwarded(0, term(1, "a"), 0)), ForwardAnswer, body)

        assert [result.status for result in answer.results] == ["unknown"]
        state = store.backed[0].state
        assert state is not None
        assert np.isfinite(state.value).all()
        assert np.abs(state.value).max() < 10.0
        assert [one.event for one in records_of(context)] == ["forward_out_of_range", "nonsense_received"]

    run(scenario())


def test_a_former_owner_that_nobody_can_dial_backs_nothing_up() -> None:
    """The new one goes on alone, under a term above that of the hand-over: no delta would reach the former one."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        swarm, _ = handler_of(store)
        swarm.hidden = [IDS["a"]]
        message = HandOver([claim(2)], [0], [[]])
        answer = await swarm.deliver("hand_over", OWNER, message, TransferResult)
        assert answer.taken == [0]
        owned = store.owned[0]
        assert (owned.backup, owned.term) == (None, Term(3, IDS["b"]))

    run(scenario())


def confirmation_of(store: ShardStore, me: Contact = ME) -> tuple[BackupHandler, ScriptedSwarm, Any]:
    swarm = ScriptedSwarm(me, [OWNER, contact("c")])
    context = context_of(swarm, store)
    return backup_of_node(context), swarm, context


def test_a_copy_that_has_not_changed_for_a_while_is_asked_about_once_an_interval() -> None:
    """From one look to the next; a delta, or a new term, in between says that the owner relies on it."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, _, _ = confirmation_of(store)

        async def after_an_interval() -> dict[bytes, tuple[Contact, list[int]]]:
            assert confirmation.due() == {}
            await asyncio.sleep(CONFIRM_AFTER_S)
            return confirmation.due()

        assert await after_an_interval() == {}
        store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
        assert await after_an_interval() == {}
        for _ in range(2):
            assert await after_an_interval() == {IDS["a"]: (OWNER, [0])}

    run(scenario())


def test_an_owner_that_is_gone_or_has_restarted_is_not_asked() -> None:
    """Its backup takes over instead."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        await asyncio.sleep(CONFIRM_AFTER_S)
        confirmation.due()
        swarm.gone.append(IDS["a"])
        await asyncio.sleep(CONFIRM_AFTER_S)
        assert confirmation.due() == {}

        swarm.gone.clear()
        store.on_restart(IDS["a"], ME)
        await asyncio.sleep(CONFIRM_AFTER_S)
        assert confirmation.due() == {}

    run(scenario())


def test_a_copy_that_the_owner_backs_up_elsewhere_is_dropped() -> None:
    """The owner names itself under a newer term."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(4, "a"), OWNER)])

        await confirmation.ask({IDS["a"]: (OWNER, [0])})

        assert (store.backed, store.superseded) == ({}, {})

    run(scenario())


def test_a_copy_of_a_shard_that_its_owner_lost_is_kept_to_be_offered() -> None:
    """The shard has another owner, which may lack deltas of this copy."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(4, "c"), contact("c"))])

        await confirmation.ask({IDS["a"]: (OWNER, [0])})

        assert store.backed == {}
        assert store.superseded[0].term == term(1, "a")

    run(scenario())


def test_an_owner_that_does_not_answer_changes_nothing() -> None:
    """The failure detector decides about it."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda to, _: TransportError("timeout", to.address, "no answer")

        await confirmation.ask({IDS["a"]: (OWNER, [0])})

        assert store.backed[0].is_active

    run(scenario())


def test_an_owner_confirms_its_backup_and_its_learner_only() -> None:
    """To any other node it names itself, or the owner it knows. Without a backup it confirms every copy: no other one
    has what was acknowledged."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = ME
        store.note_owner(1, term(2, "c"), contact("c"))
        _, swarm, _ = confirmation_of(store, OWNER)
        question = ShardList([0, 1, 2])

        answer = await swarm.deliver("backing", ME, question, TransferResult)
        assert (answer.taken, [info.shard for info in answer.others]) == ([0], [1])
        answer = await swarm.deliver("backing", contact("d"), question, TransferResult)
        assert (answer.taken, [info.owner for info in answer.others]) == ([], [IDS["a"], IDS["c"]])
        store.drop_backup(0, OWNER)
        assert (await swarm.deliver("backing", ME, question, TransferResult)).taken == [0]

    run(scenario())


def test_a_catch_up_that_the_owner_has_given_up_is_dropped() -> None:
    """Its answer was lost: the owner has no learner, and the term of the catch-up. A later catch-up goes on."""

    async def scenario() -> None:
        for has_state in (False, True):
            store = store_of("b")
            assert store.begin_catch_up(0, term(4, "a"), OWNER, 5)
            if has_state:
                assert store.take_state(0, term(5, "a"), OWNER, zeros(store))
            confirmation, swarm, _ = confirmation_of(store)
            swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(4, "a"), OWNER)])
            await confirmation.ask({IDS["a"]: (OWNER, [0])})
            assert (store.backed, store.superseded) == ({}, {})

            assert store.begin_catch_up(0, term(4, "a"), OWNER, 6)

            def begun_anew(*_: object, store: ShardStore = store) -> TransferResult:
                assert store.begin_catch_up(0, term(4, "a"), OWNER, 7)
                return TransferResult([], [OwnerInfo.of(0, term(4, "a"), OWNER)])

            swarm.answers["backing"] = begun_anew
            await confirmation.ask({IDS["a"]: (OWNER, [0])})
            assert store.backed[0].attempt == 7

    run(scenario())


def test_a_backup_is_not_dropped_for_an_answer_from_before_its_promotion() -> None:
    """The owner relied on it by then: an active copy ends with a later term of the owner alone."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(1, "a"), OWNER)])
        await confirmation.ask({IDS["a"]: (OWNER, [0])})
        assert store.backed[0].is_active

    run(scenario())
