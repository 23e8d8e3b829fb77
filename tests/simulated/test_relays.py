"""Deltas and values that are relayed: each delta is in the model once whatever happens to the relays, every node has
values that are not too old, and the requests are few."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.conservation import play
from tests.harness.runner.long_run import more
from tests.harness.swarms.exchange_swarm import Member, World
from tests.simulated.test_exchange_faults import (
    ONES,
    VALUES,
    backup,
    exchange_of,
    join,
    owner,
    push,
    simulate,
    until,
    value,
)
from training.encoding.codecs import Vector
from training.exchange.aggregation import delivery_checks, pull_sources
from training.exchange.aggregation.bundles import Carried
from training.exchange.aggregation.consignments import Note
from training.exchange.aggregation.handed_down import VALUE_BYTES, Answered, HandedDown
from training.exchange.aggregation.relays import AVOIDED_S, RESULTS_WITHIN_S, UNABLE_S
from training.exchange.client.relayed_pull import PullRelays
from training.exchange.messages import Push, PushResult, Wanted
from training.exchange.owner.published import Change, digest_of
from training.settings import ExchangeSettings
from training.simulation.relays import load

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("first", "histories", "nodes"), [(6002, 1, 8), (6100, 1, 24), *more((6000, 2, 8), (6003, 15, 8), (6019, 17, 8))]
)
def test_relayed_deltas_are_in_the_model_once(
    first: int, histories: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_conservation`, with deltas and changes that pass other nodes, which crash, pause and are cut off: after
    any faults each shard is the sum of its deltas, each once, with all acknowledged ones among them, all nodes have its
    values, and nobody waited longer for fresh ones than without relays. No relay is taken for one that keeps deltas,
    although most are checked, or sends what is not true."""
    monkeypatch.setattr(delivery_checks, "CHECKED", 1)
    monkeypatch.setattr(delivery_checks, "AGAIN_S", 6.0)
    print(f"seeds from {first}: python -m tests.harness.histories.conservation --relays --nodes {nodes} --seed N")
    tallies = [play(seed, nodes, relays=True) for seed in range(first, first + histories)]

    assert sum(tally.relayed for tally in tallies) >= 12 * histories
    assert sum(tally.handed_down for tally in tallies) >= 6 * histories
    assert sum(tally.acknowledged for tally in tallies) >= 50 * histories
    assert all(tally.longest_of_one_s <= tally.limit_s <= 25.0 for tally in tallies)


@pytest.mark.long
def test_relays_and_divisions_amid_faults() -> None:
    """Shards are divided while their deltas wait at relays."""
    tallies = [play(seed, 8, relays=True, divides=True) for seed in range(6200, 6203)]

    assert sum(tally.relayed for tally in tallies) >= 60
    assert sum(tally.divided for tally in tallies) >= 15


def requests_of(world: World) -> dict[str, int]:
    """Counts the requests from now on, by name."""
    counts: dict[str, int] = {}

    def count(_sender: str, _receiver: str, name: str, _payload: bytes) -> None:
        counts[name] = counts.get(name, 0) + 1

    world.observers.append(count)
    return counts


async def step_of_all(world: World, step: int) -> None:
    """Every node pushes a delta of this many, of all workers, and pulls."""

    async def one(member: Member) -> None:
        report = await exchange_of(member).push(step, step - 1, 1.0, np.full(96, step, np.float32))
        assert (report.outstanding, report.refused) == (0, {})
        assert member.overlay is not None
        exchange_of(member).begin_at(step)
        member.overlay.step, member.overlay.step_seconds = step, 10.0
        assert (await exchange_of(member).pull(step)).missing == []

    await asyncio.gather(*(one(member) for member in world.running()))
    for member in world.running():
        for other in world.running():
            if member is not other and member.overlay is not None and other.overlay is not None:
                member.overlay.met(other.overlay)


