"""Nodes on lines of unequal rates: who owns how many shards, what moving them costs, and that nothing moves twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from p2pnode.overlay.line.capacity import FLOOR_CLASSES, CapacityClass, class_of, split, weight_exponents
from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.settings import ExchangeSettings
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

SHARDS, VALUES_PER_SHARD, NODES = 32, 50, 5
FAST = 12
TENURE_S = 2.0
SETTINGS = ExchangeSettings(codec="float32", shards=SHARDS, weight="sum", outer_lr=1.0, outer_momentum=0.0)


def simulate(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def story(world: World) -> None:
        await world.start("n0", founder=True)
        for number in range(1, NODES):
            await world.join(f"n{number}")
        await settled(world)
        await scenario(world)

    play(
        story,
        lambda: World(
            7, settings=SETTINGS, shards=SHARDS, values=SHARDS * VALUES_PER_SHARD, synchronous=False, tenure_s=TENURE_S
        ),
    )


def owners(world: World) -> dict[int, str]:
    return {shard: member.name for member in world.running() for shard in member.exchange.store.owned}


def backups(world: World) -> Counter[str]:
    names = {member.contact.node_id: member.name for member in world.running()}
    owned = [each for member in world.running() for each in member.exchange.store.owned.values()]
    return Counter(names[each.backup.node_id] for each in owned if each.backup is not None)


async def settled(world: World) -> None:
    """No owner and no backup has changed for three tenures."""
    deadline = world.clock.monotonic() + 120.0
    last, since = None, world.clock.monotonic()
    while world.clock.monotonic() - since < 3 * TENURE_S:
        assert world.clock.monotonic() < deadline, "the shards never came to rest"
        await asyncio.sleep(0.2)
        now = (owners(world), backups(world))
        if now != last:
            last, since = now, world.clock.monotonic()


async def train(world: World, steps: range) -> None:
    """Every node pushes ones and pulls; every delta is acknowledged."""
    delta = np.ones(world.manifest.layout.total, np.float32)
    for step in steps:
        reports = await asyncio.gather(
            *(member.exchange.push(step, step - 1, 1.0, delta) for member in world.running())
        )
        assert [(report.outstanding, report.refused) for report in reports] == [(0, {})] * NODES
        await asyncio.sleep(0.5)


def sent_states(world: World) -> Callable[[], Counter[str]]:
    """Counts the copies of states that each node sends from now on."""
    counted: Counter[str] = Counter()
    carry = world.carry

    def counting(source, to, name, *rest):
        counted[source.name] += name == "state"
        carry(source, to, name, *rest)

    world.carry = counting
    return lambda: +counted


@played_by(simulate)
async def test_shards_follow_the_lines_and_leave_a_slow_node_once_without_a_copy_of_its_own(world: World) -> None:
    """A node under the floor ends with no shard and no backup, sends no state, takes none back; no delta is lost."""
    before = owners(world)
    assert set(before.values()) == {f"n{number}" for number in range(NODES)}
    for number in range(NODES):
        world.announce(f"n{number}", FAST)
    await settled(world)
    assert owners(world) == before, "equal classes move shards"

    states = sent_states(world)
    moves: list[tuple[int, str, str]] = []
    last = dict(before)

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.05)
            for shard, name in owners(world).items():
                if last[shard] != name:
                    moves.append((shard, last[shard], name))
                    last[shard] = name

    watching = asyncio.create_task(watch())
    world.announce("n1", FAST - FLOOR_CLASSES)
    await train(world, range(1, 30))
    await settled(world)
    watching.cancel()

    assert "n1" not in owners(world).values()
    assert backups(world)["n1"] == 0
    assert states()["n1"] == 0, "the slow node copied states over its own line"
    assert not [move for move in moves if move[2] == "n1"]
    assert Counter(shard for shard, source, _ in moves if source == "n1") == Counter(
        {shard: 1 for shard, name in before.items() if name == "n1"}
    )
    kept = {shard for shard, name in before.items() if name != "n1"}
    assert not kept & {shard for shard, _, _ in moves}, "shards of other nodes moved"
    for member in world.running():
        for owned in member.exchange.store.owned.values():
            assert owned.state.value.tolist() == [29.0 * NODES] * VALUES_PER_SHARD


@played_by(simulate)
async def test_a_line_that_wavers_about_the_edge_of_a_class_moves_each_shard_at_most_once(world: World) -> None:
    """Four minutes of rates that differ by 30 % between rounds: after the first class nothing moves any more."""
    seed = 4
    print(f"noise {seed}")
    rng = random.Random(seed)
    announced = {f"n{number}": CapacityClass() for number in range(NODES)}
    for name in announced:
        world.announce(name, FAST)
    await settled(world)
    last, moved = owners(world), Counter[int]()
    for _ in range(25):
        for name, capacity in announced.items():
            capacity.update(2.0**25 * (0.25 if name == "n1" else 1.0) * rng.uniform(0.86, 1.16), is_exact=True)
            world.announce(name, capacity.announced)
        for _ in range(10):
            await asyncio.sleep(1.0)
            now = owners(world)
            moved.update(shard for shard, name in now.items() if last.get(shard, name) != name)
            last |= now

    print(f"shards that moved: {len(moved)} of {SHARDS}")
    assert max(moved.values(), default=0) <= 2  # from the slow node to its backup, and to the best candidate
    late = dict(owners(world))
    await asyncio.sleep(20.0)
    assert owners(world) == late


def train_over(lines: list[float], values: int, *, within_s: float, done: Callable[[list[Host]], bool]) -> list[Host]:
    """Whole nodes with `codec = "auto"`, one on each line (bytes per second), until something holds of them."""
    seed, step_s = 9, 10.0
    print(f"seed {seed}")

    async def main() -> list[Host]:
        settings = {
            "training.min_nodes": len(lines),
            "exchange.codec": "auto",
            "exchange.shards": 16,
            "barrier.method": "asp",
        }
        swarm = Swarm(
            seed=seed,
            settings=settings,
            make_trainer=lambda name: StubTrainer(name, values, seed=seed, step_s=step_s),
            delay=(0.02, 0.03),
        )
        for number, rate in enumerate(lines):
            swarm.network.line(f"10.0.0.{number + 2}", rate)
        hosts = swarm.start_many(len(lines))
        await swarm.until(
            lambda: all(host.exchange is not None for host in hosts) and done(hosts),
            within_s=within_s,
            what="the nodes have found their place",
            every_s=1.0,
        )
        for host in hosts:
            line = host.living.overlay.line
            print(line.upload.bytes_per_s, line.upload_bytes_per_s, line.capacity, choice_of(host).reason)
        print([(record.node, record.fields) for record in swarm.records if record.event == "codec_chosen"])
        found = StatusReport(hosts[-1].living, EventRing(), LoopDelay(swarm.clock)).status().line
        assert found is not None
        assert found.codec == choice_of(hosts[-1]).codec
        for host in hosts:
            host.task.cancel()
        await asyncio.gather(*(host.task for host in hosts if host.task is not None), return_exceptions=True)
        return hosts

    return VirtualLoop().run(main(), limit_s=600)


def choice_of(host: Host) -> CodecChoice:
    return host.exchange.codec


def test_a_slow_node_whose_line_is_full_measures_it_and_owns_nothing() -> None:
    """Beside three lines of 12.5 MB/s one of 0.3, a model that fills it: measured within a quarter, its codec chosen by
    that, and no shard and no backup; the others share the shards."""
    slow = 300_000.0

    def in_place(hosts: list[Host]) -> bool:
        stores = [host.exchange.store for host in hosts if host.exchange is not None]
        last = hosts[-1].living.overlay.node_id
        backs = any(
            last in [each.node_id for each in owned.targets()] for store in stores for owned in store.owned.values()
        )
        is_measured = hosts[-1].living.overlay.line.upload_bytes_per_s is not None
        is_placed = is_measured and not stores[-1].owned and not backs
        return is_placed and "the line carries" in choice_of(hosts[-1]).reason and shares(hosts) <= {0, 1}

    def shares(hosts: list[Host]) -> set[int | None]:
        """The weights of the fast nodes: those that sent to the slow one first seem to be slow for a time."""
        announced = {host.name.encode(): host.living.overlay.line.capacity for host in hosts}
        exponents = weight_exponents(announced)
        del exponents[hosts[-1].name.encode()]
        return set(exponents.values())

    *quick, late = train_over([12.5e6, 12.5e6, 12.5e6, slow], 5_000_000, within_s=300.0, done=in_place)
    line = late.living.overlay.line
    assert line.upload_bytes_per_s == pytest.approx(slow, rel=0.25)
    capacity, is_bound = split(line.capacity)
    assert capacity in (class_of(slow), class_of(1.25 * slow))
    assert not is_bound
    announced = {host.name.encode(): host.living.overlay.line.capacity for host in (*quick, late)}
    assert weight_exponents(announced)[late.name.encode()] is None


def test_on_fast_lines_all_nodes_come_to_push_512_values() -> None:
    """From a careful first push, within a dozen steps: more values would teach the shared model less."""

    def in_place(hosts: list[Host]) -> bool:
        return all(choice_of(host).codec == "sparse512" for host in hosts)

    hosts = train_over([50e6, 50e6, 50e6], 300_000, within_s=150.0, done=in_place)
    assert all(host.living.progress.step <= 12 for host in hosts)
