"""One owner's rounds: a batch belongs to the ownership it was computed under, and a moving shard takes none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from p2pnode.training.cooperative import VALUES_PER_TURN, VALUES_PER_UPDATE
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Forward, ForwardAnswer, ForwardResult, Push, PushResult
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import KeyUpdate, ValueBatch, encode_batch
from p2pnode.training.shards.value_updates import applied, pulled
from p2pnode.training.values.encoding import encode_key, encode_value
from p2pnode.training.values.rounds import CHECK_S, LATER
from p2pnode.training.values.script_pulls import SCRIPT_WAIT_S
from p2pnode.training.values.shard_tasks import STAGGER_S
from p2pnode.training.values.store import EncodedResult, EncodedUpdate, EncodedValue
from tests.harness.builders.stores import IDS, contact, term
from tests.harness.environment.loop_turns import counted_turns
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.exchange_context import records_of
from tests.unit.training.values.value_owner import ValueOwner


def update(number: int, value: int = 1, reducer: str = "add", node: str = "x") -> KeyUpdate:
    return KeyUpdate(IDS[node], 1, number, encode_key("k"), reducer, encode_value("k", value), 0)  # type: ignore[arg-type]


CALLS: list[int] = []


async def last(updates: Sequence[EncodedUpdate], _: Mapping[bytes, EncodedValue]) -> list[EncodedResult]:
    """A `pull` that takes the last update."""
    CALLS.append(len(updates))
    return [(updates[-1].key, updates[-1].value, 0)]


@run_by(run)
async def test_a_batch_of_a_former_ownership_is_void() -> None:
    """The shard was lost and regained meanwhile: its values are others than those the batch was computed from."""
    owner = ValueOwner()
    basis = owner.store.owned[0]
    assert basis.state.table is not None
    batch = applied(basis.state.table, [update(1, 5)], 1 << 20)
    item = IncomingDelta.of_batch(0, encode_batch(batch), batch, 1, basis)
    owner.store.step_down(0)
    owner.own(0, 3)
    push = Push(IDS["a"], 1, 0, 0, 1.0, [0])
    (result,) = await owner.deltas.replicator.replicate_and_add(push, DeltaId(IDS["a"], 1, 0), [item])
    assert result.status != "ok"
    assert owner.value() is None


@run_by(run)
async def test_a_shard_that_moves_takes_no_batch() -> None:
    """Not even one whose round is about to begin: the receiver of the shard would lack it. It is applied if the shard
    stays after all."""
    owner = ValueOwner()
    loop = asyncio.get_running_loop()
    accepting = asyncio.create_task(owner.accept(update(1)))
    await asyncio.sleep(0)
    # After the turn that starts the round, and before the round.
    loop.call_soon(setattr, owner.store.owned[0], "moving", True)
    (result,) = await accepting
    assert (result.status, result.reason, owner.value()) == ("retry", LATER, None)
    assert await owner.deltas.drained([0], 1.0)
    (result,) = await owner.accept(update(1))
    assert (result.status, owner.value()) == ("retry", None)
    owner.store.owned[0].moving = False
    (result,) = await owner.accept(update(1))
    assert (result.status, owner.value()) == ("ok", 1)


@run_by(run)
async def test_a_retry_joins_the_update_that_waits() -> None:
    """Two requests with the same update, at once and one after the other: it counts once."""
    owner = ValueOwner()
    one = (0, update(1))
    answers = await asyncio.gather(*(owner.values.accept(IDS["x"], [one]) for _ in range(3)))
    answers.append(await owner.values.accept(IDS["x"], [one]))
    assert [result.status for (result,) in answers] == ["ok"] * 4
    assert owner.value() == 1


@run_by(run)
async def test_an_update_that_became_known_while_it_waited_is_not_applied_again() -> None:
    """The shard moved away and came back with it, before the round began that the update waited for."""
    owner, other = ValueOwner(), ValueOwner()
    owner.store.owned[0].moving = True
    waiting = owner.rounds.enqueue(0, update(1, 5), update(1, 5).identity)
    await asyncio.sleep(0.1)
    assert waiting.result is None
    table = other.store.owned[0].state.table
    assert table is not None
    table.apply(applied(table, [update(1, 5)], 1 << 20))
    owner.store.step_down(0)
    owner.store.own(0, other.store.owned[0].state, term(3, "a"), contact("a"), 0.0, by_handover=True)
    owner.rounds.wake()
    await asyncio.sleep(0.1)
    assert waiting.result is not None
    assert waiting.result.status == "ok"
    assert owner.value() == 5


@run_by(run)
async def test_an_update_that_the_other_side_has_acknowledged_waits_for_a_script_as_long_as_it_takes() -> None:
    """It waited here as one of many, which are refused after a while; then the other side offered it."""
    owner, other = ValueOwner(), ValueOwner()
    table = other.store.owned[0].state.table
    assert table is not None
    mine, theirs = update(1, 4, "pull"), update(2, 5, "pull")
    await owner.values.accept(IDS["x"], [(0, theirs), (1, mine)])
    item = IncomingDelta.of_batch(0, b"", pulled(table, [theirs], [(theirs.key, theirs.update, 0)], {}, 1 << 20))
    await owner.values.repair(DeltaId(IDS["b"], 1, 1), item)
    await asyncio.sleep(3 * SCRIPT_WAIT_S)
    (refused,) = await owner.accept(mine, shard=1)
    assert refused.status == "refused"
    (result,) = await owner.accept(theirs)
    assert (result.status, result.reason) == ("retry", LATER)
    owner.rounds.on_pull(last)
    (result,) = await owner.accept(theirs)
    assert (result.status, owner.value()) == ("ok", 5)


@run_by(run)
async def test_others_run_while_many_updates_are_taken_and_applied() -> None:
    """A thousand updates, in one request or in one round: at most a millisecond or so passes between two turns."""

    async def turns_of(updates: int, *, in_one_round: bool) -> int:
        owner = ValueOwner()
        some = [(number % 2, update(number)) for number in range(1, updates + 1)]
        if in_one_round:
            for shard, one in some:
                owner.rounds.enqueue(shard, one, one.identity)
        with counted_turns() as turns:
            results = await owner.values.accept(IDS["x"], some[-2:] if in_one_round else some)
        assert {one.status for one in results} == {"ok"}
        return turns.count

    few = await turns_of(2, in_one_round=True)
    assert await turns_of(1024, in_one_round=False) - few >= 1024 * VALUES_PER_UPDATE // VALUES_PER_TURN
    # After the batch of each of the two shards, and when each is added.
    assert await turns_of(1024, in_one_round=True) - few == 2 + 2


@run_by(run)
async def test_a_round_that_takes_long_has_another_beside_it_after_a_moment() -> None:
    """Its backup is slow; the update of another shard of the same pair is answered meanwhile."""
    owner, loop = ValueOwner(), asyncio.get_running_loop()
    replicator = owner.deltas.replicator
    replicate = replicator.replicate_and_add

    async def slow(push: Push, identity: DeltaId, items: list[IncomingDelta]) -> list[PushResult]:
        if items[0].shard == 0:
            await asyncio.sleep(5.0)
        return await replicate(push, identity, items)

    replicator.replicate_and_add = slow  # type: ignore[method-assign]
    first = asyncio.create_task(owner.accept(update(1)))
    await asyncio.sleep(STAGGER_S / 4)
    began_s = loop.time()
    (result,) = await owner.accept(update(2), shard=1)
    assert (result.status, owner.value(1)) == ("ok", 1)
    assert loop.time() - began_s == pytest.approx(0.75 * STAGGER_S, abs=1e-6)
    assert [result.reason for result in await first] == [LATER]


@run_by(run)
async def test_a_late_set_of_the_same_origin_changes_nothing() -> None:
    """Its request was under way while its origin went on elsewhere: the later set, repaired before, stays."""
    owner = ValueOwner()

    def placed(number: int) -> KeyUpdate:
        return KeyUpdate(IDS["x"], 1, number, encode_key("k"), "replace", encode_value("k", number), number)

    for number in (8, 7, 9):
        (result,) = await owner.accept(placed(number))
        assert (result.status, owner.value()) == ("ok", max(8, number))


@run_by(run)
async def test_two_sides_that_offer_the_same_update_have_it_applied_once() -> None:
    """It was refused here for lack of a script; two former owners offer the batch in which it was applied."""
    owner, other = ValueOwner(), ValueOwner()
    CALLS.clear()
    owner.rounds.on_pull(last)
    one = update(1, 5, "pull")
    mine, theirs = owner.store.owned[0].state.table, other.store.owned[0].state.table
    assert mine is not None
    assert theirs is not None
    mine.apply(ValueBatch(1, [one], [], [(0, "no script")]))
    item = IncomingDelta.of_batch(0, b"", pulled(theirs, [one], [(one.key, one.update, 0)], {}, 1 << 20))
    identities = [DeltaId(IDS[name], 1, 1) for name in "bc"]
    answers = await asyncio.gather(*(owner.values.repair(identity, item) for identity in identities))
    assert [result.status for result in answers] == ["ok", "ok"]
    assert owner.value() == 5
    assert CALLS == [1]


@run_by(run)
async def test_an_owner_learns_that_its_backup_has_no_copy() -> None:
    """Nothing is added to the shard for a while: an empty batch is sent, and a backup without the copy is dropped."""
    owner = ValueOwner()
    owner.context.swarm.answers["forward"] = lambda _to, _payload: ForwardAnswer([ForwardResult(0, "unknown")])  # type: ignore[attr-defined]
    owner.store.owned[0].backup = contact("b")
    checking = asyncio.create_task(owner.rounds.check_backups())
    await asyncio.sleep(3 * CHECK_S)
    checking.cancel()
    assert owner.store.owned[0].backup is None
    assert owner.store.owned[1].state.version == 0


@run_by(run)
async def test_a_hand_over_waits_for_the_batch_on_its_way() -> None:
    """Its backup may have it: the shard is drained when the batch is in."""
    owner = ValueOwner()
    swarm = owner.context.swarm
    swarm.answers["forward"] = lambda _to, _payload: ForwardAnswer([ForwardResult(0, "ok")])  # type: ignore[attr-defined]
    swarm.request_s = 0.2  # type: ignore[attr-defined]
    owner.store.owned[0].backup = contact("b")
    accepting = asyncio.create_task(owner.accept(update(1)))
    await asyncio.sleep(0.05)
    assert not await owner.deltas.drained([0], 0.05)
    assert await owner.deltas.drained([0], 1.0)
    assert owner.value() == 1
    (result,) = await accepting
    assert result.status == "ok"


@run_by(run)
async def test_the_origin_of_a_batch_is_sent_the_one_that_stands_for_it() -> None:
    """As a backup it has no copy of that: it is another batch of the same identity."""
    owner = ValueOwner()
    owner.swarm.answers["forward"] = lambda _to, _payload: ForwardAnswer([ForwardResult(0, "ok")])
    owner.store.owned[0].backup = contact("b")
    batch = ValueBatch(1, [update(1, 5)], [])
    item = IncomingDelta.of_batch(0, encode_batch(batch), batch)
    assert (await owner.values.repair(DeltaId(IDS["b"], 1, 9), item)).status == "ok"
    forwards = owner.swarm.sent("forward", Forward)
    assert [(one.node, one.shards[0].has_it) for one in forwards] == [(IDS["a"], False), (IDS["b"], False)]
    assert owner.swarm.bodies["forward"]


@run_by(run)
async def test_a_shard_that_is_owned_anew_is_not_taken_for_a_quiet_one() -> None:
    """The check of backups goes on."""
    owner = ValueOwner()
    owner.swarm.answers["forward"] = lambda _to, _payload: ForwardAnswer([ForwardResult(0, "ok")])
    checking = asyncio.create_task(owner.rounds.check_backups())
    for number in (3, 5):
        owner.store.step_down(0)
        owner.own(0, number)
        owner.store.owned[0].backup = contact("b")
        await asyncio.sleep(1.5 * CHECK_S)
    assert not checking.done()
    checking.cancel()


@run_by(run)
async def test_a_batch_whose_updates_wait_is_not_known_yet() -> None:
    """There is no script: the other side offers the batch again, and keeps what it has until then."""
    owner, other = ValueOwner(), ValueOwner()
    table = other.store.owned[0].state.table
    assert table is not None
    one = update(1, 5, "pull")
    item = IncomingDelta.of_batch(0, b"", pulled(table, [one], [(one.key, one.update, 0)], {}, 1 << 20))
    identity = DeltaId(IDS["b"], 1, 1)
    result = await owner.values.repair(identity, item)
    assert (result.status, result.reason) == ("retry", LATER)
    assert not owner.store.owned[0].state.knows(identity)
    owner.rounds.on_pull(last)
    assert (await owner.values.repair(identity, item)).status == "ok"
    assert owner.value() == 5
    assert owner.store.owned[0].state.knows(identity)


@run_by(run)
async def test_a_batch_whose_replication_had_a_fault_is_sent_again_as_it_was() -> None:
    """The fault is logged. A backup may have the batch: its updates are applied once."""
    faults = [KeyError("a bug")]
    owner = ValueOwner()
    replicate = owner.deltas.replicator.replicate_and_add
    sent: list[list[int]] = []

    async def replicated(push: Push, identity: DeltaId, items: list[IncomingDelta]) -> list[PushResult]:
        sent.append([id(item) for item in items])
        if faults:
            raise faults.pop()
        return await replicate(push, identity, items)

    owner.deltas.replicator.replicate_and_add = replicated  # type: ignore[method-assign]
    shards = [(0, update(1)), (1, update(1))]
    await owner.values.accept(IDS["x"], shards)
    await asyncio.sleep(3.0)
    results = await owner.values.accept(IDS["x"], shards)

    assert [(result.shard, result.status) for result in results] == [(0, "ok"), (1, "ok")]
    assert [owner.value(0), owner.value(1)] == [1, 1]
    assert sent[0] == sent[1]
    assert "exchange_service_failed" in [record.event for record in records_of(owner.context)]
    assert not owner.rounds.waiting
