"""When a node divides the shards of a swarm that has outgrown them, and who hears of a division."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from p2pnode.lifecycle.shard_division import LOOK_INTERVAL_S, LOOKS, ShardDivision
from tests.harness.environment.virtual_loop import run
from training.layout import BLOCK_VALUES
from training.shard_count import FEWEST_PER_NODE, Partition, outgrown

SHARDS, VALUES = 64, 1 << 24
#: With so many nodes the swarm has outgrown its shards.
MANY = SHARDS // FEWEST_PER_NODE + 1
WANTED = Partition(256, 4)


class Exchange:
    """Divides at once, as `training.exchange.exchange.Exchange` does in the background."""

    def __init__(self) -> None:
        self.manifest: Any = SimpleNamespace(partition=Partition(SHARDS), layout=SimpleNamespace(total=VALUES))
        self.divided: list[Partition] = []
        self.callbacks: list[Callable[[Any], None]] = []
        self.is_expected: Callable[[int], bool] = lambda _: False

    def on_divided(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def expect_divisions(self, is_expected: Callable[[int], bool]) -> None:
        self.is_expected = is_expected

    def divide(self, partition: Partition) -> bool:
        self.divided.append(partition)
        return True

    def follow(self, partition: Partition) -> None:
        """The division is done."""
        self.manifest = SimpleNamespace(partition=partition, layout=self.manifest.layout)
        for callback in self.callbacks:
            callback(self.manifest)


class Node:
    """The service of a node in a swarm of about `nodes` nodes."""

    def __init__(self, shards: int = 0) -> None:
        self.nodes = 2.0
        self.registered: list[Any] = []
        self.remembered: list[Any] = []
        self.remembers_s = 0.0
        overlay: Any = SimpleNamespace(
            population=lambda: SimpleNamespace(estimate=self.nodes),
            register=lambda name, handler: self.registered.append(name),
        )
        config: Any = SimpleNamespace(exchange=SimpleNamespace(shards=shards))
        self.exchange = Exchange()
        self.service = ShardDivision(config, overlay, self._remember)

    async def _remember(self, manifest: Any) -> None:
        await asyncio.sleep(self.remembers_s)
        self.remembered.append(manifest)

    def start(self, *followers: Callable[[Any], None]) -> None:
        exchange: Any = self.exchange
        self.service.start(exchange, followers)


def play(scenario: Callable[[Node], Awaitable[None]], shards: int = 0) -> None:
    async def main() -> None:
        node = Node(shards)
        try:
            await scenario(node)
        finally:
            await node.service.stop()
            await node.service.stop()
            assert node.service._tasks == {}

    run(main())


def test_the_numbers_of_this_test_are_those_of_the_rule() -> None:
    """One node fewer would not divide."""
    assert outgrown(Partition(SHARDS), VALUES, MANY) == outgrown(Partition(SHARDS), VALUES, 64) == WANTED
    assert outgrown(Partition(SHARDS), VALUES, MANY - 1) is None
    assert VALUES // WANTED.shards > BLOCK_VALUES


def test_a_swarm_that_is_large_at_three_looks_in_a_row_divides() -> None:
    """One look at which it is small again begins the count anew; after a division three more looks are needed."""

    async def scenario(node: Node) -> None:
        node.start()
        node.nodes = 64.2
        await asyncio.sleep((LOOKS - 1) * LOOK_INTERVAL_S + 1.0)
        node.nodes = 3.0
        await asyncio.sleep(LOOK_INTERVAL_S)
        node.nodes = 64.2
        await asyncio.sleep(LOOKS * LOOK_INTERVAL_S - 2.0)
        assert node.exchange.divided == []
        await asyncio.sleep(2.0)
        assert node.exchange.divided == [WANTED]
        await asyncio.sleep((LOOKS - 1) * LOOK_INTERVAL_S)
        assert node.exchange.divided == [WANTED]
        await asyncio.sleep(LOOK_INTERVAL_S)
        assert node.exchange.divided == [WANTED, WANTED]

    play(scenario)


def test_shards_that_are_given_are_not_divided_by_this_node() -> None:
    """It follows the divisions of others all the same."""

    async def scenario(node: Node) -> None:
        node.start()
        node.nodes = 64.0
        await asyncio.sleep(10 * LOOK_INTERVAL_S)
        assert node.exchange.divided == []
        node.exchange.follow(WANTED)
        await asyncio.sleep(1.0)
        assert node.remembered == [node.exchange.manifest]

    play(scenario, shards=SHARDS)


def test_what_the_swarm_is_expected_to_have_follows_its_size() -> None:
    """As the node estimates it at that moment, rounded."""

    async def scenario(node: Node) -> None:
        node.start()
        node.nodes = 2.4
        assert node.exchange.is_expected(4096)
        node.nodes = 2.6
        assert not node.exchange.is_expected(4096)
        assert node.exchange.is_expected(64)
        node.nodes = 256.0
        assert node.exchange.is_expected(4096)

    play(scenario)


def test_of_each_division_the_node_hears_before_joiners_do() -> None:
    """First its own parts, then those that join, then the state directory; the loop is not held up by the disk."""

    async def scenario(node: Node) -> None:
        order: list[str] = []
        node.start(lambda _: order.append("first"), lambda _: order.append(f"second of {len(node.registered)}"))
        assert node.registered == ["manifest"]
        node.remembers_s = 5.0
        node.exchange.follow(Partition(128, 2))
        assert order == ["first", "second of 1"]
        assert node.registered == ["manifest", "manifest"]
        assert node.remembered == []
        await asyncio.sleep(6.0)
        assert node.remembered == [node.exchange.manifest]

    play(scenario)


def test_a_node_that_ends_remembers_nothing_more() -> None:
    """What is being written is cancelled, and no task stays behind."""

    async def scenario(node: Node) -> None:
        node.start()
        node.remembers_s = 5.0
        node.exchange.follow(WANTED)
        await asyncio.sleep(1.0)
        await node.service.stop()
        await asyncio.sleep(60.0)
        assert node.remembered == []

    play(scenario)
