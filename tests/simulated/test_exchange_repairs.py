"""What is repaired after a split or a lost disk: deltas that only one side, or only their origin, still has."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pnode.training.encoding.frames import Part, frames
from p2pnode.training.exchange.messages import decode
from p2pnode.training.exchange.ownership_messages import (
    AskedDelta,
    FindDeltas,
    FindLacking,
    FoundDeltas,
    LackingDeltas,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
)
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.shards.applied import DeltaId
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exchange_story import (
    BOUND_S,
    ONES,
    ask,
    backup,
    events,
    exchange_of,
    owned,
    owner,
    push,
    simulate,
    striking,
    until,
    value,
)
from tests.harness.swarms.exchange_swarm import GENESIS, Member, World


def other(world: World) -> Member:
    return next(one for one in world.running() if one is not owner(world))


def one_owner(world: World) -> bool:
    """One node owns shard 0, and nothing is left to offer."""
    stores = [exchange_of(one).store for one in world.running()]
    return sum(0 in store.owned for store in stores) == 1 and not any(store.superseded for store in stores)


async def goes_on_alone(world: World, member: Member, step: int, amount: float) -> None:
    """A delta of a node whose owner is out of reach: it takes the shard over, from its replica where it has no more."""
    await exchange_of(member).push(step, step - 1, 1.0, amount * ONES)
    await until(world, lambda: 0 in exchange_of(member).store.owned, within_s=2 * BOUND_S, what="a second owner")
    assert await exchange_of(member).flush(BOUND_S) == 0


@played_by(simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0, pull_codec="float32")
async def test_the_side_with_the_history_takes_the_shard_back_from_a_replica(world: World) -> None:
    """The replica has one delta, the history two. The side of the history rises above the other's term, and the deltas
    of both sides are in its value once."""
    first, second = owner(world), other(world)
    await push(first, 1, 1.0)
    assert (await exchange_of(second).pull(1)).missing == []
    world.part({second.name: 1})
    await push(first, 2, 20.0)
    exchange_of(second).begin_at(1)
    await goes_on_alone(world, second, 3, 300.0)
    assert float(exchange_of(second).store.owned[0].state.value[0]) == 301.0
    world.heal()
    await until(world, lambda: one_owner(world), within_s=3 * BOUND_S, what="one owner")
    assert owner(world) is first
    assert value(world) == [321.0]
    assert events(world, "shard_taken_back")
    await push(second, 4, 4000.0)
    assert value(world) == [4321.0]


@played_by(simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0, pull_codec="float32")
async def test_an_older_copy_takes_no_shard_back_from_a_replica_that_has_more(world: World) -> None:
    """The owner comes back with a disk of before its last deltas; another node has gone on from a replica with them."""
    first, second = owner(world), other(world)
    await push(first, 1, 1.0)
    term, former = owned(world).term, owned(world).state.copy()
    await push(first, 2, 20.0)
    await push(first, 3, 300.0)
    assert (await exchange_of(second).pull(3)).missing == []
    exchange_of(second).begin_at(3)
    world.kill(first.name)
    await goes_on_alone(world, second, 4, 4000.0)
    again = await world.start(first.name)
    exchange_of(again).offer(1, [], {0: StoredState(term, former, clean=False)})
    await exchange_of(again).join(second.contact)
    await asyncio.sleep(15.0)
    assert value(world) == [4321.0]
    assert not events(world, "shard_taken_back")


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "sparse512"])
@played_by(simulate, nodes=4, shards=1, values=5000, tenure_s=600.0, codec=Fixture("codec"))
async def test_a_repair_brings_the_bits_that_a_backup_has(world: World) -> None:
    """The owner has forwarded a delta and not added it, and the other side of a split has added it."""
    owning, backing = owner(world), backup(world)
    origin, beside = (one for one in world.running() if one not in (owning, backing))
    await push(beside, 1, 1.0)
    for one in (origin, beside):
        exchange_of(one).begin_at(1)
        assert (await exchange_of(one).pull(1)).missing == []
    identity = DeltaId(origin.contact.node_id, 1, 2)
    delta = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    with striking(world.unanswered, "forward", sender=owning):
        pushing = asyncio.create_task(exchange_of(origin).push(2, 1, 1.0, delta))
        copy = exchange_of(backing).store.backed[0].state
        assert copy is not None
        await until(world, lambda: copy.knows(identity), within_s=1.0, what="the delta at the backup")
        world.part({origin.name: 1, beside.name: 1})
        await pushing
        assert await exchange_of(owning).deltas.drained([0], BOUND_S)
    assert await exchange_of(origin).flush(3 * BOUND_S) == 0
    assert not exchange_of(owning).store.owned[0].state.knows(identity)

    world.part({backing.name: 2})  # it would take the shard back itself
    await until(world, lambda: one_owner(world), within_s=3 * BOUND_S, what="one owner, nothing left to mend")

    assert owner(world) is owning
    assert owned(world).state.knows(identity)
    assert owned(world).state.value.tobytes() == copy.value.tobytes()


@played_by(simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0)
async def test_an_owner_that_comes_back_with_an_older_disk_is_sent_what_it_had_acknowledged(world: World) -> None:
    """Nobody else may own the shard. Each delta that it lacks is sent again, once, under its identity; what it cannot
    have lost is not."""
    server, client = owner(world), other(world)
    world.hide(client.name)
    await push(client, 1, 1.0)
    term, former = owned(world).term, owned(world).state.copy()
    await push(client, 2, 2.0)
    await push(client, 3, 4.0)
    world.kill(server.name)
    await asyncio.sleep(8.0)
    again = await world.start(server.name)
    exchange_of(again).offer(1, [], {0: StoredState(term, former, clean=False)})
    await asyncio.sleep(2.0)
    await exchange_of(again).resume(1, 3.0)
    assert (await exchange_of(client).push(4, 3, 1.0, 8 * ONES)).refused == {}
    await until(world, lambda: value(world) == [15.0], within_s=BOUND_S, what="all deltas again")
    await asyncio.sleep(2.0)
    asked: list[str] = []
    world.observers.append(lambda _sender, _receiver, name, _payload: asked.append(name))
    await asyncio.sleep(5.0)
    assert value(world) == [15.0]
    assert exchange_of(client).counters.deltas_sent_again == 2
    assert "lacking" not in asked


@played_by(simulate, nodes=2, shards=1, replicas=0, pull_codec="float32", weight="samples")
async def test_a_node_that_has_taken_over_from_its_replica_adds_its_own_deltas(world: World) -> None:
    """Those that the replica certainly lacks, once, with the weight that they had; its owner had acknowledged them."""
    first, second = owner(world), other(world)
    exchange = exchange_of(second)
    await push(second, 1, 1.0)
    assert (await exchange.pull(1)).missing == []
    assert (await exchange.push(2, 1, 0.5, 4 * ONES)).acknowledged == 1
    assert value(world) == [3.0]
    world.kill(first.name)
    await goes_on_alone(world, second, 3, 8.0)
    await until(world, lambda: value(world) == [11.0], within_s=BOUND_S, what="its own delta")
    await asyncio.sleep(5.0)
    assert value(world) == [11.0]


@played_by(simulate, nodes=3, shards=2, owners=2)
async def test_an_owner_names_what_it_certainly_lacks(world: World) -> None:
    """Not what it has, nor a delta with a base before an era; of a shard that it does not own it says nothing."""
    first, second = owner(world), other(world)
    theirs = next(shard for shard in range(2) if shard not in exchange_of(first).store.owned)
    await push(second, 1)
    owned(world).state.era_step = 3
    asked = [AskedDelta(0, 1, 4), AskedDelta(0, 6, 5), AskedDelta(0, 7, 2), AskedDelta(theirs, 6, 5)]
    answer = await ask(second, first, "lacking", FindLacking(1, asked), LackingDeltas)
    assert answer == LackingDeltas([theirs], [1])


@pytest.mark.parametrize("log_bytes", [0, 1 << 20])
@played_by(
    simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0, pull_codec="float32", log_bytes=Fixture("log_bytes")
)
async def test_deltas_that_nobody_has_any_more_are_sought_in_pages_and_reported_once(
    world: World, *, log_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request names a few; with a log there is nothing to seek, and the deltas of both sides are added."""
    monkeypatch.setattr("p2pnode.training.exchange.recovery.reconciliation.MAX_SOUGHT", 2)
    sought: list[int] = []

    def observe(_sender: str, _receiver: str, name: str, payload: bytes) -> None:
        if name == "request_repair":
            ranges = decode(payload.removeprefix(GENESIS), FindDeltas).identities
            sought.append(sum(last - first + 1 for *_, found in ranges for first, last in found))

    first, second = owner(world), other(world)
    assert (await exchange_of(second).pull(0)).missing == []
    world.part({second.name: 1})
    exchange_of(second).begin_at(1)
    await goes_on_alone(world, second, 3, 1.0)
    for step in range(5, 13, 2):
        await push(second, step, 1.0)
    for step in range(1, 8):
        await push(first, step, 100.0)
    world.observers.append(observe)
    world.heal()
    await until(world, lambda: one_owner(world), within_s=3 * BOUND_S, what="one owner")
    # A node that has lost the shard twice names them twice.
    lost = max((record.fields["count"] for record in events(world, "deltas_lost_in_split")), default=0)
    assert bool(lost) is (not log_bytes)
    # Its origin may send one again that was given up.
    assert 705.0 - lost <= value(world)[0] <= 705.0
    assert max(exchange_of(one).counters.lost_in_splits for one in world.running()) >= lost
    assert max(sought, default=0) <= 2
    assert log_bytes or len(sought) > 1