@pytest.mark.parametrize("above", [8, *more(0)])
def test_a_step_of_many_nodes_takes_few_requests(above: int) -> None:
    """Of 24 nodes with two shards each, every one pushes at once, and pulls. By way of others that takes a third of the
    requests, as many as the tables of next nodes say. Every shard has the sum."""
    found: dict[str, int] = {}

    async def main() -> None:
        settings = ExchangeSettings(
            codec="float32",
            pull_codec="int8",
            shards=48,
            weight="sum",
            outer_lr=1.0,
            outer_momentum=0.0,
            tenure_s=3.0,
            relay_above=above,
            relay_bits=3,
        )
        world = World(7, settings=settings, shards=48, values=96, synchronous=False)
        try:
            await world.start("n0", founder=True)
            for number in range(1, 24):
                await join(world, f"n{number}")
            await asyncio.sleep(20.0)
            await step_of_all(world, 1)
            counts = requests_of(world)
            await step_of_all(world, 2)
            found.update(counts)
            assert value(world) == [24.0 * (1 + 2)] * 48
            handed = sum(exchange_of(member).counters.handed_down for member in world.running())
            assert bool(handed) is bool(above)
        finally:
            world.stop()

    VirtualLoop().run(main(), limit_s=600)
    sent = sum(found.get(name, 0) for name in ("push", "relay", "forward", "forwards")) / 24
    pulled = sum(found.get(name, 0) for name in ("pull", "follow")) / 24
    print(f"requests per node and step: {sent:.1f} for deltas, {pulled:.1f} for values, of {found}")
    counted = load(24, 48, 3 if above else 0)
    assert pulled == pytest.approx(counted.for_values, abs=2.0)
    assert sum(found.get(name, 0) for name in ("push", "relay")) / 24 == pytest.approx(counted.for_deltas, abs=2.0)
    assert bool(found.get("relay")) is bool(found.get("follow")) is bool(above)
    assert sent <= 20 if above else sent >= 60
    assert pulled <= 14 if above else pulled >= 19


def relay_of(world: World, origin: Member) -> Member:
    """The node to which the origin hands its deltas for the owner of shard 0."""
    routes = exchange_of(origin).services.relays.routes()
    hop = None if routes is None else routes.hop(owner(world).contact.node_id)
    return next(one for one in world.running() if one.contact.node_id == hop)


def with_a_relay(world: World) -> Member:
    """A node whose deltas for shard 0 pass another one, which neither owns nor backs the shard."""
    for origin in world.running():
        routes = exchange_of(origin).services.relays.routes()
        hop = None if routes is None else routes.hop(owner(world).contact.node_id)
        if hop not in (None, backup(world).contact.node_id) and origin is not backup(world):
            return origin
    raise AssertionError("nobody has a relay")


@pytest.mark.parametrize("fault", ["killed", "hangs", "never ends", "only says that it is at work", "delivers nothing"])
def test_a_relay_that_fails_costs_one_timeout(fault: str) -> None:
    """It is killed or hangs, delivers and does not end its answer, has no result and says all the time that it is at
    work, or answers that it could not deliver. The origin pushes to the owner, under the same identity: the delta is in
    once. The next one goes by another way."""

    async def scenario(world: World) -> None:
        origin = with_a_relay(world)
        relay = relay_of(world, origin)
        if fault == "killed":
            world.kill(relay.name)
        elif fault == "hangs":
            world.pause(relay.name)
        elif fault == "delivers nothing":

            async def nothing(push: Push, _items: object, note: Note, *_: object, **__: object) -> None:
                note([PushResult.retry(shard, "not_relayed") for shard in push.shards])

            exchange_of(relay).services.relays.deliver = nothing  # type: ignore[method-assign, assignment]
        else:
            deliver = exchange_of(relay).services.relays.deliver

            async def lost(push: Push, items: list[Carried], note: Note, hops: int, before: bytes) -> None:
                if fault == "never ends":
                    await deliver(push, items, note, hops, before)
                await asyncio.Event().wait()

            exchange_of(relay).services.relays.deliver = lost  # type: ignore[method-assign, assignment]
        began_s = world.clock.monotonic()
        await push(origin, 1)
        most_s = RESULTS_WITHIN_S + 6.0 if fault == "only says that it is at work" else 6.0
        assert world.clock.monotonic() - began_s <= most_s
        assert value(world)[0] == 1.0
        counts = requests_of(world)
        began_s = world.clock.monotonic()
        await push(origin, 2)
        assert world.clock.monotonic() - began_s <= 6.0
        assert value(world)[0] == 3.0
        assert counts["relay"] >= 1

    simulate(scenario, nodes=24, shards=4, relay_above=8, relay_bits=2)
    assert AVOIDED_S >= 6.0


def test_a_node_hands_on_no_delta_that_its_sender_forged() -> None:
    """A push that says that it comes from its origin, and does not, is refused, and counts as a lie."""

    async def scenario(world: World) -> None:
        origin = with_a_relay(world)
        relay = relay_of(world, origin)
        liar = next(one for one in world.running() if one not in (origin, relay, owner(world), backup(world)))
        report = await exchange_of(origin).push(1, 0, 1.0, ONES)
        assert report.acknowledged == 4
        services = exchange_of(liar).services
        sent = services.relays._send
        forged: list[bool] = []

        async def forge(to: object, batch: list[object]) -> bool:
            for one in batch:
                push_of = one.push  # type: ignore[attr-defined]
                one.push = type(push_of)(  # type: ignore[attr-defined]
                    push_of.genesis, origin.contact.node_id, 1, 9, 8, 1.0, push_of.shards
                )
            forged.append(await sent(to, batch))  # type: ignore[arg-type]
            return forged[-1]

        services.relays._send = forge  # type: ignore[method-assign, assignment]
        await exchange_of(liar).push(1, 0, 1.0, ONES)
        assert forged
        assert not any(forged)
        assert value(world) == [2.0] * 4

    world = simulate(scenario, nodes=24, shards=4, relay_above=8, relay_bits=2)
    assert any(record.event in ("member_lied", "member_distrusted") for record in world.records)


