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
from tests.harness.swarms.exchange_story import (
    BOUND_S,
    ONES,
    ask,
    backup,
    bystander,
    events,
    exchange_of,
    join,
    logged,
    owned,
    owner,
    paired,
    push,
    simulate,
    striking,
    until,
    value,
)
from tests.harness.swarms.exchange_swarm import GENESIS, Links, Member, World


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
        assert member.overlay is not None
        member.overlay.activity = Activity.JOINING
    await asyncio.sleep(5.0)
    assert not [name for *_, name in seen if name == "learn"]
    assert owned(world).backup is None
    if change == "ready":
        for member in world.running():
            assert member.overlay is not None
            member.overlay.activity = Activity.READY
            world.spread(member)
    else:
        await push(world.members["n0"], 1)
    await until(world, lambda: logged(world), within_s=BOUND_S, what="a backup for each shard")


@played_by(simulate, nodes=3, shards=1, replicas=0)
async def test_without_replicas_nobody_is_taught_and_what_moves_is_no_backup_afterwards(world: World) -> None:
    """`replicas = 0`: a shard moves all the same, by way of a learner."""
    await push(world.running()[-1], 1)
    assert all(not exchange_of(one).store.backed for one in world.running())
    former = owner(world)
    better = next(one for one in world.running() if one is not former)
    prefer(world, better)
    await until(world, lambda: owner(world) is better, within_s=2 * BOUND_S, what="the shard has moved")
    await asyncio.sleep(1.0)
    assert all(not exchange_of(one).store.backed for one in world.running())
    assert value(world) == [1.0]


@played_by(simulate, nodes=4, shards=1, tenure_s=10.0)
async def test_a_shard_moves_to_a_better_node_after_its_tenure_and_its_backup_to_the_second_best(world: World) -> None:
    """A copy is sent first, then the shard is handed over, and its former owner backs it up. Meanwhile deltas are added
    as ever, and each is at owner and backup."""
    former, better = owner(world), bystander(world)
    await asyncio.sleep(8.0)
    seen = requests_seen(world)
    prefer(world, better, former)
    began_s = world.clock.monotonic()
    pushing, step = bystander(world), 0
    while owner(world) is not better:
        step += 1
        await push(pushing, step, 1.0)
        await asyncio.sleep(0.2)
        assert world.clock.monotonic() - began_s < BOUND_S
    assert list(dict.fromkeys(name for *_, name in seen if name in ("learn", "state", "hand_over"))) == [
        "learn",
        "state",
        "hand_over",
    ]
    assert backup(world) is former
    await push(pushing, step + 1, 1.0)
    assert value(world) == [step + 1.0]
    assert paired(world)

    since_s = world.clock.monotonic()
    prefer(world, former, better)
    await until(world, lambda: owner(world) is former, within_s=30.0, what="the shard moves back")
    assert world.clock.monotonic() - since_s >= 8.0
    (first, *_) = events(world, "shards_handed_over")
    assert first.fields["count"] == 1


@pytest.mark.parametrize("is_initial", [True, False])
@played_by(simulate, nodes=4, shards=1, values=64, codec="int8", settle_s=6.0)
async def test_a_learner_that_made_the_initial_values_itself_is_sent_none(world: World, *, is_initial: bool) -> None:
    """Nodes that begin alike need no copy of a shard to which nothing was added; after a delta it is sent whole."""
    former, better = owner(world), bystander(world)
    if not is_initial:
        await exchange_of(former).push(1, 0, 1.0, np.random.default_rng(1).normal(size=64).astype(np.float32))
    sizes, carry = list[int](), world.carry

    def noted(source: Any, to: Any, name: str, payload: bytes, buffers: list[bytes], answer: Any) -> None:
        if name == "state":
            sizes.append(sum(map(len, buffers)))
        carry(source, to, name, payload, buffers, answer)

    world.carry = noted  # type: ignore[method-assign]
    prefer(world, better, former)
    await until(world, lambda: owner(world) is better, within_s=2 * BOUND_S, what="the shard has moved")
    assert (sizes[0] >= 4 * 64) is not is_initial
    await until(world, lambda: logged(world) and paired(world), within_s=BOUND_S, what="a pair")