@played_by(simulate, nodes=3, shards=1)
async def test_a_delta_that_is_offered_is_added_once_if_it_may_be(world: World) -> None:
    """It is weighed among the workers of both sides. One that is not finite, of a step that nobody reaches, or of a
    shard that there is not, is not added; those before it are."""
    first, second = owner(world), other(world)
    await push(second, 1, 1.0)
    for member in world.running():
        exchange_of(member).begin_at(1)
        exchange_of(member).view.invalidate()

    def offered(step: int, *, shard: int = 0) -> LoggedDelta:
        return LoggedDelta(shard, b"d" * 20, 1, step, 0.5, 2.0)

    async def answer(deltas: list[LoggedDelta], amount: float = 8.0) -> OfferedDeltasAnswer:
        body = [
            bytes(one)
            for delta in deltas
            for one in frames(delta.shard, np.full(8, amount, np.float32), "float32", Part.DELTA)
        ]
        return await ask(second, first, "repair", OfferedDeltas(deltas), OfferedDeltasAnswer, body)

    assert (await answer([offered(2)])).added == 1
    assert (await answer([offered(2)])).added == 1
    assert value(world)[0] == 1.0 + 8.0 * 0.5
    assert (await answer([offered(3)], np.inf)).added == 0
    assert (await answer([offered(1 << 40)])).added == 0
    assert value(world)[0] == 5.0


