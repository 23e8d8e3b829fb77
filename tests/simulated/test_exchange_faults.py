"""One fault at a time over the real exchange, on the light network of `tests.harness.swarms.exchange_swarm`."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Push
from p2pnode.training.exchange.terms import FENCES_FILE, KnownOwner, Term
from p2pnode.training.shards.applied import DeltaId
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exchange_story import BOUND_S, ONES, VALUES, simulate
from tests.harness.swarms.exchange_swarm import GENESIS, World
from tests.harness.swarms.light_network import Links, Member


def remember(member: Member, term: Term) -> None:
    """The node's disk holds a fence that no other node knows of."""
    rows = dict.fromkeys(range(2), tuple(term))
    member.disk.write(FENCES_FILE, msgspec.msgpack.encode((GENESIS, rows)))


# -- the trainer's memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("is_alone", [False, True])
@played_by(simulate, nodes=Fixture("nodes"), codec=Fixture("codec"))
async def test_a_delta_may_be_overwritten_when_its_push_has_returned(
    world: World, *, nodes: int, is_alone: bool
) -> None:
    """A trainer overwrites its delta while it is sent again and again: the owners add what it was. A node that has
    never met another sends nothing, and has added it before."""
    member, delta, taken = world.running()[-1], 3 * ONES, []
    world.links = Links(loss=0.3)
    if is_alone and member.overlay is not None:
        member.overlay.remembered = list

    report = await member.exchange.push(1, 0, 1.0, delta, on_encoded=lambda: taken.append((set(delta), world.value())))
    delta.fill(7.0)

    # Before the answers, unless nothing was to be sent.
    assert taken == [({3.0}, [3.0, 3.0] if nodes == 1 and is_alone else [0.0, 0.0])]
    assert report.refused == {}
    assert await member.exchange.flush(60.0) == 0
    assert world.value() == [3.0, 3.0]


# -- fences -----------------------------------------------------------------------------------------------------------


@played_by(simulate)
async def test_a_fence_that_only_one_node_remembers_blocks_no_other(world: World) -> None:
    """A restarted node has seen a higher term than the owner's: it sends it, the owner raises its term, and is
    accepted."""
    await world.owner().push(1)
    name = world.bystander().name
    await world.kill(name)
    remember(world.members[name], Term(50, b"z" * 20))
    again = await world.start(name)
    await again.exchange.directory.learn_all(world.owner().contact)

    began = world.clock.monotonic()
    report = await again.exchange.pull_client.pull(1, silence_s=BOUND_S)

    assert report.missing == []
    assert world.clock.monotonic() - began < 5.0
    assert world.owner().exchange.store.owned[0].term.number > 50
    await world.until(lambda: bool(world.owner().exchange.store.owned[0].targets()), within_s=5, what="a pair")
    await again.push(2)
    assert world.value() == [3.0, 3.0]


@played_by(simulate, nodes=7, tenure_s=600.0)
async def test_an_owner_that_is_no_candidate_any_more_is_sent_the_fence_as_well(world: World) -> None:
    """The first candidates name it, under a term that the restarted node refuses: that one tells it so."""

    async def scenario(world: World) -> None:
        owning = world.owner()
        world.prefer(range(2), "n2", "n3", "n4", "n5", "n6")
        await owning.push(1)
        await world.kill("n6")
        remember(world.members["n6"], Term(50, b"z" * 20))
        again = await world.start("n6")
        await asyncio.sleep(3.0)

        assert (await again.exchange.pull_client.pull(1, silence_s=BOUND_S)).missing == []
        assert world.owner() is owning
        assert owning.exchange.store.owned[0].term.number > 50

    # It has the shards by a hand-over, and keeps them for its tenure.
    world.prefer(range(2), "n1", "n0")
    await world.until(lambda: world.owner().name == "n1" and world.logged(), within_s=30.0, what="a hand-over")
    await scenario(world)


@played_by(simulate)
async def test_a_fence_that_the_backup_remembers_costs_nothing(world: World) -> None:
    """The owner used to drop its state when its restarted backup refused it under a fence of no owner."""
    await world.owner().push(1)
    name, owning = world.backup().name, world.owner()
    await world.kill(name)
    remember(world.members[name], Term(50, b"z" * 20))
    await world.join(name)
    await (world.bystander() if owning.exchange.store.owned[0].backup else owning).push(2)

    assert world.value() == [3.0, 3.0]
    assert world.owner().exchange.store.owned[0].state.era_step == 0


