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
from tests.harness.swarms.exchange_story import BOUND_S, ONES, ask, simulate, striking
from tests.harness.swarms.exchange_swarm import GENESIS, World
from tests.harness.swarms.light_network import Member


def other(world: World) -> Member:
    return next(one for one in world.running() if one is not world.owner())


def one_owner(world: World) -> bool:
    """One node owns shard 0, and nothing is left to offer."""
    stores = [one.exchange.store for one in world.running()]
    return sum(0 in store.owned for store in stores) == 1 and not any(store.superseded for store in stores)


async def goes_on_alone(world: World, member: Member, step: int, amount: float) -> None:
    """A delta of a node whose owner is out of reach: it takes the shard over, from its replica where it has no more."""
    await member.exchange.push(step, step - 1, 1.0, amount * ONES)
    await world.until(lambda: 0 in member.exchange.store.owned, within_s=2 * BOUND_S, what="a second owner")
    assert await member.exchange.flush(BOUND_S) == 0


@played_by(simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0, pull_codec="float32")
async def test_the_side_with_the_history_takes_the_shard_back_from_a_replica(world: World) -> None:
    """The replica has one delta, the history two. The side of the history rises above the other's term, and the deltas
    of both sides are in its value once."""
    first, second = world.owner(), other(world)
    await first.push(1, 1.0)
    assert (await second.exchange.pull(1)).missing == []
    world.part({second.name: 1})
    await first.push(2, 20.0)
    second.exchange.begin_at(1)
    await goes_on_alone(world, second, 3, 300.0)
    assert float(second.exchange.store.owned[0].state.value[0]) == 301.0
    world.heal()
    await world.until(lambda: one_owner(world), within_s=3 * BOUND_S, what="one owner")
    assert world.owner() is first
    assert world.value() == [321.0]
    assert world.of("shard_taken_back")
    await second.push(4, 4000.0)
    assert world.value() == [4321.0]


@played_by(simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0, pull_codec="float32")
async def test_an_older_copy_takes_no_shard_back_from_a_replica_that_has_more(world: World) -> None:
    """The owner comes back with a disk of before its last deltas; another node has gone on from a replica with them."""
    first, second = world.owner(), other(world)
    await first.push(1, 1.0)
    term, former = world.owned().term, world.owned().state.copy()
    await first.push(2, 20.0)
    await first.push(3, 300.0)
    assert (await second.exchange.pull(3)).missing == []
    second.exchange.begin_at(3)
    await world.kill(first.name)
    await goes_on_alone(world, second, 4, 4000.0)
    again = await world.start(first.name)
    again.exchange.offer(1, [], {0: StoredState(term, former, clean=False)})
    await again.exchange.join(second.contact)
    await asyncio.sleep(15.0)
    assert world.value() == [4321.0]
    assert not world.of("shard_taken_back")


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "sparse512"])
@played_by(simulate, nodes=4, shards=1, values=5000, tenure_s=600.0, codec=Fixture("codec"))
async def test_a_repair_brings_the_bits_that_a_backup_has(world: World) -> None:
    """The owner has forwarded a delta and not added it, and the other side of a split has added it."""
    owning, backing = world.owner(), world.backup()
    origin, beside = (one for one in world.running() if one not in (owning, backing))
    await beside.push(1, 1.0)
    for one in (origin, beside):
        one.exchange.begin_at(1)
        assert (await one.exchange.pull(1)).missing == []
    identity = DeltaId(origin.contact.node_id, 1, 2)
    delta = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    with striking(world.unanswered, "forward", sender=owning):
        pushing = asyncio.create_task(origin.exchange.push(2, 1, 1.0, delta))
        copy = backing.exchange.store.backed[0].state
        assert copy is not None
        await world.until(lambda: copy.knows(identity), within_s=1.0, what="the delta at the backup")
        world.part({origin.name: 1, beside.name: 1})
        await pushing
        assert await owning.exchange.deltas.drained([0], BOUND_S)
    assert await origin.exchange.flush(3 * BOUND_S) == 0
    assert not owning.exchange.store.owned[0].state.knows(identity)

    world.part({backing.name: 2})  # it would take the shard back itself
    await world.until(lambda: one_owner(world), within_s=3 * BOUND_S, what="one owner, nothing left to mend")

    assert world.owner() is owning
    assert world.owned().state.knows(identity)
    assert world.owned().state.value.tobytes() == copy.value.tobytes()


