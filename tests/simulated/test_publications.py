"""Pulls as changes over the real exchange: all who follow hold one published value, whatever happens to its owner."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.training.encoding.table import CODECS, CodecName
from p2pnode.training.exchange.messages import Pull, PullAnswer, decode, encode
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.replica import NO_POSITION
from p2pnode.training.progress import Progress
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.step_exchange import StepExchange, TrainedStep
from p2pnode.training.trainer_link.interface import Ranges, StepReport
from tests.harness.builders.codec_kinds import OF_CHANGES
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import Fixture, played_by, run_by
from tests.harness.swarms.exchange_story import striking
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Member
from tests.harness.swarms.simulated_swarm import play

SHARDS, SIZE = 4, 300
SETTINGS = ExchangeSettings(codec="int8", shards=SHARDS, weight="sum", outer_lr=1.0, outer_momentum=0.0)
STEP_S = 1.0
#: A rounded difference of a published value to the value of its shard, for steps of one.
NEAR = 0.05


def simulate(
    scenario: Callable[[World], Awaitable[None]], *, nodes: int = 5, seed: int = 5, **changes: object
) -> World:
    """A swarm that has settled, then the scenario; returns the world for a look at its records."""

    async def story(world: World) -> None:
        await world.start("n0", founder=True)
        for number in range(1, nodes):
            await world.join(f"n{number}")
        await asyncio.sleep(6.0)
        await scenario(world)

    settings = msgspec.structs.replace(SETTINGS, **changes)
    return play(
        story,
        lambda: World(seed, settings=settings, shards=SHARDS, values=SHARDS * SIZE, synchronous=False, tenure_s=3.0),
    )


def delta(world: World, number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(world.manifest.layout.total).astype(np.float32)


@dataclass
class Training:
    """Steps of all running nodes, one after the other."""

    world: World
    step: int = 0
    missing: list[int] = field(default_factory=list)

    async def steps(self, count: int, *, without: tuple[str, ...] = ()) -> None:
        for _ in range(count):
            self.step += 1
            members = [member for member in self.world.running() if member.name not in without]
            await asyncio.gather(
                asyncio.sleep(STEP_S), *(self._one(number, member) for number, member in enumerate(members))
            )

    async def _one(self, number: int, member: Member) -> None:
        exchange, overlay = member.exchange, member.overlay
        overlay.step, overlay.step_seconds = self.step, STEP_S
        report = await exchange.push(self.step, self.step - 1, 1.0, delta(self.world, 100 * self.step + number))
        assert report.refused == {}
        await exchange.pull(self.step)

    async def rest(self) -> None:
        """Everybody pulls what is there."""
        for member in self.world.running():
            assert (await member.exchange.pull(self.step)).missing == []


def check_followers(world: World, *, within: float = NEAR) -> int:
    """Who is in a shard's publication at its last version holds its bits; returns how many such pairs there are."""
    count = 0
    for shard in range(SHARDS):
        owning = world.owner(shard).exchange
        published = owning.publisher.published(shard)
        assert published is not None
        x = owning.store.owned[shard].state.value
        assert float(np.abs(x - published.value).max()) < within
        for member in world.running():
            replica = member.exchange.replica
            if replica.position_of(shard) == (published.publication, published.version):
                assert replica.slice_of(shard).tobytes() == published.value.tobytes()
                count += 1
    return count


def totals(world: World) -> tuple[int, int, int]:
    """Shards followed, publications entered, mismatches, of all running nodes."""
    found = [member.exchange.counters for member in world.running()]
    return (
        sum(one.shards_followed for one in found),
        sum(one.publications_entered for one in found),
        sum(one.publication_mismatches for one in found),
    )


@pytest.mark.parametrize(
    ("codec", "pull_codec"), [*((codec, "auto") for codec in OF_CHANGES), *more(("int4", "sparse"))]
)
@played_by(simulate, codec=Fixture("codec"), pull_codec=Fixture("pull_codec"))
async def test_all_nodes_follow_the_publications_of_all_owners(
    world: World, *, codec: CodecName, pull_codec: str
) -> None:
    """After the first pull, which brings the whole, every later one brings changes, and all hold the same bits."""
    training = Training(world)
    await training.steps(2)
    before, entered, _ = totals(world)
    await training.steps(10)
    await training.rest()

    is_partial = CODECS[codec if pull_codec == "auto" else pull_codec].is_partial
    assert check_followers(world, within=100.0 if is_partial else 1.0) == 4 * SHARDS
    followed, now_entered, mismatches = totals(world)
    assert (now_entered - entered, mismatches) == (0, 0)
    assert followed - before >= 8 * 4 * SHARDS