# -- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise(4)
@played_by(simulate)
async def test_an_owner_that_restarts_before_it_is_missed_leaves_its_shards_to_its_backup(world: World) -> None:
    """It answers every probe, and owns nothing: no node ever took over."""
    owning = world.owner()
    await owning.push(1)
    await world.kill(owning.name)
    await asyncio.sleep(0.2)
    await world.start(owning.name)
    other = next(one for one in world.running() if one is not owning)
    await owning.exchange.directory.learn_all(other.contact)

    await asyncio.wait_for(other.push(2), BOUND_S)

    assert world.value() == [3.0, 3.0]
    assert world.owner().exchange.store.owned[0].state.era_step == 0


# -- redirects --------------------------------------------------------------------------------------------------------


@played_by(simulate)
async def test_redirects_do_not_run_in_a_circle(world: World) -> None:
    """All nodes know a wrong owner, under the true owner's term: once it has denied that, others are asked."""
    owning, asker = world.owner(), world.bystander()
    false = next(one for one in world.running() if one not in (owning, asker))
    contact = Contact(false.contact.node_id, false.contact.address)
    for member in world.running():
        if member is not owning:
            store = member.exchange.store
            for shard in range(2):
                if shard not in store.owned:
                    store.ownership.known_owners[shard] = KnownOwner(store.ownership.fence(shard), contact)
    before = world.requests

    await asyncio.wait_for(asker.push(1), 1.0)

    assert world.value() == [1.0, 1.0]
    assert world.requests - before < 50


# -- hand-over --------------------------------------------------------------------------------------------------------


@played_by(simulate)
async def test_a_hand_over_that_waits_in_vain_does_not_end_the_delta_in_flight(world: World) -> None:
    """It waits for deltas in flight, at most a second; giving up must not cancel what it waited for."""
    owning = world.owner()
    exchange = owning.exchange
    world.pause(world.backup().name)
    item = IncomingDelta(0, ONES[:4], ONES[:4].tobytes(), "float32")
    identity = DeltaId(owning.contact.node_id, 1, 1)
    delta = Push(*identity, 0, 1.0, [0])
    first = asyncio.create_task(exchange.deltas.accept(delta, [item]))
    await asyncio.sleep(0.1)

    assert not await exchange.deltas.drained([0], 0.2)
    (result,) = await first
    assert result.status == "retry"
    assert result.reason in ("backup_silent", "no_backup_yet")


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.promise(5)
def test_both_sides_of_a_split_end_in_one_model(synchronous: bool) -> None:
    """Owner and backup on two sides: both acknowledge; healed, one owner has the deltas of both, each once."""

    async def scenario(world: World) -> None:
        names = [world.owner().name, world.backup().name]
        others = [member.name for member in world.running() if member.name not in names]
        world.part({names[0]: 0, others[0]: 0} | dict.fromkeys([names[1], *others[1:]], 1))
        await asyncio.sleep(BOUND_S)
        await asyncio.gather(world.members[others[0]].push(1), world.members[others[1]].push(10))
        world.heal()
        took_s = await world.until(world.logged, within_s=BOUND_S, what="one owner, nothing left to mend")
        print(f"mended in {took_s:.1f} s")
        for shard in range(2):
            world.owner(shard).exchange.store.owned[shard].state.fold(10, world_rule(world))
        assert world.value() == [11.0, 11.0]

    world = simulate(scenario, nodes=6, synchronous=synchronous)
    assert not [record for record in world.records if record.event == "deltas_lost_in_split"]


def world_rule(world: World):
    return world.manifest.rule


@pytest.mark.promise(5)
@played_by(simulate, seed=3, nodes=6, shards=1, log_bytes=VALUES * 4)
async def test_what_the_log_does_not_reach_is_reported_with_its_identity(world: World) -> None:
    """A log of one delta on each node: of three that one side acknowledged alone two are lost, and named. Owner and
    backup of that side may both have a copy to settle, and then both name them."""
    names = [world.owner().name, world.backup().name]
    others = [member.name for member in world.running() if member.name not in names]
    world.part({names[0]: 0, others[0]: 0} | dict.fromkeys([names[1], *others[1:]], 1))
    await asyncio.sleep(BOUND_S)
    for step in (1, 2, 3):
        await world.members[others[0]].push(step)
        await world.members[others[1]].push(10 * step)
    world.heal()
    await world.until(world.logged, within_s=BOUND_S, what="one owner, nothing left to mend")

    lost = [record for record in world.records if record.event == "deltas_lost_in_split"]
    assert {record.fields["count"] for record in lost} == {2}
    (named,) = {name for record in lost for name in record.fields["deltas"]}
    assert named.endswith(("/1:1-2", "/1:10-10"))
    counted = [member.exchange.counters.lost_in_splits for member in world.running()]
    assert sorted(filter(None, counted)) == [2] * len(lost)
    assert len(lost) <= 2
    assert world.value()[0] in (60.0 + 3.0, 6.0 + 30.0)


