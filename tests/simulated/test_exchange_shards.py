"""Who owns a shard and who backs it up: joins, moves, hand-overs, deaths, leaves, and starts of all."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.peers import Activity
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import decode
from p2pnode.training.exchange.ownership_messages import HandOver, Learn, ShardList, TransferResult
from p2pnode.training.exchange.peer_score import NONSENSE
from p2pnode.training.exchange.recovery.failover import REPLICA_GRACE_S
from p2pnode.training.exchange.recovery.rebalancing import Rebalancer
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.terms import GENERATION, OwnerInfo, Term
from p2pnode.training.shards.applied import Applied
from tests.harness.environment.loop_turns import counted_turns
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exchange_story import BOUND_S, ONES, ask, simulate, striking
from tests.harness.swarms.exchange_swarm import GENESIS, World
from tests.harness.swarms.light_network import Links, Member


def requests_seen(world: World) -> list[tuple[str, str, str]]:
    """Sender, receiver and name of the requests that are sent from now on."""
    seen: list[tuple[str, str, str]] = []
    world.observers.append(lambda sender, receiver, name, _payload: seen.append((sender, receiver, name)))
    return seen


def prefer(world: World, *members: Member) -> None:
    """These are the best candidates of all shards from now on, the first one before the second."""
    world.prefer(range(world.manifest.shards), *(member.name for member in members))


# -- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["ready", "delta"])
@played_by(simulate, nodes=1, settle_s=0.1, tenure_s=60.0)
async def test_copies_wait_until_the_joiners_have_the_vector_or_a_delta_comes(world: World, *, change: str) -> None:
    """They share the line of the founder, and nothing is lost without them before the first delta. That one is
    acknowledged when there is a backup."""
    seen = requests_seen(world)
    for name in ("n1", "n2"):
        member = await world.start(name)
        member.overlay.activity = Activity.JOINING
    await asyncio.sleep(5.0)
    assert not [name for *_, name in seen if name == "learn"]
    assert world.owned().backup is None
    if change == "ready":
        for member in world.running():
            member.overlay.activity = Activity.READY
            world.spread(member)
    else:
        await world.members["n0"].push(1)
    await world.until(world.logged, within_s=BOUND_S, what="a backup for each shard")


@played_by(simulate, nodes=3, shards=1, replicas=0)
async def test_without_replicas_nobody_is_taught_and_what_moves_is_no_backup_afterwards(world: World) -> None:
    """`replicas = 0`: a shard moves all the same, by way of a learner."""
    await world.running()[-1].push(1)
    assert all(not one.exchange.store.backed for one in world.running())
    former = world.owner()
    better = next(one for one in world.running() if one is not former)
    prefer(world, better)
    await world.until(lambda: world.owner() is better, within_s=2 * BOUND_S, what="the shard has moved")
    await asyncio.sleep(1.0)
    assert all(not one.exchange.store.backed for one in world.running())
    assert world.value() == [1.0]


@played_by(simulate, nodes=4, shards=1, tenure_s=10.0)
async def test_a_shard_moves_to_a_better_node_after_its_tenure_and_its_backup_to_the_second_best(world: World) -> None:
    """A copy is sent first, then the shard is handed over, and its former owner backs it up. Meanwhile deltas are added
    as ever, and each is at owner and backup."""
    former, better = world.owner(), world.bystander()
    await asyncio.sleep(8.0)
    seen = requests_seen(world)
    prefer(world, better, former)
    began_s = world.clock.monotonic()
    pushing, step = world.bystander(), 0
    while world.owner() is not better:
        step += 1
        await pushing.push(step, 1.0)
        await asyncio.sleep(0.2)
        assert world.clock.monotonic() - began_s < BOUND_S
    assert list(dict.fromkeys(name for *_, name in seen if name in ("learn", "state", "hand_over"))) == [
        "learn",
        "state",
        "hand_over",
    ]
    assert world.backup() is former
    await pushing.push(step + 1, 1.0)
    assert world.value() == [step + 1.0]
    assert world.paired()

    since_s = world.clock.monotonic()
    prefer(world, former, better)
    await world.until(lambda: world.owner() is former, within_s=30.0, what="the shard moves back")
    assert world.clock.monotonic() - since_s >= 8.0
    (first, *_) = world.of("shards_handed_over")
    assert first.fields["count"] == 1


@pytest.mark.parametrize("is_initial", [True, False])
@played_by(simulate, nodes=4, shards=1, values=64, codec="int8", settle_s=6.0)
async def test_a_learner_that_made_the_initial_values_itself_is_sent_none(world: World, *, is_initial: bool) -> None:
    """Nodes that begin alike need no copy of a shard to which nothing was added; after a delta it is sent whole."""
    former, better = world.owner(), world.bystander()
    if not is_initial:
        await former.exchange.push(1, 0, 1.0, np.random.default_rng(1).normal(size=64).astype(np.float32))
    sizes, carry = list[int](), world.carry

    def noted(source: Any, to: Any, name: str, payload: bytes, buffers: list[bytes], answer: Any) -> None:
        if name == "state":
            sizes.append(sum(map(len, buffers)))
        carry(source, to, name, payload, buffers, answer)

    world.carry = noted
    prefer(world, better, former)
    await world.until(lambda: world.owner() is better, within_s=2 * BOUND_S, what="the shard has moved")
    assert (sizes[0] >= 4 * 64) is not is_initial
    await world.until(lambda: world.logged() and world.paired(), within_s=BOUND_S, what="a pair")


@played_by(simulate, nodes=1, shards=4, settle_s=0.1)
async def test_states_are_sent_in_batches_of_what_the_line_carries(world: World) -> None:
    """Of a node with a slow line one state goes at a time, so that no delta waits behind all of them."""
    founder = world.members["n0"]
    founder.overlay.line.upload = SimpleNamespace(bytes_per_s=1.0)
    states: list[int] = []

    def observe(sender: str, _receiver: str, name: str, payload: bytes) -> None:
        if (sender, name) == ("n0", "state"):
            states.append(len(decode(payload.removeprefix(GENESIS), ShardList).shards))

    world.observers.append(observe)
    await world.join("n1")
    await world.until(world.logged, within_s=6 * BOUND_S, what="a backup for each shard")
    assert states == [1] * len(states)
    assert len(states) >= 4


@played_by(simulate, nodes=1, shards=40, values=40, settle_s=0.1)
async def test_others_run_while_the_candidates_of_all_shards_are_ranked(world: World) -> None:
    """After a change of membership that takes a few tenths of a millisecond for each shard."""
    with counted_turns() as turns:
        await world.owner().exchange.rebalancer.tick()
    assert turns.count >= 4


@pytest.mark.parametrize("name", ["learn", "state", "hand_over"])
@pytest.mark.parametrize("is_lost", [False, True])
@played_by(simulate, nodes=5, shards=1)
async def test_a_move_that_fails_is_tried_again_and_no_delta_waits_for_ever(
    world: World, *, name: str, is_lost: bool
) -> None:
    """The request is rejected, or the answer is lost. Nobody stays a learner without a sender, and in the end there is
    one owner with everything."""
    former, better = world.owner(), world.bystander()
    await asyncio.sleep(4.0)
    pushing, sent = next(one for one in world.running() if one not in (former, better, world.backup())), 0
    prefer(world, better, former)
    with striking(world.unanswered if is_lost else world.rejected, name):
        for step in range(1, 4):
            report = await pushing.exchange.push(step, step - 1, 1.0, ONES.copy())
            sent += not report.returned
            await asyncio.sleep(1.0)
    assert await pushing.exchange.flush(30.0) == 0
    await world.until(lambda: world.owner() is better and world.logged(), within_s=40.0, what="the shard has moved")
    assert world.value() == [float(sent)]
    await world.until(world.paired, within_s=BOUND_S, what="a backup with the same bits")
    if not is_lost:
        assert world.of("shard_move_failed")


@played_by(simulate, nodes=1, shards=1)
async def test_a_copy_goes_on_while_its_receiver_misses_forwards(world: World) -> None:
    """Over a full line: the deltas wait for the only node that has them beside the owner, and its copy is not sent
    again."""
    alone, carry = world.owner(), world.carry
    await alone.exchange.push(1, 0, 1.0, ONES.copy())

    def slow(source: Any, to: Any, name: str, *rest: Any) -> None:
        asyncio.get_running_loop().call_later(0.8 if name == "state" else 0.0, carry, source, to, name, *rest)

    world.carry = slow
    seen = requests_seen(world)
    await world.join("n1")
    await world.until(lambda: world.owned().learner is not None, within_s=20.0, what="a learner")
    with striking(world.rejected, "forward"):
        pushed = asyncio.create_task(alone.exchange.push(2, 1, 1.0, ONES.copy()))
        await world.until(lambda: world.owned().learner is None, within_s=BOUND_S, what="the end of the copy")
    assert (await pushed).outstanding == 0
    assert world.value() == [2.0]
    await world.until(lambda: world.logged() and world.paired(), within_s=BOUND_S, what="a backup")
    assert [name for _, _, name in seen].count("state") == 1


@played_by(simulate, nodes=4, shards=1)
async def test_a_backup_that_lacks_something_is_not_handed_the_shard(world: World) -> None:
    """It refuses: the owner keeps the shard under a new term, and finds another backup."""
    former, copy = world.owner(), world.backup()
    await asyncio.sleep(4.0)
    await former.push(1)
    del copy.exchange.store.backed[0]
    term = world.owned().term
    prefer(world, copy)
    await world.until(lambda: world.owned().term > term, within_s=BOUND_S, what="a new term")
    await world.until(lambda: world.owner() is copy and world.logged(), within_s=30.0, what="the shard has moved")
    assert world.value() == [1.0]
    assert world.paired()


@played_by(simulate, nodes=4, shards=1)
async def test_a_hand_over_shows_what_the_former_owner_lacks(world: World) -> None:
    """The backup has added a delta whose acknowledgement was lost: it owns the shard, and the former owner, which has
    fewer deltas, is no backup until it has caught up."""
    former, copy = world.owner(), world.backup()
    await asyncio.sleep(4.0)
    with striking(world.unanswered, "forward"):
        await world.bystander().exchange.push(1, 0, 1.0, ONES.copy())
    # As if the owner's next attempts were lost as well.
    await world.bystander().exchange.outbox.stop()
    prefer(world, copy, former)
    await world.until(lambda: world.owner() is copy and world.logged(), within_s=30.0, what="the shard has moved")
    assert world.value() == [1.0]
    await world.until(world.paired, within_s=BOUND_S, what="a backup with the same bits")


@played_by(simulate, nodes=4, shards=1)
async def test_nothing_makes_a_node_owner_or_learner_against_a_higher_term_or_without_its_owner(world: World) -> None:
    """Requests of a node that owns nothing, of one whose term is too low, and for shards that there are not."""
    owning, copy, other = world.owner(), world.backup(), world.bystander()
    state = copy.exchange.store.backed[0].state
    assert state is not None
    term = world.owned().term
    claimed = OwnerInfo.of(0, Term(term.number + 1, owning.contact.node_id), copy.contact)
    answer = await ask(other, copy, "hand_over", HandOver([claimed], [state.known_count], [[]]), TransferResult)
    assert answer.taken == []
    low = Learn([OwnerInfo.of(0, Term(0, other.contact.node_id), other.contact)], [1])
    answer = await ask(other, copy, "learn", low, TransferResult)
    assert (answer.taken, [info.owner for info in answer.others]) == ([], [owning.contact.node_id])
    outside = Learn([OwnerInfo.of(99, Term(1, other.contact.node_id), other.contact)], [2])
    assert (await ask(other, copy, "learn", outside, TransferResult)).taken == []
    await copy.exchange.close(0.1)
    higher = Learn([OwnerInfo.of(0, term, owning.contact)], [term.number + 5])
    assert (await ask(owning, copy, "learn", higher, TransferResult)).taken == []


@played_by(simulate, nodes=5, shards=1, tenure_s=30.0)
async def test_who_cannot_be_dialled_any_more_gives_its_shards_away_at_once_and_backs_none_up(world: World) -> None:
    """It keeps them for no minimum time. A backup that nobody can dial is replaced as well."""
    hidden = world.owner()
    world.hide(hidden.name)
    await world.until(lambda: world.owner() is not hidden, within_s=BOUND_S, what="another owner")
    await world.until(lambda: world.logged() and world.backup() is not hidden, within_s=BOUND_S, what="a backup")
    copy = world.backup()
    world.hide(copy.name)
    await world.until(lambda: world.logged() and world.backup() is not copy, within_s=40.0, what="another backup")
    await world.bystander().push(1)


@played_by(simulate, nodes=4, shards=1)
async def test_an_owner_that_sends_nonsense_gets_no_backup(world: World) -> None:
    """It is ignored for a minute: its backup takes over, and no node catches up for it."""
    bad, copy = world.owner(), world.backup()
    term = world.owned().term
    for _ in range(NONSENSE):
        copy.exchange.view.score.nonsense(bad.contact.node_id, "value")
        await asyncio.sleep(1.0)
    learn = Learn([OwnerInfo.of(0, Term(term.number + 3, bad.contact.node_id), bad.contact)], [term.number + 4])
    assert (await ask(bad, copy, "learn", learn, TransferResult)).taken == []


# -- deaths and leaves ------------------------------------------------------------------------------------------------


@played_by(simulate, nodes=5, shards=1)
async def test_a_backup_takes_over_at_once_and_tells_the_others(world: World) -> None:
    """Though one of those that it asks says nothing. Nobody has to search for the new owner."""
    dead, copy, other = world.owner(), world.backup(), world.bystander()
    await other.push(1)
    term = world.owned().term
    await world.kill(dead.name)
    with striking(world.unanswered, "query_replicas", to=other):
        await world.until(lambda: owner_is(world, copy), within_s=BOUND_S, what="the backup owns the shard")
        assert world.owned().term > term
        await asyncio.sleep(1.0)
    known = other.exchange.store.redirect(0)
    assert known is not None
    assert known.owner == copy.contact.node_id
    (record,) = world.of("shards_taken_over")
    assert (record.fields["count"], record.fields["from_replica"]) == (1, 0)
    await other.push(2)
    assert world.value() == [3.0]


def owner_is(world: World, member: Member) -> bool:
    return 0 in member.exchange.store.owned


@played_by(simulate, nodes=5, shards=1)
async def test_of_several_replicas_the_newest_goes_on_after_a_moment_for_a_backup_to_appear(world: World) -> None:
    """Owner and backup die. What the new owner lacks of it is fetched. The shard begins an era: a delta that its value
    may have is refused, a later one is added."""
    pair = [world.owner(), world.backup()]
    others = [one for one in world.running() if one not in pair]
    await others[0].push(1)
    await asyncio.gather(*(one.exchange.pull(1) for one in others))
    await others[0].push(2)
    newest = others[-1]
    assert (await newest.exchange.pull(2)).missing == []
    for one in others:
        one.exchange.begin_at(2)
    for member in pair:
        await world.kill(member.name)
    # It is not the first candidate, and asks that one.
    pushing = asyncio.ensure_future(others[1].exchange.push(3, 2, 1.0, 10 * ONES))
    taken = await world.until(
        lambda: any(owner_is(world, one) for one in others), within_s=2 * BOUND_S, what="an owner"
    )
    assert taken >= REPLICA_GRACE_S
    assert world.owned().state.era_step >= 1
    await pushing
    assert await others[1].exchange.flush(BOUND_S) == 0
    assert world.owner() is others[0]
    assert world.value() == [13.0]
    report = await others[0].exchange.push(1, 0, 1.0, ONES.copy())
    assert report.refused == {"before_era": 1}
    assert world.of("shards_taken_over")[-1].fields["from_replica"] == 1


def test_a_node_alone_leaves_at_once_and_one_of_several_hands_everything_over() -> None:
    """Also what it backs up is kept by others then. It takes no more shards, and no replica of its own."""

    async def scenario(world: World) -> None:
        leaving = world.owner()
        await world.bystander().push(1)
        assert await leaving.exchange.leave(BOUND_S) == (0, 0)
        store = leaving.exchange.store
        assert store.owned == {}
        await world.kill(leaving.name, left=True)
        await world.until(world.logged, within_s=BOUND_S, what="pairs without it")
        assert world.value() == [1.0] * 4

    async def alone(world: World) -> None:
        began_s = world.clock.monotonic()
        assert (await world.owner().exchange.leave(BOUND_S))[1] == 4
        assert world.clock.monotonic() == began_s

    simulate(scenario, nodes=4, shards=4)
    simulate(alone, nodes=1, shards=4)


@pytest.mark.parametrize("why", ["leaves", "has just started"])
@played_by(simulate, nodes=4, shards=1)
async def test_some_nodes_take_no_shard_over_from_a_replica(world: World, *, why: str) -> None:
    """One that leaves would go with the shard, under a term above that of a whole state on another disk. One that has
    just started does not know the others yet. They are asked all the same."""
    asked, asking = world.running()[2:]
    await asking.push(1)
    for member in (asked, asking):
        assert (await member.exchange.pull(1)).missing == []
        member.exchange.begin_at(1)
    if why == "leaves":
        leaving = asyncio.ensure_future(asked.exchange.leave(60.0))
    else:
        asked.exchange.rebalancer.delay_takeover(600.0)
    for member in world.running()[:2]:
        await world.kill(member.name)
    seen = requests_seen(world)
    pushing = asyncio.ensure_future(asking.exchange.push(2, 1, 1.0, ONES.copy()))
    await asyncio.sleep(15.0)
    await pushing
    assert (asking.name, asked.name, "request_takeover") in seen
    assert not world.of("shards_taken_over")
    if why == "leaves":
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    else:
        asked.exchange.rebalancer.allow_takeover()
        await world.until(lambda: owner_is(world, asked), within_s=BOUND_S, what="it owns the shard")


@played_by(simulate, nodes=4, shards=1, settle_s=4.0)
async def test_a_delta_in_flight_stops_a_hand_over(world: World) -> None:
    """It is given up without a request, and tried again when the delta is in."""
    former, copy = world.owner(), world.backup()
    prefer(world, copy, former)
    with striking(world.unanswered, "forward"):
        pushing = asyncio.ensure_future(world.bystander().exchange.push(1, 0, 1.0, ONES.copy()))
        await asyncio.sleep(0.2)
        seen = requests_seen(world)
        await former.exchange.rebalancer.tick()
        await asyncio.sleep(2.0)
        assert "hand_over" not in [name for *_, name in seen]
    await pushing
    assert await world.bystander().exchange.flush(BOUND_S) == 0
    await world.until(lambda: world.owner() is copy and world.paired(), within_s=30.0, what="the shard has moved")
    assert world.value() == [1.0]


@pytest.mark.promise(6)
@pytest.mark.parametrize("from_disk", [True, False])
def test_what_a_restart_has_lost_is_counted_by_the_steps_that_the_disks_show(from_disk: bool) -> None:
    """Three nodes start with steps 9, 8 and 7; the state from disk has steps 7, 8 and 5 of them: what is lost is
    2 + 0 + 2. Of a replica only its step is known. The terms are of a new generation, above every copy of before."""

    async def main(world: World) -> None:
        await world.kill("n0")
        names, steps = ("a", "b", "c"), {"a": 9, "b": 8, "c": 7}
        members = [await started(world, name) for name in names]
        store = members[0].exchange.store
        states = {}
        if from_disk:
            state = store.fresh_state(0, 2 * ONES)
            rows = zip(members, (7, 8, 5), strict=True)
            state.applied = Applied.of_rows([(one.contact.node_id, 1, [(1, last)]) for one, last in rows])
            state.version = 20
            states = {0: StoredState(Term(3, b"x" * 20), state, clean=False)}
        versions = [] if from_disk else [(Term(3, b"x" * 20), 6)]
        for member in members:
            member.exchange.offer(
                steps[member.name], versions if member.name == "a" else [], states if member.name == "a" else {}
            )
        began_s = world.clock.monotonic()
        await members[0].exchange.resume(3, 2.0)
        assert 2.0 <= world.clock.monotonic() - began_s < 5.0  # a third one was expected
        assert members[0].exchange.counters.lost_in_restarts == (4 if from_disk else 0)
        (resumed,) = world.of("swarm_resumed")
        assert (resumed.fields["nodes"], resumed.fields["expected"], resumed.level) == (3, 4, "warning")
        assert resumed.fields["deltas_lost_by_shard"] == ({0: 4} if from_disk else {})
        owned_now = members[0].exchange.store.owned[0]
        assert owned_now.term == Term(GENERATION, members[0].contact.node_id)
        # No node that starts again is refused a delta.
        assert owned_now.state.era_step == (1 if from_disk else 7)

    async def started(world: World, name: str) -> Member:
        member = await world.start(name)
        member.overlay.activity = Activity.JOINING
        world.spread(member)
        await asyncio.sleep(2.5)
        return member

    simulate(main, nodes=1, shards=1, settle_s=0.1)


# -- services ---------------------------------------------------------------------------------------------------------


def test_a_service_that_fails_is_reported_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes get their backups all the same; after the end of an exchange nothing of it runs."""
    tick, faults = Rebalancer.tick, [ValueError("a fault")] * 3

    async def failing(self: Rebalancer) -> None:
        if faults:
            raise faults.pop()
        await tick(self)

    monkeypatch.setattr(Rebalancer, "tick", failing)

    async def scenario(world: World) -> None:
        found = world.of("exchange_service_failed")
        assert [one.fields["error"] for one in found] == ["ValueError('a fault')"] * 3
        assert world.logged()
        exchange: Exchange = world.running()[0].exchange
        before = Counter(task.get_name() for task in asyncio.all_tasks())
        await exchange.stop()
        await exchange.stop()
        after = Counter(task.get_name() for task in asyncio.all_tasks())
        assert before - after >= Counter(["rebalancer", "fences"])

    simulate(scenario, nodes=3)