@pytest.mark.parametrize(("steps", "bytes_per_value"), [(0, 0.0), (1, 1.1)])
@run_by(run, limit_s=900)
async def test_a_joiner_with_the_initial_values_is_encoded_what_has_changed(steps: int, bytes_per_value: float) -> None:
    """All scripts of a run mostly make the same values: those are not sent, only a founder's deltas since. One script
    has made another model: it is sent the whole."""
    world = World(7, settings=SETTINGS, shards=SHARDS, values=SHARDS * SIZE, synchronous=False, tenure_s=3.0)
    try:
        initial = delta(world, 1)
        founder = (await world.start("founder")).exchange
        founder.replica.vector[:] = initial
        await founder.found()
        values = initial + sum((delta(world, 100 + step) for step in range(1, steps + 1)), np.float32(0))
        for step in range(1, steps + 1):
            await founder.push(step, step - 1, 1.0, delta(world, 100 + step))
        for name, vector in (("same", initial), ("other", delta(world, 2))):
            joiner = (await world.start(name)).exchange
            joiner.replica.vector[:] = vector
            report = await joiner.join(world.members["founder"].contact)
            assert not report.missing
            assert all(joiner.replica.pulled_version(shard) is not None for shard in range(SHARDS))
            assert np.abs(joiner.replica.vector - values).max() < NEAR
            sent_bytes = joiner.counters.bytes_received / (SHARDS * SIZE)
            is_whole = joiner.counters.publications_entered == SHARDS
            assert (is_whole, sent_bytes <= bytes_per_value) == ((False, True) if name == "same" else (True, False))
    finally:
        await world.stop()


@played_by(simulate)
async def test_a_joiner_enters_the_publication_with_its_first_whole(world: World) -> None:
    """In the middle of the publication, in float32; from then on it is sent changes like the others."""
    training = Training(world)
    await training.steps(3)
    late = await world.join("late")
    counters = late.exchange.counters
    assert (counters.shards_followed, counters.publications_entered) == (0, SHARDS)
    for shard in range(SHARDS):
        assert late.exchange.replica.position_of(shard).published > 0
    await training.steps(2)
    await training.rest()

    assert counters.shards_followed >= SHARDS
    assert check_followers(world) >= 4 * SHARDS


@played_by(simulate)
async def test_after_a_take_over_a_new_publication_begins(world: World) -> None:
    """The owner dies. Its shards get a new publication from their value, in bfloat16, the others keep theirs."""
    training = Training(world)
    await training.steps(3)
    dead = world.owner(0)
    theirs = dict.fromkeys(dead.exchange.store.owned)
    publications = {shard: publication_of(world, shard) for shard in range(SHARDS)}
    await world.kill(dead.name)
    await asyncio.sleep(10.0)
    await training.steps(3)
    await training.rest()

    for shard in range(SHARDS):
        assert (publication_of(world, shard) != publications[shard]) == (shard in theirs)
    assert check_followers(world) == 3 * SHARDS
    assert totals(world)[2] == 0


@played_by(simulate, seed=7)
async def test_a_publication_survives_the_hand_over_of_its_shard(world: World) -> None:
    """Nodes that fit better join and are handed shards while all train: the publications keep their names and go on."""
    training = Training(world)
    await training.steps(3)
    publications = {shard: publication_of(world, shard) for shard in range(SHARDS)}
    owners = {shard: world.owner(shard).name for shard in range(SHARDS)}
    versions = {shard: published_version(world, shard) for shard in range(SHARDS)}
    for number in range(6):
        await world.join(f"late{number}")
        await training.steps(2)
    await training.steps(6)
    await training.rest()

    moved = [shard for shard in range(SHARDS) if world.owner(shard).name != owners[shard]]
    assert moved, "no shard was handed over: another seed"
    for shard in range(SHARDS):
        assert publication_of(world, shard) == publications[shard]
        assert published_version(world, shard) > versions[shard]
    # The deltas of ten nodes, not of four, may come between two ticks.
    assert check_followers(world, within=2 * NEAR) >= 10 * SHARDS - len(moved)
    assert totals(world)[2] == 0


