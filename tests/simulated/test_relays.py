"""Deltas that are relayed: each is in the model once whatever happens to the relays, and the requests are few."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.conservation import play
from tests.harness.runner.long_run import more
from tests.harness.swarms.exchange_swarm import Member, World
from tests.simulated.test_exchange_faults import ONES, backup, exchange_of, join, owner, push, simulate, until, value
from training.exchange.aggregation import delivery_checks
from training.exchange.aggregation.consignments import Note
from training.exchange.aggregation.relays import AVOIDED_S
from training.exchange.messages import Push, PushResult
from training.settings import ExchangeSettings

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(("first", "histories", "nodes"), [(6000, 6, 8), (6100, 1, 24), *more((6006, 66, 8))])
def test_relayed_deltas_are_in_the_model_once(
    first: int, histories: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_conservation`, with deltas that pass other nodes, which crash, pause and are cut off: after any
    faults each shard is the sum of its deltas, each once, with all acknowledged ones among them. No relay is taken for
    one that keeps deltas, although most are checked."""
    monkeypatch.setattr(delivery_checks, "CHECKED", 1)
    monkeypatch.setattr(delivery_checks, "AGAIN_S", 6.0)
    print(f"seeds from {first}: python -m tests.harness.histories.conservation --relays --nodes {nodes} --seed N")
    tallies = [play(seed, nodes, relays=True) for seed in range(first, first + histories)]

    assert sum(tally.relayed for tally in tallies) >= 12 * histories
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
    """Every node pushes a delta of this many, of all workers."""

    async def one(member: Member) -> None:
        report = await exchange_of(member).push(step, step - 1, 1.0, np.full(96, step, np.float32))
        assert (report.outstanding, report.refused) == (0, {})
        assert member.overlay is not None
        exchange_of(member).begin_at(step)
        member.overlay.step, member.overlay.step_seconds = step, 10.0

    await asyncio.gather(*(one(member) for member in world.running()))
    for member in world.running():
        for other in world.running():
            if member is not other and member.overlay is not None and other.overlay is not None:
                member.overlay.met(other.overlay)


@pytest.mark.parametrize("above", [0, 8])
def test_a_step_of_many_nodes_takes_few_requests(above: int) -> None:
    """Of 24 nodes with two shards each, every one pushes at once. In bundles that takes half of the requests, and every
    shard has the sum."""
    found: dict[str, int] = {}

    async def main() -> None:
        settings = ExchangeSettings(
            codec="float32",
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
        finally:
            world.stop()

    VirtualLoop().run(main(), limit_s=600)
    sent = sum(found.get(name, 0) for name in ("push", "relay", "forward", "forwards")) / 24
    print(f"requests per node and step: {sent:.1f} of {found}")
    assert bool(found.get("relay")) is bool(above)
    assert sent <= 32 if above else sent >= 60


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


@pytest.mark.parametrize("fault", ["killed", "hangs", "silent about it", "delivers nothing"])
def test_a_relay_that_fails_costs_one_timeout(fault: str) -> None:
    """It is killed or hangs, delivers and never answers, or answers that it could not deliver. The origin pushes to the
    owner, under the same identity: the delta is in once. The next one goes by another way."""

    async def scenario(world: World) -> None:
        origin = with_a_relay(world)
        relay = relay_of(world, origin)
        if fault == "killed":
            world.kill(relay.name)
        elif fault == "hangs":
            world.pause(relay.name)
        elif fault == "delivers nothing":

            async def nothing(push: Push, _items: object, note: Note, _hops: int) -> None:
                note([PushResult.retry(shard, "not_relayed") for shard in push.shards])

            exchange_of(relay).services.relays.deliver = nothing  # type: ignore[method-assign, assignment]
        else:
            deliver = exchange_of(relay).services.relays.deliver

            async def lost(*arguments: object) -> None:
                await deliver(*arguments)  # type: ignore[arg-type]
                await asyncio.Event().wait()

            exchange_of(relay).services.relays.deliver = lost  # type: ignore[method-assign, assignment]
        began_s = world.clock.monotonic()
        await push(origin, 1)
        assert world.clock.monotonic() - began_s <= 6.0
        assert value(world)[0] == 1.0
        counts = requests_of(world)
        await push(origin, 2)
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


@pytest.mark.parametrize("codec", ["float32", "int4"])
def test_a_relay_that_keeps_deltas_is_found_and_avoided(codec: str) -> None:
    """It answers that the owner has what it has not handed on. The owner does not list it; the next ones go by another
    way, and all that the relay has kept is sent to its owner. No other relay is suspected."""

    async def scenario(world: World) -> None:
        origin = with_a_relay(world)
        relay = relay_of(world, origin)
        kept_shards: list[int] = []

        async def kept(push: Push, _items: object, note: Note, _hops: int) -> None:
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
