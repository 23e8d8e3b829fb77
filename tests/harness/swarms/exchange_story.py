"""Stories of real exchanges on the light network: a swarm that has settled, what happens to it, and its model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.state import ShardState
from tests.harness.environment.simulated import Record
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.exchange_swarm import GENESIS, Member, Strikes, World

VALUES = 8
ONES = np.ones(VALUES, np.float32)
#: Detection, and a survey of the copies.
BOUND_S = 10.0

Answer = TypeVar("Answer", bound=msgspec.Struct)


def simulate(
    scenario: Callable[[World], Awaitable[None]],
    *,
    seed: int = 5,
    nodes: int = 5,
    shards: int = 2,
    values: int = VALUES,
    synchronous: bool = False,
    owners: int = 1,
    settle_s: float = 3.0,
    tenure_s: float = 3.0,
    **changes: float | str,
) -> World:
    """A swarm that has settled, then the scenario; returns the world for a look at its records.

    The first `owners` nodes own the shards in turn, and the next node backs each one up. With 0 the ids of the nodes
    decide. A delta is added whole, in float32, unless `changes` of the settings say otherwise.
    """
    print(f"seed {seed}")
    worlds = []

    async def main() -> None:
        plain = ExchangeSettings(codec="float32", shards=shards, weight="sum", outer_lr=1.0, outer_momentum=0.0)
        settings = msgspec.structs.replace(plain, **changes)
        world = World(seed, settings=settings, shards=shards, values=values, synchronous=synchronous, tenure_s=tenure_s)
        worlds.append(world)
        try:
            names = [f"n{number}" for number in range(nodes)]
            for shard in range(shards) if owners and nodes else ():
                first = shard % min(owners, nodes)
                world.prefer([shard], *names[first:], *names[:first])
            for number, name in enumerate(names):
                await (join(world, name) if number else world.start(name, founder=True))
            if owners and nodes:
                await until(world, lambda: placed(world), within_s=60.0, what="each shard at its best candidates")
            await asyncio.sleep(settle_s)
            await scenario(world)
        finally:
            world.stop()

    VirtualLoop().run(main(), limit_s=600)
    return worlds[0]


async def join(world: World, name: str) -> Member:
    member = await world.start(name)
    await exchange_of(member).join(world.members["n0" if name != "n0" else "n1"].contact)
    return member


def exchange_of(member: Member) -> Exchange:
    assert member.exchange is not None
    return member.exchange


def owner(world: World, shard: int = 0) -> Member:
    owners = [one for one in world.running() if shard in exchange_of(one).store.owned]
    return max(owners, key=lambda one: exchange_of(one).store.owned[shard].term)


def owned(world: World, shard: int = 0) -> Owned:
    return exchange_of(owner(world, shard)).store.owned[shard]


def backup(world: World, shard: int = 0) -> Member:
    found = owned(world, shard).backup
    assert found is not None
    return next(one for one in world.members.values() if one.contact.node_id == found.node_id)


def bystander(world: World) -> Member:
    """A node that neither owns shard 0 nor backs it."""
    return next(one for one in world.running() if one not in (owner(world), backup(world)))


async def push(member: Member, step: int, amount: float | None = None) -> None:
    """A delta of `amount` (None: the step) in each value, acknowledged for all shards."""
    values = exchange_of(member).replica.vector.size
    delta = np.full(values, step if amount is None else amount, np.float32)
    report = await exchange_of(member).push(step, step - 1, 1.0, delta)
    assert (report.outstanding, report.refused, report.returned) == (0, {}, ())
    assert member.overlay is not None
    # As the step loop does: nobody repairs what is still to be trained.
    exchange_of(member).begin_at(step)
    member.overlay.step = step
    member.overlay.world.training = False  # but none is counted as a worker: one delta sets the measure of lengths


def model(world: World) -> Vector:
    """What the owners of all shards have, float32[total]."""
    return np.concatenate([owned(world, shard).state.value for shard in range(world.manifest.shards)])


def value(world: World) -> list[float]:
    """The first value of each shard, at its owner."""
    return [float(owned(world, shard).state.value[0]) for shard in range(world.manifest.shards)]


async def until(world: World, condition: Callable[[], bool], *, within_s: float, what: str) -> float:
    began = world.clock.monotonic()
    while not condition():
        assert world.clock.monotonic() - began <= within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.05)
    return world.clock.monotonic() - began


def logged(world: World) -> bool:
    """One owner for each shard, with a backup, and nothing left to offer."""
    stores = [exchange_of(member).store for member in world.running()]
    all_owned = [one for store in stores for one in store.owned.values()]
    paired = all(one.backup is not None and not one.moving for one in all_owned)
    return paired and len(all_owned) == len(stores[0]) and not any(store.superseded for store in stores)


def placed(world: World) -> bool:
    """Whether the best candidate owns each shard, and the second one backs it up where there are backups."""
    for shard, names in world.preferred.items():
        holders = [one for one in world.running() if shard in exchange_of(one).store.owned]
        if [one.name for one in holders] != names[:1] or owned(world, shard).moving or owned(world, shard).learner:
            return False
        copy = owned(world, shard).backup
        if len(names) > 1 and world.settings.replicas and copy != world.members[names[1]].contact:
            return False
    return True


def paired(world: World) -> bool:
    """Whether each backup has what its owner has, bit by bit."""
    for shard in range(world.manifest.shards):
        if owned(world, shard).backup is None:
            return False
        backed = exchange_of(backup(world, shard)).store.backed.get(shard)
        copy, state = None if backed is None else backed.state, owned(world, shard).state
        if copy is None or _compared(copy) != _compared(state):
            return False
    return True


def _compared(state: ShardState) -> tuple[object, ...]:
    """All that a backup has to have as its owner has it."""
    return state.value.tobytes(), state.known_count, sorted(state.norms.rows())


def events(world: World, name: str) -> list[Record]:
    return [record for record in world.records if record.event == name]


@contextmanager
def striking(
    faults: list[Strikes], *names: str, sender: Member | None = None, to: Member | None = None
) -> Iterator[None]:
    """Meanwhile requests of these names have a fault (`World.rejected`, `World.unanswered`); those of all, if none."""

    def strikes(source: str, target: str, name: str) -> bool:
        from_it = sender is None or source == sender.name
        return from_it and (to is None or target == to.name) and (not names or name in names)

    faults.append(strikes)
    try:
        yield
    finally:
        faults.remove(strikes)


async def ask(
    sender: Member, to: Member, name: str, message: msgspec.Struct, kind: type[Answer], body: Any = ()
) -> Answer:
    """A request as a member makes it by itself. Raises `TransportError`."""
    assert sender.overlay is not None
    async with sender.overlay.request(to.contact, name, GENESIS + encode(message), body, timeout_s=5.0) as answer:
        return decode(answer.head, kind)