def published_version(world: World, shard: int) -> int:
    published = world.owner(shard).exchange.publisher.published(shard)
    assert published is not None
    return published.version


@played_by(simulate)
async def test_a_restarted_node_enters_the_publications_again(world: World) -> None:
    """It has states and a replica from its disk, but no place in a publication; what it owned has new publications."""
    training = Training(world)
    await training.steps(3)
    name = world.owner(2).name
    exchange = world.members[name].exchange
    states = {
        shard: StoredState(term, state.copy(), clean=False) for shard, term, state in exchange.store.states_to_save()
    }
    vector, versions = exchange.replica.vector.copy(), exchange.replica.versions()
    theirs = dict.fromkeys(exchange.store.owned)
    publications = {shard: publication_of(world, shard) for shard in range(SHARDS)}
    await world.kill(name)
    await asyncio.sleep(0.5)
    member = await world.start(name)
    exchange = member.exchange
    exchange.replica.vector[:] = vector
    exchange.offer(0, versions, states)
    other = next(one for one in world.running() if one is not member)
    await exchange.join(other.contact)
    await asyncio.sleep(10.0)
    await training.steps(3)
    await training.rest()

    for shard in theirs:
        assert publication_of(world, shard) != publications[shard]
    assert check_followers(world) >= 4 * SHARDS - 1
    assert totals(world)[2] == 0


def publication_of(world: World, shard: int) -> bytes:
    published = world.owner(shard).exchange.publisher.published(shard)
    assert published is not None
    return published.publication


def corrupt(member: Member, shard: int) -> None:
    """A bit of the replica changes without anybody's doing."""
    member.exchange.replica.slice_of(shard).view(np.uint32)[7] ^= np.uint32(1 << 20)


def test_a_replica_with_another_bit_is_found_by_its_digest_and_cured_by_the_whole() -> None:
    """With the next change, in the same pull; it is counted and logged, and nobody else is disturbed."""

    async def scenario(world: World) -> None:
        training = Training(world)
        await training.steps(2)
        shard = 1
        victim = next(one for one in world.running() if one is not world.owner(shard))
        corrupt(victim, shard)
        entered = totals(world)[1]
        await training.steps(1)
        await training.rest()

        assert check_followers(world) == 4 * SHARDS
        assert totals(world)[1:] == (entered + 1, 1)
        assert victim.exchange.counters.publication_mismatches == 1

    world = simulate(scenario)
    (record,) = [one for one in world.records if one.event == "publication_mismatch"]
    assert record.fields["shard"] == 1


@played_by(simulate)
async def test_a_change_that_was_damaged_on_its_way_never_reaches_the_replica(world: World) -> None:
    """The shard stays as it was until the whole has arrived."""
    training = Training(world)
    await training.steps(2)
    shard = 2
    serving, victim = world.owner(shard), next(one for one in world.running() if one is not world.owner(shard))
    handle, damaged = serving.overlay.handlers["pull"], []
    before = victim.exchange.replica.slice_of(shard).copy()
    seen = []

    async def damaging(sender, payload, stream):
        if sender.node_id == victim.contact.node_id:
            seen.append(victim.exchange.replica.slice_of(shard).copy())
        response = await handle(sender, payload, stream)
        buffers = [bytearray(buffer) for buffer in response.body]
        if sender.node_id == victim.contact.node_id and buffers and not damaged:
            buffers[-1][-1] ^= 0x40
            damaged.append(len(buffers))
        response.body = [bytes(buffer) for buffer in buffers]
        return response

    serving.overlay.handlers["pull"] = damaging
    await training.steps(1)
    assert damaged
    assert victim.exchange.counters.publication_mismatches == 1
    assert len(seen) >= 2
    assert seen[1].tobytes() in (before.tobytes(), victim.exchange.replica.slice_of(shard).tobytes())
    await training.rest()
    assert check_followers(world) == 4 * SHARDS