@played_by(simulate, nodes=1, shards=4, settle_s=0.1)
async def test_states_are_sent_in_batches_of_what_the_line_carries(world: World) -> None:
    """Of a node with a slow line one state goes at a time, so that no delta waits behind all of them."""
    founder = world.members["n0"]
    assert founder.overlay is not None
    founder.overlay.line.upload = SimpleNamespace(bytes_per_s=1.0)  # type: ignore[assignment]
    states: list[int] = []

    def observe(sender: str, _receiver: str, name: str, payload: bytes) -> None:
        if (sender, name) == ("n0", "state"):
            states.append(len(decode(payload.removeprefix(GENESIS), ShardList).shards))

    world.observers.append(observe)
    await join(world, "n1")
    await until(world, lambda: logged(world), within_s=6 * BOUND_S, what="a backup for each shard")
    assert states == [1] * len(states)
    assert len(states) >= 4


@played_by(simulate, nodes=1, shards=40, values=40, settle_s=0.1)
async def test_others_run_while_the_candidates_of_all_shards_are_ranked(world: World) -> None:
    """After a change of membership that takes a few tenths of a millisecond for each shard."""
    with counted_turns() as turns:
        await exchange_of(owner(world)).rebalancer.tick()
    assert turns.count >= 4


@pytest.mark.parametrize("name", ["learn", "state", "hand_over"])
@pytest.mark.parametrize("is_lost", [False, True])
@played_by(simulate, nodes=5, shards=1)
async def test_a_move_that_fails_is_tried_again_and_no_delta_waits_for_ever(
    world: World, *, name: str, is_lost: bool
) -> None:
    """The request is rejected, or the answer is lost. Nobody stays a learner without a sender, and in the end there is
    one owner with everything."""
    former, better = owner(world), bystander(world)
    await asyncio.sleep(4.0)
    pushing, sent = next(one for one in world.running() if one not in (former, better, backup(world))), 0
    prefer(world, better, former)
    with striking(world.unanswered if is_lost else world.rejected, name):
        for step in range(1, 4):
            report = await exchange_of(pushing).push(step, step - 1, 1.0, ONES.copy())
            sent += not report.returned
            await asyncio.sleep(1.0)
    assert await exchange_of(pushing).flush(30.0) == 0
    await until(world, lambda: owner(world) is better and logged(world), within_s=40.0, what="the shard has moved")
    assert value(world) == [float(sent)]
    await until(world, lambda: paired(world), within_s=BOUND_S, what="a backup with the same bits")
    if not is_lost:
        assert events(world, "shard_move_failed")


@played_by(simulate, nodes=1, shards=1)
async def test_a_copy_goes_on_while_its_receiver_misses_forwards(world: World) -> None:
    """Over a full line: the deltas wait for the only node that has them beside the owner, and its copy is not sent
    again."""
    alone, carry = owner(world), world.carry
    await exchange_of(alone).push(1, 0, 1.0, ONES.copy())

    def slow(source: Any, to: Any, name: str, *rest: Any) -> None:
        asyncio.get_running_loop().call_later(0.8 if name == "state" else 0.0, carry, source, to, name, *rest)

    world.carry = slow  # type: ignore[method-assign]
    seen = requests_seen(world)
    await join(world, "n1")
    await until(world, lambda: owned(world).learner is not None, within_s=20.0, what="a learner")
    with striking(world.rejected, "forward"):
        pushed = asyncio.create_task(exchange_of(alone).push(2, 1, 1.0, ONES.copy()))
        await until(world, lambda: owned(world).learner is None, within_s=BOUND_S, what="the end of the copy")
    assert (await pushed).outstanding == 0
    assert value(world) == [2.0]
    await until(world, lambda: logged(world) and paired(world), within_s=BOUND_S, what="a backup")
    assert [name for _, _, name in seen].count("state") == 1


@played_by(simulate, nodes=4, shards=1)
async def test_a_backup_that_lacks_something_is_not_handed_the_shard(world: World) -> None:
    """It refuses: the owner keeps the shard under a new term, and finds another backup."""
    former, copy = owner(world), backup(world)
    await asyncio.sleep(4.0)
    await push(former, 1)
    del exchange_of(copy).store.backed[0]
    term = owned(world).term
    prefer(world, copy)
    await until(world, lambda: owned(world).term > term, within_s=BOUND_S, what="a new term")
    await until(world, lambda: owner(world) is copy and logged(world), within_s=30.0, what="the shard has moved")
    assert value(world) == [1.0]
    assert paired(world)


