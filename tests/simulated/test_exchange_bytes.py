"""What a step of exchange sends, counted on the simulated network; and what becomes of a push that its step leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from p2pnode.training.settings import ExchangeSettings
from tests.harness.runner.long_run import more
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Member
from tests.harness.swarms.simulated_swarm import play

VALUES_PER_SHARD = 2000
#: Headers, and nothing else, may come on top.
WITHIN = 0.05


def simulate(scenario: Callable[[World], Awaitable[None]], settings: ExchangeSettings, nodes: int) -> None:
    """A swarm that has settled, then the scenario."""

    async def story(world: World) -> None:
        await world.start("n0", founder=True)
        for number in range(1, nodes):
            await world.join(f"n{number}")
        await settled(world)
        await scenario(world)

    values = VALUES_PER_SHARD * settings.shards
    play(
        story,
        lambda: World(11, settings=settings, shards=settings.shards, values=values, synchronous=False, tenure_s=0.0),
    )


async def settled(world: World) -> None:
    """Every shard has an owner, a backup where there should be one, and no learner is catching up."""
    deadline = world.clock.monotonic() + 60.0
    last, since = [], world.clock.monotonic()
    while world.clock.monotonic() - since < 3.0:
        assert world.clock.monotonic() < deadline, "the shards never came to rest"
        await asyncio.sleep(0.2)
        stores = [member.exchange.store for member in world.running()]
        now = [(len(store.owned), len(store.backed)) for store in stores]
        learning = any(owned.learner is not None for store in stores for owned in store.owned.values())
        if now != last or learning:
            last, since = now, world.clock.monotonic()


async def step(member: Member, number: int, delta: np.ndarray) -> None:
    report = await member.exchange.push(number, number - 1, 1.0, delta)
    assert (report.outstanding, report.refused) == (0, {})
    await member.exchange.pull(number)


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("nodes", [2, 8])
def test_a_step_sends_twice_the_model_and_once_more_for_a_backup_whatever_the_size_of_the_swarm(
    nodes: int, replicas: int
) -> None:
    """Bytes per node and step are within 5 % of 2·(N−1)/N encoded models, plus (N−1)/N where there are backups.

    A backup is not sent the delta that came from itself.
    """
    settings = ExchangeSettings(codec="bfloat16", pull_codec="bfloat16", shards=32, replicas=replicas, weight="sum")

    async def scenario(world: World) -> None:
        members = world.running()
        delta = np.ones(world.manifest.layout.total, np.float32)
        await asyncio.gather(*(step(member, 1, delta) for member in members))
        before = [member.exchange.counters.bytes_sent for member in members]
        await asyncio.gather(*(step(member, 2, delta) for member in members))
        sent = [member.exchange.counters.bytes_sent - was for member, was in zip(members, before, strict=True)]

        models = sum(sent) / nodes / (2 * world.manifest.layout.total)
        expected = (2 + replicas) * (nodes - 1) / nodes
        print(f"{nodes} nodes, {replicas} backups: {models:.3f} models, by the formula {expected:.3f}")
        assert expected <= models <= (1 + WITHIN) * expected

    simulate(scenario, settings, nodes)


@dataclass
class Bytes:
    """Bytes of bodies: those of requests by name, and those that pulls were answered with."""

    sent: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, buffers: Iterable[bytes]) -> None:
        self.sent[name] = self.sent.get(name, 0) + sum(len(buffer) for buffer in buffers)

    def watch(self, world: World) -> None:
        carry = world.carry

        def counted(source: Any, to: Any, name: str, payload: bytes, buffers: list[bytes], answer: Any) -> None:
            self.count(name, buffers)
            carry(source, to, name, payload, buffers, answer)

        world.carry = counted
        for member in world.running():
            member.overlay.handlers["pull"] = self._answering(member.overlay.handlers["pull"])

    def _answering(self, handle: Any) -> Any:
        async def handler(sender: Any, payload: bytes, stream: Any) -> Any:
            response = await handle(sender, payload, stream)
            response.body = [bytes(buffer) for buffer in response.body]
            self.count("pull", response.body)
            return response

        return handler


STEP_S = 10.0


@pytest.mark.parametrize(("nodes", "staggered"), [(2, False), (8, True), *more((32, True))])
def test_with_sparse_pushes_and_pulls_as_changes_a_step_sends_a_tenth_and_receives_a_twentieth_byte_per_parameter(
    nodes: int, staggered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 0.12 bytes pushed per parameter, node and step with a backup, and 0.07 pulled, headers included, whatever
    the size of the swarm: where all step together, and where each has its own phase."""
    monkeypatch.setattr("tests.simulated.test_exchange_bytes.VALUES_PER_SHARD", 16384 if nodes < 32 else 8192)
    shards = 32 if nodes == 32 else 16
    settings = ExchangeSettings(codec="sparse", shards=shards, weight="population")
    steps = 3

    async def scenario(world: World) -> None:
        members, values = world.running(), world.manifest.layout.total
        chance = np.random.default_rng(3)
        deltas = [chance.standard_normal(values).astype(np.float32) for _ in members]

        async def live(number: int, member: Member, first: int, last: int) -> None:
            overlay = member.overlay
            began = world.clock.monotonic() + (number / nodes * STEP_S if staggered and first == 1 else 0.0)
            for index in range(first, last + 1):
                await asyncio.sleep(max(0.0, began + (index - first) * STEP_S - world.clock.monotonic()))
                overlay.step, overlay.step_seconds = index, STEP_S
                await step(member, index, deltas[number])
            await asyncio.sleep(max(0.0, began + (last - first + 1) * STEP_S - world.clock.monotonic()))

        counted = Bytes()
        counted.watch(world)
        marks: list[dict[str, int]] = []

        async def whole(number: int, member: Member) -> None:
            await live(number, member, 1, 2)  # enters the publications, and the step times become known
            if number == 0:
                marks.append(dict(counted.sent))
            await live(number, member, 3, 2 + steps)
            if number == 0:
                marks.append(dict(counted.sent))

        await asyncio.gather(*(whole(number, member) for number, member in enumerate(members)))
        spent = {name: marks[1].get(name, 0) - marks[0].get(name, 0) for name in marks[1]}
        each = nodes * steps * values
        pushed, pulled = (spent["push"] + spent["forward"]) / each, spent["pull"] / each
        print(f"{nodes} nodes: {pushed:.4f} bytes pushed, {pulled:.4f} pulled per parameter and step")
        assert 0.04 < pushed <= 0.12
        assert 0.05 * (nodes - 1) / nodes < pulled <= 0.07
        assert sum(member.exchange.counters.publication_mismatches for member in members) == 0

    simulate(scenario, settings, nodes)


def test_what_a_step_leaves_on_its_way_arrives_as_it_was_although_the_trainer_writes_the_next_delta() -> None:
    """A float32 push sends the trainer's own memory; past its deadline the outbox has a copy of it."""
    settings = ExchangeSettings(codec="float32", shards=4, replicas=0, weight="sum", outer_lr=1.0, outer_momentum=0.0)

    async def scenario(world: World) -> None:
        shards_of = {member.name: list(member.exchange.store.owned) for member in world.running()}
        owner = next(member for member in world.running() if shards_of[member.name])
        origin = next(member for member in world.running() if member is not owner)
        delta = np.ones(world.manifest.layout.total, np.float32)
        world.pause(owner.name)

        report = await origin.exchange.push(1, 0, 1.0, delta)
        assert report.outstanding == len(shards_of[owner.name])
        delta[:] = 100.0
        world.resume(owner.name)
        await world.until(lambda: not origin.exchange.outbox.steps, within_s=30.0, what="all is acknowledged")

        for member in world.running():
            for owned in member.exchange.store.owned.values():
                assert owned.state.value.tolist() == [1.0] * VALUES_PER_SHARD

    simulate(scenario, settings, 3)
