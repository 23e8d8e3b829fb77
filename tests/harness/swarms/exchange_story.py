"""Stories of real exchanges on the light network: a swarm that has settled, what happens to it, and its model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.settings import ExchangeSettings
from tests.harness.swarms.exchange_swarm import GENESIS, World
from tests.harness.swarms.light_network import Member, Strikes
from tests.harness.swarms.simulated_swarm import play

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
    plain = ExchangeSettings(codec="float32", shards=shards, weight="sum", outer_lr=1.0, outer_momentum=0.0)
    settings = msgspec.structs.replace(plain, **changes)

    async def story(world: World) -> None:
        names = [f"n{number}" for number in range(nodes)]
        for shard in range(shards) if owners and nodes else ():
            first = shard % min(owners, nodes)
            world.prefer([shard], *names[first:], *names[:first])
        for number, name in enumerate(names):
            await (world.join(name) if number else world.start(name, founder=True))
        if owners and nodes:
            await world.until(world.placed, within_s=60.0, what="each shard at its best candidates")
        await asyncio.sleep(settle_s)
        await scenario(world)

    return play(
        story,
        lambda: World(
            seed, settings=settings, shards=shards, values=values, synchronous=synchronous, tenure_s=tenure_s
        ),
    )


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
    async with sender.overlay.request(to.contact, name, GENESIS + encode(message), body, timeout_s=5.0) as answer:
        return decode(answer.head, kind)