@played_by(simulate, nodes=4, shards=1)
async def test_a_hand_over_shows_what_the_former_owner_lacks(world: World) -> None:
    """The backup has added a delta whose acknowledgement was lost: it owns the shard, and the former owner, which has
    fewer deltas, is no backup until it has caught up."""
    former, copy = owner(world), backup(world)
    await asyncio.sleep(4.0)
    with striking(world.unanswered, "forward"):
        await exchange_of(bystander(world)).push(1, 0, 1.0, ONES.copy())
    # As if the owner's next attempts were lost as well.
    await exchange_of(bystander(world)).outbox.stop()
    prefer(world, copy, former)
    await until(world, lambda: owner(world) is copy and logged(world), within_s=30.0, what="the shard has moved")
    assert value(world) == [1.0]
    await until(world, lambda: paired(world), within_s=BOUND_S, what="a backup with the same bits")


@played_by(simulate, nodes=4, shards=1)
async def test_nothing_makes_a_node_owner_or_learner_against_a_higher_term_or_without_its_owner(world: World) -> None:
    """Requests of a node that owns nothing, of one whose term is too low, and for shards that there are not."""
    owning, copy, other = owner(world), backup(world), bystander(world)
    state = exchange_of(copy).store.backed[0].state
    assert state is not None
    term = owned(world).term
    claimed = OwnerInfo.of(0, Term(term.number + 1, owning.contact.node_id), copy.contact)
    answer = await ask(other, copy, "hand_over", HandOver([claimed], [state.known_count], [[]]), TransferResult)
    assert answer.taken == []
    low = Learn([OwnerInfo.of(0, Term(0, other.contact.node_id), other.contact)], [1])
    answer = await ask(other, copy, "learn", low, TransferResult)
    assert (answer.taken, [info.owner for info in answer.others]) == ([], [owning.contact.node_id])
    outside = Learn([OwnerInfo.of(99, Term(1, other.contact.node_id), other.contact)], [2])
    assert (await ask(other, copy, "learn", outside, TransferResult)).taken == []
    await exchange_of(copy).close(0.1)
    higher = Learn([OwnerInfo.of(0, term, owning.contact)], [term.number + 5])
    assert (await ask(owning, copy, "learn", higher, TransferResult)).taken == []


@played_by(simulate, nodes=5, shards=1, tenure_s=30.0)
async def test_who_cannot_be_dialled_any_more_gives_its_shards_away_at_once_and_backs_none_up(world: World) -> None:
    """It keeps them for no minimum time. A backup that nobody can dial is replaced as well."""
    hidden = owner(world)
    world.hide(hidden.name)
    await until(world, lambda: owner(world) is not hidden, within_s=BOUND_S, what="another owner")
    await until(world, lambda: logged(world) and backup(world) is not hidden, within_s=BOUND_S, what="a backup")
    copy = backup(world)
    world.hide(copy.name)
    await until(world, lambda: logged(world) and backup(world) is not copy, within_s=40.0, what="another backup")
    await push(bystander(world), 1)


@played_by(simulate, nodes=4, shards=1)
async def test_an_owner_that_sends_nonsense_gets_no_backup(world: World) -> None:
    """It is ignored for a minute: its backup takes over, and no node catches up for it."""
    bad, copy = owner(world), backup(world)
    term = owned(world).term
    for _ in range(NONSENSE):
        exchange_of(copy).view.score.nonsense(bad.contact.node_id, "value")
        await asyncio.sleep(1.0)
    learn = Learn([OwnerInfo.of(0, Term(term.number + 3, bad.contact.node_id), bad.contact)], [term.number + 4])
    assert (await ask(bad, copy, "learn", learn, TransferResult)).taken == []


# -- deaths and leaves ------------------------------------------------------------------------------------------------