@played_by(simulate)
async def test_a_backup_wrongly_declared_dead_ranks_below_its_successor(world: World) -> None:
    """Its owner continues under a new term: its copy must never win over what was acknowledged without it."""
    owning, backing = world.owner(), world.backup()
    before = owning.exchange.store.owned[0].term
    world.part({backing.name: 1})
    await world.until(lambda: owning.exchange.store.owned[0].term > before, within_s=7, what="a new term")
    await asyncio.wait_for(owning.push(1), BOUND_S)
    assert owning.exchange.store.owned[0].term > before


def stale(world: World) -> list[tuple[str, int]]:
    """Copies that their nodes keep as backups, and to which no owner adds."""
    owners = {shard: world.owner(shard) for shard in range(world.manifest.shards)}
    return [
        (member.name, shard)
        for member in world.running()
        for shard in member.exchange.store.backed
        if member.contact not in owners[shard].exchange.store.owned[shard].targets()
    ]


@played_by(simulate, nodes=3, shards=8, owners=0, settle_s=6.0)
async def test_a_former_backup_asks_and_forgets(world: World) -> None:
    """Its owner chooses a nearer one, and tells it nothing: it asks, and drops its copy."""
    for number in range(3, 9):
        await world.join(f"n{number}")
    await world.until(lambda: bool(stale(world)), within_s=BOUND_S, what="a copy that nobody adds to")
    await world.until(lambda: not stale(world), within_s=2 * BOUND_S, what="no such copy, and no more moves")
    await world.until(world.logged, within_s=BOUND_S, what="everything in its place")


@played_by(simulate)
async def test_a_lesson_that_its_owner_gave_up_is_forgotten(world: World) -> None:
    """A learner's owner, whose term has risen since, chooses another backup. The learner asks, and stops waiting for a
    state that will never come."""
    owning = world.owner()
    store, me = owning.exchange.store, owning.contact
    learner = next(m for m in world.running() if m not in (owning, world.backup()))
    attempt = store.promise(0).number
    assert learner.exchange.store.begin_catch_up(0, store.owned[0].term, me, attempt)
    store.drop_backup(0, me)
    await world.until(lambda: store.owned[0].backup is not None, within_s=BOUND_S, what="a backup")
    assert (learner.name, 0) in stale(world)
    await world.until(lambda: not stale(world), within_s=BOUND_S, what="no learner without a sender")


@played_by(simulate, nodes=6)
async def test_the_pair_of_a_side_that_lost_keeps_no_copy_that_looks_like_a_backups(world: World) -> None:
    """Owner and backup together on the side whose claim loses: both copies are offered to the winner, then they go."""
    names = [world.owner().name, world.backup().name]
    others = [member.name for member in world.running() if member.name not in names]
    world.part(dict.fromkeys(names, 0) | dict.fromkeys(others, 1))
    await asyncio.sleep(BOUND_S + 2.0)
    await asyncio.gather(world.members[names[0]].push(3), world.members[others[0]].push(20))
    world.heal()
    await world.until(lambda: world.logged() and not stale(world), within_s=2 * BOUND_S, what="no stale copy")

    assert world.value() == [23.0, 23.0]


@played_by(simulate)
async def test_links_that_lose_and_double_requests_lose_and_double_no_delta(world: World) -> None:
    """A tenth of all requests is lost, as many arrive twice, up to three seconds late."""
    world.links = Links(loss=0.1, duplicate=0.1, slow=0.05)
    pusher = world.bystander()
    for step in range(1, 21):
        await pusher.exchange.push(step, step - 1, 1.0, step * ONES)
    await world.until(lambda: not pusher.exchange.outbox.steps, within_s=60, what="all are in")
    world.links = Links()
    await asyncio.sleep(5.0)

    assert world.value() == [210.0, 210.0]
