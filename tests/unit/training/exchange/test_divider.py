"""The division of one node's shards amid what it does: what is under way ends, and is asked again of the parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from overlay.transport import Buffer, RequestRejected
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.exchange_swarm import Member, World
from training.encoding.frames import Part, encoded_frames
from training.exchange.divisions import DIVIDING
from training.exchange.exchange import Exchange
from training.exchange.messages import Forward, Forwarded, Push, encode
from training.settings import ExchangeSettings
from training.shard_count import Partition
from training.shards.applied import DeltaId

VALUES, SHARDS = 16, 4
SETTINGS = ExchangeSettings(codec="float32", shards=SHARDS, weight="sum", outer_lr=1.0, outer_momentum=0.0)
HALVES = Partition(2 * SHARDS, 2)


def simulate(scenario: Callable[[World, Member, Member], Awaitable[None]]) -> None:
    """Two nodes, each shard with an owner and a backup; the first one owns shard 0."""

    async def main() -> None:
        world = World(7, settings=SETTINGS, shards=SHARDS, values=VALUES, synchronous=False)
        try:
            first = await world.start("n0", founder=True)
            second = await world.start("n1")
            await asyncio.sleep(3.0)
            assert second.exchange is not None
            await second.exchange.join(first.contact)
            await until(lambda: sum(map(paired, (first, second))) == SHARDS)
            is_first = 0 in exchange_of(first).store.owned
            await scenario(world, *((first, second) if is_first else (second, first)))
        finally:
            world.stop()

    VirtualLoop().run(main(), limit_s=600)


def paired(member: Member) -> int:
    """How many shards a node owns and another one backs up."""
    owned = exchange_of(member).store.owned.values()
    return sum(one.backup is not None and one.learner is None and not one.moving for one in owned)


def exchange_of(member: Member) -> Exchange:
    assert member.exchange is not None
    return member.exchange


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110 - nodes set no event for a test
            await asyncio.sleep(0.01)


async def divided(*members: Member) -> None:
    await until(lambda: all(len(exchange_of(one).store) == 2 * SHARDS for one in members))


def test_what_is_handled_ends_without_an_acknowledgement() -> None:
    """A forward whose body still arrives when its receiver divides is refused: the parts have nothing of it. So is a
    push, to which nothing is answered that is not in the parts."""

    async def scenario(_world: World, first: Member, second: Member) -> None:
        owner, backup = exchange_of(first), exchange_of(second)
        shard, owned = 0, owner.store.owned[0]
        arrives = asyncio.Event()
        whole = list(encoded_frames(shard, np.ones(4, np.float32).tobytes(), "float32", Part.DELTA, step=9))

        async def slowly() -> AsyncIterator[Buffer]:
            yield whole[0]
            await arrives.wait()
            for buffer in whole[1:]:
                yield buffer

        genesis, node = owner.context.genesis, first.contact.node_id
        forward = Forward(
            genesis=genesis, node=node, incarnation=1, step=9, weight=1.0, synchronous=False,
            shards=[Forwarded(shard, *owned.term, 0, 1.0, 0.0, False, 0)], momentum=True,
        )  # fmt: skip
        push = Push(genesis, second.contact.node_id, 1, 9, 0, 1.0, [shard])
        assert first.overlay is not None
        assert second.overlay is not None
        asked = [
            asyncio.ensure_future(second.overlay.handlers["forward"](first.contact, encode(forward), slowly())),
            asyncio.ensure_future(first.overlay.handlers["push"](second.contact, encode(push), slowly())),
        ]
        await asyncio.sleep(0.1)
        assert backup.divide(HALVES)
        await divided(first, second)
        arrives.set()
        for request in asked:
            with pytest.raises(RequestRejected, match=DIVIDING):
                await request
        for exchange in (owner, backup):
            states = [one.state for one in (*exchange.store.owned.values(), *exchange.store.backed.values())]
            assert states
            for state in states:
                assert state is not None
                assert not state.knows(DeltaId(node, 1, 9))
                assert not state.knows(DeltaId(second.contact.node_id, 1, 9))

    simulate(scenario)


def test_a_push_and_a_pull_go_on_with_the_parts() -> None:
    """The owner is away when the node divides: the push that waits for it is delivered to the parts, once, and a pull
    ends with their values. Neither is told of the division."""

    async def scenario(world: World, first: Member, second: Member) -> None:
        owner, pusher = exchange_of(first), exchange_of(second)
        world.pause(first.name)
        push = asyncio.create_task(pusher.push(1, 0, 1.0, np.ones(VALUES, np.float32)))
        pull = asyncio.create_task(pusher.pull(1))
        await asyncio.sleep(0.3)
        assert pusher.divide(HALVES)
        await until(lambda: len(pusher.store) == 2 * SHARDS)
        assert not push.done()
        world.resume(first.name)
        report = await push
        assert (report.outstanding, report.refused) == (0, {})
        assert not (await pull).missing
        assert not (await pusher.pull(1)).missing
        assert len(owner.store) == 2 * SHARDS
        assert pusher.context.replica.vector.tolist() == [1.0] * VALUES

    simulate(scenario)


def test_a_cancelled_pull_is_not_asked_again() -> None:
    """A division tells the cancellation of a step from its own."""

    async def scenario(world: World, first: Member, second: Member) -> None:
        exchange = exchange_of(second)
        world.pause(first.name)
        pull = asyncio.create_task(exchange.pull(1))
        await asyncio.sleep(0.1)
        assert exchange.divide(HALVES)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        await until(lambda: len(exchange.store) == 2 * SHARDS)

    simulate(scenario)


def test_a_division_that_fails_is_a_crash_of_what_the_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing of it to its disk, and tries it no more; its partner goes on with all."""

    def fails(*_: object) -> None:
        raise MemoryError

    async def scenario(world: World, first: Member, second: Member) -> None:
        exchange = exchange_of(first)
        with monkeypatch.context() as broken:
            broken.setattr("training.exchange.divider.divide_store", fails)
            assert exchange.divide(HALVES)
            await until(lambda: any(record.event == "division_failed" for record in world.records))
        assert exchange.states_to_save() == []
        assert not exchange.divide(HALVES)
        assert exchange_of(second).divide(HALVES)
        await divided(second)

    simulate(scenario)


def test_the_manifest_follows_and_nodes_that_leave_divide_no_more() -> None:
    """Whoever asked is told of every division before anything is served of it."""

    async def scenario(_world: World, first: Member, second: Member) -> None:
        exchange, told = exchange_of(first), list[Partition]()
        exchange.on_divided(lambda manifest: told.append(manifest.partition))
        assert not exchange.divide(Partition(3 * SHARDS, 3))
        assert not exchange.divide(Partition(2 * SHARDS, 1))
        assert exchange.divide(HALVES)
        await divided(first, second)
        assert told == [exchange.manifest.partition] == [exchange_of(second).manifest.partition] == [HALVES]

        await exchange.close(1.0)
        exchange.divide(Partition(4 * SHARDS, 4))
        await asyncio.sleep(2.0)
        assert told == [HALVES]

    simulate(scenario)