@played_by(simulate, nodes=5, shards=1)
async def test_a_backup_takes_over_at_once_and_tells_the_others(world: World) -> None:
    """Though one of those that it asks says nothing. Nobody has to search for the new owner."""
    dead, copy, other = owner(world), backup(world), bystander(world)
    await push(other, 1)
    term = owned(world).term
    world.kill(dead.name)
    with striking(world.unanswered, "query_replicas", to=other):
        await until(world, lambda: owner_is(world, copy), within_s=BOUND_S, what="the backup owns the shard")
        assert owned(world).term > term
        await asyncio.sleep(1.0)
    known = exchange_of(other).store.redirect(0)
    assert known is not None
    assert known.owner == copy.contact.node_id
    (record,) = events(world, "shards_taken_over")
    assert (record.fields["count"], record.fields["from_replica"]) == (1, 0)
    await push(other, 2)
    assert value(world) == [3.0]


def owner_is(world: World, member: Member) -> bool:
    return 0 in exchange_of(member).store.owned


@played_by(simulate, nodes=5, shards=1)
async def test_of_several_replicas_the_newest_goes_on_after_a_moment_for_a_backup_to_appear(world: World) -> None:
    """Owner and backup die. What the new owner lacks of it is fetched. The shard begins an era: a delta that its value
    may have is refused, a later one is added."""
    pair = [owner(world), backup(world)]
    others = [one for one in world.running() if one not in pair]
    await push(others[0], 1)
    await asyncio.gather(*(exchange_of(one).pull(1) for one in others))
    await push(others[0], 2)
    newest = others[-1]
    assert (await exchange_of(newest).pull(2)).missing == []
    for one in others:
        exchange_of(one).begin_at(2)
    for member in pair:
        world.kill(member.name)
    # It is not the first candidate, and asks that one.
    pushing = asyncio.ensure_future(exchange_of(others[1]).push(3, 2, 1.0, 10 * ONES))
    taken = await until(
        world, lambda: any(owner_is(world, one) for one in others), within_s=2 * BOUND_S, what="an owner"
    )
    assert taken >= REPLICA_GRACE_S
    assert owned(world).state.era_step >= 1
    await pushing
    assert await exchange_of(others[1]).flush(BOUND_S) == 0
    assert owner(world) is others[0]
    assert value(world) == [13.0]
    report = await exchange_of(others[0]).push(1, 0, 1.0, ONES.copy())
    assert report.refused == {"before_era": 1}
    assert events(world, "shards_taken_over")[-1].fields["from_replica"] == 1


def test_a_node_alone_leaves_at_once_and_one_of_several_hands_everything_over() -> None:
    """Also what it backs up is kept by others then. It takes no more shards, and no replica of its own."""

    async def scenario(world: World) -> None:
        leaving = owner(world)
        await push(bystander(world), 1)
        assert await exchange_of(leaving).leave(BOUND_S) == (0, 0)
        store = exchange_of(leaving).store
        assert store.owned == {}
        world.kill(leaving.name, left=True)
        await until(world, lambda: logged(world), within_s=BOUND_S, what="pairs without it")
        assert value(world) == [1.0] * 4

    async def alone(world: World) -> None:
        began_s = world.clock.monotonic()
        assert (await exchange_of(owner(world)).leave(BOUND_S))[1] == 4
        assert world.clock.monotonic() == began_s

    simulate(scenario, nodes=4, shards=4)
    simulate(alone, nodes=1, shards=4)


@pytest.mark.parametrize("why", ["leaves", "has just started"])
@played_by(simulate, nodes=4, shards=1)
async def test_some_nodes_take_no_shard_over_from_a_replica(world: World, *, why: str) -> None:
    """One that leaves would go with the shard, under a term above that of a whole state on another disk. One that has
    just started does not know the others yet. They are asked all the same."""
    asked, asking = world.running()[2:]
    await push(asking, 1)
    for member in (asked, asking):
        assert (await exchange_of(member).pull(1)).missing == []
        exchange_of(member).begin_at(1)
    if why == "leaves":
        leaving = asyncio.ensure_future(exchange_of(asked).leave(60.0))
    else:
        exchange_of(asked).rebalancer.delay_takeover(600.0)
    for member in world.running()[:2]:
        world.kill(member.name)
    seen = requests_seen(world)
    pushing = asyncio.ensure_future(exchange_of(asking).push(2, 1, 1.0, ONES.copy()))
    await asyncio.sleep(15.0)
    await pushing
    assert (asking.name, asked.name, "request_takeover") in seen
    assert not events(world, "shards_taken_over")
    if why == "leaves":
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    else:
        exchange_of(asked).rebalancer.allow_takeover()
        await until(world, lambda: owner_is(world, asked), within_s=BOUND_S, what="it owns the shard")