def test_a_new_node_is_met_by_the_others() -> None:
    """What joins a swarm of this size is relayed to, and relays, without being told."""

    async def scenario(world: World) -> None:
        joined = await join(world, "late")
        await asyncio.sleep(10.0)
        await push(joined, 1)
        assert value(world) == [1.0] * 8

    simulate(scenario, nodes=24, shards=8, relay_above=8, relay_bits=2)


@pytest.mark.parametrize("codec", ["float32", *more("int4")])
def test_a_relay_that_keeps_deltas_is_found_and_avoided(codec: str) -> None:
    """It answers that the owner has what it has not handed on. The owner does not list it; the next ones go by another
    way, and all that the relay has kept is sent to its owner. No other relay is suspected."""

    async def scenario(world: World) -> None:
        origin = with_a_relay(world)
        relay = relay_of(world, origin)
        kept_shards: list[int] = []

        async def kept(push: Push, _items: object, note: Note, *_: object, **__: object) -> None:
            kept_shards.extend(push.shards)
            note([PushResult(shard, "ok", 1) for shard in push.shards])

        exchange_of(relay).services.relays.deliver = kept  # type: ignore[method-assign, assignment]
        exchange, total = exchange_of(origin), 0.0
        for step in range(1, 200):
            await push(origin, step)
            await push(owner(world), step)
            total += 2 * step
            await exchange.pull(step)
            await asyncio.sleep(1.0)
            if relay_of(world, origin) is not relay:
                break
        assert 0 in kept_shards
        assert step < 120
        await until(world, lambda: value(world)[0] == total, within_s=20.0, what="what was kept is sent again")
        await push(origin, 300)
        assert value(world)[0] == total + 300.0

    world = simulate(scenario, nodes=24, shards=8, relay_above=8, relay_bits=2, pull_codec=codec)
    (found,) = (record for record in world.records if record.event == "relay_kept_delta")
    assert found.fields["count"] >= 30


# -- values -----------------------------------------------------------------------------------------------------------


def sources_of(member: Member) -> PullRelays:
    return exchange_of(member).pull_client.relays


async def round_of_all(world: World, step: int) -> None:
    """The owner of shard 0 pushes a delta of this many, and every node pulls, at its own time in a second."""

    async def pull(member: Member) -> None:
        await asyncio.sleep(world.random.uniform(0.0, 1.0))
        if member.exchange is not None:
            await exchange_of(member).pull(step)

    began_s = world.clock.monotonic()
    await push(owner(world), step)
    for member in world.running():
        assert member.overlay is not None
        member.overlay.step, member.overlay.step_seconds = step, 1.0
        world.spread(member)
    await asyncio.gather(*(pull(member) for member in world.running()))
    await asyncio.sleep(max(0.0, 1.0 - (world.clock.monotonic() - began_s)))


async def settled(world: World) -> tuple[Member, Member]:
    """Nodes pull by way of others: a node, and another one that it asks for shard 0, which neither owns nor backs
    it."""
    for step in range(1, 8):
        await round_of_all(world, step)
    for member in world.running():
        routes = sources_of(member).routes()
        node = None if routes is None else routes.hop(owner(world).contact.node_id)
        found = next((one for one in world.running() if one.contact.node_id == node), None)
        if found is not None and found is not owner(world) and member is not backup(world):
            return member, found
    raise AssertionError("nobody asks another node than the owner")


def held(member: Member) -> float:
    return float(exchange_of(member).context.replica.slice_of(0)[0])


def simulate_pulls(scenario: Callable[[World], Awaitable[None]]) -> World:
    return simulate(scenario, nodes=12, shards=4, relay_above=8, relay_bits=2, pull_codec="int8")


