"""A swarm of a few nodes with the store of named values alone, on the simulated network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.values.client import shard_of
from p2pnode.training.values.encoding import encode_key
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.decoded_values import DecodedValues
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Member

SHARDS = 8
KEYS = [f"key{number}" for number in range(100)]
SETTINGS = ExchangeSettings(shards=SHARDS)


class Few:
    """A swarm of a few nodes with the store alone."""

    def __init__(self, seed: int = 1, settings: ExchangeSettings = SETTINGS) -> None:
        self.world = World(seed, settings=settings, shards=SHARDS, values=0, synchronous=False)

    async def start(self, *names: str) -> None:
        """The first founds, the others join; returns when every shard has an owner and a backup."""
        for name in names:
            await (self.world.join(name) if self.world.running() else self.world.start(name, founder=True))
        await self.whole()

    def store(self, name: str) -> DecodedValues:
        return DecodedValues(self.world.members[name].exchange.values)

    def limit_bytes(self, name: str, limit: int) -> None:
        """Let a node own so many bytes of values at most."""
        exchange = self.world.members[name].exchange
        assert exchange is not None
        exchange.values.handler.rounds.limit_bytes = limit

    def owner(self, key: str) -> Member:
        (owner,) = self.world.owners(shard_of(encode_key(key), SHARDS))
        return owner

    def key_of(self, name: str) -> str:
        """A key that a node owns."""
        return next(key for key in (f"key{number}" for number in range(1000)) if self.owner(key).name == name)

    async def whole(self, within_s: float = 30.0) -> None:
        """Every shard has one owner, and with two nodes a backup."""

        def is_whole() -> bool:
            for shard in range(SHARDS):
                if len(self.world.owners(shard)) != 1:
                    return False
                owned = self.world.owned(shard)
                if owned.moving or (len(self.world.running()) > 1 and owned.backup is None):
                    return False
            return True

        await self.world.until(is_whole, within_s, "an owner and a backup for every shard", every_s=0.1)

    async def without_former_backups(self, within_s: float = 30.0) -> None:
        """No node keeps a copy of a shard that it backed up once."""

        def copies() -> int:
            return sum(len(one.exchange.store.backed) for one in self.world.running())

        await self.world.until(lambda: copies() <= SHARDS, within_s, "no copies of former backups", every_s=0.1)

    async def leave(self, name: str, within_s: float = 2.0) -> tuple[int, int]:
        """A node leaves as a daemon does; what it could not hand over."""
        member = self.world.members[name]
        member.overlay.eligible = False
        self.world.spread(member)
        left = await member.exchange.leave(within_s)
        await member.exchange.close(0.5)
        await self.world.kill(name, left=True)
        return left

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record.fields for record in self.world.of(name)]


def play(scenario: Callable[[Few], Awaitable[None]], settings: ExchangeSettings = SETTINGS, *, seed: int = 1) -> None:
    """One scenario on the virtual clock."""

    async def main() -> None:
        few = Few(seed, settings)
        try:
            await scenario(few)
        finally:
            await few.world.stop()

    VirtualLoop().run(main(), limit_s=600)