@played_by(simulate, nodes=4, shards=1, settle_s=4.0)
async def test_a_delta_in_flight_stops_a_hand_over(world: World) -> None:
    """It is given up without a request, and tried again when the delta is in."""
    former, copy = owner(world), backup(world)
    prefer(world, copy, former)
    with striking(world.unanswered, "forward"):
        pushing = asyncio.ensure_future(exchange_of(bystander(world)).push(1, 0, 1.0, ONES.copy()))
        await asyncio.sleep(0.2)
        seen = requests_seen(world)
        await exchange_of(former).rebalancer.tick()
        await asyncio.sleep(2.0)
        assert "hand_over" not in [name for *_, name in seen]
    await pushing
    assert await exchange_of(bystander(world)).flush(BOUND_S) == 0
    await until(world, lambda: owner(world) is copy and paired(world), within_s=30.0, what="the shard has moved")
    assert value(world) == [1.0]


@pytest.mark.promise(6)
@pytest.mark.parametrize("from_disk", [True, False])
def test_what_a_restart_has_lost_is_counted_by_the_steps_that_the_disks_show(from_disk: bool) -> None:
    """Three nodes start with steps 9, 8 and 7; the state from disk has steps 7, 8 and 5 of them: what is lost is
    2 + 0 + 2. Of a replica only its step is known. The terms are of a new generation, above every copy of before."""

    async def main(world: World) -> None:
        world.kill("n0")
        names, steps = ("a", "b", "c"), {"a": 9, "b": 8, "c": 7}
        members = [await started(world, name) for name in names]
        store = exchange_of(members[0]).store
        states = {}
        if from_disk:
            state = store.fresh_state(0, 2 * ONES)
            rows = zip(members, (7, 8, 5), strict=True)
            state.applied = Applied.of_rows([(one.contact.node_id, 1, [(1, last)]) for one, last in rows])
            state.version = 20
            states = {0: StoredState(Term(3, b"x" * 20), state, clean=False)}
        versions = [] if from_disk else [(Term(3, b"x" * 20), 6)]
        for member in members:
            exchange_of(member).offer(
                steps[member.name], versions if member.name == "a" else [], states if member.name == "a" else {}
            )
        began_s = world.clock.monotonic()
        await exchange_of(members[0]).resume(3, 2.0)
        assert 2.0 <= world.clock.monotonic() - began_s < 5.0  # a third one was expected
        assert exchange_of(members[0]).counters.lost_in_restarts == (4 if from_disk else 0)
        (resumed,) = events(world, "swarm_resumed")
        assert (resumed.fields["nodes"], resumed.fields["expected"], resumed.level) == (3, 4, "warning")
        assert resumed.fields["deltas_lost_by_shard"] == ({0: 4} if from_disk else {})
        owned_now = exchange_of(members[0]).store.owned[0]
        assert owned_now.term == Term(GENERATION, members[0].contact.node_id)
        # No node that starts again is refused a delta.
        assert owned_now.state.era_step == (1 if from_disk else 7)

    async def started(world: World, name: str) -> Member:
        member = await world.start(name)
        assert member.overlay is not None
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
        found = events(world, "exchange_service_failed")
        assert [one.fields["error"] for one in found] == ["ValueError('a fault')"] * 3
        assert logged(world)
        exchange: Exchange = exchange_of(world.running()[0])
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
    exchange = exchange_of(await world.start("late", founder=True))
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
    pushing, step, sent = bystander(world), 0, [0.0, 0.0]
    for _ in range(3):
        prefer(world, bystander(world), pushing)
        for _ in range(3):
            step += 1
            report = await exchange_of(pushing).push(step, step - 1, 1.0, ONES.copy())
            sent = [sum_of + (shard not in report.returned) for shard, sum_of in enumerate(sent)]
            await asyncio.sleep(1.0)
    world.links = Links()
    assert await exchange_of(pushing).flush(30.0) == 0
    await until(world, lambda: logged(world) and paired(world), within_s=40.0, what="pairs with the same bits")
    assert value(world) == sent