@played_by(simulate, nodes=3, shards=1)
async def test_who_searches_for_deltas_gets_those_that_a_log_has(world: World) -> None:
    """By identity, with their weights, until the answer is full; of a shard that there is not, none."""
    first, second = owner(world), other(world)
    for step in (1, 2, 3):
        await push(second, step)
    node = second.contact.node_id

    async def found(shard: int) -> list[tuple[int, float]]:
        question = FindDeltas(shard, [(node, 1, [(2, 9)]), (b"d" * 20, 1, [(1, 9)])])
        answer = await ask(second, first, "request_repair", question, FoundDeltas)
        return [(one.step, one.weight) for one in answer.deltas]

    assert await found(0) == [(2, 1.0), (3, 1.0)]
    assert await found(99) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pnode.training.exchange.recovery.reconciliation.MAX_BATCH_BYTES", 1)
        assert await found(0) == [(2, 1.0)]


@played_by(simulate, nodes=3, shards=1)
async def test_an_owner_tells_what_it_has_when_it_can(world: World) -> None:
    """With its term. While its shard is held, or waits for a backup, it is asked again; another node names it."""
    first, second = owner(world), other(world)
    await push(second, 1)
    found = exchange_of(first).reconciler.history(0)
    assert (found.status, found.term, found.known_count) == ("owner", owned(world).term, 1)
    assert found.known == [(second.contact.node_id, 1, [(1, 1)])]
    elsewhere = exchange_of(second).reconciler.history(0)
    assert (elsewhere.status, elsewhere.owner_info and elsewhere.owner_info.owner) == (
        "not_owner",
        first.contact.node_id,
    )
    mine = owned(world)
    mine.moving = True
    assert exchange_of(first).reconciler.history(0).status == "retry"
    mine.moving, mine.backup = False, None
    assert exchange_of(first).reconciler.history(0).status == "retry"
