"""Divides the shards of one node while it takes part in the swarm.

A node divides by itself, whenever it hears that another one has, or when its rule says that the swarm has outgrown its
shards (`training.shard_count.outgrown`). It halts what is under way, divides all that it has,
and goes on with the parts (`training.exchange.store.division`). Nothing is asked or answered in between. To the others
that is a node that was silent for a moment, and requests between nodes of different divisions are lost messages: the
protocol of ownership keeps its promises whatever gets lost. What this node waited for is asked again of the parts'
owners.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from overlay.supervision import supervised
from training.exchange.divisions import Divisions
from training.exchange.interruption import Interruptible, interrupt_all
from training.exchange.owner.published import Published
from training.exchange.services import ExchangeServices, store_of
from training.exchange.store.division import can_divide, divide_store, sizes_of_parts
from training.exchange.store.shard_store import ShardStore
from training.layout import is_partition
from training.manifest import Manifest
from training.shard_count import MAX_SHARDS, Partition

R = TypeVar("R")


class Divided(Protocol):
    """The exchange whose shards are divided."""

    services: ExchangeServices

    @property
    def manifest(self) -> Manifest: ...

    def serve_parts(self, manifest: Manifest, store: ShardStore) -> None:
        """Go on with the shards of this manifest, which are in this store; nothing is under way."""
        ...


class Divider:
    """Belongs to one exchange. `callbacks` get the new manifest before anything is served of the parts."""

    def __init__(self, exchange: Divided, divisions: Divisions) -> None:
        self.divisions = divisions
        self.callbacks: list[Callable[[Manifest], None]] = []
        self._exchange = exchange
        self._is_open = asyncio.Event()
        self._is_open.set()
        #: How many things hold divisions up.
        self._holds = 0
        self._is_free = asyncio.Event()
        self._is_free.set()
        #: What this node waits for, and asks again after a division.
        self._waiting: dict[Interruptible, None] = {}
        self._task: asyncio.Task[None] | None = None
        divisions.can_divide = self._can_divide

    # -- what waits for a division, and what it waits for

    async def over(self, ask: Callable[[], Awaitable[R]]) -> R:
        """The result of a question to the owners; asked again if the shards are divided meanwhile."""
        while True:
            await self._is_open.wait()
            waiting = Interruptible(self._waiting)
            try:
                return await ask()
            except asyncio.CancelledError:
                if not waiting.was_interrupted():
                    raise
            finally:
                waiting.done()

    async def passed(self) -> None:
        """Wait until no division is under way."""
        await self._is_open.wait()

    @property
    def is_dividing(self) -> bool:
        return not self._is_open.is_set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No division begins within the block."""
        self._holds += 1
        self._is_free.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._is_free.set()

    async def hold(self) -> None:
        """No division begins from now on: this node leaves, and the others go on with copies that they have."""
        self._holds += 1
        self._is_free.clear()
        await self._is_open.wait()

    # -- the division

    def want(self, partition: Partition) -> bool:
        """See `Exchange.divide`."""
        present = self._exchange.manifest.partition
        return bool(present.divisor(partition)) and self.divisions.want(partition.parts)

    def _can_divide(self, parts: int) -> bool:
        manifest = self._exchange.manifest
        factor, rest = divmod(parts, manifest.shard_parts)
        shards = manifest.shards * factor
        if rest or factor & (factor - 1) or shards > MAX_SHARDS or not self._exchange.services.context.settings.enabled:
            return False
        if not manifest.layout.total or not is_partition(manifest.layout.total, shards, parts):
            return False
        after = msgspec.structs.replace(manifest, shards=shards, shard_parts=parts)
        return can_divide(manifest.bounds(), after.bounds())

    def start(self) -> None:
        """Divide whenever it is wanted."""
        self._task = asyncio.create_task(supervised("divider", self._run, self._on_fault), name="divider")

    def _on_fault(self, name: str, error: Exception) -> None:
        log = self._exchange.services.context.environment.log
        log.error("exchange_service_failed", service=name, error=repr(error))

    def kill(self) -> None:
        """Divide no more; what is under way is not waited for."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Divide no more."""
        self.kill()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _give_up(self, services: ExchangeServices, error: Exception) -> None:
        """The shards cannot be divided, as without memory, and a part of them is not there any more: this node serves
        none, and writes none to its disk. The others go on with their copies, as after a crash."""
        store = services.context.store
        for held in (store.owned, store.backed, store.superseded, store.stored):
            held.clear()
        self.divisions.give_up()
        services.context.environment.log.error("division_failed", reason=repr(error))

    async def _run(self) -> None:
        while True:
            await self.divisions.wait()
            await self._is_free.wait()
            await self._divide()

    async def _divide(self) -> None:
        exchange, former = self._exchange, self._exchange.services
        clock = former.context.environment.clock
        began_s = clock.monotonic()
        self._is_open.clear()
        try:
            await former.push_client.idle()
            await interrupt_all(self._waiting)
            await former.halt()
            was, parts = exchange.manifest, self.divisions.wanted
            shards = was.shards * (parts // was.shard_parts)
            manifest = msgspec.structs.replace(was, shards=shards, shard_parts=parts)
            store = store_of(former.context.swarm, manifest, former.context.settings)
            # In a thread: nothing else changes what is divided, and the loop has the overlay to serve.
            try:
                published = await former.context.environment.executor.run(_divided, former, store)
            except Exception as error:
                self._give_up(former, error)
                return
            self.divisions.reached(parts)
            exchange.serve_parts(manifest, store)
            exchange.services.publisher.take_from(former.publisher, published)
            for call in self.callbacks:
                call(exchange.manifest)
            exchange.services.start()
            former.context.environment.log.info(
                "shards_divided", stored=len(former.context.store), shards=shards, seconds=clock.monotonic() - began_s
            )
        finally:
            self._is_open.set()


def _divided(services: ExchangeServices, parts: ShardStore) -> dict[int, Published]:
    """Fill the store of the parts; returns what is published of them."""
    whole = services.context.store
    published = services.publisher.parts(sizes_of_parts(whole.bounds, parts.bounds))
    divide_store(whole, parts)
    return published