@played_by(simulate)
async def test_an_old_node_is_answered_with_values_and_answers_with_values(world: World) -> None:
    """A message without the new fields gets a value in the codec that it names. A new node that asks an owner which
    sends no changes takes its values in bfloat16."""
    training = Training(world)
    await training.steps(2)
    owning = world.owner(0)
    asking = next(one for one in world.running() if one is not owning)
    wanted = [[0, [0, b""], 0]]
    genesis = bytes.fromhex(owning.exchange.manifest.genesis)
    old_pull = genesis + msgspec.msgpack.encode([1, "float32", wanted])
    response = await owning.overlay.handlers["pull"](asking.contact, old_pull, _nothing())
    (result,) = decode(response.head, PullAnswer).results
    assert (result.status, result.publication, result.changes) == ("value", b"", 0)
    assert sum(len(bytes(buffer)) for buffer in response.body) == 32 + 4 * SIZE

    handle = owning.overlay.handlers["pull"]

    async def old_owner(sender, payload, stream):
        """Knows nothing of the new fields."""
        pull = decode(payload.removeprefix(genesis), Pull)
        plain = [msgspec.structs.replace(one, publication=b"", published=0) for one in pull.shards]
        old = genesis + encode(msgspec.structs.replace(pull, shards=plain, follows=False))
        return await handle(sender, old, stream)

    owning.overlay.handlers["pull"] = old_owner
    await training.steps(1)
    await training.rest()
    replica = asking.exchange.replica
    assert replica.position_of(0) == NO_POSITION
    x = owning.exchange.store.owned[0].state.value
    assert float(np.abs(replica.slice_of(0) - x).max()) < 0.1


async def _nothing():
    for buffer in ():
        yield buffer


@pytest.mark.parametrize(("codec", "is_published"), [("bfloat16", False), ("sparse512", True)])
def test_initial_values_are_published_only_where_others_may_follow_them(
    *, codec: CodecName, is_published: bool
) -> None:
    """With a codec of whole values the founder keeps no second copy of its shards."""

    async def scenario(world: World) -> None:
        for member in world.running():
            exchange = member.exchange
            for shard, owned in exchange.store.owned.items():
                await exchange.publisher.begin_run(b"genesis", shard, owned)
            assert (exchange.publisher.size_bytes > 0) == (is_published and bool(exchange.store.owned))

    simulate(scenario, nodes=2, codec=codec)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@played_by(simulate, codec=Fixture("codec"))
async def test_whole_values_have_no_publication(world: World, *, codec: CodecName) -> None:
    """Pulls in float32 and bfloat16 are values, as they are for pushes in these codecs by default."""
    training = Training(world)
    await training.steps(3)
    assert totals(world) == (0, 0, 0)
    assert all(one.exchange.publisher.size_bytes == 0 for one in world.running())
    for shard in range(SHARDS):
        x = world.owner(shard).exchange.store.owned[shard].state.value
        for member in world.running():
            await member.exchange.pull(training.step)
            off = np.abs(member.exchange.replica.slice_of(shard) - x)
            assert float(off.max()) <= (0.0 if codec == "float32" else float(np.abs(x).max()) / 128)


@played_by(simulate)
async def test_a_final_pull_brings_the_value_itself(world: World) -> None:
    """In float32 and whole, to all nodes the same bits, and those of the owner."""
    training = Training(world)
    await training.steps(3)
    for member in world.running():
        assert (await member.exchange.pull_final(training.step, 30.0)).missing == []
    for shard in range(SHARDS):
        x = world.owner(shard).exchange.store.owned[shard].state.value
        for member in world.running():
            assert member.exchange.replica.slice_of(shard).tobytes() == x.tobytes()


@pytest.mark.parametrize(("are_equal", "low", "high"), [(True, 1.0, 1.15), (False, 1.7, 2.0)])
def test_a_nodes_rate_follows_how_much_its_deltas_agree_with_the_others(
    *, are_equal: bool, low: float, high: float
) -> None:
    """Four nodes that push equal deltas add their mean at a rate near 1; with nothing in common, near √4."""
    rates: list[float] = []

    async def scenario(world: World) -> None:
        members = world.running()
        for step in range(1, 9):
            sent = [delta(world, 100 * step + (0 if are_equal else number)) for number in range(len(members))]
            await asyncio.gather(
                *(member.exchange.push(step, step - 1, 0.25, own) for member, own in zip(members, sent, strict=True))
            )
            await asyncio.sleep(STEP_S)
            for member, own in zip(members, sent, strict=True):
                await member.exchange.pull(step, own)
                member.exchange.advance(step)
        rates.extend(member.exchange.pull_client.agreement.rate(4.0) for member in members)

    simulate(scenario, nodes=4, codec="sparse512")
    print(rates)
    assert all(low <= rate <= high for rate in rates)