@pytest.mark.parametrize("fault", ["killed", "hangs", "an earlier version", "has nothing"])
def test_who_hands_nothing_down_costs_one_timeout(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, hangs, does not serve the request, or has none of the changes. The value comes from another node,
    or from the owner, in the same pull."""

    async def scenario(world: World) -> None:
        member, source = await settled(world)
        await push(owner(world), 20)
        monkeypatch.setattr(pull_sources, "drawn", lambda *_: None)  # no check goes to the owner
        if fault == "killed":
            world.kill(source.name)
        elif fault == "hangs":
            world.pause(source.name)
        elif fault == "an earlier version":
            assert source.overlay is not None
            del source.overlay.handlers["follow"]
        else:
            sources_of(source).handed._held.clear()
        began_s = world.clock.monotonic()
        report = await exchange_of(member).pull(20)
        assert report.missing == []
        assert world.clock.monotonic() - began_s <= 5.0
        assert held(member) == pytest.approx(sum(range(1, 8)) + 20.0, abs=0.5)
        is_avoided = sources_of(member).sources.is_avoided
        assert is_avoided(source.contact.node_id, world.clock.monotonic()) is (fault != "has nothing")

    simulate_pulls(scenario)


def test_values_are_handed_down_and_are_not_too_old() -> None:
    """Most nodes do not ask the owner; each has every value within a few steps, and a base says how old it is."""

    async def scenario(world: World) -> None:
        await settled(world)
        counts = requests_of(world)
        total, most = float(sum(range(1, 8))), 0
        for step in range(8, 16):
            await round_of_all(world, step)
            total += step
            for member in world.running():
                # One node is on the way, and pulls in each step.
                assert held(member) >= total - step - (step - 1) - 0.5
        handed = sum(exchange_of(member).counters.handed_down for member in world.running())
        print(f"{handed} shards handed down, in {counts}")
        assert handed >= 100
        kept = [exchange_of(member).pull_client.relays.handed.size_bytes for member in world.running()]
        assert 0 < max(kept) < VALUE_BYTES * VALUES
        reports = await asyncio.gather(*(exchange_of(member).pull(16) for member in world.running()))
        most = max(report.behind_steps for report in reports)
        assert 0 <= most <= 2
        finals = [exchange_of(member).pull_final(16, 5.0) for member in world.running()]
        await asyncio.gather(*finals)
        assert {held(member) for member in world.running()} == {total}

    world = simulate_pulls(scenario)
    assert not [one for one in world.records if one.event in ("relay_sent_old_values", "relay_sent_wrong_values")]


@pytest.mark.parametrize("lie", ["wrong", "frozen", "nothing new"])
def test_who_hands_down_what_is_not_true_is_found_and_avoided(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends values of its own, with a digest that fits; serves what it had, as if it were of today; or says of
    whatever it is asked that nothing is new. A check with the owner shows it: in the last case one that comes after
    some steps, because owners make a value in half a step at most. Then others are asked."""
    checks, now = pull_sources.drawn, [0]
    if lie == "nothing new":
        monkeypatch.setattr(pull_sources, "drawn", lambda *one: None if now[0] % 16 else checks(*one))

    async def scenario(world: World) -> None:
        member, source = await settled(world)
        honest, handed = sources_of(source).handed.answer, dict(sources_of(source).handed._held)
        lies: list[int] = []
        held_before: dict[tuple[int, bytes, int], Vector] = {}

        def answer(wanted: Wanted, now_s: float) -> Answered:
            lies.append(wanted.shard)
            if lie == "frozen":
                found = HandedDown()
                found._held = handed
                return dataclasses.replace(found.answer(wanted, now_s), age_s=0.0)
            mine = held_before.get((wanted.shard, wanted.chain, wanted.published))
            if mine is None or wanted.shard not in handed:
                return honest(wanted, now_s)
            if lie == "nothing new":
                told = msgspec.structs.replace(handed[wanted.shard].result, status="same", changes=0)
                told = msgspec.structs.replace(told, published=wanted.published, digest=digest_of(mine))
                return Answered(told, 0.0)
            change = Change(wanted.published + 1, "float32", np.full(mine.size, 5.0, np.float32).tobytes())
            told = msgspec.structs.replace(
                handed[wanted.shard].result,
                status="changes",
                published=wanted.published + 1,
                changes=1,
                digest=digest_of(mine + np.float32(5.0)),
            )
            return Answered(told, 0.0, (change,))

        sources_of(source).handed.answer = answer  # type: ignore[method-assign]
        found_at, replica = 0, exchange_of(source).context.replica
        for step in range(8, 80):
            now[0] = step
            for shard in range(4):
                held_before[shard, *replica.position_of(shard)] = replica.slice_of(shard).copy()
            await round_of_all(world, step)
            is_avoided = sources_of(member).sources.is_avoided
            if is_avoided(source.contact.node_id, world.clock.monotonic() + UNABLE_S):
                found_at = step
                break
        assert lies
        assert found_at
        lies.clear()
        for step in range(80, 84):
            await round_of_all(world, step)
        total = float(sum(range(1, found_at + 1)) + sum(range(80, 84)))
        assert held(member) >= total - 83.0 - 82.0 - 0.5
        assert held(member) <= total + 0.5

    world = simulate_pulls(scenario)
    event = "relay_sent_wrong_values" if lie == "wrong" else "relay_sent_old_values"
    assert [one for one in world.records if one.event == event]