@played_by(simulate, nodes=2, shards=1, replicas=0, tenure_s=600.0)
async def test_an_owner_that_comes_back_with_an_older_disk_is_sent_what_it_had_acknowledged(world: World) -> None:
    """Nobody else may own the shard. Each delta that it lacks is sent again, once, under its identity; what it cannot
    have lost is not."""
    server, client = world.owner(), other(world)
    world.hide(client.name)
    await client.push(1, 1.0)
    term, former = world.owned().term, world.owned().state.copy()
    await client.push(2, 2.0)
    await client.push(3, 4.0)
    await world.kill(server.name)
    await asyncio.sleep(8.0)
    again = await world.start(server.name)
    again.exchange.offer(1, [], {0: StoredState(term, former, clean=False)})
    await asyncio.sleep(2.0)
    await again.exchange.resume(1, 3.0)
    assert (await client.exchange.push(4, 3, 1.0, 8 * ONES)).refused == {}
    await world.until(lambda: world.value() == [15.0], within_s=BOUND_S, what="all deltas again")
    await asyncio.sleep(2.0)
    asked: list[str] = []
    world.observers.append(lambda _sender, _receiver, name, _payload: asked.append(name))
    await asyncio.sleep(5.0)
    assert world.value() == [15.0]
    assert client.exchange.counters.deltas_sent_again == 2
    assert "lacking" not in asked


@played_by(simulate, nodes=2, shards=1, replicas=0, pull_codec="float32", weight="samples")
async def test_a_node_that_has_taken_over_from_its_replica_adds_its_own_deltas(world: World) -> None:
    """Those that the replica certainly lacks, once, with the weight that they had; its owner had acknowledged them."""
    first, second = world.owner(), other(world)
    exchange = second.exchange
    await second.push(1, 1.0)
    assert (await exchange.pull(1)).missing == []
    assert (await exchange.push(2, 1, 0.5, 4 * ONES)).acknowledged == 1
    assert world.value() == [3.0]
    await world.kill(first.name)
    await goes_on_alone(world, second, 3, 8.0)
    await world.until(lambda: world.value() == [11.0], within_s=BOUND_S, what="its own delta")
    await asyncio.sleep(5.0)
    assert world.value() == [11.0]


@played_by(simulate, nodes=3, shards=2, owners=2)
async def test_an_owner_names_what_it_certainly_lacks(world: World) -> None:
    """Not what it has, nor a delta with a base before an era; of a shard that it does not own it says nothing."""
    first, second = world.owner(), other(world)
    theirs = next(shard for shard in range(2) if shard not in first.exchange.store.owned)
    await second.push(1)
    world.owned().state.era_step = 3
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

    first, second = world.owner(), other(world)
    assert (await second.exchange.pull(0)).missing == []
    world.part({second.name: 1})
    second.exchange.begin_at(1)
    await goes_on_alone(world, second, 3, 1.0)
    for step in range(5, 13, 2):
        await second.push(step, 1.0)
    for step in range(1, 8):
        await first.push(step, 100.0)
    world.observers.append(observe)
    world.heal()
    await world.until(lambda: one_owner(world), within_s=3 * BOUND_S, what="one owner")
    # A node that has lost the shard twice names them twice.
    lost = max((record.fields["count"] for record in world.of("deltas_lost_in_split")), default=0)
    assert bool(lost) is (not log_bytes)
    # Its origin may send one again that was given up.
    assert 705.0 - lost <= world.value()[0] <= 705.0
    assert max(one.exchange.counters.lost_in_splits for one in world.running()) >= lost
    assert max(sought, default=0) <= 2
    assert log_bytes or len(sought) > 1


@played_by(simulate, nodes=3, shards=1)
async def test_a_delta_that_is_offered_is_added_once_if_it_may_be(world: World) -> None:
    """It is weighed among the workers of both sides. One that is not finite, of a step that nobody reaches, or of a
    shard that there is not, is not added; those before it are."""
    first, second = world.owner(), other(world)
    await second.push(1, 1.0)
    for member in world.running():
        member.exchange.begin_at(1)
        member.exchange.view.invalidate()

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
    assert world.value()[0] == 1.0 + 8.0 * 0.5
    assert (await answer([offered(3)], np.inf)).added == 0
    assert (await answer([offered(1 << 40)])).added == 0
    assert world.value()[0] == 5.0


@played_by(simulate, nodes=3, shards=1)
async def test_who_searches_for_deltas_gets_those_that_a_log_has(world: World) -> None:
    """By identity, with their weights, until the answer is full; of a shard that there is not, none."""
    first, second = world.owner(), other(world)
    for step in (1, 2, 3):
        await second.push(step)
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
    first, second = world.owner(), other(world)
    await second.push(1)
    found = first.exchange.reconciler.history(0)
    assert (found.status, found.term, found.known_count) == ("owner", world.owned().term, 1)
    assert found.known == [(second.contact.node_id, 1, [(1, 1)])]
    elsewhere = second.exchange.reconciler.history(0)
    assert (elsewhere.status, elsewhere.owner_info and elsewhere.owner_info.owner) == (
        "not_owner",
        first.contact.node_id,
    )
    mine = world.owned()
    mine.moving = True
    assert first.exchange.reconciler.history(0).status == "retry"
    mine.moving, mine.backup = False, None
    assert first.exchange.reconciler.history(0).status == "retry"