@played_by(simulate)
async def test_a_publication_that_nobody_asks_for_is_dropped(world: World) -> None:
    """After two minutes; who comes later begins a new one."""
    training = Training(world)
    await training.steps(2)
    publications = {shard: publication_of(world, shard) for shard in range(SHARDS)}
    held = sum(one.exchange.publisher.size_bytes for one in world.running())
    assert held >= 4 * SHARDS * SIZE
    await asyncio.sleep(130.0)
    assert sum(one.exchange.publisher.size_bytes for one in world.running()) == 0
    await training.steps(2)
    await training.rest()

    assert all(publication_of(world, shard) != publications[shard] for shard in range(SHARDS))
    assert check_followers(world) == 4 * SHARDS


class Base:
    """The base of a trainer, which a `StepExchange` tells what to take."""

    def __init__(self, world: World, member: Member) -> None:
        self.exchange = member.exchange
        self.delta = np.zeros(SHARDS * SIZE, np.float32)
        self.values = self.exchange.replica.vector.copy()
        overlay: Any = member.overlay
        overlay.announce = lambda **_: None
        stub: Any = SimpleNamespace(
            exclude=lambda _: None, ask=self._ask, barrier=SimpleNamespace(enough=lambda _: None)
        )
        trainer: Any = self
        self._steps = StepExchange(
            swarm=overlay,
            exchange=self.exchange,
            trainer=trainer,
            waiter=stub,
            settings=world.settings,
            environment=self.exchange.environment,
            progress=Progress(),
        )

    async def _ask(self) -> float:
        return 0.0

    def encoded(self) -> None:
        self.values += self.delta

    async def arrived(
        self, _step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        assert not takes_back
        now = self.exchange.replica.vector.copy()
        for first, end in adds_delta:
            now[first:end] += self.delta[first:end]
        for first, end in keeps_base:
            now[first:end] = self.values[first:end]
        self.values = now

    async def step(self, number: int, shard: int, amount: float) -> float:
        """Train a delta that is zero in all other shards; returns the mean that the base has of the shard then."""
        part = slice(shard * SIZE, (shard + 1) * SIZE)
        self.delta[:] = 0.0
        self.delta[part] = amount
        report = StepReport(number, 0.0, 1, 1, SLOW_STEP_S, {})
        row, pushed = await self._steps.push(TrainedStep(number, report, 1, SLOW_STEP_S, 0.0))
        await self._steps.pull(row, pushed)
        return float(self.values[part].mean())


#: The owners publish so seldom that what is pulled is from before the push.
SLOW_STEP_S = 20.0


@pytest.mark.parametrize("fault", ["late", "unanswered"])
def test_a_base_keeps_the_own_deltas_that_a_published_value_lacks(fault: str) -> None:
    """Also one that its owner has added after the exchange that had it, and one whose answer was lost: an owner knows
    such a delta by its identity."""

    async def scenario(world: World) -> None:
        serving = world.owner(0)
        backed = [member for member in world.running() if 0 in member.exchange.store.backed]
        one, other = (member for member in world.running() if member not in (serving, *backed))
        base, numbers = Base(world, one), itertools.count(1)

        async def publish() -> None:
            """When a version is due, the other node makes its owner publish what it has now."""
            await asyncio.sleep(SLOW_STEP_S)
            number = next(numbers)
            for member in world.running():
                member.overlay.step, member.overlay.step_seconds = number, SLOW_STEP_S
            await other.exchange.push(number, number - 1, 1.0, np.ones(SHARDS * SIZE, np.float32))
            await other.exchange.pull(number)

        await base.step(1, 0, 1.0)
        await publish()  # the first change: how long it is decides when the next one is due
        await publish()
        if fault == "late":
            with striking(world.rejected, "push", sender=one, to=serving):
                assert await base.step(2, 0, 8.0) > 8.0
                await publish()
            assert await base.exchange.flush(5.0) == 0
            assert await base.step(3, 0, 1.0) > 8.0
        else:
            asyncio.get_running_loop().call_later(0.3, world.unanswered.clear)
            world.unanswered.append(lambda *request: request == (one.name, serving.name, "push"))
            assert await base.step(2, 0, 8.0) > 8.0
            assert serving.exchange.store.owned[0].state.value.mean() > 8.0

    simulate(scenario, nodes=4)