@pytest.mark.parametrize(("staleness", "limit"), [(None, None), (0, 10), (4, 16), (25, 100)])
@played_by(simulate, nodes=0, settle_s=0.0)
async def test_a_delta_is_late_by_four_times_the_staleness(
    world: World, *, staleness: int | None, limit: int | None
) -> None:
    """At least ten steps; without a staleness none is."""
    world.staleness = staleness
    exchange = (await world.start("late", founder=True)).exchange
    assert exchange.stale_limit == limit
    exchange.begin_at(500)
    exchange.view.invalidate()
    base = 500 - (limit or 400)
    assert (await exchange.push(501, base, 1.0, ONES.copy())).refused == {}
    report = await exchange.push(502, base - 1, 1.0, ONES.copy())
    assert report.refused == ({} if limit is None else {"late": 2})


@played_by(simulate, nodes=5)
async def test_an_absent_backup_and_a_slow_network_change_no_bit(world: World) -> None:
    """States take seconds, requests are lost: a learner that was sent its state twice has each delta once."""
    world.links = Links(loss=0.1, duplicate=0.1, state_s=3.0)
    pushing, step, sent = world.bystander(), 0, [0.0, 0.0]
    for _ in range(3):
        prefer(world, world.bystander(), pushing)
        for _ in range(3):
            step += 1
            report = await pushing.exchange.push(step, step - 1, 1.0, ONES.copy())
            sent = [sum_of + (shard not in report.returned) for shard, sum_of in enumerate(sent)]
            await asyncio.sleep(1.0)
    world.links = Links()
    assert await pushing.exchange.flush(30.0) == 0
    await world.until(lambda: world.logged() and world.paired(), within_s=40.0, what="pairs with the same bits")
    assert world.value() == sent
